"""One step out of its parts: the pipelines side by side, then what each rank reduces, gathers and updates."""

# S = stages (model chunks), P = pipeline ranks, D = data-parallel replicas, R = the replicas that are simulated.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.collectives import Kind
from pipette_launch.cost.compute import ComputeTable
from pipette_launch.cost.parameters import expert_dp
from pipette_launch.cost.simulate import Engine, engine_of
from pipette_launch.cost.traffic import Exchange, StepTraffic, exchanges, hop_bytes, step_traffic
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout

Array = NDArray[np.float64]

_MANY_REPLICAS = 64
"""Above this many, comparing every pair of replicas costs more than simulating them all."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a layout asks of its ranks, wherever they lie."""

    layout: Layout
    num_microbatches: int
    engine: Engine
    forward_s_S: Array
    """Compute of one micro-batch on a slot of speed 1."""
    backward_s_S: Array
    recompute_s_S: Array
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
    expert_dp: int
    optimizer_s_P: Array
    """The optimizer step on a slot of speed 1."""
    rank_S: NDArray[np.int64]
    zero_S: Array

    @classmethod
    def of(cls, job: Job, layout: Layout, compute: ComputeTable, optimizer_s_per_parameter: float) -> Work:
        """Work it out from the job, the layout and the measured compute times."""
        num_microbatches = layout.num_microbatches(job.batch.global_batch_size)
        passes = compute.chunk_passes(layout)
        traffic = step_traffic(job, layout)
        return cls(
            layout=layout,
            num_microbatches=num_microbatches,
            engine=engine_of(layout, num_microbatches),
            forward_s_S=np.array([chunk.forward_s for chunk in passes]),
            backward_s_S=np.array([chunk.backward_s for chunk in passes]),
            recompute_s_S=np.array([chunk.recompute_s for chunk in passes]),
            forward_idle_s_S=np.array([chunk.forward_idle_s for chunk in passes]),
            backward_idle_s_S=np.array([chunk.backward_idle_s for chunk in passes]),
            exchanges=exchanges(job, layout, compute.hiding(layout)),
            hop_bytes=hop_bytes(job, layout),
            traffic=traffic,
            gradient_bytes_S2=np.array(traffic.gradient_bytes, dtype=np.float64),
            parameter_bytes_S2=np.array(traffic.parameter_bytes, dtype=np.float64),
            reduce_kind="reduce_scatter" if layout.use_distributed_optimizer else "all_reduce",
            gather_kind="all_gather",
            expert_dp=expert_dp(layout),
            optimizer_s_P=np.array(traffic.resident_parameters) * optimizer_s_per_parameter,
            rank_S=np.arange(layout.num_chunks) % layout.pp,
            zero_S=np.zeros(layout.num_chunks),
        )


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What the places of a layout's ranks make of its work."""

    slowness_PD: Array
    """1 / speed of the slowest slot of each pipeline rank of each replica."""
    exchange_s_PD: tuple[Array, ...]
    """Seconds of each of `Work.exchanges`, before anything hides."""
    forward_hop_s_PD: Array
    """From pipeline rank p to p + 1; the last entry is the way from the last to the first."""
    backward_hop_s_PD: Array
    """The same links the other way."""
    reduce_s_S: Array
    gather_s_S: Array
    embedding_s: float


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """A step and its parts by name."""

    total_s: float
    breakdown_s: dict[str, float]


def total_s(work: Work, prices: Prices) -> float:
    """Seconds of the step."""
    durations_D, hops_D = pipelines(work, prices)
    worst = _undominated(np.concatenate([durations_D, hops_D]))
    drain_S = work.engine.drain_s_SR(durations_D[:, worst], hops_D[:, worst]).max(axis=1)
    return _finish(work, prices, drain_S, durations_D).total_s


def step_parts(work: Work, prices: Prices) -> StepParts:
    """Seconds of the step, told along its slowest pipeline rank: what it computes, sends and waits for."""
    durations_D, hops_D = pipelines(work, prices)
    drain_SD = work.engine.drain_s_SR(durations_D, hops_D)
    tail = _finish(work, prices, drain_SD.max(axis=1), durations_D)
    rank = tail.rank
    stages = slice(rank, None, work.layout.pp)
    replica = int(drain_SD[stages].max(axis=0).argmax())
    end_s = float(drain_SD[stages, replica].max())
    one = slice(replica, replica + 1)
    no_hop_s = float(work.engine.drain_s_SR(durations_D[:, one], np.zeros_like(hops_D[:, one]))[stages].max())
    breakdown = _busy_s(work, prices, rank, replica)
    breakdown["first_gather"] = float(_first_gather_s(work, prices, durations_D)[stages, replica].sum())
    breakdown["pipeline_transfer"] = end_s - no_hop_s
    breakdown["bubble"] = no_hop_s - sum(breakdown[name] for name in breakdown if name != "pipeline_transfer")
    breakdown["data_parallel"] = tail.finish_s - end_s
    breakdown["embedding_gradients"] = tail.embedding_s
    breakdown["optimizer"] = tail.optimizer_s
    breakdown["parameter_gather"] = tail.gather_s + breakdown.pop("first_gather")
    return StepParts(total_s=tail.total_s, breakdown_s=breakdown)


@dataclass(frozen=True, kw_only=True)
class _Tail:
    """What follows the pipelines."""

    rank: int
    """The pipeline rank whose gradients are reduced last."""
    finish_s: float
    embedding_s: float
    optimizer_s: float
    gather_s: float
    total_s: float


def pipelines(work: Work, prices: Prices) -> tuple[Array, Array]:
    """Durations and hops of every replica's pipeline, laid out as in `StageTimes`."""
    rank_S = work.rank_S
    slowness_SD = prices.slowness_PD[rank_S]
    forward_SD = work.forward_s_S[:, None] * slowness_SD
    backward_SD = (work.backward_s_S + work.recompute_s_S)[:, None] * slowness_SD
    exchanged = np.zeros((2, *slowness_SD.shape))
    for item, seconds_PD in zip(work.exchanges, prices.exchange_s_PD, strict=True):
        exposed_SD = np.maximum(seconds_PD - item.hidden_s, 0.0)[rank_S]
        exchanged += np.array([item.forward, item.backward])[:, :, None] * exposed_SD
    forward_SD = forward_SD + np.maximum(exchanged[0] - work.forward_idle_s_S[:, None] * slowness_SD, 0.0)
    backward_SD = backward_SD + np.maximum(exchanged[1] - work.backward_idle_s_S[:, None] * slowness_SD, 0.0)
    durations_D = np.concatenate([forward_SD, backward_SD, forward_SD])
    stages = len(rank_S)
    durations_D[2 * stages :] += _first_gather_s(work, prices, durations_D)
    hops = [prices.forward_hop_s_PD[rank_S[:-1]], prices.backward_hop_s_PD[rank_S[:-1]]]
    return durations_D, np.concatenate([*hops, np.zeros((1, forward_SD.shape[1]))])


def _first_gather_s(work: Work, prices: Prices, durations_D: Array) -> Array:
    """Overlapped parameter gather: it starts with the first forward, which waits for the first bucket.

    The other buckets pass behind it (param_and_grad_buffer.py, finish_param_sync): with n equal buckets
    g/n + (n - 1) max(0, g - f)/n.
    """
    stages = len(work.rank_S)
    forward_SD = durations_D[:stages]
    if not (work.layout.use_distributed_optimizer and work.layout.overlap_param_gather):
        return np.zeros_like(forward_SD)
    gather_S1 = prices.gather_s_S[:, None]
    buckets_S1 = np.array(work.traffic.num_buckets)[:, None]
    exposed: Array = gather_S1 / buckets_S1 + (buckets_S1 - 1) * np.maximum(gather_S1 - forward_SD, 0.0) / buckets_S1
    return exposed


def _finish(work: Work, prices: Prices, drain_S: Array, durations_D: Array) -> _Tail:
    """Reduce gradients, then those of the tied embedding, then step, then gather.

    The gradient norm needs every rank, so no optimizer starts before the last reduction ends.
    """
    pp = work.layout.pp
    backward_S = durations_D[len(drain_S) : 2 * len(drain_S)].min(axis=1)
    finish_P = np.array([reduced_s(work, prices, drain_S, backward_S, rank) for rank in range(pp)])
    rank = int(finish_P.argmax())
    tied_s = max(finish_P[0], finish_P[-1]) + prices.embedding_s
    embedding_s = max(float(tied_s - finish_P[rank]), 0.0)
    slowness_P = prices.slowness_PD.max(axis=1)
    gathers = prices.gather_s_S.reshape(-1, pp).sum(axis=0)
    gather_P = np.zeros(pp) if work.layout.overlap_param_gather else gathers
    step_P = work.optimizer_s_P * slowness_P + gather_P
    last = int(step_P.argmax())
    return _Tail(
        rank=rank,
        finish_s=float(finish_P[rank]),
        embedding_s=embedding_s,
        optimizer_s=float(step_P[last] - gather_P[last]),
        gather_s=float(gather_P[last]),
        total_s=float(finish_P[rank]) + embedding_s + float(step_P[last]),
    )


def reduced_s(work: Work, prices: Prices, drain_S: Array, backward_S: Array, rank: int) -> float:
    """When a rank's gradients are reduced.

    Without overlap everything leaves after its last backward. With overlap each chunk leaves when its own last
    backward ends, one after the other; buckets of a chunk leave during that backward, in equal parts.
    """
    stages = range(rank, len(drain_S), work.layout.pp)
    if not work.layout.overlap_grad_reduce:
        return float(max(drain_S[stage] for stage in stages) + sum(prices.reduce_s_S[stage] for stage in stages))
    done_s = 0.0
    for stage in sorted(stages, key=lambda stage: (drain_S[stage], -stage)):
        buckets = work.traffic.num_buckets[stage]
        reduce_s = prices.reduce_s_S[stage]
        first_ready_s = drain_S[stage] - backward_S[stage] * (buckets - 1) / buckets
        done_s = max(max(done_s, first_ready_s) + reduce_s, drain_S[stage] + reduce_s / buckets)
    return float(done_s)


def _busy_s(work: Work, prices: Prices, rank: int, replica: int) -> dict[str, float]:
    """Seconds that one pipeline rank of one replica computes and communicates inside its passes, by part."""
    stages = slice(rank, None, work.layout.pp)
    slowness = float(prices.slowness_PD[rank, replica])
    times = work.num_microbatches * slowness
    busy = {
        "compute": times * float((work.forward_s_S + work.backward_s_S)[stages].sum()),
        "recompute": times * float(work.recompute_s_S[stages].sum()),
        "tensor_parallel": 0.0,
        "context_parallel": 0.0,
        "expert_parallel": 0.0,
    }
    seconds = [
        max(float(seconds_PD[rank, replica]) - item.hidden_s, 0.0)
        for item, seconds_PD in zip(work.exchanges, prices.exchange_s_PD, strict=True)
    ]
    for way, idle_s_S in (("forward", work.forward_idle_s_S), ("backward", work.backward_idle_s_S)):
        counts_S = [np.array(getattr(item, way)[stages]) for item in work.exchanges]
        exchanged_S = sum(
            (count * each for count, each in zip(counts_S, seconds, strict=True)), np.zeros(work.layout.vpp)
        )
        left_S = np.maximum(exchanged_S - slowness * idle_s_S[stages], 0.0)
        # What passes while the device is idle anyway is taken off all exchanges alike.
        shown_S = np.divide(left_S, exchanged_S, out=np.zeros_like(left_S), where=exchanged_S > 0)
        for item, counts, each in zip(work.exchanges, counts_S, seconds, strict=True):
            busy[item.part] += work.num_microbatches * each * float((counts * shown_S).sum())
    return busy


def _undominated(times_D: Array) -> NDArray[np.int64]:
    """Return the replicas that are not faster than another in everything: only these can set the step time."""
    replicas = times_D.shape[1]
    slowest = (times_D == times_D.max(axis=1, keepdims=True)).all(axis=0)
    if slowest.any():
        return np.array([int(slowest.argmax())])
    if replicas > _MANY_REPLICAS:
        return np.arange(replicas)
    below_DD = (times_D[:, :, None] <= times_D[:, None, :]).all(axis=0)
    # Of equal ones the first stays.
    strictly_DD = below_DD & ~(below_DD.T & (np.arange(replicas)[:, None] <= np.arange(replicas)[None, :]))
    return np.flatnonzero(~strictly_DD.any(axis=1))
