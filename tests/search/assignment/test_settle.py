"""Settling never loses the start, is a function of its arguments, and is exact where there are few seats."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search.problems import any_flows, ring_and_path
from search.toys import Ticks

from pipette_launch.search.assignment.problem import Flows
from pipette_launch.search.assignment.settle import Settled, settle


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


@given(st.integers(0, 10_000), st.integers(2, 6))
@settings(max_examples=15)
def test_few_seats_are_settled_for_good(seed: int, seats: int) -> None:
    """With moves enough for every bijection the result is the best of them, and says so."""
    flows = any_flows(np.random.default_rng(seed), seats)
    found = run(flows, moves=720)
    least = min(flows.cost(place) for place in permutations(range(seats)))

    assert (least, True) == (found.cost, found.is_optimal)


@pytest.mark.parametrize("seats", [8, 20])
def test_the_same_arguments_give_the_same_answer(seats: int) -> None:
    """Chance comes from the generator that is passed alone."""
    flows = any_flows(np.random.default_rng(3), seats)
    first, again = run(flows, moves=5_000), run(flows, moves=5_000)

    assert (first.place_Q.tolist(), first.cost, first.moves) == (again.place_Q.tolist(), again.cost, again.moves)


@pytest.mark.parametrize("seats", [8, 20, 60])
def test_a_past_deadline_returns_the_start(seats: int) -> None:
    """Without time nothing is tried, and nothing is lost."""
    flows = any_flows(np.random.default_rng(1), seats)
    found = run(flows, moves=100_000, deadline_s=0)

    assert (list(range(seats)), 0, False) == (found.place_Q.tolist(), found.moves, found.is_optimal)


@pytest.mark.parametrize("seats", [20, 60])
def test_a_hidden_ring_is_found(seats: int) -> None:
    """Links are fast along one hidden ring only; rings and paths in any order are brought onto it."""
    hidden = np.random.default_rng(4).permutation(seats)
    seconds_HH = np.full((seats, seats), 3.0)
    seconds_HH[hidden, np.roll(hidden, -1)] = seconds_HH[np.roll(hidden, -1), hidden] = 1.0
    flows = ring_and_path(seconds_HH)
    found = run(flows, moves=60_000)

    assert found.cost < 0.6 * flows.cost(np.arange(seats))


def test_what_is_no_bijection_is_refused() -> None:
    """A place that is named twice would cost less than any placement."""
    with pytest.raises(ValueError, match="each of 3 places once"):
        settle(
            any_flows(np.random.default_rng(0), 3),
            [0, 1, 1],
            moves=1,
            rng=np.random.default_rng(0),
            clock=Ticks(),
            deadline_s=1.0,
        )


def test_the_slowest_link_of_a_ring_is_led_away() -> None:
    """Sixty-four unequal hosts in a ring, one of them bad: its two best links are the slowest that are used."""
    rng = np.random.default_rng(5)
    seconds_HH = 1 / (1 - np.abs(rng.normal(0, 0.08, (64, 64)))).clip(0.3)
    seconds_HH = np.maximum(seconds_HH, seconds_HH.T)
    seconds_HH[49], seconds_HH[:, 49] = seconds_HH[49] / 0.6, seconds_HH[:, 49] / 0.6
    seats = np.arange(64)
    ring = Flows(
        seconds_THH=seconds_HH[None],
        sender_F=seats,
        receiver_F=np.roll(seats, -1),
        type_F=np.zeros(64, dtype=np.int64),
        weight_F=np.ones(64),
        group_F=seats,
        offset_G=np.zeros(64),
        family_G=np.zeros(64, dtype=np.int64),
        seat_type_Q=np.zeros(64, dtype=np.int64),
        seat_seconds_UH=np.zeros((1, 64)),
        seat_group_Q=np.full(64, -1),
    )
    settled = settle(ring, seats, moves=40_000, rng=np.random.default_rng(0), clock=lambda: 0.0, deadline_s=1.0)
    least_s = np.sort(np.delete(seconds_HH[49], 49))[1]

    assert least_s <= settled.cost <= 1.002 * least_s
