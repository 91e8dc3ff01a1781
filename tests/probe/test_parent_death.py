"""A worker ends with whoever started it."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

WORKER = (
    "import time; from pipette_launch.probe.parent_death import end_with_parent; "
    "end_with_parent(); print('up', flush=True); time.sleep(600)"
)
PARENT = (
    f"import subprocess, sys; worker = subprocess.Popen([sys.executable, '-c', {WORKER!r}], start_new_session=True); "
    "print(worker.pid, flush=True); worker.wait()"
)


def test_a_worker_ends_with_a_parent_that_is_killed() -> None:
    """SIGKILL leaves the parent no time to end anyone; the kernel does it."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert "up\n" == parent.stdout.readline()

        parent.kill()
        ends_s = time.monotonic() + 20
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < ends_s:
            time.sleep(0.02)

        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
