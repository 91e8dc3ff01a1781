"""The GPT models of Pipette's scripts, as jobs."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpt import gpt_job
from benchmarks.planners.machines import Machine
from pipette_launch.facts import Job, Layout

MODELS = {
    "2.5B": (52, 1920, 24),
    "2.7B": (56, 1920, 24),
    "3.2B": (64, 1920, 24),
    "5.9B": (32, 3840, 32),
    "8.1B": (64, 3072, 24),
    "8.3B": (72, 3072, 24),
    "18B": (40, 6144, 48),
    "21B": (48, 6144, 48),
    "39B": (48, 8192, 64),
    "175B": (96, 12288, 96),
}
"""Layers, hidden size, heads."""
FOR_EACH_WIDTH = ("2.5B", "5.9B", "8.1B", "18B", "39B", "175B")
SEQ_LENGTH = 1024
VOCABULARY = 50256
GLOBAL_BATCH = 512


PLAIN = (
    "cp",
    "vpp",
    "layers_per_chunk",
    "sequence_parallel",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "recompute",
)


def plain(job: Job) -> Job:
    """Pin everything that planners of 2024 have no notion of, at its plainest."""
    return replace(job, pinned=tuple(sorted(PLAIN)))


def job_of(name: str, machine: Machine, world_size: int) -> Job:
    """The job of a model, fp16 with Adam; its own layout is a stand-in until the user's rules have chosen one."""
    return job_of_shape(MODELS[name], machine, world_size, global_batch_size=GLOBAL_BATCH)


def job_of_shape(shape: tuple[int, int, int], machine: Machine, world_size: int, *, global_batch_size: int) -> Job:
    """The same for a model with the given layers, hidden size and heads, and the given sequences per step."""
    return gpt_job(
        shape,
        seq_length=SEQ_LENGTH,
        vocab_size=VOCABULARY,
        params_dtype="fp16",
        transformer_impl=machine.transformer_impl,
        attention_backend=machine.attention_backend,
        global_batch_size=global_batch_size,
        own=Layout(dp=world_size),
    )
