"""A warm-up worker for tests: gives signs as the real one does, without torch, and comes to grief as it is told.

`python prober.py FOLDER LOCAL_RANK HOW`: HOW is what it does in the third of seven steps of its phase.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from pipette_launch.probe.progress import Progress

LIMIT_S = 1.5
"""By when the next sign is due."""
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:39485"
TIMED_OUT = "RuntimeError: Timed out waiting 1000ms for recv operation to complete"


def leave(progress: Progress, error: str) -> None:
    """Fail as the real worker does."""
    progress.fail(f"warm-up worker {progress.local_rank} failed in phase {progress.phase}: {error}")
    os._exit(1)


def main(folder: Path, local_rank: int, how: str) -> None:
    """Work for seven steps, or come to grief in the third."""
    progress = Progress(folder=folder, local_rank=local_rank, limit_s=LIMIT_S)
    progress.announce("start")
    if "child" in how:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(folder)], start_new_session=True)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(folder)])
    with progress.during("links"):
        for step in range(8):
            progress.step(step, 7, peers=[1 - local_rank] if "peer" in how else [])
            if step == 3:
                grieve(progress, how)
            # Computes a little, as real ones do.
            sum(range(10**5))
            time.sleep(0.05)


def await_grief(grief: Path) -> None:
    """Wait until the culprit has died or stopped, which its peers notice at once."""
    while not (grief.exists() and (pid := grief.read_text())):
        time.sleep(0.01)
    with contextlib.suppress(psutil.Error):
        while psutil.Process(int(pid)).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
            time.sleep(0.01)


def grieve(progress: Progress, how: str) -> None:
    """Do what was told."""
    grief = progress.folder.parent / "grief"
    if any(what in how for what in ("killed", "stopped", "raises", "hangs")):
        grief.write_text(str(os.getpid()))
        come_to_grief(progress, how)
    elif "alone" in how:
        leave(progress, CLOSED)
    elif "closed" in how:
        await_grief(grief)
        leave(progress, CLOSED)
    elif "timed-out" in how:
        await_grief(grief)
        time.sleep(2.5)
        leave(progress, TIMED_OUT)
    elif "waits" in how:
        progress.waits("the others", limit_s=600, peers=[1])
        time.sleep(600)
    elif "slow" in how:
        compute(3 * LIMIT_S)


def come_to_grief(progress: Progress, how: str) -> None:
    """Be the cause."""
    if "slow" in how:
        compute(3 * LIMIT_S)
    if "killed" in how:
        os.kill(os.getpid(), signal.SIGKILL)
    if "stopped" in how:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "raises" in how:
        leave(progress, "ZeroDivisionError: division by zero")
    if "hangs" in how:
        time.sleep(600)


def compute(seconds: float) -> None:
    """Compute all the time, and say nothing."""
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        sum(range(10**5))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
