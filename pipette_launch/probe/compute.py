"""How long the user's own layers take: forward, backward to the input, and what the weight gradients add.

Every slot measures alone, under a fake process group. The reference case is measured by all (it tells slow slots from
fast ones); the other cases are dealt out, so that as many shapes are measured at a time as there are slots.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipette_launch.facts import ComputeCase, ComputeTime, MemoryReading, Samples
from pipette_launch.probe.harness import Budget, Progress
from pipette_launch.probe.memory import MemoryMeter
from pipette_launch.probe.options import ProbeOptions
from pipette_patches import workload as patches_workload
from pipette_patches.workload import Part, Workload, WorkloadError

COMPUTE_SHARE = 1.0
MAX_VALUES = 20
MIN_VALUES = 3


class Stopwatch(Protocol):
    """Marks moments in a device's work and tells the seconds between two of them."""

    def mark(self) -> Any:
        """Note a moment."""

    def seconds(self, before: Any, after: Any) -> float:
        """The time between two moments."""


class CpuStopwatch:
    """Work on the CPU is done when the call returns."""

    def mark(self) -> float:
        """Read the clock."""
        return time.perf_counter()

    def seconds(self, before: float, after: float) -> float:
        """Subtract."""
        return after - before


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


@dataclass(frozen=True, kw_only=True)
class ComputeResult:
    """What one slot measured, and which cases it could not."""

    times: tuple[ComputeTime, ...]
    memory: tuple[MemoryReading, ...]
    notes: tuple[str, ...]


def cases_of(cases: tuple[ComputeCase, ...], slot: int, num_slots: int) -> tuple[ComputeCase, ...]:
    """The reference case for everyone, and every `num_slots`-th of the others, dealt out in order of promise."""
    return (cases[0], *cases[1 + slot :: num_slots])


def num_values(seconds: float, habits: Habits) -> int:
    """How many timed runs: as many as fit into `value_s`, within limits."""
    if seconds * MAX_VALUES <= habits.value_s:
        return MAX_VALUES
    return max(MIN_VALUES, int(habits.value_s / seconds))


def measure(
    options: ProbeOptions, *, slot: int, budget: Budget, progress: Progress, meter: MemoryMeter
) -> ComputeResult:
    """Measure this slot's cases, time first and then memory, until the budget is spent."""
    times: list[ComputeTime] = []
    memory: list[MemoryReading] = []
    notes: list[str] = []
    longest_s = 0.0
    # Whatever was imported stays: collections between the cases need not walk through it.
    gc.freeze()
    for index, case in enumerate(cases_of(options.cases, slot, options.num_slots)):
        if index and not budget.allows(COMPUTE_SHARE, needs_s=longest_s):
            break
        before_s = budget.clock()
        try:
            with patches_workload.workload(options.job, case, device_kind=options.device_kind) as work:
                notes += work.notes
                times += time_case(work, case, slot=slot, device_kind=options.device_kind)
                with progress.during("memory"):
                    memory.append(_memory(work, case, slot=slot, meter=meter))
        except WorkloadError as error:
            notes.append(f"compute: {error}")
        except (RuntimeError, MemoryError) as error:
            if not patches_workload.is_out_of_memory(error):
                raise
            words = patches_workload.case_words(case)
            notes.append(f"compute: one layer of {words} ran out of memory on slot {options.slot_name(slot)}")
        longest_s = max(longest_s, budget.clock() - before_s)
    return ComputeResult(times=tuple(times), memory=tuple(memory), notes=tuple(notes))


def time_case(work: Workload, case: ComputeCase, *, slot: int, device_kind: str) -> list[ComputeTime]:
    """Time every part of a case."""
    stopwatch: Stopwatch = CudaStopwatch() if device_kind == "cuda" else CpuStopwatch()
    habits = HABITS[device_kind]
    return [_time_part(part, case, slot=slot, stopwatch=stopwatch, habits=habits) for part in work.parts]


def _time_part(part: Part, case: ComputeCase, *, slot: int, stopwatch: Stopwatch, habits: Habits) -> ComputeTime:
    forward, full, input_grad = _time_passes(part, stopwatch, habits)
    return ComputeTime(
        case=case,
        part=part.name,
        slot=slot,
        forward=forward,
        input_grad=input_grad,
        weight_grad=difference(full, input_grad),
    )


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


def _memory(work: Workload, case: ComputeCase, *, slot: int, meter: MemoryMeter) -> MemoryReading:
    """The peak of one layer, the MoE one where there is one: it holds more."""
    layer = [part for part in work.parts if part.chains][-1]

    def step() -> None:
        layer.backward(layer.forward(1))

    with layer.accumulating():
        peak = meter.peak(step)
    return MemoryReading(
        case=case, slot=slot, allocator_peak_bytes=peak.allocator_bytes, device_peak_bytes=peak.device_bytes
    )
