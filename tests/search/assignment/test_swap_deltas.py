"""Prices of single swaps agree with the difference of whole prices, and swaps made together do not disturb them."""

from __future__ import annotations

import numpy as np
import pytest
from c_for_tests import in_c
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from search.problems import any_flows

from pipette_launch.search.assignment import swap_deltas
from pipette_launch.search.assignment.problem import Flows
from pipette_launch.search.assignment.swap_deltas import Position, SwapPrices


def summed(flows: Flows) -> Flows:
    """The same flows, all in one sum."""
    fields = {name: getattr(flows, name) for name in Flows.__dataclass_fields__}
    alone = {"group_F": np.zeros_like(flows.group_F), "offset_G": np.zeros(1), "family_G": np.zeros(1, dtype=np.int64)}
    return Flows(**{**fields, **alone})


def soft_maxima(flows: Flows, place_Q: np.ndarray, softness_s: float) -> np.ndarray:
    """The soft maximum of each family, by the definition."""
    group_G = flows.group_seconds(place_Q[None])[0]
    families = [group_G[flows.family_G == family] for family in set(flows.family_G.tolist())]
    return np.array([softness_s * np.logaddexp.reduce(family / softness_s) for family in families])


def rises(prices: SwapPrices, here: Position, one_P: np.ndarray, two_P: np.ndarray, softness_s: float) -> np.ndarray:
    """What swaps would add to the soft maxima."""
    return prices.rises(here, one_P, two_P, prices.shares(here, softness_s), softness_s)


@given(st.integers(0, 10_000), st.integers(2, 9), st.sampled_from([0.1, 0.3, 2.0]))
@settings(max_examples=60)
def test_a_swap_costs_what_the_whole_price_says(seed: int, seats: int, softness_s: float) -> None:
    """Asymmetric links, parallel flows, flows between the two seats and shared groups are all counted."""
    rng = np.random.default_rng(seed)
    for flows in (any_flows(rng, seats), summed(any_flows(rng, seats))):
        prices = SwapPrices(flows)
        before_Q = rng.permutation(seats)
        one, two = rng.choice(seats, size=2, replace=False)
        rise = rises(prices, prices.position(before_Q), np.array([one]), np.array([two]), softness_s)[0]
        after_Q = before_Q.copy()
        after_Q[[one, two]] = before_Q[[two, one]]
        change_N = soft_maxima(flows, after_Q, softness_s) - soft_maxima(flows, before_Q, softness_s)
        # What is far beyond any temperature is cut short.
        assume((np.abs(change_N) < 20 * softness_s).all() or flows.num_groups == flows.num_families)

        assert change_N.sum() == pytest.approx(rise, abs=3e-5)


@given(st.integers(0, 10_000), st.integers(6, 40))
@settings(max_examples=30)
def test_swaps_made_together_add_up(seed: int, seats: int) -> None:
    """Of a plain sum, all swaps of a batch together change it by the sum of what each alone would."""
    rng = np.random.default_rng(seed)
    flows = summed(any_flows(rng, seats))
    prices = SwapPrices(flows)
    here = prices.position(rng.permutation(seats))
    one_P, two_P = rng.integers(seats, size=(2, 200))
    one_P, two_P = one_P[one_P != two_P], two_P[one_P != two_P]
    made = prices.apart(one_P, two_P)
    one_A, two_A = one_P[made], two_P[made]
    place_Q = here.place_Q.copy()
    place_Q[one_A], place_Q[two_A] = here.place_Q[two_A], here.place_Q[one_A]

    assert len(made) > 0
    assert prices.position(place_Q).cost_s - here.cost_s == pytest.approx(
        rises(prices, here, one_A, two_A, 1.0).sum(), abs=1e-4
    )


@given(st.integers(0, 10_000), st.integers(2, 9), st.sampled_from([1e-4, 0.1, 0.3, 2.0]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_swaps_cost_in_c_what_they_cost_in_numpy(
    monkeypatch: pytest.MonkeyPatch, seed: int, seats: int, softness_s: float
) -> None:
    """But for float32's rounding, of any problem, soft or hard, whatever the bijection."""
    rng = np.random.default_rng(seed)
    flows = any_flows(rng, seats)
    prices = SwapPrices(flows)
    here = prices.position(rng.permutation(seats))
    one_P, two_P = rng.integers(seats, size=(2, 20))
    one_P, two_P = one_P[one_P != two_P], two_P[one_P != two_P]
    found = []
    for module in (None, in_c("search.assignment._swaps")):
        monkeypatch.setattr(swap_deltas, "IN_C", module)
        found.append(rises(prices, here, one_P, two_P, softness_s))

    # Far falls are what is left of 1 when nearly all of it is taken away, so only that they are far is known.
    is_far_P = found[0] < -10 * softness_s * flows.num_families

    assert found[1][~is_far_P] == pytest.approx(found[0][~is_far_P], rel=1e-4, abs=3e-5)
    assert (found[1][is_far_P] < -9 * softness_s).all()
