"""How long one part of a model takes: forward, backward to the input, and what the weight gradients and recompute add.

A layer's times are slopes: a short and a long chain of layers run in turns, and the difference of their times is
divided by the difference of their lengths. So the costs of entering and leaving a chain (the first launch on an idle
device, making the incoming gradient) do not count. The weight gradients and recompute are differences of chains of
equal length.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset

from pipette_launch.facts import ComputeCase, ComputeTime, Job, LoadingTime, Samples
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.megatron.performance import performance_options
from pipette_launch.probe.instruments import CudaStopwatch
from pipette_patches.workload import Part, workload

MAX_VALUES = 20
USUAL_CORE_S = 1.5e-3
"""Time of `CoreSpeed`'s fixed computation on a core of usual speed, to which all slots' times are converted."""
CHECK_EVERY_S = 0.1
"""Wall time for which a check of the core's speed holds."""
CHECK_REPEATS = 3
"""A check is the median of so many: the first comes behind a layer and finds cold caches."""


class CoreSpeed:
    """How fast a core computes at the moment, by the processor time of a fixed computation that is repeated.

    A virtual core shares a real one with others, which no counter shows: a layer took 37 ms of processor time, and 58
    some seconds later. The layers of three models on four hosts scattered by 4 to 17 % from one 0.4 s to the next, and
    by 3 to 8 % once divided by the time of the fixed computation (correlation 0.6 to 0.96).
    """

    def __init__(
        self,
        work: Callable[[], object] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        computed: Callable[[], float] = time.thread_time,
    ) -> None:
        self._work = work or _fixed_work()
        self._clock = clock
        self._computed = computed
        self._checked_s = -CHECK_EVERY_S
        self._checks_s: list[float] = []

    def check(self) -> None:
        """Time the fixed computation, unless the last check is recent."""
        now_s = self._clock()
        if now_s - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = now_s
            times_s = []
            for _ in range(CHECK_REPEATS):
                before_s = self._computed()
                self._work()
                times_s.append(self._computed() - before_s)
            self._checks_s.append(statistics.median(times_s))

    @property
    def now(self) -> float:
        """Seconds of the last check over those of a usual core; 1 before the first check."""
        return self._checks_s[-1] / USUAL_CORE_S if self._checks_s else 1.0

    @property
    def usual(self) -> float:
        """The same of the median check."""
        return statistics.median(self._checks_s) / USUAL_CORE_S if self._checks_s else 1.0


def _fixed_work() -> Callable[[], object]:
    """Some matrix products, and some passes over memory."""
    left, right, span = torch.ones(192, 192), torch.ones(192, 192), torch.ones(1 << 19)

    def work() -> None:
        for _ in range(4):
            torch.mm(left, right)
        for _ in range(2):
            span.mul_(0.5).add_(0.5)

    return work


class CpuStopwatch:
    """Counts the time that this thread computed, and apart from it how much longer that took on the wall.

    A layer of a few milliseconds is either preempted or not, so wall times of single runs scatter by the length of a
    time slice. What other processes take away is a steady factor over many runs. Once `check_speed` was called, times
    are those of a core of usual speed, and the speed of this core is a part of the stretch.
    """

    def __init__(self, core_speed: CoreSpeed | None = None) -> None:
        self._core_speed = core_speed or CoreSpeed()
        self._wall_s = 0.0
        self._computed_s = 0.0
        self._kept: float | None = None

    def mark(self) -> tuple[float, float]:
        """Read both clocks."""
        return time.perf_counter(), time.thread_time()

    def seconds(self, before: tuple[float, float], after: tuple[float, float]) -> float:
        """The time computed between two marks."""
        computed_s = after[1] - before[1]
        self._wall_s += after[0] - before[0]
        self._computed_s += computed_s
        return computed_s / self._core_speed.now

    def check_speed(self) -> None:
        """Check how fast the core is; what is timed from now on is converted by that."""
        self._core_speed.check()

    def settle(self) -> None:
        """Return once the device has done all its work: on a CPU that is now."""

    def keep_share(self) -> None:
        """Fix the share of the core: all slots worked until now, and later some may be done before others."""
        self._kept = self._share()

    def stretch(self) -> float:
        """The factor that turns times into wall times while all slots work, on a core of its usual speed."""
        return self._core_speed.usual * (self._kept or self._share())

    def _share(self) -> float:
        """Wall time over computing time of all that was timed so far."""
        return max(1.0, self._wall_s / self._computed_s) if self._computed_s else 1.0


Stopwatch: TypeAlias = CpuStopwatch | CudaStopwatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """How a device kind is measured."""

    warmups: int
    """Number of untimed turns after the first lap, in which autotuners and allocators adapt."""
    chains: tuple[int, int]
    """Lengths of the short and the long chain. A GPU needs two layers even in the short one: behind the first layers
    the host has launched ahead, or has not, as in a real stage."""
    value_s: float
    """Seconds to spend on the timed turns of one part, if they are short."""
    min_values: int
    """Least number of timed turns of a part, however long they take."""
    long_layer_s: float
    """A layer that takes longer, forward and backward, is timed in short chains only: entering is under 1 % of it."""

    def hastier(self, factor: float) -> Habits:
        """Spend so many times less time on the timed turns, with three of them at least."""
        return replace(self, value_s=self.value_s / factor, min_values=min(self.min_values, 3))


HABITS = {
    "cpu": Habits(warmups=1, chains=(1, 3), value_s=0.3, min_values=5, long_layer_s=0.1),
    "cuda": Habits(warmups=5, chains=(2, 6), value_s=0.3, min_values=5, long_layer_s=0.02),
}


class Run(NamedTuple):
    """Seconds of one chain's forward and backward."""

    forward_s: float
    backward_s: float


class Turn(NamedTuple):
    """Seconds of one layer, or of another part, from one run of each of its chains."""

    forward_s: float
    backward_s: float
    weight_s: float
    again_s: float


def num_values(seconds: float, habits: Habits) -> int:
    """How many timed runs: as many as fit into `value_s`, within limits."""
    if seconds * MAX_VALUES <= habits.value_s:
        return MAX_VALUES
    return max(habits.min_values, int(habits.value_s / seconds))


def stopwatch_for(device_kind: str) -> Stopwatch:
    """The stopwatch of a device kind."""
    return CudaStopwatch() if device_kind == "cuda" else CpuStopwatch()


def time_part(
    part: Part, case: ComputeCase, *, slot: int, stopwatch: Stopwatch, habits: Habits, again: bool = True
) -> ComputeTime:
    """Time one part of a case on this slot.

    Args:
        part: a layer, or what comes before or after the layers.
        case: the tensor and context parallel sizes and the micro-batch.
        slot: the slot of this worker.
        stopwatch: that of the slot's device.
        habits: how often, and in which chains.
        again: time recompute too, where Megatron recomputes the part.

    """
    timed_again = again and part.recomputed is not None
    with part.accumulating():

        def turns(number: int, lengths: Sequence[int]) -> list[Turn]:
            return [_turn(part, lengths, stopwatch, again=timed_again) for _ in range(number)]

        warmups = turns(habits.warmups, habits.chains[:1])
        layer_s = warmups[-1].forward_s + warmups[-1].backward_s
        lengths = habits.chains if part.chains and layer_s < habits.long_layer_s else habits.chains[:1]
        before = stopwatch.mark()
        warmups += turns(1, lengths)
        turn_s = stopwatch.seconds(before, stopwatch.mark())
        values = turns(num_values(turn_s, habits), lengths)
        part.freeze(False)

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


def time_calls(
    action: Callable[[], None], *, stopwatch: Stopwatch, habits: Habits, wait: Callable[[], None] | None = None
) -> Samples:
    """Time something that has no backward; `wait` comes before each call."""

    def once() -> float:
        stopwatch.check_speed()
        if wait is not None:
            wait()
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
    """Run all that is timed one after the other, so that a disturbance of the machine affects all of it alike."""
    part.freeze(False)
    stopwatch.check_speed()
    runs = [run_part(part, part.forward, length, stopwatch) for length in lengths]
    # A difference of two equal chains needs no slope: both contain the cost of entering.
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
    """Time a chain of a part, forward and backward.

    Args:
        part: runs the backward.
        forward: runs the part as often in a row as it is told.
        length: number of times.
        stopwatch: that of the part's device.

    """
    start = stopwatch.mark()
    output = forward(length)
    middle = stopwatch.mark()
    part.backward(output)
    end = stopwatch.mark()
    return Run(stopwatch.seconds(start, middle), stopwatch.seconds(middle, end))


TOKENS = 32
"""Number of tokens of the timed layer on each rank: the overheads do not grow with them, and would be small beside the
scatter of a long layer."""
WAIT_S = 0.02
"""Wait before each timed pass; other processes compute meanwhile."""
WARMUPS, VALUES = 1, 7
QUEUED = 2
"""Batches that each process of a loader prepares ahead (torch's `prefetch_factor`)."""
TURNS, BATCHES = 3, 8
REST_S = 0.05
"""Time for the loader's processes to fill their queues, so that they do not compute during what is timed next."""


@contextmanager
def short_layer(job: Job, case: ComputeCase) -> Iterator[Part]:
    """Build a layer that is cut as in this case, for one sample of few tokens, on a CPU.

    No process group may exist in this process.

    Raises:
        WorkloadError: megatron-core refuses the case.

    """
    length = min(job.model.seq_length, TOKENS * case.tp * case.cp)
    short = replace(job, model=replace(job.model, seq_length=length))
    with workload(short, replace(case, micro_batch_size=1), device_kind="cpu") as work:
        yield next(part for part in work.parts if part.name in LAYERS)


def time_wake(layer: Part, stopwatch: Stopwatch, sleep: Callable[[float], None] = time.sleep) -> float:
    """Return how many seconds longer forward and backward of a layer take together where each comes after a wait.

    They are compared with a layer that runs directly after another. Noise does not make the result negative.
    """

    def turn() -> float:
        stopwatch.check_speed()
        one, two = (sum(run_part(layer, layer.forward, length, stopwatch)) for length in (1, 2))
        sleep(WAIT_S)
        begun = stopwatch.mark()
        output = layer.forward(1)
        forward_s = stopwatch.seconds(begun, stopwatch.mark())
        sleep(WAIT_S)
        begun = stopwatch.mark()
        layer.backward(output)
        return forward_s + stopwatch.seconds(begun, stopwatch.mark()) - (two - one)

    with layer.accumulating():
        found = [turn() for _ in range(WARMUPS + VALUES)]
    return max(statistics.median(found[WARMUPS:]), 0.0)


@dataclass(frozen=True, kw_only=True)
class GptSamples(Dataset[dict[str, torch.Tensor]]):
    """The tensors that Megatron's GPT dataset returns for each sample, made by the same operations."""

    num_samples: int
    seq_length: int
    has_mask: bool

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Make one sample."""
        length = self.seq_length
        text = torch.arange(index, index + length + 1)
        mask = {"attention_mask": torch.tril(torch.ones((1, length, length))) < 0.5} if self.has_mask else {}
        return {
            "tokens": text[:-1].contiguous(),
            "labels": text[1:].contiguous(),
            "loss_mask": torch.ones(length),
            "position_ids": torch.arange(length),
            **mask,
        }


def loads_as_megatron_lm(job: Job) -> bool:
    """Whether Megatron-LM's own trainer is installed or lies beside the script, and makes its data loader itself."""
    is_there = importlib.util.find_spec("megatron.training") is not None
    return is_there and performance_options(job).dataloader_type != "external"


def loading_time(job: Job, layer: Part, micro_batch_size: int) -> LoadingTime:
    """Time the loading of micro-batches of one sample and of so many, at least two, beside a layer on a CPU."""
    num_workers = performance_options(job).num_workers
    has_mask = performance_options(job).create_attention_mask_in_dataloader
    num_batches = TURNS * (2 * BATCHES + QUEUED * num_workers + 1)
    sizes, seconds = (1, max(2, micro_batch_size)), []
    for size in sizes:
        # As Megatron-LM's trainer does (megatron/training/datasets/data_samplers.py of core_v0.16).
        loader = DataLoader(
            GptSamples(num_samples=num_batches * size, seq_length=job.model.seq_length, has_mask=has_mask),
            batch_size=size,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        seconds.append(time_loading(layer, iter(loader).__next__, ahead=QUEUED * num_workers))
        # The loader's processes end with it.
        del loader
    per_sample_s = max((seconds[1] - seconds[0]) / (sizes[1] - sizes[0]), 0.0)
    return LoadingTime(batch_s=max(min(seconds) - per_sample_s, 0.0), sample_s=per_sample_s)


def time_loading(
    layer: Part,
    load: Callable[[], object],
    *,
    ahead: int,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Return the seconds that loading costs a stage for each batch.

    That is the wait for a batch, or how much longer load and layer take than the layer, whichever is more. On cores of
    their own the loader's processes cost nothing. On the slot's cores they make the call wait where few batches are
    ready, or the layer slower. Where a slot has a part of a core it saves up computing time while the call waits, so
    the difference alone would be too little (7 to 10 ms, where stages took 14).

    Args:
        layer: runs forward and backward.
        load: returns the next batch.
        ahead: number of batches that are ready after a pause; they are used up before time counts.
        clock: returns wall time in seconds.
        sleep: waits so many seconds.

    """

    def run(times: int, *, loads: bool) -> tuple[float, float]:
        waited_s, begun_s = 0.0, clock()
        for _ in range(times):
            if loads:
                before_s = clock()
                load()
                waited_s += clock() - before_s
            layer.backward(layer.forward(1))
        return (clock() - begun_s) / times, waited_s / times

    def turn() -> float:
        run(ahead + 1, loads=True)
        whole_s, waited_s = run(BATCHES, loads=True)
        sleep(REST_S)
        layer_s, _ = run(BATCHES, loads=False)
        return max(whole_s - layer_s, waited_s)

    with layer.accumulating():
        return statistics.median(turn() for _ in range(TURNS))
