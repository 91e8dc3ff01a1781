"""`--pipette-on-sick` with real launchers: a node that somebody else uses, and one that turns out to be slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end import jobs
from end_to_end.jobs import ECHO, MODEL, Done, finish, start_warm

from pipette_launch.facts import Plan, files

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
WORDS = [*MODEL, "--train-iters", "1"]
HELD = "cpu-0: process 17 (somebody) holds"


def job(folder: Path, policy: str, nnodes: str, names: str, **env: str) -> dict[str, Done]:
    """A job on nodes of one slot each, whose warm-up takes no time."""
    flags = [f"--nnodes={nnodes}", f"--pipette-on-sick={policy}"]
    if len(names) > 1:
        flags += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{jobs.free_port()}"]
    env["PYTHONPATH"] = jobs.WITHOUT_WARMUP
    launchers = {name: start_warm(folder, [*flags, ECHO, *WORDS], **env, SLURMD_NODENAME=name) for name in names}
    return {name: finish(launcher) for name, launcher in launchers.items()}


def told(done: dict[str, Done]) -> str:
    """All that the launchers wrote to stderr."""
    return "".join(one.err for one in done.values())


def trained(done: dict[str, Done]) -> dict[str, list[str]]:
    """The ranks that each node ran, with WORLD_SIZE and the number of nodes that torchrun counts."""
    return {
        name: [f"{rank} of {seen['WORLD_SIZE']}" for rank, seen in sorted(one.workers.items())]
        for name, one in done.items()
    }


def test_a_sick_node_stands_by(tmp_path: Path) -> None:
    """Two of three nodes are measured and train; the third, which mostly is the one that decides, ends with 0."""
    done = job(tmp_path, "exclude", "2:3", "abc", SICK="a")

    assert {"a": 0, "b": 0, "c": 0} == {name: one.code for name, one in done.items()}, told(done)
    ranks = trained(done)
    assert [] == ranks.pop("a")
    assert ["0 of 2", "1 of 2"] == sorted(rank for each in ranks.values() for rank in each)
    assert f"a {HELD}" in told(done)
    assert "a runs no workers and waits on standby, because of --pipette-on-sick=exclude" in told(done)
    # torch numbers nodes of one address by their process ids.
    assert any(f"measuring 2 slots on {healthy}" in told(done) for healthy in ("b, c", "c, b"))
    (kept,) = (tmp_path / "cache").glob("pipette-launch/*/plan.json")
    assert {"b", "c"} == {*files.read(kept, Plan).hosts}
    assert [] == list(tmp_path.glob("pipette*"))


def test_a_slow_node_is_planned_without(tmp_path: Path) -> None:
    """It was measured with the other, and then runs nothing."""
    done = job(tmp_path, "exclude", "1:2", "ab", SLOW="a")

    assert {"a": 0, "b": 0} == {name: one.code for name, one in done.items()}, told(done)
    assert {"a": [], "b": ["0 of 1"]} == trained(done)
    assert "measuring 2 slots on" in told(done)
    assert "a: takes 2 ms for the same layer, its peers take 1 ms; a runs no workers" in told(done)
    # The measurements of both, and those of the other one with its plan.
    assert 2 == len([*(tmp_path / "cache").glob("pipette-launch/*/cluster.json")])
    (kept,) = (tmp_path / "cache").glob("pipette-launch/*/plan.json")
    assert ("b",) == files.read(kept, Plan).hosts


@pytest.mark.parametrize(
    ("policy", "code", "words"),
    [
        ("fail", 1, "the job stops, because of --pipette-on-sick=fail"),
        ("exclude", 0, "a cannot be excluded: no healthy node would be left; add a spare node"),
    ],
)
def test_a_job_that_cannot_do_without(tmp_path: Path, policy: str, code: int, words: str) -> None:
    """It stops if it is to, else it goes on; either way with the sentence."""
    done = job(tmp_path, policy, "1", "a", SICK="a")

    assert code == done["a"].code, told(done)
    assert f"a {HELD}" in told(done)
    assert words in told(done)
    assert {"a": ["0 of 1"] if policy == "exclude" else []} == trained(done)
