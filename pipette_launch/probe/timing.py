"""How long one part of a model takes: forward, backward to the input, and what the weight gradients add."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipette_launch.facts import ComputeCase, ComputeTime, Samples
from pipette_patches.workload import Part

MAX_VALUES = 20
MIN_VALUES = 3


class Stopwatch(Protocol):
    """Marks moments in a device's work and tells the seconds between two of them."""

    def mark(self) -> Any:
        """Note a moment."""

    def seconds(self, before: Any, after: Any) -> float:
        """The time between two moments."""

    def stretch(self) -> float:
        """The factor by which all times so far have to be multiplied to be times on the wall."""


class CpuStopwatch:
    """Counts the time that this thread computed, and apart from it how much longer that took on the wall.

    A layer of a few milliseconds is either preempted or not, so wall times of single runs scatter by the length of a
    time slice. What the others take away is a steady factor over many runs.
    """

    def __init__(self) -> None:
        self._wall_s = 0.0
        self._computed_s = 0.0

    def mark(self) -> tuple[float, float]:
        """Read both clocks."""
        return time.perf_counter(), time.thread_time()

    def seconds(self, before: tuple[float, float], after: tuple[float, float]) -> float:
        """The time computed between two moments."""
        computed_s = after[1] - before[1]
        self._wall_s += after[0] - before[0]
        self._computed_s += computed_s
        return computed_s

    def stretch(self) -> float:
        """Wall time over computing time, of all that was timed so far."""
        return max(1.0, self._wall_s / self._computed_s) if self._computed_s else 1.0


class CudaStopwatch:
    """Events in the stream, so that launching ahead is not counted as work."""

    def mark(self) -> Any:
        """Record an event behind all work launched so far."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, before: Any, after: Any) -> float:
        """Wait for the later event, then compare."""
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    def stretch(self) -> float:
        """A GPU's events already tell the time on the wall."""
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """How a device kind is measured."""

    warmups: int
    """Compilers, autotuners and allocators settle in these."""
    chain: int
    """Layers in a row: on CUDA a single one would measure its launches instead of its kernels."""
    value_s: float
    """Time to spend on the timed runs of one part, if they are short."""


HABITS = {"cpu": Habits(warmups=2, chain=1, value_s=0.2), "cuda": Habits(warmups=5, chain=4, value_s=0.3)}


def num_values(seconds: float, habits: Habits) -> int:
    """How many timed runs: as many as fit into `value_s`, within limits."""
    if seconds * MAX_VALUES <= habits.value_s:
        return MAX_VALUES
    return max(MIN_VALUES, int(habits.value_s / seconds))


def stopwatch_for(device_kind: str) -> Stopwatch:
    """The stopwatch of a device kind."""
    return CudaStopwatch() if device_kind == "cuda" else CpuStopwatch()


def time_part(part: Part, case: ComputeCase, *, slot: int, stopwatch: Stopwatch, habits: Habits) -> ComputeTime:
    """Time one part of a case on this slot."""
    forward, full, input_grad = _time_passes(part, stopwatch, habits)
    return ComputeTime(
        case=case,
        part=part.name,
        slot=slot,
        forward=forward,
        input_grad=input_grad,
        weight_grad=difference(full, input_grad),
    )


def time_calls(action: Callable[[], None], *, stopwatch: Stopwatch, habits: Habits) -> Samples:
    """Time something that has no backward."""

    def once() -> float:
        start = stopwatch.mark()
        action()
        return stopwatch.seconds(start, stopwatch.mark())

    warmups = tuple(once() for _ in range(habits.warmups))
    values = tuple(once() for _ in range(num_values(warmups[-1], habits)))
    return Samples(values_s=values, warmup_s=warmups)


def difference(whole: Samples, piece: Samples) -> Samples:
    """What the whole takes beyond the usual duration of a piece, never below 0."""
    usual_s = piece.median_s
    return Samples(
        values_s=tuple(max(value - usual_s, 0.0) for value in whole.values_s),
        warmup_s=tuple(max(value - usual_s, 0.0) for value in whole.warmup_s),
    )


def _time_passes(part: Part, stopwatch: Stopwatch, habits: Habits) -> tuple[Samples, Samples, Samples]:
    """Seconds of one application of the part: forward, full backward, backward to the input only."""
    chain = habits.chain if part.chains else 1

    def once(*, frozen: bool) -> tuple[float, float]:
        part.freeze(frozen)
        start = stopwatch.mark()
        output = part.forward(chain)
        middle = stopwatch.mark()
        part.backward(output)
        end = stopwatch.mark()
        return stopwatch.seconds(start, middle) / chain, stopwatch.seconds(middle, end) / chain

    def both() -> tuple[float, float, float]:
        # In turns, so that whatever else slows the machine down falls on both alike.
        forward_s, full_s = once(frozen=False)
        # Token ids take no gradient: all of the embedding's backward is for its weights.
        return forward_s, full_s, once(frozen=True)[1] if part.source is not None else 0.0

    with part.accumulating():
        warmups = [both() for _ in range(habits.warmups)]
        values = [both() for _ in range(num_values(sum(warmups[-1]) * chain, habits))]
        part.freeze(False)
    forward, full, input_grad = (
        Samples(values_s=tuple(value[which] for value in values), warmup_s=tuple(value[which] for value in warmups))
        for which in range(3)
    )
    return forward, full, input_grad
