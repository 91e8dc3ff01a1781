"""A warm-up worker for tests: gives signs as the real one does, without torch, and comes to grief as it is told.

`python prober.py FOLDER LOCAL_RANK HOW`: HOW is what it does in the third of seven steps of its phase.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


def grieve(progress: Progress, how: str) -> None:
    """Do what was told."""
    if "killed" in how:
        os.kill(os.getpid(), signal.SIGKILL)
    if "stopped" in how:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "raises" in how:
        leave(progress, "ZeroDivisionError: division by zero")
    if "hangs" in how:
        time.sleep(600)
    if "closed" in how:
        leave(progress, CLOSED)
    if "timed-out" in how:
        leave(progress, TIMED_OUT)
    if "waits" in how:
        progress.waits("the others", limit_s=600, peers=[1])
        time.sleep(600)
    if "slow" in how:
        # Computes all the time, and says nothing for three times as long as it should.
        ends_s = time.monotonic() + 3 * LIMIT_S
        while time.monotonic() < ends_s:
            sum(range(10**5))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
