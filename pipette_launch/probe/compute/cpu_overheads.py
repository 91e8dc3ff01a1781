"""What a stage on a CPU takes beside its layers: waking up after a wait, and loading micro-batches.

Waking: a layer that comes after a wait, as in a pipeline, finds the processor's caches cold. On four hosts of 0.4 cores
forward and backward of a layer took 1.2 to 1.7 ms of processor time more after waits of 20 ms each than in a row,
whatever the layer's size: 3 to 4 ms of each pass of each chunk.

Loading: the processes of Megatron-LM's data loader compute on the cores of the slot, and transfer every tensor of a
batch by itself. On four hosts of 0.4 cores that took 12 ms of the first and the last stage for each micro-batch,
whatever its size. On GPUs the loader has cores of its own and works while kernels run.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.utils.data import DataLoader, Dataset

from pipette_launch.facts import ComputeCase, Job, LoadingTime
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.megatron.performance import performance_options
from pipette_launch.probe.compute.timing import Stopwatch, run_part
from pipette_patches.workload.layers import Part, workload

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
