"""The example on real processes: cuts and rank orders change no printed digit, and nobody waits for the dead."""

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--transformer-impl local --use-cpu-initialization --attention-dropout 0 --hidden-dropout 0 "
    "--vocab-size 256 --make-vocab-size-divisible-by 64 --micro-batch-size 1 --global-batch-size 4 "
    "--lr 1e-2 --lr-decay-style constant --log-interval 1 --eval-interval 4 --eval-iters 1"
)
PATIENCE_S = 90.0
"""Longer than any run here takes on a busy machine; a process that exceeds it hangs."""


@contextlib.contextmanager
def started(
    ranks: Sequence[int], text: str, folder: Path, python: Sequence[str] = (sys.executable,)
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start process i with RANK `ranks[i]`, its output in `folder`/rank<RANK>.log, and leave none behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder.mkdir(exist_ok=True)
    common = {
        **warm.environment([ROOT, ROOT / "patches"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(len(ranks)),
    }
    processes = []
    try:
        for local_rank, rank in enumerate(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*python, str(SCRIPT), *TINY.split(), *text.split()],
                        env=common | place,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def warm_python() -> list[str]:
    """Return the words before a script that is forked with megatron-core; one process of these tests starts without."""
    return [warm.python().path, *warm.PATCHED]


def losses(folder: Path, world_size: int) -> dict[str, str]:
    """Printed losses by iteration (and `valid`), in the output of the last rank."""
    output = (folder / f"rank{world_size - 1}.log").read_text()
    found = dict(re.findall(r"iteration +(\d+)/.* lm loss: ([\d.E+-]+) ", output))
    validation = re.findall(r"lm loss value: ([\d.E+-]+) ", output)
    return found | ({"valid": validation[-1]} if validation else {})


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations of one process, saved after the second and the fourth; its folder."""
    folder = tmp_path_factory.mktemp("straight")
    with started([0], f"--train-iters 4 --save {folder / 'saved'} --save-interval 2", folder) as (process,):
        assert process.wait(PATIENCE_S) == 0, (folder / "rank0.log").read_text()
    return folder


def test_one_process_learns(straight: Path) -> None:
    """The loss starts near ln 256 = 5.55 and falls, and all of Megatron's surroundings are printed."""
    found = losses(straight, 1)
    first, *_, last = (float(found[str(iteration)]) for iteration in range(1, 5))
    output = (straight / "rank0.log").read_text()

    assert 5.0 < first < 6.0
    assert last < first - 0.3
    assert "end of arguments" in output
    assert "no --data-path was given" in output
    assert "4" == (straight / "saved" / "latest_checkpointed_iteration.txt").read_text()


def test_training_goes_on_under_another_layout_and_rank_order(straight: Path, tmp_path: Path) -> None:
    """A pipeline with virtual stages and swapped ranks continues from the second iteration with the same losses."""
    tracker = straight / "saved" / "latest_checkpointed_iteration.txt"
    tracker.write_text("2")
    layout = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    words = f"--train-iters 4 --load {straight / 'saved'} {layout}"
    with started([1, 0], words, tmp_path, warm_python()) as processes:
        codes = [process.wait(PATIENCE_S) for process in processes]
    tracker.write_text("4")
    found = losses(straight, 1)

    assert [0, 0] == codes
    assert {name: found[name] for name in ("3", "4", "valid")} == losses(tmp_path, 2)


def test_a_killed_worker_ends_the_other(straight: Path, tmp_path: Path) -> None:
    """Data-parallel ranks that share the optimizer print the same losses; without its peer a rank fails at once."""
    words = "--train-iters 100000 --use-distributed-optimizer"
    with started([0, 1], words, tmp_path, warm_python()) as (first, second):
        deadline_s = time.monotonic() + PATIENCE_S
        while "3" not in losses(tmp_path, 2):
            assert second.poll() is None, (tmp_path / "rank1.log").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        first.kill()
        code = second.wait(20.0)
    expected, found = losses(straight, 1), losses(tmp_path, 2)

    assert code not in (0, None)
    assert [expected[name] for name in ("1", "2", "3")] == [found[name] for name in ("1", "2", "3")]
