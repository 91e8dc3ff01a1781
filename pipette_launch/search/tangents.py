"""What each stage and each hop weighs in the time of a pipeline: a few cuts that hold wherever its ranks lie."""

# S = stages (model chunks), P = pipeline ranks, K = cuts, N = points at which the pipeline is looked at.
# B = 3 * S durations: forwards, backwards, first forwards. J = 2 * S - 1 hops, as in `StageTimes.hops_s`.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.assemble import Work
from pipette_launch.cost.critical import critical_counts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUDGE = 0.05
"""A stage is made slower by at least this part, to see what happens where it sets the pace."""
CLOSE = 1e-3
"""Cuts that raise the model by less than this part of the pipeline's time are left out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tangents:
    """Cuts of the makespan: it is at least counts * times for each of them, and equal for the steepest.

    The makespan of a schedule is that of the longest of many paths, and each cut is one of these paths.
    """

    duration_BK: Floats
    """How often each duration lies on the path."""
    hop_JK: Floats
    """How often each hop does."""
    most_B: Floats
    """The largest count of each duration over all paths that were met, those left out included."""

    @property
    def size(self) -> int:
        """K."""
        return int(self.duration_BK.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How far the times of a pipeline may move with its place."""

    slowness: float
    """Of the slowest host, in parts of the median one."""
    typical_hop_s: float
    slowest_hop_s: float


def tangents_of(work: Work, durations_B: Floats, hops_J: Floats, spread: Spread, *, most: int) -> Tangents:
    """Cut the makespan at given times, and where stages are slower and hops longer than there.

    Args:
        work: the layout's.
        durations_B: seconds, one pipeline's.
        hops_J: likewise.
        spread: how far to look.
        most: keep so many cuts at most; the first is always that at the given times.

    """
    durations_BN, hops_JN = _points(work, durations_B, hops_J, spread)
    duration_BN, hop_JN = critical_counts(work.engine, durations_BN, hops_JN)
    _, first = np.unique(np.concatenate([duration_BN, hop_JN]), axis=1, return_index=True)
    first.sort()
    said_KN = duration_BN[:, first].T @ durations_BN + hop_JN[:, first].T @ hops_JN
    kept = first[_steepest(said_KN, most)]
    return Tangents(duration_BK=duration_BN[:, kept], hop_JK=hop_JN[:, kept], most_B=duration_BN.max(axis=1))


def _points(work: Work, durations_B: Floats, hops_J: Floats, spread: Spread) -> tuple[Floats, Floats]:
    """As given; each pipeline rank slower; each link longer; all links typical, or as long as the longest."""
    stages, pp = len(work.rank_S), work.layout.pp
    links = range(pp) if work.layout.vpp > 1 else range(pp - 1)
    rank_J = np.concatenate([work.rank_S[:-1], work.rank_S[:-1], [-1]])
    is_hop_J = rank_J >= 0
    levels = (spread.typical_hop_s, spread.slowest_hop_s) if pp > 1 else ()
    points = [(durations_B, hops_J), *((durations_B, np.where(is_hop_J, level, 0.0)) for level in levels)]
    for rank in range(pp):
        slower_B = np.where(np.tile(work.rank_S == rank, 3), max(spread.slowness, 1 + NUDGE), 1.0)
        points.append((durations_B * slower_B, hops_J))
    points += [(durations_B, np.where(rank_J == link, spread.slowest_hop_s, hops_J)) for link in links]
    assert len(durations_B) == 3 * stages
    return np.stack([point[0] for point in points], axis=1), np.stack([point[1] for point in points], axis=1)


def _steepest(said_KN: Floats, most: int) -> list[int]:
    """The first cut, then each time the one that is missed most: what it says at its best point beyond the others."""
    chosen = [0]
    model_N = said_KN[0]
    while len(chosen) < most:
        missed_KN = said_KN - model_N
        cut, point = np.unravel_index(int(missed_KN.argmax()), missed_KN.shape)
        if missed_KN[cut, point] <= CLOSE * said_KN[cut, point]:
            break
        chosen.append(int(cut))
        model_N = np.maximum(model_N, said_KN[cut])
    return chosen
