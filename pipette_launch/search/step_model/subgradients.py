"""How often each stage and each hop lies on the critical path of a pipeline: cuts that bound its time anywhere."""

# S = stages (model chunks), P = pipeline ranks, D = pipelines, K = cuts, C = cuts to choose from, N = points.
# B = 3 * S durations: forwards, backwards, first forwards. J = 2 * S - 1 hops, as in `StageTimes.hops_s`.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipette_launch.cost.pipeline.engine import critical_counts
from pipette_launch.cost.step.work import LayoutWork
from pipette_launch.search.assignment.problem import Floats

NUDGE = 0.05
"""A stage is made slower by at least this part, to find the critical path through a slow stage."""
CLOSE = 1e-3
"""Cuts that raise the model by less than this part of the pipeline's time are left out."""


SLOW_PIPELINES = 16
MIXED_PIPELINES = 16
MIXING_STRIDE = 7
"""Cuts are made at so many of the slowest pipelines, and at so many whose hops come from different pipelines."""


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
    """The largest count of each duration over all paths that were found, kept or not."""

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


def tangents_of(
    work: LayoutWork, durations_BD: Floats, hops_JD: Floats, spread: Spread, *, most: int, known: Tangents | None = None
) -> Tangents:
    """Cut the makespan where pipelines are now, and where stages are slower and hops longer than there.

    Args:
        work: the layout's.
        durations_BD: seconds, of every pipeline.
        hops_JD: seconds of every hop, likewise.
        spread: how much slower stages and hops may become.
        most: keep so many cuts at most; the first is always that of the slowest pipeline.
        known: cuts from other placements, to choose from too.

    """
    durations_BN, hops_JN = _points(work, durations_BD, hops_JD, spread)
    duration_BC, hop_JC = critical_counts(work.engine, durations_BN, hops_JN)
    most_B = duration_BC.max(axis=1)
    if known is not None:
        duration_BC, hop_JC = np.hstack([duration_BC, known.duration_BK]), np.hstack([hop_JC, known.hop_JK])
        most_B = np.maximum(most_B, known.most_B)
    # By a dict, as `np.unique` along an axis makes a type with a field for each row, which takes longer than all else.
    first_of: dict[bytes, int] = {}
    for index, cut in enumerate(np.concatenate([duration_BC, hop_JC]).T):
        first_of.setdefault(cut.tobytes(), index)
    first = np.array(list(first_of.values()))
    said_CN = duration_BC[:, first].T @ durations_BN + hop_JC[:, first].T @ hops_JN
    kept = first[_steepest(said_CN, most)]
    return Tangents(duration_BK=duration_BC[:, kept], hop_JK=hop_JC[:, kept], most_B=most_B)


def _points(work: LayoutWork, durations_BD: Floats, hops_JD: Floats, spread: Spread) -> tuple[Floats, Floats]:
    """Slow pipelines as they are and with each other's hops; then the slowest with stages or hops longer than now."""
    stages, pp, replicas = len(work.rank_S), work.layout.pp, durations_BD.shape[1]
    assert len(durations_BD) == 3 * stages
    slowest = np.argsort(-work.engine.drain_s_SR(durations_BD, hops_JD).max(axis=0), kind="stable")
    durations_B, hops_J = durations_BD[:, slowest[0]], hops_JD[:, slowest[0]]
    rank_J = np.concatenate([work.rank_S[:-1], work.rank_S[:-1], [-1]])
    points = [(durations_BD[:, index], hops_JD[:, index]) for index in slowest[:SLOW_PIPELINES]]
    if pp > 1 and replicas > 1:
        # Hop j of the mixed pipeline m comes from pipeline m + j, so that each meets new neighbours.
        taken_JM = (np.arange(len(rank_J))[:, None] * MIXING_STRIDE + np.arange(MIXED_PIPELINES)) % replicas
        points += [(durations_B, mixed_J) for mixed_J in np.take_along_axis(hops_JD, taken_JM, axis=1).T]
    levels = (spread.typical_hop_s, spread.slowest_hop_s) if pp > 1 else ()
    points += [(durations_B, np.where(rank_J >= 0, level, 0.0)) for level in levels]
    for rank in range(pp):
        slower_B = np.where(np.tile(work.rank_S == rank, 3), max(spread.slowness, 1 + NUDGE), 1.0)
        points.append((durations_B * slower_B, hops_J))
    links = range(pp) if work.layout.vpp > 1 else range(pp - 1)
    points += [(durations_B, np.where(rank_J == link, spread.slowest_hop_s, hops_J)) for link in links]
    return np.stack([point[0] for point in points], axis=1), np.stack([point[1] for point in points], axis=1)


def _steepest(said_CN: Floats, most: int) -> list[int]:
    """Choose the first cut, then again and again the one that exceeds the chosen ones most at some point."""
    chosen = [0]
    model_N = said_CN[0]
    while len(chosen) < most:
        missed_CN = said_CN - model_N
        cut, point = np.unravel_index(int(missed_CN.argmax()), missed_CN.shape)
        if missed_CN[cut, point] <= CLOSE * said_CN[cut, point]:
            break
        chosen.append(int(cut))
        model_N = np.maximum(model_N, said_CN[cut])
    return chosen
