"""One step out of its parts: the pipelines side by side, then what each rank reduces, gathers and updates."""

# K = placements, D = replicas of each, R = replicas, T = times of a replica's pipeline.
# S = stages (model chunks), P = pipeline ranks, V = chunks of each, R = pipelines that are priced side by side.
# S = stages (model chunks), P = pipeline ranks, V = chunks of each, D = data-parallel replicas, K = placements side by
# side, R = the replicas of all of them, those of one placement together.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.pipeline.engine import StageTimes
from pipette_launch.cost.step.work import Array, LayoutWork, Prices
from pipette_launch.facts.layout import Layout

Ints = NDArray[np.int64]

_FEW_REPLICAS = 16
"""Up to this many, comparing every pair of replicas costs less than simulating them all."""


def deciding_replicas(times_R: Array, placements: int) -> tuple[Ints, Ints, Ints]:
    """Find the replicas that can set the step time of their placement, and which of them are alike.

    Returns:
        Columns of `times_R` that differ; for each replica in question its place among these; and its placement, rising.

    """
    replicas = times_R.shape[1] // placements
    # Times that all replicas of all placements have in common do not distinguish them.
    times_KDT = times_R[(times_R != times_R[:, :1]).any(axis=1)].T.reshape(placements, replicas, -1)
    slowest_KD = (times_KDT == times_KDT.max(axis=1, keepdims=True)).all(axis=2)
    stays_KD = np.zeros_like(slowest_KD)
    stays_KD[np.arange(placements), slowest_KD.argmax(axis=1)] = True
    stays_KD[~slowest_KD.any(axis=1)] = True
    if placements == 1:
        chosen = undominated(times_KDT[0].T) if stays_KD.sum() > 1 else np.flatnonzero(stays_KD)
        return chosen, np.arange(len(chosen)), np.zeros_like(chosen)
    placement_R, replica_R = np.nonzero(stays_KD)
    # The first of all that are equal, and for each which of these it is like.
    times_RT = times_KDT[stays_KD]
    weights_T = np.random.default_rng(0).random(times_RT.shape[1])
    _, first, alike_R = np.unique(times_RT @ weights_T, return_index=True, return_inverse=True)
    if not (times_RT[first][alike_R] == times_RT).all():
        first = alike_R = np.arange(len(times_RT))
    return (placement_R * replicas + replica_R)[first], alike_R, placement_R


def undominated(times_D: Array) -> NDArray[np.int64]:
    """Return the replicas that are not faster than another in everything: only these can set the step time."""
    replicas = times_D.shape[1]
    if replicas > _FEW_REPLICAS:
        return np.arange(replicas)
    below_DD = (times_D[:, :, None] <= times_D[:, None, :]).all(axis=0)
    # Of equal ones the first stays.
    strictly_DD = below_DD & ~(below_DD.T & (np.arange(replicas)[:, None] <= np.arange(replicas)[None, :]))
    return np.flatnonzero(~strictly_DD.any(axis=1))


Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Forwards:
    """Forward and hop times of some pipelines, waits not included."""

    forward_s_SR: Floats
    hop_s_SR: Floats
    """From each stage to the next: S - 1 rows."""
    rendezvous: bool = False
    """As `Order.rendezvous`, in the warm-up."""

    def arrival_s(self, stage: int, sent_s_R: Floats, free_s_R: Floats) -> Floats:
        """Return when a stage can start: the stage before sent at `sent_s_R`, its own rank is free at `free_s_R`."""
        hop_s_R = self.hop_s_SR[stage - 1]
        if self.rendezvous:
            return np.asarray(np.maximum(sent_s_R, free_s_R) + hop_s_R)
        return np.asarray(np.maximum(sent_s_R + hop_s_R, free_s_R))

    def take(self, some_R: NDArray[np.int64]) -> Forwards:
        """Return those of some pipelines."""
        return Forwards(
            forward_s_SR=self.forward_s_SR[:, some_R], hop_s_SR=self.hop_s_SR[:, some_R], rendezvous=self.rendezvous
        )


def waits_one_by_one_s(gather_s: Floats, forward_s: Floats, num_buckets: Ints) -> Floats:
    """Return the wait of each first forward that dispatches its own gather (module docstring); shapes broadcast."""
    more_s = (num_buckets - 1) * np.maximum(gather_s - forward_s, 0.0)
    return np.asarray(gather_s / num_buckets + more_s / num_buckets)


def waits_aligned_s(layout: Layout, gather_s_SR: Floats, forwards: Forwards) -> Floats:
    """Return the wait of each first forward under aligned gathers (module docstring).

    A rank gathers chunk c during its N forwards of chunk c - 1, or earlier. If no gather takes longer than these
    forwards, only first chunks wait. Only pipelines with a longer gather need the whole warm-up simulated.
    """
    pp = layout.pp
    group = layout.microbatch_group_size or pp
    waits_SR = np.zeros_like(gather_s_SR)
    behind_SR = group * forwards.forward_s_SR[:-pp]
    is_long_R = (gather_s_SR[pp:] > behind_SR).any(axis=0)
    short, long = np.flatnonzero(~is_long_R), np.flatnonzero(is_long_R)
    if len(short):
        waits_SR[:pp, short] = _first_chunk_s(gather_s_SR[:pp, short], forwards.take(short))
    if len(long):
        waits_SR[:, long] = _all_chunks_s(gather_s_SR[:, long], forwards.take(long), pp=pp, group=group)
    return waits_SR


def _first_chunk_s(gather_s_PR: Floats, forwards: Forwards) -> Floats:
    """Return the waits of first chunks only: micro-batch 0 reaches the ranks one after the other."""
    waits_PR = np.empty_like(gather_s_PR)
    nothing_R = np.zeros(gather_s_PR.shape[1])
    end_R = nothing_R
    for rank, gather_s_R in enumerate(gather_s_PR):
        start_R = forwards.arrival_s(rank, end_R, nothing_R) if rank else nothing_R
        waits_PR[rank] = np.maximum(gather_s_R - start_R, 0.0)
        end_R = start_R + waits_PR[rank] + forwards.forward_s_SR[rank]
    return waits_PR


def _all_chunks_s(gather_s_SR: Floats, forwards: Forwards, *, pp: int, group: int) -> Floats:
    """Simulate each rank's forwards up to the first of its last chunk; no backward comes before these.

    In turn t rank r runs its forward number t - r. Its input was computed in turn t - 1, or earlier by the last rank.
    """
    stages, pipelines = gather_s_SR.shape
    chunks = stages // pp
    last = (chunks - 1) * group
    waits_SR = np.zeros_like(gather_s_SR)
    gather_VPR = gather_s_SR.reshape(chunks, pp, pipelines)
    gathered_VPR = np.zeros_like(gather_VPR)
    gathered_VPR[:2] = gather_VPR[:2].cumsum(axis=0)
    nothing_R = np.zeros(pipelines)
    end_PR = np.zeros((pp, pipelines))
    last_rank_ends: list[Floats] = []
    for turn in range(last + pp):
        dispatched = turn // group + 1 if turn % group == 0 else 0
        before_PR = end_PR.copy()
        for rank in range(max(0, turn - last), min(pp, turn + 1)):
            forward = turn - rank
            chunk, place = divmod(forward, group)
            stage = chunk * pp + rank
            sent_R = before_PR[rank - 1] if rank else last_rank_ends[forward - group] if chunk else nothing_R
            start_R = forwards.arrival_s(stage, sent_R, before_PR[rank]) if stage else before_PR[rank]
            if 1 < dispatched < chunks:
                begun_R = np.maximum(start_R, gathered_VPR[dispatched - 1, rank])
                gathered_VPR[dispatched, rank] = begun_R + gather_VPR[dispatched, rank]
            if place == 0:
                waits_SR[stage] = np.maximum(gathered_VPR[chunk, rank] - start_R, 0.0)
                start_R = start_R + waits_SR[stage]
            end_PR[rank] = start_R + forwards.forward_s_SR[stage]
        if turn >= pp - 1:
            last_rank_ends.append(end_PR[-1].copy())
    return waits_SR


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted seconds of one optimizer step."""

    total_s: float
    breakdown_s: dict[str, float]
    """Parts along the slowest pipeline rank; they sum to the total."""


def total_s(work: LayoutWork, prices: Prices) -> float:
    """Seconds of the step."""
    return float(totals_s_K(work, prices)[0])


def totals_s_K(work: LayoutWork, prices: Prices) -> Array:
    """Seconds of the step of each of the placements that are priced side by side: the same digits as one by one."""
    durations_R, hops_R = pipelines(work, prices)
    placements = prices.reduce_s_S.size // len(work.rank_S)
    chosen, alike_R, placement_R = deciding_replicas(np.concatenate([durations_R, hops_R]), placements)
    drain_SR = work.engine.drain_s_SR(durations_R[:, chosen], hops_R[:, chosen])[:, alike_R]
    drain_SK = np.maximum.reduceat(drain_SR, np.flatnonzero(np.diff(placement_R, prepend=-1)), axis=1)
    return _finish(work, prices, drain_SK, durations_R).total_s_K


def step_parts(work: LayoutWork, prices: Prices) -> StepTime:
    """Seconds of the step, told along its slowest pipeline rank: what it computes, sends and waits for."""
    durations_D, hops_D = pipelines(work, prices)
    drain_SD = work.engine.drain_s_SR(durations_D, hops_D)
    finish = _finish(work, prices, drain_SD.max(axis=1, keepdims=True), durations_D)
    rank = int(finish.rank_K[0])
    stages = work.rank_S == rank
    replica = int(drain_SD[stages].max(axis=0).argmax())
    end_s = float(drain_SD[stages, replica].max())
    # When its stages drain without hops, and without hops and overlapped gathers.
    first = 2 * len(work.rank_S)
    passes_B = durations_D[:, replica]
    ungathered_B = np.concatenate([passes_B[:first], passes_B[: len(work.rank_S)], passes_B[3 * len(work.rank_S) :]])
    both_B2 = np.stack([durations_D[:, replica], ungathered_B], axis=1)
    without_S2 = work.engine.drain_s_SR(both_B2, np.zeros((first - 1, 2)))
    no_hop_s, no_gather_s = without_S2[stages].max(axis=0).tolist()
    breakdown = _busy_s(work, prices, rank, replica)
    bubble_s = no_gather_s - sum(breakdown.values())
    breakdown["pipeline_transfer"] = end_s - no_hop_s
    # What rounding leaves of nothing is nothing.
    breakdown["bubble"] = bubble_s if abs(bubble_s) > 1e-12 * end_s else 0.0
    breakdown["data_parallel"] = (
        breakdown.get("data_parallel", 0.0) + float(finish.finish_s_K[0]) - end_s + float(finish.loss_s_K[0])
    )
    breakdown["embedding_gradients"] = float(finish.embedding_s_K[0])
    breakdown["optimizer"] = float(finish.optimizer_s_K[0])
    breakdown["parameter_gather"] = float(finish.gather_s_K[0]) + (no_hop_s - no_gather_s)
    return StepTime(total_s=float(finish.total_s_K[0]), breakdown_s=breakdown)


@dataclass(frozen=True, kw_only=True)
class _Finish:
    """What follows the pipelines of each placement."""

    rank_K: NDArray[np.int64]
    """The pipeline rank whose gradients are reduced last."""
    finish_s_K: Array
    embedding_s_K: Array
    loss_s_K: Array
    optimizer_s_K: Array
    gather_s_K: Array
    total_s_K: Array


def pipelines(work: LayoutWork, prices: Prices) -> tuple[Array, Array]:
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
    hops_D = np.concatenate([*_hops_s(rank_S, prices), np.zeros((1, forward_SD.shape[1]))])
    durations_D[2 * len(rank_S) :] += _first_gather_s(work, prices, durations_D, hops_D)
    if work.engine.splits_backward:
        weight_SD = work.weight_grad_s_S[:, None] * slowness_SD
        durations_D = np.concatenate([durations_D, backward_SD - weight_SD, weight_SD])
    return durations_D, hops_D


def _hops_s(rank_S: NDArray[np.int64], prices: Prices) -> tuple[Array, Array]:
    """Seconds from each stage to the next, and back; stages that follow each other on one rank send nothing."""
    here, there = rank_S[:-1], rank_S[1:]
    # Back up the ranks of a V outputs take the way that gradients take elsewhere. Of two ranks it is that of the wrap.
    goes_back = ((there == here - 1) & (len(prices.slowness_PD) > 2))[:, None]
    forward_SD = np.where(goes_back, prices.backward_hop_s_PD[there], prices.forward_hop_s_PD[here])
    backward_SD = np.where(goes_back, prices.forward_hop_s_PD[there], prices.backward_hop_s_PD[here])
    stays = (there == here)[:, None]
    return np.where(stays, 0.0, forward_SD), np.where(stays, 0.0, backward_SD)


def stage_times(work: LayoutWork, prices: Prices) -> StageTimes:
    """Return the passes and hops of the slowest replica's pipeline, for schedules that are made to fit them."""
    durations_D, hops_D = pipelines(work, prices)
    stages = len(work.rank_S)
    slowest = int(durations_D[: 2 * stages].sum(axis=0).argmax())
    slowness_S = prices.slowness_PD[work.rank_S, slowest]
    weight_S = work.weight_grad_s_S * slowness_S
    forward, backward, first = (tuple(each.tolist()) for each in np.split(durations_D[: 3 * stages, slowest], 3))
    forward_hop, backward_hop = (tuple(each.tolist()) for each in np.split(hops_D[:-1, slowest], 2))
    return StageTimes(
        forward_s=forward,
        backward_s=backward,
        first_forward_s=first,
        input_s=tuple((np.array(backward) - weight_S).tolist()),
        weight_s=tuple(weight_S.tolist()),
        forward_hop_s=forward_hop,
        backward_hop_s=backward_hop,
    )


def _first_gather_s(work: LayoutWork, prices: Prices, durations_D: Array, hops_D: Array) -> Array:
    """Overlapped parameter gather: what the first forwards wait for; see `first_gathers`."""
    stages = len(work.rank_S)
    forward_SD = durations_D[:stages]
    if not (work.layout.use_distributed_optimizer and work.layout.overlap_param_gather):
        return np.zeros_like(forward_SD)
    gather_SK = prices.gather_s_S.reshape(stages, -1)
    gather_SR = np.repeat(gather_SK, forward_SD.shape[1] // gather_SK.shape[1], axis=1)
    if not work.aligns_gathers:
        return waits_one_by_one_s(gather_SR, forward_SD, np.array(work.traffic.num_buckets)[:, None])
    forwards = Forwards(forward_s_SR=forward_SD, hop_s_SR=hops_D[: stages - 1], rendezvous=work.engine.meets_receivers)
    return waits_aligned_s(work.layout, gather_SR, forwards)


def _finish(work: LayoutWork, prices: Prices, drain_SK: Array, durations_R: Array) -> _Finish:
    """Reduce gradients, then those of the tied embedding, then add up the loss, then step, then gather.

    The last stage adds up its replicas' losses once its gradients are reduced (training.py, train_step). The gradient
    norm needs every rank, so no optimizer starts before the last of this ends.
    """
    pp, (stages, placements) = work.layout.pp, drain_SK.shape
    # Chunk after chunk, each on all ranks in turn: for a V the second chunk's stages are turned round.
    by_chunk = np.lexsort((work.rank_S, np.arange(stages) // pp))
    drain_SK = drain_SK[by_chunk]
    reduce_SK, gather_SK = (seconds.reshape(stages, -1) for seconds in (prices.reduce_s_S, prices.gather_s_S))
    # Each of a rank's gradients waits for all replicas; their last buckets leave while the fastest computes.
    backward_SK = durations_R[stages : 2 * stages].reshape(stages, placements, -1).min(axis=2)[by_chunk]
    finish_PK = _reduced_s_PK(work, reduce_SK, drain_SK, backward_SK)
    finish_K = finish_PK.max(axis=0)
    tied_K = np.maximum(finish_PK[0], finish_PK[-1]) + prices.embedding_s
    embedding_K = np.maximum(tied_K - finish_K, 0.0)
    last_K = tied_K if work.traffic.embedding_bytes else finish_PK[-1]
    loss_K = np.maximum(work.loss_s - (np.maximum(tied_K, finish_K) - last_K), 0.0)
    slowness_PK = prices.slowness_PD.reshape(pp, placements, -1).max(axis=2)
    gather_PK = np.zeros((pp, placements))
    if not work.layout.overlap_param_gather:
        for chunk_PK in gather_SK.reshape(-1, pp, placements):
            gather_PK += chunk_PK
    step_PK = work.optimizer_s_P[:, None] * slowness_PK + gather_PK
    last_K = step_PK.argmax(axis=0)
    step_K, gather_K = (np.take_along_axis(seconds, last_K[None], axis=0)[0] for seconds in (step_PK, gather_PK))
    return _Finish(
        rank_K=finish_PK.argmax(axis=0),
        finish_s_K=finish_K,
        embedding_s_K=embedding_K,
        loss_s_K=loss_K,
        optimizer_s_K=step_K - gather_K,
        gather_s_K=gather_K,
        total_s_K=finish_K + embedding_K + step_K + loss_K,
    )


def reduced_s_P(work: LayoutWork, prices: Prices, drain_S: Array, backward_S: Array) -> Array:
    """When the gradients of each pipeline rank are reduced; see `_reduced_s_PK`."""
    columns = (seconds.reshape(len(drain_S), -1) for seconds in (prices.reduce_s_S, drain_S, backward_S))
    return _reduced_s_PK(work, *columns)[:, 0]


def _reduced_s_PK(work: LayoutWork, reduce_SK: Array, drain_SK: Array, backward_SK: Array) -> Array:
    """When each rank's gradients are reduced.

    Without overlap everything leaves after its last backward. With overlap each chunk leaves when its own last
    backward ends, one after the other; buckets of a chunk leave during that backward, in equal parts.
    """
    pp, placements = work.layout.pp, drain_SK.shape[1]
    reduce_VPK, drain_VPK, backward_VPK = (
        seconds_SK.reshape(-1, pp, placements) for seconds_SK in (reduce_SK, drain_SK, backward_SK)
    )
    done_PK = np.zeros((pp, placements))
    if not work.layout.overlap_grad_reduce:
        for reduce_PK in reduce_VPK:
            done_PK += reduce_PK
        done_PK += drain_VPK.max(axis=0)
        return done_PK
    buckets_VP1 = np.array(work.traffic.num_buckets).reshape(-1, pp, 1)
    first_ready_VPK = drain_VPK - backward_VPK * (buckets_VP1 - 1) / buckets_VP1
    chunks = [first_ready_VPK, reduce_VPK, drain_VPK + reduce_VPK / buckets_VP1]
    if len(drain_VPK) > 1:
        # Where two chunks end together the later one leaves first: turned around, a stable sort keeps it in front.
        order_VPK = len(drain_VPK) - 1 - np.argsort(drain_VPK[::-1], axis=0, kind="stable")
        chunks = [np.take_along_axis(seconds_VPK, order_VPK, axis=0) for seconds_VPK in chunks]
    for first_ready_PK, reduce_PK, last_bucket_PK in zip(*chunks, strict=True):
        done_PK = np.maximum(np.maximum(done_PK, first_ready_PK) + reduce_PK, last_bucket_PK)
    return done_PK


def _busy_s(work: LayoutWork, prices: Prices, rank: int, replica: int) -> dict[str, float]:
    """Seconds that one pipeline rank of one replica computes and communicates inside its passes, by part."""
    stages = work.rank_S == rank
    slowness = float(prices.slowness_PD[rank, replica])
    times = work.num_microbatches * slowness
    busy = {
        "compute": times * float((work.forward_s_S + work.backward_s_S)[stages].sum()),
        "recompute": times * float(work.recompute_s_S[stages].sum()),
        "tensor_parallel": 0.0,
        "context_parallel": 0.0,
        "expert_parallel": 0.0,
    }
    busy |= dict.fromkeys((item.part for item in work.exchanges if item.is_sharding), 0.0)
    seconds = [
        max(float(seconds_PD[rank, replica]) - item.hidden_s, 0.0)
        for item, seconds_PD in zip(work.exchanges, prices.exchange_s_PD, strict=True)
    ]
    for way, idle_s_S in (("forward", work.forward_idle_s_S), ("backward", work.backward_idle_s_S)):
        counts_S = [np.array(getattr(item, way))[stages] for item in work.exchanges]
        exchanged_S = sum(
            (count * each for count, each in zip(counts_S, seconds, strict=True)), np.zeros(work.layout.vpp)
        )
        left_S = np.maximum(exchanged_S - slowness * idle_s_S[stages], 0.0)
        # What passes while the device is idle anyway is taken off all exchanges alike.
        shown_S = np.divide(left_S, exchanged_S, out=np.zeros_like(left_S), where=exchanged_S > 0)
        for item, counts, each in zip(work.exchanges, counts_S, seconds, strict=True):
            busy[item.part] += work.num_microbatches * each * float((counts * shown_S).sum())
    return busy
