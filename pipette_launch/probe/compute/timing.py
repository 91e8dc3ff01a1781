"""Times of one part of a model: forward, gradients of input and weights, recompute, and loading of batches on a CPU.

The time of a layer is a slope: a short and a long chain run in turns, and the difference of their times is divided by
the difference of their lengths. So the cost of entering a chain does not count, such as the first launch on an idle
device. The time of weight gradients, or of recompute, is the difference between two chains of equal length.

On a CPU a stage also takes time that layers in a row do not show: the data loader's processes compute on the slot's
cores. On four hosts with 0.4 of a core each, they cost the first and the last stage 12 ms for each micro-batch of any
size. On a GPU machine the data loader has its own cores.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from pipette_launch.facts import ComputeCase, ComputeTime, Job, LoadingTime, Samples
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.probe.instruments import Stopwatch
from pipette_patches.workload import MakeProgram, Part, workload

MAX_VALUES = 20
TOKENS = 32
"""Tokens on each rank for the layer beside which loading is timed."""
WAIT_S = 0.02  # Wait (s) before each timed step of the optimizer, in which other processes compute
QUEUED = 2  # Batches that each process of a loader prepares ahead (torch's `prefetch_factor`)
TURNS, BATCHES = 3, 8
REST_S = 0.05  # Seconds in which the loader's processes fill their queues, to be idle during the next timing


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """Number and length of timed turns on a kind of device, `cpu` or `cuda`. A turn runs each chain of layers once."""

    warmups: int
    """Number of untimed turns before the timed turns, in which autotuners and allocators adapt."""
    chains: tuple[int, int]
    """Lengths of the short and the long chain. On a GPU the host launches a second layer ahead, as in a real stage."""
    value_s: float
    """Seconds for the timed turns of one part, if the turns are short."""
    min_values: int
    """Least number of timed turns of a part, even if the turns are long."""
    long_layer_s: float
    """Slower layers (forward and backward) run only in short chains, because entering takes under 1 % of their time."""

    def hastier(self, factor: float) -> Habits:
        """Return timing habits that spend `factor` times less time, with at least three timed turns."""
        return replace(self, value_s=self.value_s / factor, min_values=min(self.min_values, 3))


HABITS = {
    "cpu": Habits(warmups=1, chains=(1, 3), value_s=0.3, min_values=5, long_layer_s=0.1),
    "cuda": Habits(warmups=5, chains=(2, 6), value_s=0.3, min_values=5, long_layer_s=0.02),
}


class Run(NamedTuple):
    """Seconds of the forward and of the backward of one chain of layers."""

    forward_s: float
    backward_s: float


class Turn(NamedTuple):
    """Seconds of one layer, or of another part, from one run of each chain."""

    forward_s: float
    backward_s: float
    weight_s: float
    again_s: float


def num_values(seconds: float, habits: Habits) -> int:
    """Return the number of timed turns that fit into `value_s`, within limits, if a turn takes `seconds`."""
    if seconds * MAX_VALUES <= habits.value_s:
        return MAX_VALUES
    return max(habits.min_values, int(habits.value_s / seconds))


def time_part(
    part: Part, case: ComputeCase, *, slot: int, stopwatch: Stopwatch, habits: Habits, again: bool = True
) -> ComputeTime:
    """Time one part of a case on this slot. With `again`, time recompute too, if Megatron recomputes the part."""
    timed_again = again and part.recomputed is not None
    with part.accumulating():

        def turns(number: int, lengths: Sequence[int]) -> list[Turn]:
            return [_turn(part, lengths, stopwatch, again=timed_again) for _ in range(number)]

        warmups = turns(habits.warmups, habits.chains[:1])
        layer_s = warmups[-1].forward_s + warmups[-1].backward_s
        is_layer = part.chains or part.name in LAYERS
        lengths = habits.chains if is_layer and layer_s < habits.long_layer_s else habits.chains[:1]
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
        # Subtract the median weight gradient, not the same turn's, so that both medians add up to the backward.
        input_grad=samples(lambda turn: max(turn.backward_s - usual_s, 0.0) if part.source is not None else 0.0),
        weight_grad=weight,
        recompute=samples(lambda turn: turn.again_s) if timed_again else None,
    )


def time_calls(
    action: Callable[[], object], *, stopwatch: Stopwatch, habits: Habits, wait: Callable[[], None] | None = None
) -> Samples:
    """Time repeated calls of an action without a backward pass; `wait` runs untimed before each call."""

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
    """Return the seconds of one more layer, from chains of one or two lengths; never negative.

    Drift and single disturbed runs change the median of the turns' slopes less than the slope of medians (test_timing).
    """
    if len(lengths) == 1:
        return seconds[0] / lengths[0]
    return max(seconds[1] - seconds[0], 0.0) / (lengths[1] - lengths[0])


def _turn(part: Part, lengths: Sequence[int], stopwatch: Stopwatch, *, again: bool) -> Turn:
    """Run all timed chains one after the other, so that a disturbance of the machine affects all of them."""
    part.freeze(False)
    stopwatch.check_speed()
    runs = [run_part(part, part.forward, length, stopwatch) for length in lengths]
    # Two chains of equal length need no slope, because the cost of entering a chain cancels out.
    few, whole = lengths[0], runs[0]
    again_s = 0.0
    if again:
        assert part.recomputed is not None
        twice = run_part(part, part.recomputed, few, stopwatch)
        again_s = max(sum(twice) - sum(whole), 0.0) / few
    backward_s = slope(lengths, [run.backward_s for run in runs])
    weight_s = backward_s
    # Token ids have no gradient, so the whole backward of the embedding is for weights.
    if part.source is not None:
        part.freeze(True)
        frozen = run_part(part, part.forward, few, stopwatch)
        weight_s = min(max(whole.backward_s - frozen.backward_s, 0.0) / few, backward_s)
    forward_s = slope(lengths, [run.forward_s for run in runs])
    return Turn(*(seconds / part.num_layers for seconds in (forward_s, backward_s, weight_s, again_s)))


def run_part(part: Part, forward: Callable[[int], torch.Tensor], length: int, stopwatch: Stopwatch) -> Run:
    """Time a chain of `length` parts and its backward. A part that cannot chain runs forward and backward in turn."""
    marks = [stopwatch.mark()]
    for _ in range(1 if part.chains else length):
        output = forward(length if part.chains else 1)
        marks.append(stopwatch.mark())
        part.backward(output)
        marks.append(stopwatch.mark())
    # Read the marks at the end, because reading waits for the device.
    seconds = [stopwatch.seconds(*pair) for pair in pairwise(marks)]
    return Run(sum(seconds[::2]), sum(seconds[1::2]))


@contextmanager
def short_layer(job: Job, case: ComputeCase, program: MakeProgram) -> Iterator[Part]:
    """Build a layer of this case for one sample of few tokens on a CPU. Raises WorkloadError like `workload`."""
    length = min(job.model.seq_length, TOKENS * case.tp * case.cp)
    short = replace(job, model=replace(job.model, seq_length=length))
    with workload(short, replace(case, micro_batch_size=1), device_kind="cpu", program=program) as work:
        yield next(part for part in work.parts if part.name in LAYERS)


@dataclass(frozen=True, kw_only=True)
class GptSamples(Dataset[dict[str, torch.Tensor]]):
    """Samples with the tensors of Megatron's GPT dataset, made by the same operations."""

    num_samples: int
    seq_length: int
    has_mask: bool

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
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
    """Return whether the job can import `megatron.training` of a Megatron-LM checkout, whose trainer loads the data."""
    spec = importlib.util.find_spec("megatron.training")
    # The wheel of megatron-core 0.19 also contains `megatron.training`, but no script beside it.
    is_checkout = spec and spec.origin and Path(spec.origin).parents[2].joinpath("pretrain_gpt.py").is_file()
    return bool(is_checkout) and job.options.dataloader_type != "external"


def loading_time(job: Job, layer: Part, micro_batch_size: int) -> LoadingTime:
    """Time the loading of micro-batches of two sizes beside a layer on a CPU: 1 sample, and `micro_batch_size` or 2."""
    num_workers = job.options.num_workers
    has_mask = job.options.create_attention_mask_in_dataloader
    num_batches = TURNS * (2 * BATCHES + QUEUED * num_workers + 1)
    sizes, seconds = (1, max(2, micro_batch_size)), []
    for size in sizes:
        # Make the loader as Megatron-LM's trainer does (megatron/training/datasets/data_samplers.py of core_v0.16).
        loader = DataLoader(
            GptSamples(num_samples=num_batches * size, seq_length=job.model.seq_length, has_mask=has_mask),
            batch_size=size,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        seconds.append(time_loading(layer, iter(loader).__next__, ahead=QUEUED * num_workers))
        del loader  # Ends the loader's processes
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
    """Return the seconds that loading a batch costs a stage.

    The cost is the larger of two times: the wait for a batch, and the time of loading and layer minus the time of the
    layer. The difference alone is too small (7 to 10 ms of 14 in a test), because a slot with part of a core saves up
    computing time while the call waits. After a pause `ahead` batches are ready, so they are taken before the timing.
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
