"""The annealer never loses the best, is a function of its arguments, and keeps placements legal."""

from __future__ import annotations

import random
from collections.abc import Callable

from facts_for_tests import tiny_cluster
from hypothesis import given
from hypothesis import strategies as st
from search.toys import OneByOne, after, link_cost, never, random_distances

from pipette_launch.facts import Layout
from pipette_launch.search.placement.annealing import annealed
from pipette_launch.search.placement.slots import Placed, PlacementProblem, host_order


def on_links(seed: int) -> OneByOne:
    """Four stages of two replicas on drawn links."""
    return link_cost(Layout(pp=4, dp=2), random_distances(8, random.Random(seed)))


def run(objective: OneByOne, *, seed: int = 0, is_late: Callable[[], bool] = never) -> Placed:
    """Anneal from torchrun's order."""
    order = host_order(8)
    problem = PlacementProblem(layout=Layout(pp=4, dp=2), cluster=tiny_cluster(8, 1), objective=objective, bound_s=0.0)
    start = Placed(placement=order, cost_s=objective.cost(order), is_optimal=False)
    return annealed(problem, start, steps=30, rng=random.Random(seed), is_late=is_late)


@given(st.integers(0, 1000), st.integers(1, 60))
def test_it_never_returns_worse_than_its_start(seed: int, asked: int) -> None:
    """Whatever the links and the time, the result costs what is said, and at most what the start did."""
    objective = on_links(seed)
    found = run(objective, seed=seed, is_late=after(asked))

    assert objective.cost(found.placement) == found.cost_s <= objective.cost(host_order(8))


@given(st.integers(0, 100), st.integers(1, 30), st.integers(0, 30))
def test_more_time_is_never_worse(seed: int, short: int, more: int) -> None:
    """The same seed walks the same way, and only further."""
    objective = on_links(seed)

    assert run(objective, is_late=after(short + more)).cost_s <= run(objective, is_late=after(short)).cost_s


def test_it_climbs_out_of_a_valley() -> None:
    """From a start all of whose neighbours cost more it comes to a better placement."""
    goal = (7, 6, 5, 4, 3, 2, 1, 0)

    def cost(placement: tuple[int, ...]) -> float:
        if tuple(placement) == host_order(8):
            return 100.0
        return 99.0 if tuple(placement) == goal else 100.05

    assert 99.0 in [run(OneByOne(cost), seed=seed).cost_s for seed in range(8)]


def test_the_same_arguments_give_the_same_walk() -> None:
    """No global chance is used."""
    random.seed(1)
    first = run(on_links(3), seed=7)
    random.seed(2)

    assert first == run(on_links(3), seed=7)


def test_a_past_deadline_returns_the_start() -> None:
    """Without time nothing is tried, and nothing is lost."""
    assert host_order(8) == run(on_links(0), is_late=after(0)).placement


def test_a_met_bound_is_told() -> None:
    """A placement as fast as the bound is optimal."""
    objective = OneByOne(lambda placement: 1.0 if tuple(placement) == host_order(8) else 0.0)

    assert run(objective).is_optimal
