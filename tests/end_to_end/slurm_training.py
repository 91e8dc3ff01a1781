"""In a SLURM job: stands in for a training. Says where it runs, and ends as it is told to.

Words: a folder that all nodes share, and what to wait for: `nothing`; `save`, a SIGUSR2 on which it leaves a
checkpoint, unless it finds one; `loss`, a file that says that a node is gone, on which it fails as any training does.
"""

import os
import signal
import sys
import time
from pathlib import Path

folder, awaited = Path(sys.argv[1]), sys.argv[2]
rank, start = os.environ["RANK"], os.environ.get("SLURM_RESTART_COUNT", "0")
gone, saved = folder / "gone", folder / f"saved-{rank}"
is_resumed = saved.exists() or gone.exists()


def save(_number: int, _frame: object) -> None:
    """Leave a checkpoint, and end."""
    saved.touch()
    # Not by an exception: the stand-in for patched workers runs this file while Python still starts.
    os._exit(0)


# One write for the whole line: the workers share a file.
words = f"start {start}: rank {rank} of {os.environ['WORLD_SIZE']} on {os.environ['SLURMD_NODENAME']}"
sys.stdout.write(f"{words}{', resumed' if is_resumed else ''}\n")
sys.stdout.flush()
if awaited == "save":
    signal.signal(signal.SIGUSR2, save)
(folder / f"up-{start}-{rank}").touch()
while awaited != "nothing" and not is_resumed:
    time.sleep(0.1)
    if gone.exists():
        sys.exit("a peer is gone")
