"""Run one part after another, each in its own process with a deadline, even if something in it hangs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
ON_CPU = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
GRACE_S = 5.0
"""Between asking a process to end and killing it: a launcher ends its own workers in that time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of the check."""

    name: str
    module: str
    share: float
    """Share of the remaining time if all later parts still have to run."""
    says: str
    """Purpose of the part, for `--help` and the report."""


PARTS = (
    Part(
        name="main", module="main_job", share=0.40, says="the main job: measure, plan, launch, train, run out of memory"
    ),
    Part(name="engine", module="engine", share=0.16, says="the main job with layers of Transformer Engine"),
    Part(
        name="script",
        module="own_script",
        share=0.16,
        says="a script as it is, in each precision, with windows and CUDA graphs: played, and beside it in training",
    ),
    Part(
        name="ranks",
        module="ranks",
        share=0.22,
        says="several ranks on one device: order of collectives, plans, placements, zero-bubble schedules",
    ),
    Part(name="tests", module="suite", share=0.06, says="tests marked `gpu`"),
)
"""The most valuable first."""


def adopt_orphans() -> None:
    """Adopt all processes that a part's launchers leave behind, so that this process can end them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def limits_s(parts: tuple[Part, ...], left_s: float) -> float:
    """Return the time for the first of these parts, if all of them are to run in the remaining time."""
    return left_s * parts[0].share / sum(part.share for part in parts)


def run(part: Part, words: Sequence[str], *, limit_s: float, log: Path, device_kind: str) -> str:
    """Run a part, and end it with all that it started once its time is over.

    Args:
        part: what to run.
        words: of the command line.
        limit_s: how long it may take.
        log: takes the output of all its processes.
        device_kind: on a CPU Megatron compiles nothing, as that takes longer than the part.

    Returns:
        Why it did not end by itself and well; empty where it did.

    """
    ends_s = time.monotonic() + limit_s
    with log.open("ab") as output:
        output.write(f"\n=== {part.name}, at most {limit_s:.0f} s\n".encode())
        output.flush()
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "benchmarks.gpu", "--only-part", part.name, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(ON_CPU if device_kind == "cpu" else {})},
        )
        try:
            code = process.wait(max(ends_s - time.monotonic(), 0.0))
            trouble = f"it ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            trouble = f"it was ended after {limit_s:.0f} s"
        finally:
            left = end_children()
            process.poll()
    return trouble + (f"; {left} of its processes could not be ended" if left else "")


def end_children() -> int:
    """End every process below this one; returns how many are still there (a driver may hold one for ever)."""
    family = psutil.Process().children(recursive=True)
    for act in (psutil.Process.terminate, psutil.Process.kill):
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                act(one)
        _, family = psutil.wait_procs(family, timeout=GRACE_S)
        # Processes that started after the first signal.
        family = list({*family, *psutil.Process().children(recursive=True)})
        if not family:
            return 0
    return len([one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE])
