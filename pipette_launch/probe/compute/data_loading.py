"""What loading a micro-batch takes of a stage, under Megatron-LM's own trainer on CPUs.

Its loader's processes compute on the cores of the slot, and hand every tensor of a batch over by itself: on four hosts
of 0.4 cores that took 12 ms of the first and the last stage for each micro-batch, whatever its size. On GPUs the loader
has cores to itself and works while kernels run.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.utils.data import DataLoader, Dataset

from pipette_launch.facts import ComputeCase, Job, LoadingTime
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.probe.compute.cold_start import TOKENS
from pipette_patches.workload.layers import Part, workload

QUEUED = 2
"""Batches that each process of a loader prepares ahead (torch's `prefetch_factor`)."""
TURNS, BATCHES = 3, 8
REST_S = 0.05
"""For the loader's processes to fill their queues, so that they take nothing from what is timed next."""


class GptSamples(Dataset[dict[str, torch.Tensor]]):
    """What Megatron's GPT dataset returns for each sample, made by the same operations."""

    def __init__(self, num_samples: int, seq_length: int, *, has_mask: bool) -> None:
        self._num_samples = num_samples
        self._seq_length = seq_length
        self._has_mask = has_mask

    def __len__(self) -> int:
        """Count them."""
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Make one."""
        length = self._seq_length
        text = torch.arange(index, index + length + 1)
        mask = {"attention_mask": torch.tril(torch.ones((1, length, length))) < 0.5} if self._has_mask else {}
        return {
            "tokens": text[:-1].contiguous(),
            "labels": text[1:].contiguous(),
            "loss_mask": torch.ones(length),
            "position_ids": torch.arange(length),
            **mask,
        }


def loads_as_megatron_lm(job: Job) -> bool:
    """Whether Megatron-LM's own trainer lies beside the script or is installed, and is left to make its loader."""
    is_there = importlib.util.find_spec("megatron.training") is not None
    return is_there and job.flag_value("--dataloader-type", "single") != "external"


def loading_time(job: Job, case: ComputeCase) -> LoadingTime:
    """Time it for micro-batches of one sample and of as many as the case has; on a CPU.

    No process group may exist in this process.

    Raises:
        WorkloadError: megatron-core refuses the case.

    """
    length = min(job.model.seq_length, TOKENS * case.tp * case.cp)
    short = replace(job, model=replace(job.model, seq_length=length))
    sizes = (1, max(2, case.micro_batch_size))
    with workload(short, replace(case, micro_batch_size=1), device_kind="cpu") as work:
        layer = next(part for part in work.parts if part.name in LAYERS)
        seconds = [_seconds(job, size, layer) for size in sizes]
    per_sample_s = max((seconds[1] - seconds[0]) / (sizes[1] - sizes[0]), 0.0)
    return LoadingTime(batch_s=max(min(seconds) - per_sample_s, 0.0), sample_s=per_sample_s)


def _seconds(job: Job, micro_batch_size: int, layer: Part) -> float:
    with _batches(job, micro_batch_size) as batches:
        return time_loading(layer, lambda: next(batches), ahead=QUEUED * _num_workers(job))


def time_loading(
    layer: Part,
    load: Callable[[], object],
    *,
    ahead: int,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Return what a stage waits for a batch, or how much longer load and layer take than the layer, whichever is more.

    The processes of the loader compute meanwhile: on cores of their own that costs nothing, on the slot's they make the
    call wait, where little lies ready, or the layer take longer. Where a slot has a part of a core its pauses in the
    call are not lost, so the difference alone would be too little (7 to 10 ms, where stages took 14).

    Args:
        layer: runs forward and backward.
        load: the next batch.
        ahead: batches that lie ready after a pause; they are used up before time counts.
        clock: seconds on the wall.
        sleep: pauses.

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


def _num_workers(job: Job) -> int:
    return int(job.flag_value("--num-workers", "2"))


@contextmanager
def _batches(job: Job, micro_batch_size: int) -> Iterator[Iterator[dict[str, torch.Tensor]]]:
    """Load micro-batches as Megatron-LM's trainer does (megatron/training/datasets/data_samplers.py of core_v0.16)."""
    num_workers = _num_workers(job)
    num_batches = TURNS * (2 * BATCHES + QUEUED * num_workers + 1)
    has_mask = not job.has_flag("--no-create-attention-mask-in-dataloader")
    loader = DataLoader(
        GptSamples(num_batches * micro_batch_size, job.model.seq_length, has_mask=has_mask),
        batch_size=micro_batch_size,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    batches = iter(loader)
    try:
        yield batches
    finally:
        # The loader's processes end with it.
        del batches, loader
