"""What a layout asks of its ranks in a step, and what the places of its ranks make of that."""

# S = stages (model chunks), P = pipeline ranks, D = data-parallel replicas, K = placements side by side.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.collectives import Kind
from pipette_launch.cost.communication.exchanges import (
    Exchange,
    StepTraffic,
    aligns_gathers,
    blocks_at_ends,
    exchanges,
    hop_bytes,
    meets_receivers,
    step_traffic,
)
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.layers.parameters import OnceAStep, expert_dp, gradient_bytes_per_parameter, shard_copies
from pipette_launch.cost.pipeline.engine import Engine
from pipette_launch.cost.pipeline.steady_state import engine_of
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout

Array = NDArray[np.float64]

_PASSES = ("forward_s", "backward_s", "recompute_s", "weight_grad_s", "forward_idle_s", "backward_idle_s")


@dataclass(frozen=True, kw_only=True)
class LayoutWork:
    """What a layout asks of its ranks, wherever they lie."""

    layout: Layout
    num_microbatches: int
    engine: Engine
    forward_s_S: Array
    """Compute of one micro-batch on a slot of speed 1."""
    backward_s_S: Array
    recompute_s_S: Array
    weight_grad_s_S: Array
    """Of the backward, the part that schedules may put off."""
    forward_idle_s_S: Array
    """Of the forward, while the device waits for the host: exchanges pass in it."""
    backward_idle_s_S: Array
    exchanges: tuple[Exchange, ...]
    hop_bytes: int
    traffic: StepTraffic
    gradient_bytes_S2: Array
    parameter_bytes_S2: Array
    reduce_kind: Kind
    gather_kind: Kind
    aligns_gathers: bool
    """Whether overlapped gathers start on all pipeline ranks at once."""
    loss_s: float
    """Adding up the step's loss over the replicas of the last stage; no placement makes it less."""
    expert_dp: int
    shard_copies: int
    """As `Groups.of` takes them."""
    optimizer_s_P: Array
    """Once a step on a slot of speed 1: passes over all gradients, the optimizer, and waiting for the host."""
    rank_S: NDArray[np.int64]

    @classmethod
    def of(
        cls, job: Job, layout: Layout, compute: ComputeTable, once: OnceAStep, *, loss_s: float, domain: int = 1
    ) -> LayoutWork:
        """Work it out from the job, the layout and the measured times; `domain` as in `exchanges_of`."""
        num_microbatches = layout.num_microbatches(job.batch.global_batch_size)
        passes = compute.chunk_passes(layout)
        traffic = step_traffic(job, layout)
        return cls(
            layout=layout,
            num_microbatches=num_microbatches,
            engine=engine_of(
                layout,
                num_microbatches,
                rendezvous=meets_receivers(job, layout.vpp, compute.device_kind),
                blocking_ends=blocks_at_ends(job, layout.vpp, compute.device_kind),
            ),
            **{f"{name}_S": np.array([getattr(chunk, name) for chunk in passes]) for name in _PASSES},
            exchanges=exchanges(job, layout, compute.hiding(layout), domain),
            hop_bytes=hop_bytes(job, layout),
            traffic=traffic,
            gradient_bytes_S2=np.array(traffic.gradient_bytes, dtype=np.float64),
            parameter_bytes_S2=np.array(traffic.parameter_bytes, dtype=np.float64),
            reduce_kind="reduce_scatter" if layout.use_distributed_optimizer else "all_reduce",
            gather_kind="all_gather",
            aligns_gathers=aligns_gathers(job, layout.vpp),
            loss_s=loss_s,
            expert_dp=expert_dp(layout),
            shard_copies=shard_copies(job),
            optimizer_s_P=once.seconds(
                np.array(traffic.resident_parameters),
                np.array(traffic.held_gradients) * gradient_bytes_per_parameter(job),
            ),
            rank_S=np.arange(layout.num_chunks) % layout.pp,
        )


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What the places of a layout's ranks make of its work.

    Of several placements side by side the replicas follow each other, those of one placement together; what is of
    stages then has a second axis K, and `embedding_s` is an array.
    """

    slowness_PD: Array
    """1 / speed of the slowest slot of each pipeline rank of each replica."""
    exchange_s_PD: tuple[Array, ...]
    """Seconds of each of `LayoutWork.exchanges`, before anything hides."""
    forward_hop_s_PD: Array
    """From pipeline rank p to p + 1; the last entry is the way from the last to the first."""
    backward_hop_s_PD: Array
    """The same links the other way."""
    reduce_s_S: Array
    gather_s_S: Array
    embedding_s: float | Array
