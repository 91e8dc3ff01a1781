"""Trials before a training: the measured best trains, and what was tried leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end import jobs
from end_to_end.jobs import MODEL, Done, finish, start_warm

from pipette_launch.facts import Plan, files

pytestmark = [pytest.mark.timeout(240), pytest.mark.processes]
WRITER = Path(__file__).parent / "writer.py"


def on_two_nodes(folder: Path, *words: object) -> list[Done]:
    """A job of two agents with one slot each, whose warm-up is written down instead of measured."""
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{jobs.free_port()}"]
    env = {"PYTHONPATH": jobs.WITHOUT_WARMUP}
    return [finish(agent) for agent in [start_warm(folder, [*flags, *words], **env) for _ in range(2)]]


def test_the_measured_best_trains_and_trials_leave_nothing(tmp_path: Path) -> None:
    """Two agents try plans in one round and train under the fastest, and only then is anything written."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("was there before")
    writes = ["--save", out / "ckpt", "--save-interval", "2", "--tensorboard-dir", out / "tb", "--exit-interval", "3"]
    words = ["--pipette-trials=2", "--pipette-trial-iters=3", WRITER, *MODEL, "--train-iters", "9", *writes]

    done = on_two_nodes(tmp_path, *words)

    text = "".join(one.err for one in done)
    assert [0, 0] == [one.code for one in done], text
    (path,) = (tmp_path / "cache").glob("pipette-launch/*/plan.json")
    made = files.read(path, Plan)
    assert made.trials is not None
    assert {True: 1, False: 2} == {own: [run.is_own for run in made.trials.runs].count(own) for own in (True, False)}
    assert all(run.step for run in made.trials.runs), text
    # The script prints 30 ms a step for a plan, and 60 ms for the user's own configuration.
    assert not made.keeps_own
    assert ["trial 1 of 3: your own configuration, 5 iterations" in text, "Settled by trials" in text] == [
        True,
        True,
    ]
    # Each rank wrote once, in the training; the record beside the checkpoints is the launcher's.
    left = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}
    record = left.pop("ckpt/pipette-plan.json")
    assert made.chosen == files.loads(Plan, record, "the record").chosen
    assert {"mine.txt": "was there before"} | {
        f"{name}/{rank}.txt": "written" for name in ("ckpt", "tb") for rank in (0, 1)
    } == left
    assert list(range(1, 10)) == [number for one in done for number, _ in one.losses]
    assert [] == [path.name for path in tmp_path.glob("pipette*")]
