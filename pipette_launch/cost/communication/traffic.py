"""What a layout makes its ranks send each other between stages and once a step, and how Megatron times it."""

# S = stages (model chunks) in model order.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.shards import gradients_of_copies, parameters_of_ends
from pipette_launch.cost.layers import activations
from pipette_launch.cost.layers.optimizer import gradient_bytes_per_parameter, held_gradients, resident_parameters
from pipette_launch.cost.layers.parameters import (
    by_rank,
    chunk_parameters,
    has_two_embeddings,
    word_embedding_parameters,
)
from pipette_launch.cost.layers.sharding import sharding_of
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.megatron.performance import performance_options

Ints = NDArray[np.int64]
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTraffic:
    """What is exchanged once a step, in bytes on one rank."""

    gradient_bytes: tuple[tuple[int, int], ...]
    """Of each stage: dense, expert."""
    parameter_bytes: tuple[tuple[int, int], ...]
    """What the distributed optimizer gathers; zeros without it."""
    num_buckets: tuple[int, ...]
    """Parts of each stage's gradients that can leave one by one."""
    resident_parameters: tuple[int, ...]
    """Parameters that each pipeline rank steps."""
    held_gradients: tuple[int, ...]
    """Gradients that each pipeline rank keeps from micro-batch to micro-batch."""
    embedding_bytes: int
    """Gradient of the word embedding, summed over first and last pipeline rank; 0 when there is one copy."""


def hop_bytes(job: Job, layout: Layout) -> int:
    """One activation between neighbouring stages: s*b*h/c, over t with sequence parallelism (schedules.py)."""
    return activations.residual_bytes(job.model, layout)


def meets_receivers(job: Job, vpp: int, device_kind: str) -> bool:
    """Whether a message between stages starts only once its receiver, done with its pass, asks for it.

    Megatron asks right before it needs, but for `overlap_p2p_comm`, which holds with virtual stages only and there
    unless the user says no (arguments.py, validate_args). gloo then sends to nobody who has not asked: between 4 hosts,
    an activation that had long been sent took all its 13 ms when it was asked for. NCCL has not been measured here; the
    published step times are met better (by 0.1 to 0.7 points) if its messages travel ahead.
    """
    asks_late = vpp == 1 or not performance_options(job).overlap_p2p_comm
    return device_kind == "cpu" and asks_late


def blocks_at_ends(job: Job, vpp: int, device_kind: str) -> bool:
    """Whether ranks with virtual stages wait for the messages of warm-up and cool-down before their next pass.

    Megatron overlaps those of the steady part alone, unless it is asked for more. On 2 x 2 hosts, groups of 4
    micro-batches in place of 2, whose warm-up and cool-down are longer, took 8 % more and not 1 % less. As with
    `meets_receivers`, NCCL has not been measured.
    """
    overlaps = performance_options(job).overlap_p2p_comm
    asks_early = performance_options(job).overlap_p2p_comm_warmup_flush
    return device_kind == "cpu" and vpp > 1 and overlaps and not asks_early


def loss_report_bytes(device_kind: str) -> int:
    """What the replicas of the last stage add up once a step to report its loss: the sum and the count of its tokens.

    Over gloo that waits for all replicas once more: with four ranks on two cores 5 to 7 ms of a step of 57. Over NCCL
    it takes some tens of microseconds, and a ring's latencies would make more of it: it counts as nothing.
    """
    return 2 * _FP32_BYTES if device_kind == "cpu" else 0


def aligns_gathers(job: Job, vpp: int) -> bool:
    """Whether overlapped parameter gathers start on all pipeline ranks at once (see `first_gathers`).

    Megatron does so with virtual stages, and never without (arguments.py, validate_args).
    """
    return vpp > 1 and performance_options(job).align_param_gather


def step_traffic(job: Job, layout: Layout) -> StepTraffic:
    """Count gradients to reduce and parameters to gather of each stage, by who shares them.

    What FSDP exchanges in every micro-batch is not in it (`shard_exchanges`).
    """
    gradient, element, sharding = gradient_bytes_per_parameter(job), job.model.dtype_bytes, sharding_of(job)
    chunks = chunk_parameters(job.model, layout)
    gathers = element if layout.use_distributed_optimizer else 0
    ranks = [(part.dense, part.expert) for part in by_rank(chunks, layout.pp)]
    shared = layout.pp > 1 and has_two_embeddings(job.model)
    return StepTraffic(
        gradient_bytes=gradients_of_copies(job, layout, chunks)
        if sharding and sharding.gradients
        else tuple((chunk.dense * gradient, chunk.expert * gradient) for chunk in chunks),
        parameter_bytes=parameters_of_ends(job, layout, gathers)
        if sharding and sharding.weights
        else tuple((chunk.dense * gathers, chunk.expert * gathers) for chunk in chunks),
        # Only the first chunk of pipeline rank 0 is split, and only to overlap (param_and_grad_buffer.py).
        num_buckets=tuple(
            1 if stage or not layout.overlap_grad_reduce else int(num_buckets(chunk.count, layout.dp * layout.cp))
            for stage, chunk in enumerate(chunks)
        ),
        resident_parameters=tuple(int(resident_parameters(job, *rank, layout)) for rank in ranks),
        held_gradients=tuple(int(held_gradients(job, *rank, layout)) for rank in ranks),
        embedding_bytes=word_embedding_parameters(job.model, layout.tp) * gradient if shared else 0,
    )


def num_buckets(parameters: Ints | int, replicas: Ints | int) -> Ints:
    """Into how many parts Megatron splits overlapped gradients: of 40 million parameters, or of 1 million a replica.

    `replicas` is dp * cp (distributed_data_parallel.py). Numbers or arrays.
    """
    return np.asarray(-(-parameters // np.maximum(40_000_000, 1_000_000 * replicas)))
