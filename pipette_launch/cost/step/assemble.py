"""The seconds of one step: parallel pipelines, then gradient reduction, optimizer and parameter gathers."""

# Letters of array axes: S = stages (model chunks), P = pipeline ranks, V = chunks of each rank, D = data-parallel
# replicas. K = placements side by side, R = replicas of all placements, sorted by placement. N = placements or layouts
# side by side.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.pipeline.engine import StageTimes
from pipette_launch.cost.step.work import LayoutWork, Prices, exposed_s, pass_s
from pipette_launch.facts.layout import Floats, Ints, Layout, LayoutColumns

LAUNCHING = "launching_kernels"
"""Name of the part of a step in which devices wait until the host has launched kernels (`StepTime.breakdown_s`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted seconds of one optimizer step."""

    total_s: float
    breakdown_s: dict[str, float]
    """Seconds of each part of the step on the slowest pipeline rank. The parts add up to the total."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEnd:
    """The part of a step after the last passes, for N placements of one layout."""

    layout: Layout
    drain_s_VPN: Floats
    """Time in the step at which the last backward of each chunk ends."""
    backward_s_VPN: Floats
    """Seconds of the last backward of each chunk on the fastest replica, during which gradient buckets can be sent."""
    num_buckets_VPN: NDArray[np.int64]
    reduce_s_VPN: Floats
    gather_s_VPN: Floats
    optimizer_s_PN: Floats
    embedding_s_N: Floats
    """Seconds of the reduction of tied embedding gradients between the first and the last stage."""

    @cached_property
    def reduced_s_PN(self) -> Floats:
        """Time in the step at which each pipeline rank has reduced its gradients.

        Without overlap, all reductions follow the last backward of the rank. With overlap, the rank reduces each
        chunk's gradients after this chunk's last backward, one chunk after the other. The buckets of a chunk are sent
        during its last backward, at equal intervals.
        """
        if self.layout.overlap_grad_reduce:
            return self._reduced_with_overlap()
        return np.asarray(sum(self.reduce_s_VPN) + self.drain_s_VPN.max(axis=0))

    @cached_property
    def finish_s_N(self) -> Floats:
        """Time in the step at which the last pipeline rank has reduced its gradients."""
        return np.asarray(self.reduced_s_PN.max(axis=0))

    @cached_property
    def more_embedding_s_N(self) -> Floats:
        """Seconds that the reduction of the tied embedding's gradients adds to the step."""
        both_s_N = np.maximum(self.reduced_s_PN[0], self.reduced_s_PN[-1])
        return exposed_s(both_s_N + self.embedding_s_N, self.finish_s_N)

    @cached_property
    def gather_after_s_PN(self) -> Floats:
        """Seconds of parameter gathers after the optimizer; 0 s if they overlap with the next step's forwards."""
        if self.layout.overlap_param_gather:
            return np.zeros_like(self.optimizer_s_PN)
        return np.asarray(sum(self.gather_s_VPN))

    @cached_property
    def update_s_PN(self) -> Floats:
        """Seconds of optimizer and gathers of each rank. All ranks start together, after the gradient norm."""
        return np.asarray(self.optimizer_s_PN + self.gather_after_s_PN)

    @property
    def total_s_N(self) -> Floats:
        """Seconds of the whole step."""
        return np.asarray(self.finish_s_N + self.more_embedding_s_N + self.update_s_PN.max(axis=0))

    def _reduced_with_overlap(self) -> Floats:
        drain_VPN, buckets_VPN = self.drain_s_VPN, self.num_buckets_VPN
        ready_VPN = drain_VPN - self.backward_s_VPN * (buckets_VPN - 1) / buckets_VPN
        chunks = [ready_VPN, self.reduce_s_VPN, drain_VPN + self.reduce_s_VPN / buckets_VPN]
        if (drain_VPN[:-1] >= drain_VPN[1:]).all():
            # The last backwards of a rank's chunks end in reverse order. At equal ends, the later chunk is first.
            chunks = [seconds_VPN[::-1] for seconds_VPN in chunks]
        else:
            order_VPN = len(drain_VPN) - 1 - np.argsort(drain_VPN[::-1], axis=0, kind="stable")
            chunks = [np.take_along_axis(seconds_VPN, order_VPN, axis=0) for seconds_VPN in chunks]
        done_PN = np.zeros(drain_VPN.shape[1:])
        for ready_PN, reduce_PN, last_bucket_PN in zip(*chunks, strict=True):
            done_PN = np.maximum(np.maximum(done_PN, ready_PN) + reduce_PN, last_bucket_PN)
        return done_PN


def gathers_in_forward(layout: Layout | LayoutColumns) -> bool | NDArray[np.bool_]:
    """Return whether the first forwards of a step wait for parameter gathers (`--overlap-param-gather`)."""
    return np.logical_and(layout.use_distributed_optimizer, layout.overlap_param_gather)


def gather_waits_s(gather_s: Floats, forward_s: Floats, num_buckets: int | Ints) -> Floats:
    """Return the wait of each first forward that starts its own gather of parameters. Shapes of arguments broadcast.

    The first forward waits for the gather of the whole first bucket. For each later bucket, the forward waits only if
    the bucket's gather takes longer than the compute on the previous bucket.
    """
    more_s = (num_buckets - 1) * exposed_s(gather_s, forward_s)
    return np.asarray(gather_s / num_buckets + more_s / num_buckets)


def totals_s_K(work: LayoutWork, prices: Prices) -> Floats:
    """Return the step's seconds for each of K placements, with the same digits as for each placement alone."""
    durations_R, hops_R = pipelines(work, prices)
    drain_SR = work.engine.drain_s_SR(durations_R, hops_R)
    drain_SK = drain_SR.reshape(len(drain_SR), prices.reduce_s_SK.shape[1], -1).max(axis=2)
    return step_end(work, prices, drain_SK, durations_R).total_s_N


def step_end(work: LayoutWork, prices: Prices, drain_SK: Floats, durations_R: Floats) -> StepEnd:
    """Return the part of the step that follows the last passes of the pipelines, for K placements."""
    pp, (stages, placements) = work.layout.pp, drain_SK.shape
    shape = (-1, pp, placements)
    # Sort stages by chunk, then by rank, because a V schedule places the second chunks on the ranks in reverse order.
    by_chunk = np.lexsort((work.rank_S, np.arange(stages) // pp))
    # A gradient reduction waits for all replicas. The last buckets can be sent only while the fastest replica computes.
    backward_SK = durations_R[stages : 2 * stages].reshape(stages, placements, -1).min(axis=2)
    return StepEnd(
        layout=work.layout,
        drain_s_VPN=drain_SK[by_chunk].reshape(shape),
        backward_s_VPN=backward_SK[by_chunk].reshape(shape),
        num_buckets_VPN=np.array(work.traffic.num_buckets).reshape(-1, pp, 1),
        reduce_s_VPN=prices.reduce_s_SK.reshape(shape),
        gather_s_VPN=prices.gather_s_SK.reshape(shape),
        optimizer_s_PN=work.optimizer_s_P[:, None] * prices.slowness_PD.reshape(pp, placements, -1).max(axis=2),
        embedding_s_N=prices.embedding_s_K,
    )


def pipelines(work: LayoutWork, prices: Prices) -> tuple[Floats, Floats]:
    """Return the seconds of passes and messages of every replica's pipeline, in the order of `StageTimes`."""
    rank_S = work.rank_S
    slowness_SD = prices.slowness_PD[rank_S]
    exchanged = np.zeros((2, *slowness_SD.shape))
    for item, seconds_PD in zip(work.exchanges, prices.exchange_s_PD, strict=True):
        exchanged += np.array([item.forward, item.backward])[:, :, None] * exposed_s(seconds_PD, item.hidden_s)[rank_S]
    forward_SD, backward_SD = (
        pass_s(compute_S[:, None] * slowness_SD, exchanged_SD, idle_S[:, None] * slowness_SD)
        for compute_S, exchanged_SD, idle_S in (
            (work.forward_s_S, exchanged[0], work.forward_idle_s_S),
            (work.backward_s_S + work.recompute_s_S, exchanged[1], work.backward_idle_s_S),
        )
    )
    durations_D = np.concatenate([forward_SD, backward_SD, forward_SD])
    forth_SD, back_SD = _hops_s(rank_S, prices)
    back_SD = back_SD * work.backward_s_S.any()  # A step of forwards alone sends nothing back.
    hops_D = np.concatenate([forth_SD, back_SD, np.zeros((1, forward_SD.shape[1]))])
    if gathers_in_forward(work.layout):
        # The first forwards of the step wait for the gathers of their parameters.
        gather_SD = np.repeat(prices.gather_s_SK, forward_SD.shape[1] // prices.gather_s_SK.shape[1], axis=1)
        if work.layout.vpp > 1:
            # All pipeline ranks gather at the same time, so only the first stage waits (arguments.py, validate_args).
            durations_D[2 * len(rank_S)] += gather_SD[0]
        else:
            buckets_S1 = np.array(work.traffic.num_buckets)[:, None]
            durations_D[2 * len(rank_S) :] += gather_waits_s(gather_SD, forward_SD, buckets_S1)
    if work.engine.splits_backward:
        weight_SD = work.weight_grad_s_S[:, None] * slowness_SD
        durations_D = np.concatenate([durations_D, backward_SD - weight_SD, weight_SD])
    return durations_D, hops_D


def _hops_s(rank_S: Ints, prices: Prices) -> tuple[Floats, Floats]:
    """Return the seconds of a message from each stage to the next stage, and back; 0 between stages of one rank."""
    here, there = rank_S[:-1], rank_S[1:]
    # In the second half of a V schedule, outputs travel from higher to lower ranks, like gradients. With two ranks,
    # these outputs use the link from the last rank to the first.
    goes_back = ((there == here - 1) & (len(prices.slowness_PD) > 2))[:, None]
    forward_SD = np.where(goes_back, prices.backward_hop_s_PD[there], prices.forward_hop_s_PD[here])
    backward_SD = np.where(goes_back, prices.forward_hop_s_PD[there], prices.backward_hop_s_PD[here])
    stays = (there == here)[:, None]
    return np.where(stays, 0.0, forward_SD), np.where(stays, 0.0, backward_SD)


def stage_times(work: LayoutWork, prices: Prices) -> StageTimes:
    """Return the seconds of passes and messages of the slowest replica, from which schedules by times are built."""
    durations_D, hops_D = pipelines(work, prices)
    stages = len(work.rank_S)
    slowest = int(durations_D[: 2 * stages].sum(axis=0).argmax())
    weight_S = work.weight_grad_s_S * prices.slowness_PD[work.rank_S, slowest]
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


def step_parts(work: LayoutWork, prices: Prices) -> StepTime:
    """Return the seconds of the step, split into compute and all kinds of waits of the slowest pipeline rank.

    The pipeline of the rank's slowest replica is simulated three times. The differences of its ends are parts:

        pipeline_transfer = end - end without messages
        parameter_gather  = end without messages - end without messages and gathers, plus gathers after the optimizer
        bubble            = end without messages and gathers - compute and exchanges of the rank's passes
        data_parallel     = end of the last reduction - end, plus the exchanges of FSDP in the passes
        optimizer         = update of the slowest rank - its gathers after the optimizer
    """
    durations_D, hops_D = pipelines(work, prices)
    drain_SD = work.engine.drain_s_SR(durations_D, hops_D)
    end = step_end(work, prices, drain_SD.max(axis=1, keepdims=True), durations_D)
    rank = int(end.reduced_s_PN[:, 0].argmax())
    stages = work.rank_S == rank
    replica = int(drain_SD[stages].max(axis=0).argmax())
    drained_s = float(drain_SD[stages, replica].max())
    no_hop_s, no_gather_s = _ends_without_waits_s(work, durations_D[:, replica], rank)
    last = int(end.update_s_PN[:, 0].argmax())
    gather_after_s = float(end.gather_after_s_PN[last, 0])
    breakdown = _busy_s(work, prices, rank, replica)
    bubble_s = no_gather_s - sum(breakdown.values())
    breakdown["pipeline_transfer"] = drained_s - no_hop_s
    # A pipeline bubble as small as rounding errors counts as 0 s.
    breakdown["bubble"] = bubble_s if abs(bubble_s) > 1e-12 * drained_s else 0.0
    breakdown["data_parallel"] = breakdown.get("data_parallel", 0.0) + float(end.finish_s_N[0]) - drained_s
    breakdown["embedding_gradients"] = float(end.more_embedding_s_N[0])
    breakdown["optimizer"] = float(end.update_s_PN[last, 0]) - gather_after_s
    breakdown["parameter_gather"] = gather_after_s + (no_hop_s - no_gather_s)
    return StepTime(total_s=float(end.total_s_N[0]), breakdown_s=breakdown)


def _ends_without_waits_s(work: LayoutWork, durations: Floats, rank: int) -> tuple[float, float]:
    """Return a rank's last end in one pipeline without messages, and without messages and waits for gathers."""
    stages = len(work.rank_S)
    ungathered = durations.copy()
    # A first forward that waits for no gather takes as long as any other forward.
    ungathered[2 * stages : 3 * stages] = durations[:stages]
    no_hops = np.zeros((2 * stages - 1, 2))
    end_S2 = work.engine.drain_s_SR(np.stack([durations, ungathered], axis=1), no_hops)
    no_hop_s, no_gather_s = end_S2[work.rank_S == rank].max(axis=0).tolist()
    return no_hop_s, no_gather_s


def _busy_s(work: LayoutWork, prices: Prices, rank: int, replica: int) -> dict[str, float]:
    """Return the compute and communication seconds in the passes of a pipeline rank of a replica, by part.

    Exchanges that run while the device waits for the host count as launching, not as communication.
    """
    stages = work.rank_S == rank
    slowness = float(prices.slowness_PD[rank, replica])
    times = work.num_microbatches * slowness
    idle_s_S, again_s_S = work.forward_idle_s_S + work.backward_idle_s_S, work.recompute_idle_s_S
    busy = {
        "compute": times * float((work.forward_s_S + work.backward_s_S - (idle_s_S - again_s_S))[stages].sum()),
        "recompute": times * float((work.recompute_s_S - again_s_S)[stages].sum()),
        LAUNCHING: times * float(idle_s_S[stages].sum()),
        "tensor_parallel": 0.0,
        "context_parallel": 0.0,
        "expert_parallel": 0.0,
    }
    busy |= dict.fromkeys((item.part for item in work.exchanges if item.is_sharding), 0.0)
    seconds = [
        float(exposed_s(seconds_PD[rank, replica], item.hidden_s))
        for item, seconds_PD in zip(work.exchanges, prices.exchange_s_PD, strict=True)
    ]
    for way, idle_s_S in (("forward", work.forward_idle_s_S), ("backward", work.backward_idle_s_S)):
        counts_S = [np.array(getattr(item, way))[stages] for item in work.exchanges]
        zero_S = np.zeros(work.layout.vpp)
        exchanged_S = sum((count * each for count, each in zip(counts_S, seconds, strict=True)), zero_S)
        left_S = exposed_s(exchanged_S, slowness * idle_s_S[stages])
        # Idle time of the device hides an equal share of each exchange in the pass.
        shown_S = np.divide(left_S, exchanged_S, out=np.zeros_like(left_S), where=exchanged_S > 0)
        for item, counts, each in zip(work.exchanges, counts_S, seconds, strict=True):
            busy[item.part] += work.num_microbatches * each * float((counts * shown_S).sum())
    return busy
