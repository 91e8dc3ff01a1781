"""What a training job says: its iteration line, and why it failed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipette_launch.text import MIB

_COUNT, _FIGURE = r"(\d{1,15})", r"(\d{1,15}(?:\.\d{0,15})?)"
"""What Megatron prints as %d and %f; digits without end, or two points, are no number of its own."""
ITERATION = re.compile(rf"iteration\s+{_COUNT}/\s*{_COUNT} \|", re.ASCII)
STEP_TIME = re.compile(rf"elapsed time per iteration \(ms\): {_FIGURE} \|", re.ASCII)
LOSS = re.compile(r"lm loss: ([-+.\dE]+|INF) \|")
"""Absent for NaN, and for a loss that is not positive (0.14 to 0.16) or negative (0.17 and later)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One line of Megatron's training log; the last rank prints it."""

    iteration: int
    total: int
    step_time_s: float
    """Mean over the log interval."""
    loss: str | None
    """As printed, so that runs can be compared digit by digit; None for NaN."""


def parse_iteration(line: str) -> Iteration | None:
    """Read an iteration line of any release from 0.14 on; None for every other line.

    Fields come and go between releases, so that each is searched for and none is taken by position.
    """
    iteration, step_time = ITERATION.search(line), STEP_TIME.search(line)
    if not iteration or not step_time:
        return None
    loss = LOSS.search(line)
    return Iteration(
        iteration=int(iteration[1]),
        total=int(iteration[2]),
        step_time_s=float(step_time[1]) / 1e3,
        loss=loss[1] if loss else None,
    )


MEMORY = re.compile(
    rf"\[Rank {_COUNT}\] \(after {_COUNT} iterations\) memory \(MB\) \| allocated: {_FIGURE} "
    rf"\| max allocated: {_FIGURE} \| reserved: {_FIGURE} \| max reserved: {_FIGURE}",
    re.ASCII,
)
"""Printed after the first logged iteration (and from 0.16 on after the second) by the ranks of the first replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLine:
    """What torch's allocator held on one rank, as Megatron prints it; its MB are 2^20 bytes."""

    rank: int
    iteration: int
    allocated_bytes: int
    max_allocated_bytes: int
    reserved_bytes: int
    max_reserved_bytes: int


def parse_memory(line: str) -> MemoryLine | None:
    """Read a memory line of any release from 0.14 on; None for every other line."""
    found = MEMORY.search(line)
    if not found:
        return None
    allocated, max_allocated, reserved, max_reserved = (round(float(text) * MIB) for text in found.groups()[2:])
    return MemoryLine(
        rank=int(found[1]),
        iteration=int(found[2]),
        allocated_bytes=allocated,
        max_allocated_bytes=max_allocated,
        reserved_bytes=reserved,
        max_reserved_bytes=max_reserved,
    )


RERUN_EXIT_CODES = (16, 17)
"""By these Megatron's rerun state machine asks to be started again as it was, and says that a result was wrong."""
