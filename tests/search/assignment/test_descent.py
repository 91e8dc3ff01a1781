"""Descents end no higher than they begin, and near the optimum where it is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from c_for_tests import in_c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from search.problems import any_flows, ring_and_path
from search.toys import after, never

from pipette_launch.search.assignment import descent, swap_deltas
from pipette_launch.search.assignment.descent import descend
from pipette_launch.search.assignment.problem import Arrangement, Flows, ProblemBuilder


def rings_and_paths(seats: int, seed: int) -> Flows:
    """Two rings whose slowest link counts, and the slower of two paths, over drawn one-way links."""
    rng = np.random.default_rng(seed)
    builder = ProblemBuilder(seats)
    kind = builder.add_type(rng.uniform(1.0, 10.0, (seats, seats)))
    half = seats // 2
    for ring in (np.arange(half), np.arange(half, seats)):
        builder.add_flows(kind, ring, np.roll(ring, -1), 1.0, builder.add_family(np.zeros(len(ring))))
    paths = builder.add_family(np.zeros(2))
    builder.add_flows(kind, np.arange(half), np.arange(half) + half, 0.3, paths[np.arange(half) % 2])
    return builder.flows()


def descended(
    flows: Flows,
    *,
    seed: int = 0,
    is_late: Callable[[], bool] = never,
    steps: int = 60,
    group_H: np.ndarray | None = None,
) -> Arrangement:
    """From the identity, with every place near to every other."""
    size = flows.num_seats
    near_HK = np.array([[other for other in range(size) if other != place] for place in range(size)])
    return descend(
        flows,
        np.arange(size),
        near_HK=near_HK,
        steps=steps,
        rng=np.random.default_rng(seed),
        is_late=is_late,
        group_H=group_H,
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 12), st.integers(0, 1000), st.integers(0, 40))
def test_it_is_never_worse_than_its_start(half: int, seed: int, asked: int) -> None:
    """Whatever the time, what comes back is a bijection that costs what it says and no more than the start."""
    flows = rings_and_paths(2 * half, seed)

    found = descended(flows, seed=seed, is_late=after(asked))

    assert list(range(2 * half)) == sorted(found.place_Q.tolist())
    assert flows.cost(found.place_Q) == found.cost_s <= flows.cost(np.arange(2 * half))


def test_more_time_is_never_worse() -> None:
    """The deadline only cuts the course short."""
    flows = rings_and_paths(20, 5)
    costs = [descended(flows, is_late=after(deadline)).cost_s for deadline in range(0, 70, 10)]

    assert sorted(costs, reverse=True) == costs
    assert costs[-1] < costs[0]


def test_the_same_seed_gives_the_same_descent() -> None:
    """Chance comes from the argument alone."""
    flows = rings_and_paths(16, 2)

    assert descended(flows, seed=3).place_Q.tolist() == descended(flows, seed=3).place_Q.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_rings_come_back_into_their_racks(seed: int) -> None:
    """Six rings of four seats, six racks of four places: the best of four descents leaves at most one ring of six out.

    Links in a rack take 1 to 1.1 s, others 4 to 4.4 s, so with all rings inside it costs at most 6.6 s.
    """
    rng = np.random.default_rng(seed)
    rack_H = np.arange(24) // 4
    distance = np.where(rack_H[:, None] == rack_H, 1.0, 4.0) * rng.uniform(1.0, 1.1, (24, 24))
    builder = ProblemBuilder(24)
    kind = builder.add_type(distance)
    for ring in rng.permutation(24).reshape(6, 4):
        builder.add_flows(kind, ring, np.roll(ring, -1), 1.0, builder.add_family(np.zeros(4)))
    flows = builder.flows()

    assert flows.cost(np.arange(24)) > 20.0
    assert min(descended(flows, seed=seed).cost_s for seed in range(4)) <= 6.6 + 2 * 3.3


@pytest.mark.parametrize("hosts", [1, 2])
def test_nothing_to_move_ends_at_once(hosts: int) -> None:
    """A problem in which all groups cost alike is left as it is."""
    builder = ProblemBuilder(hosts)
    builder.add_family(np.ones(3))
    flows = builder.flows()

    assert descended(flows).cost_s == 1.0


@given(st.integers(0, 10_000), st.integers(2, 30))
@settings(max_examples=20, deadline=None)
def test_any_problem_keeps_its_cost(seed: int, seats: int) -> None:
    """Families of one group and of several, in both directions: the result costs what is said, and no more."""
    flows = any_flows(np.random.default_rng(seed), seats)
    found = descended(flows, seed=seed)

    assert flows.cost(found.place_Q) == found.cost_s <= flows.cost(np.arange(seats))


@pytest.mark.parametrize("seats", [20, 60])
def test_a_hidden_ring_is_found(seats: int) -> None:
    """Links are fast along one hidden ring only; sums over a ring and a path in any order are brought onto it."""
    hidden = np.random.default_rng(4).permutation(seats)
    seconds_HH = np.full((seats, seats), 3.0)
    seconds_HH[hidden, np.roll(hidden, -1)] = seconds_HH[np.roll(hidden, -1), hidden] = 1.0
    flows = ring_and_path(seconds_HH)

    assert min(descended(flows, seed=seed).cost_s for seed in range(3)) < 0.7 * flows.cost(np.arange(seats))


@given(st.integers(0, 10_000), st.integers(2, 30), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_descent_in_c_goes_where_one_in_numpy_goes(
    monkeypatch: pytest.MonkeyPatch, seed: int, seats: int, halved: bool
) -> None:
    """Both end at the same cost, where seats may go anywhere or not; seats that cost the same may stand otherwise."""
    flows = any_flows(np.random.default_rng(seed), seats)
    found = []
    for module in (None, in_c("search.assignment._swaps")):
        for used_by in (descent, swap_deltas):
            monkeypatch.setattr(used_by, "IN_C", module)
        found.append(descended(flows, seed=seed, group_H=np.arange(seats) % 2 if halved else None))

    assert found[0].cost_s == found[1].cost_s
    if halved:
        assert (found[0].place_Q % 2 == np.arange(seats) % 2).all()
