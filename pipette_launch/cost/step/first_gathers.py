"""How long the first forward of each stage waits for parameters under `--overlap-param-gather`.

From megatron-core 0.16.1 (flags and schedules.py are alike in 0.10 to 0.17): the forward pre-hooks of
DistributedDataParallel, `start_param_sync` and `finish_param_sync` (param_and_grad_buffer.py), `param_sync_func`
(training.py, schedules.py). Megatron dispatches gathers in one of two ways:

- In the forward's own hook: without virtual stages, and with `--no-align-param-gather`. A stage dispatches its first
  gather when its first activation has arrived, so the waits of successive stages add up. Of n equal buckets, each is
  dispatched when the one before it has arrived: the wait is g/n + (n - 1) max(0, g - f)/n, where g is the whole gather
  and f the forward.
- Aligned: with virtual stages, by default. Every rank dispatches chunks 0 and 1 when the step begins. Rank r dispatches
  chunk c > 1 before its forward number (c - 1) N - r, where N is the micro-batch group size; all ranks reach these
  forwards at about the same time. A chunk's buckets are dispatched together, in the order of the backward, so the
  forward waits for all of them. The gathers of one rank run one after the other, those of different ranks at the same
  time. A first forward waits only for what is left of its gather when its activation arrives.
"""

# S = stages (model chunks), P = pipeline ranks, V = chunks of each, R = pipelines that are priced side by side.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts.layout import Layout

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
