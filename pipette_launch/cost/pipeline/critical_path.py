"""Which passes and hops set the time of a pipeline: how often each lies on its longest path."""

# S = stages (model chunks), A = actions of all ranks, R = pipelines that are priced side by side.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.pipeline.simulate import Engine

Floats = NDArray[np.float64]


def critical_counts(engine: Engine, durations_R: Floats, hops_R: Floats) -> tuple[Floats, Floats]:
    """Count how often each duration and each hop lies on the longest path of each pipeline.

    The makespan is the largest over all paths of a sum of durations and hops, so it is convex in them, and these
    counts are a subgradient: at any other times it is at least counts * times.

    Args:
        engine: the schedule.
        durations_R: as for `Engine.drain_s_SR`, one column for each pipeline.
        hops_R: likewise.

    Returns:
        Counts in the shapes of `durations_R` and `hops_R`; the last hop, which is none, counts 0.

    """
    previous_A, cause_A, hop_A, wait_A, duration_A = engine.table_A
    ends = engine.ends_AR(durations_R, hops_R)
    nowhere = len(previous_A)
    duration_counts, hop_counts = np.zeros_like(durations_R), np.zeros_like(hops_R)
    column = np.arange(durations_R.shape[1])
    place = ends[:nowhere].argmax(axis=0)
    while len(column):
        duration_counts[duration_A[place], column] += 1
        hop, wait, cause, before = hop_A[place], wait_A[place], cause_A[place], previous_A[place]
        # The rank itself wins a tie, as in `Engine.timeline`.
        waits = ends[cause, column] + hops_R[hop, column] > ends[before, column] + hops_R[wait, column]
        hop_counts[np.where(waits, hop, wait), column] += 1
        place = np.where(waits, cause, before)
        inside = place != nowhere
        place, column = place[inside], column[inside]
    hop_counts[-1] = 0
    return duration_counts, hop_counts
