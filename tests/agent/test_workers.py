"""Which worker of a node sits on which device."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pipette_launch.agent.workers import (
    StoppedWorkers,
    as_oom_kill,
    end,
    end_children,
    first_failure,
    first_line,
    last_words,
    oom_kills,
    visible_devices,
)
from pipette_launch.facts.co_location import DeviceBinding, bindings
from pipette_launch.facts.messages import Failure


def bound(devices: list[int]) -> list[DeviceBinding]:
    """Workers with these devices, in the order of LOCAL_RANK."""
    return [DeviceBinding(rank=rank, device=device) for rank, device in enumerate(devices)]


def test_local_rank_follows_rank_where_it_can() -> None:
    """The worker with LOCAL_RANK i has a RANK congruent to i, on the device that the plan gave that RANK."""
    assert [DeviceBinding(rank=4, device=1), DeviceBinding(rank=7, device=0)] == list(bindings([7, 4]))


def test_physical_order_where_residues_meet() -> None:
    """Two ranks with one residue cannot both have it as LOCAL_RANK."""
    assert [DeviceBinding(rank=2, device=0), DeviceBinding(rank=4, device=1)] == list(bindings([2, 4]))


@given(st.permutations(range(8)))
def test_every_rank_keeps_its_device(ranks: list[int]) -> None:
    """Seating moves workers, never a RANK away from the device of the plan."""
    assert {(binding.rank, binding.device) for binding in bindings(ranks)} == {
        (rank, i) for i, rank in enumerate(ranks)
    }


@pytest.mark.parametrize(
    ("inherited", "order", "expected"),
    [
        (None, [1, 0], "1,0"),
        ("4,5", [1, 0], "5,4"),
        ("GPU-aa, GPU-bb,GPU-cc", [2, 0, 1], "GPU-cc,GPU-aa,GPU-bb"),
        ("0,1,2,3", [1, 0], "1,0,2,3"),
    ],
)
def test_devices_keep_their_names(inherited: str | None, order: list[int], expected: str) -> None:
    """Indices and UUIDs that the job was given are reordered, and those it does not use come last."""
    assert {"CUDA_VISIBLE_DEVICES": expected} == visible_devices(inherited, bound(order))


def test_a_list_that_names_too_few_devices_is_left_alone() -> None:
    """On CPU the slots are no devices: GPUs that the user hid stay hidden."""
    assert {} == visible_devices("", bound([1, 0]))
    assert {} == visible_devices("3", bound([1, 0]))


def test_a_binding_by_local_rank_keeps_its_devices() -> None:
    """The worker with LOCAL_RANK i then sits on device i whatever its rank."""
    assert [(3, 0), (2, 1)] == [tuple(binding) for binding in bindings([3, 2], keep_devices=True)]


@pytest.mark.parametrize(
    ("group", "file", "text"),
    [
        ("0::/job", "sys/fs/cgroup/job/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ("0::/job", "sys/fs/cgroup/memory.events", "oom_kill 2\n"),
        ("4:memory:/job\n0::/", "sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 2\n"),
        ("4:cpu:/job", "proc/vmstat", "pgmajfault 7\noom_kill 2\n"),
    ],
)
def test_kills_are_counted_where_the_kernel_tells(tmp_path: Path, group: str, file: str, text: str) -> None:
    """In the cgroup of either version, in a container's root, else for the whole machine."""
    for name, what in (("proc/self/cgroup", group), (file, text)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(what)

    assert 2 == oom_kills(tmp_path)


def test_this_machine_can_be_asked() -> None:
    """Whatever its kernel offers."""
    assert oom_kills() >= 0


def test_a_silent_kill_is_told_as_out_of_memory() -> None:
    """Where the kernel has killed since the start, and nothing else is known of the death."""
    silent = Failure(cause="", rank=3, exit_code=-9)

    told = as_oom_kill(silent, kills=1)

    assert told is not None
    assert ("out-of-host-memory", 3) == (told.kind, told.rank)
    for other, kills in ((silent, 0), (Failure(cause="x", exit_code=1), 1), (Failure(cause="x", exit_code=-11), 1)):
        assert other == as_oom_kill(other, kills=kills)
    assert as_oom_kill(None, kills=1) is None


def test_a_worker_that_stays_stopped_is_ended() -> None:
    """One that goes on in time is not."""
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    now_s = [100.0]
    watch = StoppedWorkers(lambda: now_s[0])

    def look(at_s: float) -> list[int]:
        now_s[0] = at_s
        return watch.end({0: worker})

    process = psutil.Process(worker.pid)

    def suspend() -> None:
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)

    try:
        suspend()
        assert [] == look(100.0)
        process.resume()
        while process.status() == psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert [] == look(125.0)
        suspend()
        assert [] == look(135.0)
        assert [] == look(160.0)
        assert [worker.pid] == look(166.0)
        assert -signal.SIGKILL == worker.wait(timeout=10)
        assert [] == look(200.0)
    finally:
        worker.kill()
        worker.wait()


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

    why = first_failure(RunResult(state=WorkerState.FAILED, failures=dead), [6, 7], lambda _local: ())

    assert why is not None
    assert (7, 1) == (why.rank, why.exit_code)


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

    why = first_failure(dead, [5], lambda _local: ["a warning of long ago"])

    assert why is not None
    assert "rank 5 ended with signal 9" == why.sentence


SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_the_process_that_has_the_id_of_an_ended_worker_is_spared() -> None:
    """The kernel gives the id of a worker that was waited for to another process, which may lead a session too."""
    with subprocess.Popen(SLEEPS, start_new_session=True) as other:
        worker: Any = SimpleNamespace(pid=other.pid, returncode=0, poll=lambda: 0)
        context: Any = SubprocessContext.__new__(SubprocessContext)
        context.subprocess_handlers = {0: SimpleNamespace(proc=worker)}
        try:
            end_children(context)
            assert () == end({0: worker}, began_s=time.time() + 3600, mark="/no/folder")
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(0.2)
            worker.returncode = None
            end_children(context)
            assert -signal.SIGKILL == other.wait(10)
        finally:
            other.kill()


def test_a_child_is_ended_after_its_worker() -> None:
    """While the child lives, no other process can get the worker's id."""
    program = f"import subprocess; print(subprocess.Popen({SLEEPS!r}, stdout=-3).pid, flush=True)"
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=-1, text=True, start_new_session=True)
    child = psutil.Process(int(worker.communicate()[0]))
    context: Any = SubprocessContext.__new__(SubprocessContext)
    context.subprocess_handlers = {0: SimpleNamespace(proc=worker)}
    end_children(context)

    child.wait(10)
