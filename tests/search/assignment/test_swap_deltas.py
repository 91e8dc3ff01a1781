"""Prices of single swaps agree with the difference of whole prices, and swaps made together do not disturb them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from search.problems import any_flows

from pipette_launch.search.assignment import batches
from pipette_launch.search.assignment.problem import Flows
from pipette_launch.search.assignment.swap_deltas import Board


def summed(flows: Flows) -> Flows:
    """The same flows, all in one sum."""
    fields = {name: getattr(flows, name) for name in Flows.__dataclass_fields__}
    seat_group_Q = np.minimum(flows.seat_group_Q, 0)
    alone = {"group_F": np.zeros_like(flows.group_F), "offset_G": np.zeros(1), "family_G": np.zeros(1, dtype=np.int64)}
    return Flows(**{**fields, **alone, "seat_group_Q": seat_group_Q})


def soft_maxima(flows: Flows, place_Q: np.ndarray, softness: float) -> np.ndarray:
    """The soft maximum of each family, by the definition."""
    group_G = flows.group_seconds(place_Q[None])[0]
    families = [group_G[flows.family_G == family] for family in set(flows.family_G.tolist())]
    return np.array([softness * np.logaddexp.reduce(family / softness) for family in families])


@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 3), st.sampled_from([0.1, 0.3, 2.0]))
@settings(max_examples=60)
def test_a_swap_costs_what_the_whole_price_says(seed: int, seats: int, copies: int, softness: float) -> None:
    """Asymmetric links, parallel flows, flows between the two seats, shared groups and own seconds are all counted."""
    rng = np.random.default_rng(seed)
    for flows in (any_flows(rng, seats), summed(any_flows(rng, seats))):
        board = Board(flows, copies)
        place_RQ = np.array([rng.permutation(seats) for _ in range(copies)])
        copy = int(rng.integers(copies))
        one, two = rng.choice(seats, size=2, replace=False)
        rise = board.rises(
            board.position(place_RQ.ravel()),
            np.array([copy * seats + one]),
            np.array([copy * seats + two]),
            np.full(copies, softness),
        )[0]
        before_Q, after_Q = place_RQ[copy], place_RQ[copy].copy()
        after_Q[[one, two]] = before_Q[[two, one]]
        change_N = soft_maxima(flows, after_Q, softness) - soft_maxima(flows, before_Q, softness)
        # What is far beyond any temperature is cut short.
        assume((np.abs(change_N) < 20 * softness).all() or flows.is_sum)

        assert change_N.sum() == pytest.approx(rise, abs=3e-5)


@given(st.integers(0, 10_000), st.integers(6, 40), st.integers(1, 3))
@settings(max_examples=30)
def test_swaps_made_together_add_up(seed: int, seats: int, copies: int) -> None:
    """Of a plain sum, all swaps of a batch together change it by the sum of what each alone would."""
    rng = np.random.default_rng(seed)
    flows = summed(any_flows(rng, seats))
    board = Board(flows, copies)
    here = board.position(np.tile(rng.permutation(seats), copies))
    one_P, two_P = batches._proposals(board, here, 200, rng)
    one_P, two_P = one_P[one_P != two_P], two_P[one_P != two_P]
    made = batches._apart(board, one_P, two_P)
    one_A, two_A = one_P[made], two_P[made]
    place_X = here.place_X.copy()
    place_X[one_A], place_X[two_A] = here.place_X[two_A], here.place_X[one_A]
    rise_A = board.rises(here, one_A, two_A, np.ones(copies))

    assert len(made) > 0
    assert board.position(place_X).cost_R.sum() - here.cost_R.sum() == pytest.approx(rise_A.sum(), abs=1e-4)


def test_proposals_stay_in_their_copy() -> None:
    """Two seats change places only within one copy of the problem."""
    rng = np.random.default_rng(0)
    board = Board(any_flows(rng, 12), 3)
    one_P, two_P = batches._proposals(board, board.position(np.tile(np.arange(12), 3)), 500, rng)

    assert (one_P // 12).tolist() == (two_P // 12).tolist()
    assert {0, 1, 2} == set((one_P // 12).tolist())
