"""A worker for the tests: trains the tiny GPT under Megatron's own schedule and under ours, and compares.

Prints one line of JSON a case: how far losses and gradients are apart, the most live forwards of each rank, the most
bytes that a step made and held at once, and the bytes that were sent.

    python -m torch.distributed.run --nproc-per-node 4 tests/patches/schedules_worker.py FOLDER '[{"pp": 4, ...}]'
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import patched
import torch
import torch.distributed as dist
from gpu_rules.pickled_tensors import on_gpu
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from tiny_gpt import MICRO_BATCH_SIZE, SEQ_LENGTH, batches, build, forward_step, global_name

from pipette_launch.cost.pipeline.zero_bubble import named_schedule
from pipette_launch.facts import files
from pipette_launch.facts.schedule import ExpectedTimes, ScheduleFile
from pipette_patches.schedules import executor, patch
from pipette_patches.schedules.executor import PendingMessages, PipelineStep
from pipette_patches.storage_meter import metered

STEPS = 3


Gradients = list[dict[str, torch.Tensor]]
"""Gradients of each step, by the parameter's name in the whole model."""


def train(options: dict[str, Any]) -> tuple[list[float], Gradients, int]:
    """Train; returns the losses of training and evaluation, the gradients of each step, and bytes of one more step."""
    mpu.initialize_model_parallel(options.get("tp", 1), options["pp"], options.get("vpp"))
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(7)
    chunks, optimizer = build(options)
    data = [batches() for _ in chunks]
    losses: list[float] = []
    gradients: Gradients = []

    def run(*, forward_only: bool) -> None:
        found = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data if len(chunks) > 1 else data[0], model=chunks,
            num_microbatches=options["microbatches"], seq_length=SEQ_LENGTH, micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=forward_only,
        )  # fmt: skip
        losses.extend(each["loss"].item() for each in found)

    for _ in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        run(forward_only=False)
        gradients.append(
            {
                global_name(name, chunk.module): each.main_grad.clone()
                for chunk in chunks
                for name, each in chunk.module.named_parameters()
            }
        )
        optimizer.step()
    with torch.no_grad():
        run(forward_only=True)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    with metered() as meter:
        run(forward_only=False)
    leave()
    return losses, gradients, meter.peak


OURS = ("schedule", "checks_first_step", "is_broken", "in_streams")
"""Options that change nothing under Megatron's own schedule."""


@cache
def stock(options: str) -> tuple[list[float], Gradients, int]:
    """Train under Megatron's own schedule, once for all cases that differ only in `OURS`."""
    return train(json.loads(options))


def leave() -> None:
    """Destroy all groups except the group of all ranks, because gloo keeps threads for each group."""
    mpu.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


class Counted:
    """Counts live forwards, whose backward has not begun or whose weights' gradients are not made, and sent bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self.sent = 0
        self.original = PipelineStep._forward
        self.given = PendingMessages.give

    def __enter__(self) -> None:
        def forward(passes: PipelineStep, action: Any) -> None:
            self.original(passes, action)
            held = passes._outputs.keys() | passes._weight_gradients.keys()
            self.peak = max(self.peak, len(held))

        def give(messages: PendingMessages, message: Any, tensor: torch.Tensor, **then: Any) -> None:
            self.sent += tensor.nbytes
            self.given(messages, message, tensor, **then)

        PipelineStep._forward = forward  # type: ignore[method-assign]
        PendingMessages.give = give  # type: ignore[method-assign,assignment]

    def __exit__(self, *_: object) -> None:
        PipelineStep._forward = self.original  # type: ignore[method-assign]
        PendingMessages.give = self.given  # type: ignore[method-assign]


@contextlib.contextmanager
def lost_products() -> Iterator[None]:
    """Break the executor: the last weights' gradient of each split backward is not made."""
    original = executor.deferred

    @contextlib.contextmanager
    def deferred() -> Iterator[Any]:
        with original() as products:
            yield products
        del products[-1:]

    executor.deferred = deferred
    try:
        yield
    finally:
        executor.deferred = original


def whole(gradients: Gradients, pp: int) -> Gradients:
    """The gradients of all ranks of this one's pipeline; pipelines come last in Megatron's order of ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, gradients)
    apart = dist.get_world_size() // pp
    found: Gradients = [{} for _ in gradients]
    for theirs in everyone[dist.get_rank() % apart :: apart]:
        for step, each in zip(found, theirs, strict=True):
            step.update(each)
    return found


def compare(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Run one case both ways; our schedule is written to the path."""
    theirs = {name: value for name, value in options.items() if name not in OURS}
    stock_losses, stock_gradients, stock_bytes = stock(json.dumps(theirs, sort_keys=True))
    made = named_schedule(options["schedule"]["name"], pp=options["pp"], num_microbatches=options["microbatches"])
    made = replace(made, times=ExpectedTimes.equal(made.num_stages))
    files.write(path, ScheduleFile.of(made, checks_first_step=options.get("checks_first_step", False)))
    os.environ["PIPETTE_SCHEDULE"] = str(path)
    counted = Counted()
    broken = lost_products() if options.get("is_broken") else contextlib.nullcontext()
    streams: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if options.get("in_streams"):
        # Gloo stands in for NCCL: the same programs, process groups and greetings.
        streams = mock.patch.object(executor, "runs_in_streams", return_value=True)
    with patched.use("schedules"), counted, broken, streams, on_gpu(dist.get_rank()) as restored:
        ours, gradients, held_bytes = train(options)
    furthest = max(
        (one[name] - other[name]).abs().max().item()
        for one, other in zip(whole(gradients, options["pp"]), whole(stock_gradients, options["pp"]), strict=True)
        for name in one.keys() | other.keys()
    )
    return {
        "losses": max((abs(one - other) for one, other in zip(ours, stock_losses, strict=True)), default=0.0),
        "gradients": furthest,
        "follows": patch._follows.get(str(path), True),
        "live": counted.peak,
        "sent": counted.sent,
        "foreign": sum(gpu != dist.get_rank() for gpu in restored),
        "bytes": held_bytes,
        "stock_bytes": stock_bytes,
        "largest": max(each.abs().max().item() for step in gradients for each in step.values()),
        "first_loss": ours[0] if ours else 0.0,
        "last_loss": ours[-1] if ours else 0.0,
    }


def main() -> None:
    """Run every case."""
    dist.init_process_group("nccl")
    for number, options in enumerate(json.loads(sys.argv[2])):
        found = compare(Path(sys.argv[1]) / f"{number}-{dist.get_rank()}.json", options)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"case": options, "ranks": everyone}) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
