"""Train on the hosts of a laboratory without a launcher: each slot gets its RANK."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from benchmarks.netlab import everywhere
from benchmarks.netlab.compare import TORCHRUN, Ended, ended, environment
from benchmarks.netlab.lab import Lab
from pipette_launch.facts.schedule import VARIABLE

WORKER = TORCHRUN[TORCHRUN.index("torch.distributed.run") + 1 :]
"""Worker command of torchrun on CPUs."""
FIRST_PORT, NUM_PORTS = 29600, 2000
TURN = count()
"""A store that has just closed keeps its port for a while, so each training takes the next."""


def trained(
    lab: Lab,
    words: Sequence[str],
    placement: Sequence[int],
    *,
    python: str,
    limit_s: float = 60.0,
    schedule: Path | None = None,
) -> Ended:
    """Train with these RANKs on the slots, slots host by host.

    Args:
        lab: where.
        words: the script and its arguments.
        placement: RANK of each slot.
        python: the interpreter.
        limit_s: after so long it is ended.
        schedule: the file of a pipeline schedule that the patch `schedules` executes; None for Megatron's own.

    Raises:
        LabError: a worker failed, or it took too long; the text contains the end of the output.

    """
    began_s = time.monotonic()
    port = FIRST_PORT + next(TURN) % NUM_PORTS
    slots = [(host.name, device) for host in lab.topology.hosts for device in range(host.slots)]
    head = slots[list(placement).index(0)][0]
    outputs = [lab.folder / f"slot{index}" for index in range(len(slots))]
    with ExitStack() as stack:
        processes = {}
        for index, ((host, device), rank) in enumerate(zip(slots, placement, strict=True)):
            env = {
                **environment(),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(slots)),
                "LOCAL_RANK": str(device),
                "LOCAL_WORLD_SIZE": str(lab.topology.host(host).slots),
                "MASTER_ADDR": lab.address(head),
                "MASTER_PORT": str(port),
            }
            worker = WORKER
            if schedule is not None:
                env[VARIABLE] = str(schedule)
                worker = (*WORKER[:-1], "--patch", "schedules", WORKER[-1])
            file = stack.enter_context(outputs[index].open("w"))
            argv = [python, *worker, *words]
            processes[f"slot {index} of {host}"] = lab.run(host, argv, env, stdout=file, stderr=subprocess.STDOUT)
        code, blamed = everywhere.finish(processes, 0.0, limit_s)
    fault = f"{blamed} failed, exit code {code}" if blamed else f"not done after {limit_s:g} s" if code else ""
    return ended(words, outputs, wall_s=time.monotonic() - began_s, fault=fault)
