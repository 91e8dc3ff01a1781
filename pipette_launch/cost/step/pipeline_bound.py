"""Lower bounds on the drain (end of the last backwards) of many pipelines with the same pp and vpp.

Each bound is the length of a path in the graph of the schedule (`cost.pipeline.engine`). The simulated time is the
length of the longest path, so no bound exceeds the simulated time. The bounds compute paths of two kinds, `stay` and
`zigzag`. If all stages are equal, or if one stage is much slower than the others, the longest path of the schedule has
one of these two kinds:

    stay      go to one pipeline rank, run all passes of this rank, and return. A `stay` path may go to the rank and
              return through later chunks, or through the last stage
    zigzag    the first micro-batch goes to the last stage and back, then the micro-batch that starts at its return,
              and so on (only without interleaving)
"""

# Letters of array axes: U = pipelines, V = chunks of a rank (vpp), P = pipeline ranks, S = V * P stages in model order.

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipette_launch.facts.layout import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """Times of U pipelines with the same pp and vpp, in which all messages of a pipeline take equally long."""

    forward_s_UVP: Floats
    backward_s_UVP: Floats
    """Seconds of the backward of one micro-batch on each stage, with recompute."""
    hop_s_U: Floats
    microbatches_U: Ints
    group_size_U: Ints
    """Number of micro-batches that run through one chunk before the next chunk; unused if V is 1."""


class Drains(NamedTuple):
    """Lower bounds on the end of the last backward of each pipeline rank."""

    any_UP: Floats
    """Lower bound of the end of the last backward of the rank's first chunk, the rank's last pass."""
    first_UP: Floats
    """As `any_UP`, but only from paths with every stage's first forward, to which waits can be added."""
    early_UP: Floats
    """Lower bound of the end of the last backward of the rank's last chunk, which ends before its other chunks."""


def drains(pipelines: Pipelines, *, slow: Pipelines | None = None) -> Drains:
    """Bound the ends of the last backwards of pipelines whose stages run on the fastest slots.

    `slow` has the times of the slowest slots. In each pipeline, one unknown rank takes at least the times in `slow`.
    """
    chains = _Chains.of(pipelines)
    stay = _stay(pipelines, chains)
    later_2UP = np.maximum.accumulate(stay.by_rank_2UP[..., ::-1], axis=2)[..., ::-1]
    all_2U1 = np.maximum(stay.by_last_2UP.max(axis=2), _zigzag(pipelines))[..., None]
    # Paths end with the first stage's last backward, so subtract the way from each rank's first chunk to this end.
    drains_2UP = np.maximum(later_2UP, all_2U1) - chains.out_UVP[:, 0]
    if slow is not None:
        held = _stay(slow, chains)
        whole_2U = np.maximum(held.by_rank_2UP, held.by_last_2UP).min(axis=2)
        drains_2UP[..., 0] = np.maximum(drains_2UP[..., 0], whole_2U)
    return Drains(any_UP=drains_2UP[0], first_UP=drains_2UP[1], early_UP=stay.early_UP)


class _Chains(NamedTuple):
    """Seconds of the path of a single micro-batch through the stages."""

    in_UVP: Floats
    """Seconds from the start to the beginning of the forward of each stage."""
    out_UVP: Floats
    """Seconds from the end of the backward of each stage to the end of the backward of the first stage."""
    turn_UP: Floats
    """Seconds from the beginning of the last chunk's forward to the beginning of the last chunk's backward."""
    back_UP: Floats
    """Seconds from the end of the last chunk's forward to the end of the last chunk's backward."""

    @classmethod
    def of(cls, pipelines: Pipelines) -> _Chains:
        shape, flat = pipelines.forward_s_UVP.shape, (len(pipelines.hop_s_U), -1)
        forward_US, backward_US = pipelines.forward_s_UVP.reshape(flat), pipelines.backward_s_UVP.reshape(flat)
        hops_US = pipelines.hop_s_U[:, None] * np.arange(int(np.prod(shape[1:])))
        forward_sum_US, backward_sum_US = forward_US.cumsum(axis=1), backward_US.cumsum(axis=1)
        in_US = forward_sum_US - forward_US + hops_US
        out_US = backward_sum_US - backward_US + hops_US
        whole_U1 = forward_sum_US[:, -1:] + backward_sum_US[:, -1:] + 2 * hops_US[:, -1:]
        last = slice(-shape[-1], None)
        return cls(
            in_UVP=in_US.reshape(shape),
            out_UVP=out_US.reshape(shape),
            turn_UP=(whole_U1 - in_US - out_US - backward_US)[:, last],
            back_UP=(whole_U1 - in_US - out_US - forward_US)[:, last],
        )


class _Stay(NamedTuple):
    """Lengths in seconds of paths that stay on one rank, up to the first stage's last backward, for each rank.

    On the first axis, index 0 is the longest of all paths, and index 1 the longest path with every stage's first
    forward.
    """

    by_rank_2UP: Floats
    """Seconds of paths that return only through earlier pipeline ranks."""
    by_last_2UP: Floats
    """Seconds of paths that return through the last pipeline rank, and therefore through all ranks."""
    early_UP: Floats


def _stay(own: Pipelines, chains: _Chains) -> _Stay:
    """Return the lengths of paths that stay on one rank, from the passes of the rank and the paths to it and back."""
    chunks, ranks = own.forward_s_UVP.shape[1:]
    forward_UVP, backward_UVP = own.forward_s_UVP, own.backward_s_UVP
    n_U1, group_U1 = own.microbatches_U[:, None], own.group_size_U[:, None]
    last_group_U1 = n_U1 % np.maximum(group_U1, 1)
    last_group_U1 = np.where(last_group_U1 == 0, group_U1, last_group_U1)
    total_U1 = n_U1 * chunks
    behind_P = ranks - 1 - np.arange(ranks)
    ahead_UP = behind_P + 0 * n_U1 if chunks == 1 else 2 * behind_P + (chunks - 1) * group_U1
    passed_UP = np.minimum(ahead_UP + 1, total_U1)
    run_UP = n_U1 * (forward_UVP.sum(axis=1) + backward_UVP.sum(axis=1))

    # A path reaches the rank in three ways: to its first chunk, through all stages before its last chunk, or through
    # the last stage and back.
    top_in_UP = chains.in_UVP[:, -1]
    in_last_UP = top_in_UP - group_U1 * forward_UVP[:, :-1].sum(axis=1)
    in_UP = np.maximum(chains.in_UVP[:, 0], in_last_UP)
    in_turn_UP = top_in_UP + chains.turn_UP - (_counts_UVP(passed_UP, own) * forward_UVP).sum(axis=1)
    # A path also returns from the rank to the first stage in three ways.
    top_out_UP = chains.out_UVP[:, -1]
    late_UP = last_group_U1 * backward_UVP[:, :-1].sum(axis=1)
    out_UP = chains.out_UVP[:, 0]
    out_last_UP = top_out_UP - late_UP
    out_turn_UP = top_out_UP + chains.back_UP - _last_s(backward_UVP, passed_UP, own)
    # A path can turn at the last stage on both ways only if the rank has a forward after its first backward.
    both_UP = passed_UP < total_U1
    best_in_UP = np.maximum(in_UP, in_turn_UP)
    straight_UP = np.maximum(out_UP, out_last_UP) if chunks == 1 else out_UP
    by_last_UP = np.where(both_UP, best_in_UP, in_UP) + out_turn_UP
    first_turn_UP = np.where(both_UP, in_turn_UP + out_turn_UP, -np.inf)
    if chunks > 1:
        by_last_UP = np.maximum(by_last_UP, best_in_UP + out_last_UP)
        first_turn_UP = np.maximum(first_turn_UP, in_turn_UP + out_last_UP)
    return _Stay(
        by_rank_2UP=run_UP + np.stack([best_in_UP, in_turn_UP]) + straight_UP,
        by_last_2UP=run_UP + np.stack([by_last_UP, first_turn_UP]),
        early_UP=run_UP + best_in_UP - late_UP,
    )


def _last_s(seconds_UVP: Floats, passed_UP: Ints, own: Pipelines) -> Floats:
    """Return the seconds of a rank's last `passed_UP` backwards, which run through the chunks in reverse order."""
    chunks = seconds_UVP.shape[1]
    n_U1 = own.microbatches_U[:, None]
    before_UVP = _counts_UVP(n_U1 * chunks - passed_UP, own)[:, ::-1]
    return np.asarray(((n_U1[:, None] - before_UVP) * seconds_UVP).sum(axis=1))


def _counts_UVP(passed_UP: Ints, own: Pipelines) -> Ints:
    """Return the number of forwards of each chunk among the first `passed_UP` forwards (`schedule_table`)."""
    chunks = own.forward_s_UVP.shape[1]
    if chunks == 1:
        return passed_UP[:, None]
    group_U1, n_U1 = own.group_size_U[:, None], own.microbatches_U[:, None]
    rounds_UP = np.minimum(passed_UP // (group_U1 * chunks), n_U1 // group_U1)
    rest_U1P = (passed_UP - rounds_UP * group_U1 * chunks)[:, None]
    size_U1P = np.minimum(group_U1, n_U1 - rounds_UP * group_U1)[:, None]
    begun_UVP = rest_U1P - np.arange(chunks)[:, None] * size_U1P
    return np.asarray((rounds_UP * group_U1)[:, None] + np.minimum(np.maximum(begun_UVP, 0), size_U1P))


def _zigzag(pipelines: Pipelines) -> Floats:
    """Return the length of the path that goes to the last stage and back until all micro-batches are done.

    The end of each round trip starts a round trip of the micro-batch whose number is P higher (P pipeline ranks, n
    micro-batches). A path of k = ceil((n + P - 1) / P) round trips is s = k P - (n + P - 1) ranks too long. So one of
    the k round trips turns at rank s instead of 0, or at rank P - 1 - s instead of P - 1.
    """
    chunks, ranks = pipelines.forward_s_UVP.shape[1:]
    if chunks > 1:
        return np.full(len(pipelines.hop_s_U), -np.inf)
    times_UP = (pipelines.forward_s_UVP + pipelines.backward_s_UVP)[:, 0]
    trips_U = -(-(pipelines.microbatches_U + ranks - 1) // ranks)
    short_U = trips_U * ranks - (pipelines.microbatches_U + ranks - 1)
    sums = np.concatenate([np.zeros((len(times_UP), 1)), times_UP.cumsum(axis=1)], axis=1)
    rows = np.arange(len(times_UP))
    whole_U = sums[:, -1]
    at_start_U = sums[rows, short_U]
    at_end_U = np.where(trips_U > 2, whole_U - sums[rows, ranks - short_U], np.inf)
    hops_U = 2 * pipelines.hop_s_U * (trips_U * (ranks - 1) - short_U)
    return np.asarray(trips_U * whole_U - np.minimum(at_start_U, at_end_U) + hops_U)
