"""Whose death was first, and what it said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pipette_launch.agent.failures import failure as find_failure
from pipette_launch.agent.failures import first_line, last_words, root_cause


def failure(folder: Path, exitcode: int, message: object = None, rank: int = 0) -> ProcessFailure:
    """A dead worker, with what it left in its error file."""
    path = folder / f"{rank}.json"
    if message is not None:
        path.write_text(json.dumps({"message": message, "timestamp": 1}))
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file=str(path))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("\n  RuntimeError: boom\nmore", "RuntimeError: boom"),
        ({"message": "RuntimeError: boom", "extraInfo": {"timestamp": "1", "py_callstack": "x"}}, "RuntimeError: boom"),
        ({"extraInfo": {"timestamp": "1"}}, ""),
        (None, ""),
    ],
    ids=["text", "torch's @record", "odd", "none"],
)
def test_reads_every_kind_of_error_file(tmp_path: Path, message: object, expected: str) -> None:
    """The exception is the first line, however the worker's error handler wrote it."""
    assert expected == first_line(failure(tmp_path, 1, message))


def test_the_workers_that_torch_ended_are_no_cause(tmp_path: Path) -> None:
    """A SIGTERM that came after the first death is torch's own."""
    dead = {0: failure(tmp_path, -15, "earlier", 0), 1: failure(tmp_path, 1, None, 1)}

    assert 1 == root_cause(RunResult(state=WorkerState.FAILED, failures=dead)).local_rank


def test_last_words() -> None:
    """For Python the last exception, whatever is said behind it, else the last line that is not blank."""
    torn_down = "[rank0]:[W1] Warning: destroy_process_group() was not called"
    assert "KeyError: 'x'" == last_words(["[rank0]: Traceback", "[rank0]: KeyError: 'x'", torn_down])
    assert "killed" == last_words(["starting", "killed", ""])
    assert "ValueError: no" == last_words(["Traceback", "  ValueError: no ", ""])
    assert "" == last_words([])
    assert 300 == len(last_words(["x" * 1000]))


def test_the_last_line_of_a_killed_worker_is_no_cause(tmp_path: Path) -> None:
    """SIGKILL comes without a word, and what was printed before it has nothing to do with it."""
    dead = RunResult(state=WorkerState.FAILED, failures={0: failure(tmp_path, -9)})

    why = find_failure(dead, [5], lambda _local: ["a warning of long ago"])

    assert why is not None
    assert "rank 5 ended with signal 9" == why.sentence
