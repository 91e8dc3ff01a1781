"""Settling never loses the start, is a function of its arguments, and is exact where there are few seats."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search.problems import any_flows
from search.toys import Ticks

from pipette_launch.search.flows import Flows
from pipette_launch.search.swaps import Settled, settle


def run(flows: Flows, *, moves: int, seed: int = 0, deadline_s: float = 1e9) -> Settled:
    """Settle from seat order."""
    return settle(
        flows,
        np.arange(flows.num_seats),
        moves=moves,
        rng=np.random.default_rng(seed),
        clock=Ticks(),
        deadline_s=deadline_s,
    )


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(0, 3_000))
@settings(max_examples=30)
def test_it_never_returns_worse_than_its_start(seed: int, seats: int, moves: int) -> None:
    """Whatever the problem, the result is a bijection that costs what is said, and at most what the start did."""
    flows = any_flows(np.random.default_rng(seed), max(2, seats))
    found = run(flows, moves=moves, seed=seed)

    assert list(range(flows.num_seats)) == sorted(found.place_Q.tolist())
    assert flows.cost(found.place_Q) == found.cost <= flows.cost(np.arange(flows.num_seats))


@given(st.integers(0, 10_000), st.integers(2, 24), st.integers(0, 3_000), st.integers(0, 3_000))
@settings(max_examples=30)
def test_more_moves_are_never_worse(seed: int, seats: int, moves: int, more: int) -> None:
    """The course does not depend on how many moves are allowed."""
    flows = any_flows(np.random.default_rng(seed), seats)

    assert run(flows, moves=moves + more).cost <= run(flows, moves=moves).cost


@given(st.integers(0, 10_000), st.integers(2, 7))
@settings(max_examples=20)
def test_few_seats_are_settled_for_good(seed: int, seats: int) -> None:
    """With moves enough for every bijection the result is the best of them, and says so."""
    flows = any_flows(np.random.default_rng(seed), seats)
    found = run(flows, moves=5_040)
    least = min(flows.cost(place) for place in permutations(range(seats)))

    assert (least, True) == (found.cost, found.is_optimal)


@pytest.mark.parametrize("seats", [8, 20])
def test_the_same_arguments_give_the_same_answer(seats: int) -> None:
    """Chance comes from the generator that is passed alone."""
    flows = any_flows(np.random.default_rng(3), seats)
    first, again = run(flows, moves=5_000), run(flows, moves=5_000)

    assert (first.place_Q.tolist(), first.cost, first.moves) == (again.place_Q.tolist(), again.cost, again.moves)
