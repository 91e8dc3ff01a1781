"""One training on the hosts of a laboratory without a launcher: each slot is told its RANK."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

from benchmarks.netlab.compare import TORCHRUN, Ended, environment
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.system import LabError
from pipette_launch.megatron.logs import parse_iteration

WORKER = TORCHRUN[TORCHRUN.index("torch.distributed.run") + 1 :]
"""What torchrun starts on CPUs."""
FIRST_PORT, NUM_PORTS = 29600, 2000
TURN = count()
"""A store that has just closed keeps its port for a while, so each training takes the next."""
POLL_S = 0.02
SHOWN_LINES = 12


def trained(lab: Lab, words: Sequence[str], placement: Sequence[int], *, python: str, limit_s: float = 60.0) -> Ended:
    """Train with these RANKs on the slots, slots host by host.

    Args:
        lab: where.
        words: the script and its arguments.
        placement: RANK of each slot.
        python: the interpreter.
        limit_s: after so long it is ended.

    Raises:
        LabError: a worker failed, or it took too long; the text holds the end of what was printed.

    """
    began_s = time.monotonic()
    port = FIRST_PORT + next(TURN) % NUM_PORTS
    slots = [(host.name, device) for host in lab.topology.hosts for device in range(host.slots)]
    head = slots[list(placement).index(0)][0]
    outputs = [lab.folder / f"slot{index}" for index in range(len(slots))]
    with ExitStack() as stack:
        processes = []
        for (host, device), rank, path in zip(slots, placement, outputs, strict=True):
            env = {
                **environment(),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(slots)),
                "LOCAL_RANK": str(device),
                "LOCAL_WORLD_SIZE": str(lab.topology.host(host).slots),
                "MASTER_ADDR": lab.address(head),
                "MASTER_PORT": str(port),
            }
            file = stack.enter_context(path.open("w"))
            processes.append(lab.run(host, [python, *WORKER, *words], env, stdout=file, stderr=subprocess.STDOUT))
        fault = _finish(processes, began_s + limit_s)
    lines = [line for path in outputs for line in _lines(path)]
    found = {one.iteration: one for one in map(parse_iteration, lines) if one is not None}
    if fault or not found:
        raise LabError(f"{fault or 'no iteration was printed'}\n" + "\n".join(lines[-SHOWN_LINES:]))
    ordered = [found[number] for number in sorted(found)]
    return Ended(
        step_s=tuple(one.step_time_s for one in ordered),
        losses=tuple(one.loss or "nan" for one in ordered),
        wall_s=time.monotonic() - began_s,
    )


def _finish(processes: Sequence[subprocess.Popen[str]], deadline_s: float) -> str:
    """Wait for all, and end all with the first that fails or at the deadline; returns what went wrong."""
    fault = ""
    while any(process.poll() is None for process in processes):
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None or time.monotonic() > deadline_s:
            fault = fault or (f"exit code {failed}" if failed else "it took too long and was ended")
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return fault or next((f"exit code {process.returncode}" for process in processes if process.returncode), "")


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()
