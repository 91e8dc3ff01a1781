"""A worker for the tests: trains the tiny GPT a step at a time, each under another schedule, through checkpoints.

Prints one line of JSON: the loss of each step, and the losses of as many steps without checkpoints under Megatron's own
schedule.

    python -m torch.distributed.run --nproc-per-node 4 tests/patches/checkpoint_worker.py FOLDER '["v-half", ""]' '{}'
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import patched
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from schedules_worker import leave
from tiny_gpt import MICRO_BATCH_SIZE, SEQ_LENGTH, batches, build, forward_step

from pipette_launch.cost.pipeline.zero_bubble import named_schedule
from pipette_launch.facts import files
from pipette_launch.facts.schedule import ScheduleFile

PP, MICROBATCHES = 4, 8
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def train(options: dict[str, Any], *, first: int, steps: int, source: Path | None, target: Path | None) -> list[float]:
    """Train some steps, from a checkpoint and to one; returns their losses, on the rank that has them."""
    mpu.initialize_model_parallel(1, PP, options["vpp"])
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(7)
    chunks, optimizer = build(options)
    if source is not None:
        load(source, chunks, optimizer)
    data = [batches() for _ in chunks]
    for each in data:
        for _ in range(first * MICROBATCHES):
            next(each)
    losses = []
    for _ in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data if len(chunks) > 1 else data[0], model=chunks,
            num_microbatches=MICROBATCHES, seq_length=SEQ_LENGTH, micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )  # fmt: skip
        optimizer.step()
        losses.append(sum(each["loss"].item() for each in found))
    if target is not None:
        target.mkdir(exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(state_of(chunks, optimizer, is_loading=False), str(target))
    leave()
    return losses


def state_of(chunks: list[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Return the contents of a checkpoint, as Megatron's trainer collects them."""
    model = {f"model{number}": chunk.module.sharded_state_dict() for number, chunk in enumerate(chunks)}
    optimizer_state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA)
    return {**model, "optimizer": optimizer_state}


def load(source: Path, chunks: list[Any], optimizer: Any) -> None:
    """Load a checkpoint into chunks and their optimizer."""
    found = dist_checkpointing.load(state_of(chunks, optimizer, is_loading=True), str(source))
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(found[f"model{number}"])
    optimizer.load_state_dict(found["optimizer"])


def main() -> None:
    """Train under one schedule after another."""
    folder, names, options = Path(sys.argv[1]), json.loads(sys.argv[2]), {"pp": PP, **json.loads(sys.argv[3])}
    dist.init_process_group("nccl")
    whole = train(options, first=0, steps=len(names), source=None, target=None)
    parts = []
    for number, name in enumerate(names):
        if name:
            made = named_schedule(name, pp=PP, num_microbatches=MICROBATCHES)
            path = folder / f"{number}-{dist.get_rank()}.json"
            files.write(path, ScheduleFile.of(made))
            os.environ["PIPETTE_SCHEDULE"] = str(path)
        with patched.use("schedules") if name else contextlib.nullcontext():
            parts += train(
                options,
                first=number,
                steps=1,
                source=folder / f"checkpoint{number - 1}" if number else None,
                target=folder / f"checkpoint{number}",
            )
    if dist.get_rank() == dist.get_world_size() - 1:
        sys.stdout.write(json.dumps({"whole": whole, "parts": parts}) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
