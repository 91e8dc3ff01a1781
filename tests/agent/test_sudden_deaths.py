"""Deaths without a word: the kernel's killings are recognised, and a worker that stays stopped is ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipette_launch.agent.sudden_deaths import StoppedWorkers, as_oom_kill, oom_kills
from pipette_launch.facts.messages import Failure


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
