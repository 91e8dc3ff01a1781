"""Small objectives that stand in for the cost model where only the search is tested."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from facts_for_tests import groups_of

from pipette_launch.facts import Layout
from pipette_launch.search.assignment.descent import Floats, Ints

Distances = tuple[tuple[float, ...], ...]


def random_distances(size: int, rng: random.Random) -> Distances:
    """Seconds from slot to slot, not symmetric, as measured ones are."""
    return tuple(tuple(0.0 if i == j else rng.uniform(1.0, 10.0) for j in range(size)) for i in range(size))


class OneByOne:
    """An objective out of a function of one placement."""

    def __init__(self, cost: Callable[[Sequence[int]], float]) -> None:
        self.cost = cost

    def costs(self, placement_KW: Ints) -> Floats:
        """Price them one by one."""
        return np.array([self.cost(placement) for placement in placement_KW.tolist()])


def link_cost(layout: Layout, distances: Distances) -> OneByOne:
    """The slowest pipeline, plus the slowest ring of each other kind, as Pipette has it."""
    pipelines = groups_of(layout, "pp")
    rings = [groups_of(layout, "dp_cp"), groups_of(layout, "tp")]

    def cost(placement: Sequence[int]) -> float:
        slot_of = {rank: slot for slot, rank in enumerate(placement)}

        def hops(group: tuple[int, ...], closed: bool) -> list[float]:
            slots = [slot_of[rank] for rank in group]
            ends = slots[1:] + ([slots[0]] if closed else [])
            return [distances[a][b] for a, b in zip(slots, ends, strict=closed)]

        total = max(sum(hops(group, closed=False)) for group in pipelines)
        return total + sum(max(max(hops(group, closed=True)) for group in kind) for kind in rings)

    return OneByOne(cost)


def never() -> bool:
    """Time is never up."""
    return False


def after(times: int) -> Callable[[], bool]:
    """Time is up from the so many-th question on."""
    left = iter(range(times))
    return lambda: next(left, None) is None


class Ticks:
    """A clock that advances by one each time it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Tick."""
        self.now_s += 1
        return self.now_s
