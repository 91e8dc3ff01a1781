"""Work of a layout in one step, and the prices (seconds) of this work on given slots and links."""

# Letters of array axes: S = stages (model chunks), P = pipeline ranks, D = data-parallel replicas, K = placements.

from __future__ import annotations

import statistics
from dataclasses import dataclass, fields, replace

import numpy as np

from pipette_launch.cost.communication.exchanges import StepTraffic, Waits, exchanges, step_traffic
from pipette_launch.cost.compute.stages import ComputeTable, PassSeconds
from pipette_launch.cost.layers.block import residual_bytes
from pipette_launch.cost.layers.loads import Collective, Exchange
from pipette_launch.cost.layers.parameters import OnceAStep, expert_dp, gradient_bytes_per_parameter, shard_copies
from pipette_launch.cost.pipeline.engine import Engine, engine_of
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Floats, Ints, Layout
from pipette_launch.facts.measurements import Measurements

_PASS_FIELDS = [one.name for one in fields(PassSeconds)]


@dataclass(frozen=True, kw_only=True)
class LayoutWork:
    """Work of a layout in one step, which does not depend on the placement of ranks."""

    layout: Layout
    num_microbatches: int
    engine: Engine
    forward_s_S: Floats
    """Compute seconds of the forward of one micro-batch on a slot of speed 1."""
    backward_s_S: Floats
    recompute_s_S: Floats
    weight_grad_s_S: Floats
    """Seconds of the weight gradients in the backward, which a schedule may postpone."""
    forward_idle_s_S: Floats
    """Seconds of the forward in which the device waits for the host, so that exchanges can run."""
    backward_idle_s_S: Floats
    recompute_idle_s_S: Floats
    """The part of `backward_idle_s_S` in the recompute."""
    exchanges: tuple[Exchange, ...]
    hop_bytes: int
    traffic: StepTraffic
    gradient_bytes_S2: Floats
    parameter_bytes_S2: Floats
    reduce_kind: Collective
    expert_dp: int
    shard_copies: int
    """Number of copies of FSDP's shards, the argument `instances` of `Groups.of`."""
    optimizer_s_P: Floats
    """Seconds of gradient scaling, optimizer and host work in one step, on a slot of speed 1."""
    rank_S: Ints

    @classmethod
    def of(cls, job: Job, layout: Layout, compute: ComputeTable, once: OnceAStep, *, domain: int = 1) -> LayoutWork:
        """Compute the work of a layout; `domain` is the number of slots in an NVLink domain."""
        num_microbatches = layout.num_microbatches(job.batch.global_batch_size)
        passes = compute.chunk_passes(layout)
        traffic = step_traffic(job, layout)
        meets, blocks = Waits.of(job, layout.vpp, compute.device_kind)
        work = cls(
            layout=layout,
            num_microbatches=num_microbatches,
            engine=engine_of(layout, num_microbatches, rendezvous=meets, blocking_ends=blocks),
            **{f"{name}_S": np.array([getattr(chunk, name) for chunk in passes]) for name in _PASS_FIELDS},
            exchanges=exchanges(job, layout, compute.hiding(layout), domain),
            hop_bytes=residual_bytes(job, layout),
            traffic=traffic,
            gradient_bytes_S2=np.array(traffic.gradient_bytes, dtype=np.float64),
            parameter_bytes_S2=np.array(traffic.parameter_bytes, dtype=np.float64),
            reduce_kind="reduce_scatter" if layout.use_distributed_optimizer else "all_reduce",
            expert_dp=expert_dp(layout),
            shard_copies=shard_copies(job),
            optimizer_s_P=_update_s_P(job, traffic, once),
            rank_S=np.arange(layout.num_chunks) % layout.pp,
        )
        return _forwards(work) if job.options.freeze_all_layers else work


def _forwards(work: LayoutWork) -> LayoutWork:
    """Keep the forwards of a step."""
    zero_S = 0 * work.forward_s_S
    return replace(
        work,
        backward_s_S=zero_S,
        recompute_s_S=zero_S,
        weight_grad_s_S=zero_S,
        backward_idle_s_S=zero_S,
        recompute_idle_s_S=zero_S,
        exchanges=tuple(replace(one, backward=(0.0,) * len(one.backward)) for one in work.exchanges),
        traffic=replace(work.traffic, embedding_bytes=0),
        gradient_bytes_S2=0 * work.gradient_bytes_S2,
        optimizer_s_P=0 * work.optimizer_s_P,
    )


def _update_s_P(job: Job, traffic: StepTraffic, once: OnceAStep) -> Floats:
    gradient_bytes_P = np.array(traffic.held_gradients) * gradient_bytes_per_parameter(job)
    return once.seconds(np.array(traffic.resident_parameters), gradient_bytes_P)


def once_a_step(job: Job, measurements: Measurements) -> OnceAStep:
    """Return the times of the work once a step, with the seconds that measured stages take in addition."""
    once, speed = OnceAStep.of(measurements), measurements.cluster.slot_speed
    more_s = [
        speed[reading.slot] * reading.update_s
        - float(_update_s_P(job, step_traffic(job, reading.layout), once)[reading.pp_rank])
        for reading in measurements.timed_stages_of(job)
    ]
    return once._replace(host_s=once.host_s + max(0.0, statistics.median(more_s or [0.0])))


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Seconds of a layout's work under K placements.

    Axis D has the replicas of the first placement, then of the second, and so on.
    """

    slowness_PD: Floats
    """1 / speed of the slowest slot of each pipeline rank of each replica."""
    exchange_s_PD: tuple[Floats, ...]
    """Seconds of each exchange in `LayoutWork.exchanges`, including the seconds that overlap with compute."""
    forward_hop_s_PD: Floats
    """Seconds of a message from pipeline rank p to p + 1; the last entry is from the last rank to rank 0."""
    backward_hop_s_PD: Floats
    """Seconds of a message from pipeline rank p + 1 to p; the last entry is from rank 0 to the last rank."""
    reduce_s_SK: Floats
    gather_s_SK: Floats
    embedding_s_K: Floats


def exposed_s(seconds: Floats, hidden_s: float | Floats) -> Floats:
    """Return the exposed seconds of an exchange, during which no compute hides the exchange."""
    return np.asarray(np.maximum(seconds - hidden_s, 0.0))


def pass_s(compute_s: Floats, exchanged_s: Floats, idle_s: Floats) -> Floats:
    """Return the seconds of a pass: compute, plus exchanges beyond the idle time of the device."""
    return compute_s + exposed_s(exchanged_s, idle_s)
