"""How long one part of a model takes: forward, backward to the input, and what the weight gradients and recompute add.

A layer's times are slopes: two chains of layers are run in turns, and what the longer takes more is divided by the
layers that it has more. So what it costs to enter and to leave (the first launch on an idle device, making the
gradient that comes in) is nobody's. The weight gradients and recompute are differences of chains of equal length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from pipette_launch.facts import ComputeCase, ComputeTime, Samples
from pipette_launch.probe.compute.processor_speed import Yardstick
from pipette_patches.workload.layers import Part

MAX_VALUES = 20


class Stopwatch(Protocol):
    """Marks moments in a device's work and tells the seconds between two of them."""

    def mark(self) -> Any:
        """Note a moment."""

    def seconds(self, before: Any, after: Any) -> float:
        """The time between two moments."""

    def look(self) -> None:
        """See how fast the device is at the moment; what is timed from now on counts at that pace."""

    def settle(self) -> None:
        """Return once the device has done all its work."""

    def keep_share(self) -> None:
        """Say that all slots worked until now: what others take from here on does not count in the stretch."""

    def stretch(self) -> float:
        """The factor by which all times have to be multiplied to be times on the wall, while all slots work."""


class CpuStopwatch:
    """Counts the time that this thread computed, and apart from it how much longer that took on the wall.

    A layer of a few milliseconds is either preempted or not, so wall times of single runs scatter by the length of a
    time slice. What the others take away is a steady factor over many runs. With a yardstick, times are those of a core
    of usual speed, and how this one was beside it is in the stretch.
    """

    def __init__(self, yardstick: Yardstick | None = None) -> None:
        self._yardstick = yardstick
        self._wall_s = 0.0
        self._computed_s = 0.0
        self._kept: float | None = None

    def mark(self) -> tuple[float, float]:
        """Read both clocks."""
        return time.perf_counter(), time.thread_time()

    def seconds(self, before: tuple[float, float], after: tuple[float, float]) -> float:
        """The time computed between two moments."""
        computed_s = after[1] - before[1]
        self._wall_s += after[0] - before[0]
        self._computed_s += computed_s
        return computed_s / self._yardstick.now if self._yardstick else computed_s

    def look(self) -> None:
        """Ask the yardstick."""
        if self._yardstick:
            self._yardstick.look()

    def settle(self) -> None:
        """What this thread does is done when it returns."""

    def keep_share(self) -> None:
        """Whoever is done leaves the core to the others: they took their share of what was timed until now, no more."""
        self._kept = self._share()

    def stretch(self) -> float:
        """Wall time over computing time while all worked, on a core that is as fast as it usually was."""
        pace = self._yardstick.usual if self._yardstick else 1.0
        return pace * (self._kept or self._share())

    def _share(self) -> float:
        """Wall time over computing time of all that was timed so far."""
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

    def look(self) -> None:
        """A GPU is nobody else's, and its clocks are looked at elsewhere."""

    def settle(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize()

    def keep_share(self) -> None:
        """Nobody takes any."""

    def stretch(self) -> float:
        """A GPU's events already tell the time on the wall."""
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """How a device kind is measured."""

    warmups: int
    """Compilers, autotuners and allocators settle in these."""
    chains: tuple[int, int]
    """Layers in a row, few and more. A GPU needs some even in the short chain: behind its first layers the host is
    ahead, or is not, as it would be in a real stage."""
    value_s: float
    """Time to spend on the timed turns of one part, if they are short."""
    min_values: int
    """Timed turns of a part, however long they take."""
    long_layer_s: float
    """A layer that takes longer, forward and backward, is timed in short chains alone: entering costs it under 1 %."""

    def hastier(self, factor: float) -> Habits:
        """Spend so many times less on the timed turns, and take three if need be."""
        return replace(self, value_s=self.value_s / factor, min_values=min(self.min_values, 3))


HABITS = {
    "cpu": Habits(warmups=2, chains=(1, 3), value_s=0.3, min_values=5, long_layer_s=0.1),
    "cuda": Habits(warmups=5, chains=(2, 6), value_s=0.3, min_values=5, long_layer_s=0.02),
}


class Run(NamedTuple):
    """Seconds of one chain's forward and backward."""

    forward_s: float
    backward_s: float


class Turn(NamedTuple):
    """Seconds of one layer, or of another part, once through all that is timed of it."""

    forward_s: float
    backward_s: float
    weight_s: float
    again_s: float


def num_values(seconds: float, habits: Habits) -> int:
    """How many timed runs: as many as fit into `value_s`, within limits."""
    if seconds * MAX_VALUES <= habits.value_s:
        return MAX_VALUES
    return max(habits.min_values, int(habits.value_s / seconds))


def stopwatch_for(device_kind: str, yardstick: Yardstick | None = None) -> Stopwatch:
    """The stopwatch of a device kind; a CPU's may have a yardstick."""
    return CudaStopwatch() if device_kind == "cuda" else CpuStopwatch(yardstick)


def time_part(
    part: Part, case: ComputeCase, *, slot: int, stopwatch: Stopwatch, habits: Habits, again: bool = True
) -> ComputeTime:
    """Time one part of a case on this slot; `again` asks for recompute too, where the part knows how."""
    timed_again = again and part.recomputed is not None
    with part.accumulating():

        def turns(number: int, lengths: Sequence[int]) -> list[Turn]:
            return [_turn(part, lengths, stopwatch, again=timed_again) for _ in range(number)]

        warmups = turns(habits.warmups, habits.chains[:1])
        lengths = habits.chains if part.chains and _seconds(warmups[-1]) < habits.long_layer_s else habits.chains[:1]
        before = stopwatch.mark()
        warmups += turns(1, lengths)
        turn_s = stopwatch.seconds(before, stopwatch.mark())
        values = turns(num_values(turn_s, habits), lengths)
        part.freeze(False)
    return _joined(part, case, slot, warmups, values, timed_again=timed_again)


def time_calls(action: Callable[[], None], *, stopwatch: Stopwatch, habits: Habits) -> Samples:
    """Time something that has no backward."""

    def once() -> float:
        stopwatch.look()
        start = stopwatch.mark()
        action()
        return stopwatch.seconds(start, stopwatch.mark())

    warmups = tuple(once() for _ in range(habits.warmups))
    values = tuple(once() for _ in range(num_values(warmups[-1], habits)))
    return Samples(values_s=values, warmup_s=warmups)


def slope(lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds of one layer more, from chains of one or two lengths; noise does not make it negative.

    With two lengths the slope of every turn is taken, and the median later: of this and the slope of medians it is the
    one that a drift between turns or single disturbed runs pull away less (simulated:
    tests/probe/compute/test_timing.py).
    """
    if len(lengths) == 1:
        return seconds[0] / lengths[0]
    return max(seconds[1] - seconds[0], 0.0) / (lengths[1] - lengths[0])


def _turn(part: Part, lengths: Sequence[int], stopwatch: Stopwatch, *, again: bool) -> Turn:
    """Run all that is timed one after the other, so that whatever else slows the machine down falls on all alike."""
    part.freeze(False)
    stopwatch.look()
    runs = [run_part(part, part.forward, length, stopwatch) for length in lengths]
    # What is a difference of two equal chains needs no slope: what entering costs is in both.
    few, whole = lengths[0], runs[0]
    again_s = 0.0
    if again:
        assert part.recomputed is not None
        twice = run_part(part, part.recomputed, few, stopwatch)
        again_s = max(sum(twice) - sum(whole), 0.0) / few
    backward_s = slope(lengths, [run.backward_s for run in runs])
    weight_s = backward_s
    # Token ids take no gradient: all of the embedding's backward is for its weights.
    if part.source is not None:
        part.freeze(True)
        frozen = run_part(part, part.forward, few, stopwatch)
        weight_s = min(max(whole.backward_s - frozen.backward_s, 0.0) / few, backward_s)
    return Turn(slope(lengths, [run.forward_s for run in runs]), backward_s, weight_s, again_s)


def run_part(part: Part, forward: Callable[[int], torch.Tensor], length: int, stopwatch: Stopwatch) -> Run:
    """Run a part forward so many times in a row, and backward."""
    start = stopwatch.mark()
    output = forward(length)
    middle = stopwatch.mark()
    part.backward(output)
    end = stopwatch.mark()
    return Run(stopwatch.seconds(start, middle), stopwatch.seconds(middle, end))


def _seconds(turn: Turn) -> float:
    return turn.forward_s + turn.backward_s


def _joined(
    part: Part, case: ComputeCase, slot: int, warmups: Sequence[Turn], values: Sequence[Turn], *, timed_again: bool
) -> ComputeTime:
    def samples(seconds: Callable[[Turn], float]) -> Samples:
        return Samples(values_s=tuple(map(seconds, values)), warmup_s=tuple(map(seconds, warmups)))

    weight = samples(lambda turn: turn.weight_s)
    usual_s = weight.median_s
    return ComputeTime(
        case=case,
        part=part.name,
        slot=slot,
        forward=samples(lambda turn: turn.forward_s),
        # Less the usual weight gradient, not that of the turn: so the two medians add up to the whole backward's.
        input_grad=samples(lambda turn: max(turn.backward_s - usual_s, 0.0) if part.source is not None else 0.0),
        weight_grad=weight,
        recompute=samples(lambda turn: turn.again_s) if timed_again else None,
    )
