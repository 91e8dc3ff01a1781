"""Small block placement problems to test on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts import Cluster, Layout
from pipette_launch.facts.co_location import RankBlock
from pipette_launch.search.assignment.descent import Flows
from pipette_launch.search.slots import PlacementProblem


def any_flows(rng: np.random.Generator, seats: int) -> Flows:
    """A problem with everything in it: two types, several families of several groups, offsets."""
    count, groups = int(rng.integers(1, 3 * seats)), int(rng.integers(1, 5))
    sender_F = rng.integers(seats, size=count)
    return Flows(
        seconds_THH=rng.uniform(0.1, 2, (2, seats, seats)),
        sender_F=sender_F,
        receiver_F=(sender_F + rng.integers(1, seats, size=count)) % seats,
        type_F=rng.integers(2, size=count),
        weight_F=rng.uniform(0, 2, count),
        group_F=rng.integers(groups, size=count),
        offset_G=rng.uniform(0, 1, groups),
        family_G=np.unique(rng.integers(groups, size=groups), return_inverse=True)[1],
    )


def ring_and_path(seconds_HH: NDArray[np.float64], *, path_weight: float = 1.0) -> Flows:
    """The ring 0-1-2-..-0 as one family, and the path 0-1-2-.. as another."""
    seats = len(seconds_HH)
    ring = np.arange(seats)
    return Flows(
        seconds_THH=seconds_HH[None],
        sender_F=np.concatenate([ring, ring[:-1]]),
        receiver_F=np.concatenate([(ring + 1) % seats, ring[1:]]),
        type_F=np.zeros(2 * seats - 1, dtype=np.int64),
        weight_F=np.concatenate([np.ones(seats), np.full(seats - 1, path_weight)]),
        group_F=np.repeat([0, 1], [seats, seats - 1]),
        offset_G=np.zeros(2),
        family_G=np.arange(2),
    )


def starts(layout: Layout, cluster: Cluster, *, most: int, blocks: tuple[RankBlock, ...] = ()) -> np.ndarray:
    """The start placements of a problem, which need no prices."""
    prices: Any = None
    return PlacementProblem(layout=layout, cluster=cluster, objective=prices, bound_s=0.0, blocks=blocks).starts(most)
