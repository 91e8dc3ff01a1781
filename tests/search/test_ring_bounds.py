"""What no ring and no pipeline can avoid, against all that there are."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipette_launch.cost.communication.collectives import spanning_tree
from pipette_launch.search.ring_bounds import (
    best_ways,
    cheapest_between,
    partitions,
    pipeline_splits,
    returning_splits,
    ring_thresholds,
    through,
)


def drawn(hosts: int, rng: random.Random) -> np.ndarray:
    """Links of every cost, directed."""
    return np.array([[rng.choice((1.0, 2.0, 5.0)) + rng.random() for _ in range(hosts)] for _ in range(hosts)])


def slowest(ring: tuple[int, ...], cost: np.ndarray) -> float:
    """The slowest link of a closed tour over hosts, without those inside a host."""
    pairs = zip(ring, (*ring[1:], ring[0]), strict=True)
    return float(max((cost[one, other] for one, other in pairs if one != other), default=0.0))


@settings(max_examples=15)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from(
        [(4, 1, 2, 1), (4, 1, 4, 1), (6, 1, 3, 1), (6, 1, 2, 1), (3, 2, 3, 2), (2, 3, 6, 3), (3, 2, 3, 1), (4, 2, 2, 1)]
    ),
)
def test_no_rings_are_better_than_the_thresholds(rng: random.Random, shape: tuple[int, int, int, int]) -> None:
    """All ways to lay rings over all units of all hosts, where a host may hold so many of one: their costs, sorted."""
    hosts, per_host, units, together = shape
    cost = drawn(hosts, rng)
    seats = [host for host in range(hosts) for _ in range(per_host)]
    through_h = through(cost, visits_once=together == 1 and units > 2)
    fewest = -(-units // together)
    found = ring_thresholds(cost, units_per_host=per_host, ring_units=units, fewest=fewest, through_H=through_h)

    for order in set(itertools.permutations(seats)):
        rings = [order[first : first + units] for first in range(0, len(order), units)]
        if any(ring.count(host) > together for ring in rings for host in ring):
            continue
        costs = sorted(slowest(ring, cost) for ring in rings)
        assert all(bound <= real for bound, real in zip(found, costs, strict=True))


def test_islands_hold_whole_rings_only() -> None:
    """Two islands of three: a ring of three fits into each, one of two leaves a host over on both sides."""
    island = np.arange(6) % 2
    cost = np.where(island[:, None] == island[None, :], 1.0, 9.0)
    through_h = through(cost, visits_once=True)

    def thresholds(units_per_host: int, ring_units: int, fewest: int) -> list[float]:
        return ring_thresholds(
            cost, units_per_host=units_per_host, ring_units=ring_units, fewest=fewest, through_H=through_h
        )

    assert thresholds(1, 3, 3) == [1.0, 1.0]
    assert thresholds(1, 2, 2) == [1.0, 1.0, 9.0]
    assert thresholds(1, 6, 6) == [9.0]
    assert thresholds(3, 3, 1) == [0.0] * 6
    # Four hosts of a ring are not all of one island.
    assert thresholds(2, 4, 4) == [9.0] * 3


def test_a_ring_does_not_come_back_from_where_it_went() -> None:
    """Host 0 has one good neighbour, which serves one way only; with two rings through a host it may serve both."""
    cost = np.full((4, 4), 1.0)
    cost[0, 1:] = cost[1:, 0] = (1.0, 7.0, 8.0)

    assert through(cost, visits_once=True).tolist() == [7.0, 1.0, 1.0, 1.0]
    assert through(cost, visits_once=False).tolist() == [1.0, 1.0, 1.0, 1.0]
    assert [best.tolist() for best in best_ways(cost)] == [[1.0] * 4, [1.0] * 4]


def test_parts_are_far_apart() -> None:
    """Hosts for themselves first, then the islands, which one cheap way spanning_tree."""
    island = np.array([0, 1, 0, 1])
    cost = np.where(island[:, None] == island[None, :], 1.0, 9.0)
    cost[0, 3] = 5.0

    found = [(part.tolist(), between) for part, between in partitions(cost, most=3)]

    assert found == [([0, 1, 2, 3], 1.0), ([0, 1, 0, 1], 5.0)]
    assert cheapest_between(cost, island) == 5.0
    assert [each for each, _, _ in spanning_tree(cost)] == [1.0, 1.0, 5.0]


@pytest.mark.parametrize("most", [3, 10_000])
@pytest.mark.parametrize(("stages", "longest"), [(1, 1), (4, 1), (5, 2), (7, 3), (8, 3), (8, 8)])
def test_every_cut_holds_one_of_the_sets(stages: int, longest: int, most: int) -> None:
    """Whatever runs the stages are cut into, none longer than allowed."""
    sets = [set(each) for each in pipeline_splits(stages, longest, most=most)]

    assert len(sets) <= most
    for size in range(stages):
        for hops in itertools.combinations(range(stages - 1), size):
            bounds = [-1, *hops, stages - 1]
            if all(after - before <= longest for before, after in itertools.pairwise(bounds)):
                assert any(each <= set(hops) for each in sets)


def test_the_smallest_splits() -> None:
    """Seven stages in runs of three: two hops, or three in a row of twos; eight in two halves: the middle, or two."""
    assert pipeline_splits(7, 3, most=99) == [(0, 3), (1, 3), (1, 4), (2, 3), (2, 4), (2, 5)]
    assert pipeline_splits(4, 2, most=99) == [(0, 2), (1,)]
    assert pipeline_splits(3, 1, most=99) == [(0, 1)]
    assert pipeline_splits(3, 3, most=99) == [()]


@pytest.mark.parametrize(("stages", "longest"), [(2, 2), (4, 2), (5, 3), (7, 3), (8, 4)])
def test_every_way_back_holds_one_of_the_sets(stages: int, longest: int) -> None:
    """Cuts whose first and last run fit together: first and last stage may lie in one part only then."""
    sets = [set(each) for each in returning_splits(stages, longest, most=10_000) or []]

    for size in range(2, stages):
        for hops in itertools.combinations(range(stages - 1), size):
            bounds = [-1, *hops, stages - 1]
            runs = [after - before for before, after in itertools.pairwise(bounds)]
            if max(runs) <= longest and runs[0] + runs[-1] <= longest:
                assert any(each <= set(hops) for each in sets)
    assert returning_splits(8, 3, most=2) is None
    assert returning_splits(4, 2, most=9) == [(0, 2)]
