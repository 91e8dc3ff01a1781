"""Which replicas of which placements have to be simulated: those that can set the step time, each only once."""

# K = placements, D = replicas of each, R = replicas, T = times of a replica's pipeline.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
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
