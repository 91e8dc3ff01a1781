"""All workers of a warm-up, forked from one process with the common imports, which saves seconds for each.

`python forked_workers.py ORDER PORT RANK...`; what rank 3 writes to stderr lies in errors-3 beside the order, and the
last line of stdout has the exit codes. The imports of a RANK written as `1+8` take 8 s longer.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path

from probe.workers import environment

from pipette_launch.facts import files
from pipette_launch.probe import phases, run  # noqa: F401
from pipette_launch.probe.messages import WarmupOrder
from pipette_patches import workload


def _sleep(late_s: float, _: str) -> None:
    time.sleep(late_s)


def main(order: str, port: str, *ranks: str) -> None:
    """Start the workers, and wait for them; they end with this process."""
    options = files.read(Path(order), WarmupOrder)
    # Nothing is set up by it that a fork would break: no thread, no process group.
    workload.load("cpu")
    pids = []
    for rank, _, late_s in (each.partition("+") for each in ranks):
        pid = os.fork()
        if pid == 0:
            workload.load = functools.partial(_sleep, float(late_s or 0))
            os.environ.update(environment(int(rank), options, int(port)))
            os.dup2(os.open(Path(order).with_name(f"errors-{rank}"), os.O_WRONLY | os.O_CREAT), 2)
            os._exit(run.main([order]))
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


if __name__ == "__main__":
    main(*sys.argv[1:])
