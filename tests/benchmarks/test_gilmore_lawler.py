"""No bijection costs less than the bound, and on a flat fabric one costs just that."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search.problems import any_flows, ring_and_path

from benchmarks.mapping.gilmore_lawler import assignment_bound, gilmore_bound
from pipette_launch.search.assignment.descent import Flows


@given(st.integers(0, 10_000), st.integers(2, 6))
@settings(max_examples=60)
def test_no_bijection_costs_less(seed: int, seats: int) -> None:
    """With asymmetric links, parallel flows, several families and own seconds: every bijection is tried."""
    flows = any_flows(np.random.default_rng(seed), seats)
    least = flows.costs(np.array(list(permutations(range(seats))))).min()

    assert gilmore_bound(flows) <= least * (1 + 1e-12)


@given(st.integers(0, 10_000), st.integers(1, 5))
@settings(max_examples=60)
def test_the_assignment_is_nearly_the_least(seed: int, profiles: int) -> None:
    """The dual value is at most the least assignment, and within 2 % of its spread for each place."""
    rng = np.random.default_rng(seed)
    count_U = rng.integers(1, 3, size=profiles)
    cost_UH = rng.uniform(0, 1, (profiles, int(count_U.sum())))
    row_Q = np.repeat(np.arange(profiles), count_U)
    if len(row_Q) > 7:
        count_U, row_Q = np.ones(profiles, dtype=np.int64), np.arange(profiles)
        cost_UH = cost_UH[:, :profiles]
    every_KQ = np.array(list(permutations(range(len(row_Q)))))
    least = cost_UH[row_Q, every_KQ].sum(axis=1).min()
    bound = assignment_bound(cost_UH, count_U)

    assert least - 0.02 * len(row_Q) <= bound <= least + 1e-9


def test_a_flat_fabric_meets_the_bound() -> None:
    """Where all links are alike every bijection costs the same, and the bound says so."""
    flows = ring_and_path(np.full((20, 20), 0.5), path_weight=3.0)

    assert gilmore_bound(flows) == pytest.approx(flows.cost(np.arange(20)))


def test_flows_between_two_seats_share_a_link() -> None:
    """A ring of two: both flows take the one link that is there, however far the next is."""
    seconds_HH = np.array([[0.0, 1.0, 9.0, 9.0], [1.0, 0.0, 9.0, 9.0], [9.0, 9.0, 0.0, 1.0], [9.0, 9.0, 1.0, 0.0]])
    base = ring_and_path(seconds_HH)
    fields = {name: getattr(base, name) for name in Flows.__dataclass_fields__}
    flows = Flows(
        **{
            **fields,
            "sender_F": np.array([0, 1]),
            "receiver_F": np.array([1, 0]),
            "type_F": np.zeros(2, dtype=np.int64),
            "weight_F": np.ones(2),
            "group_F": np.zeros(2, dtype=np.int64),
        }
    )

    assert gilmore_bound(flows) == pytest.approx(2.0)


def test_negative_weights_are_refused() -> None:
    """The pairing of heavy flows with short links bounds nothing then."""
    base = ring_and_path(np.ones((3, 3)))
    fields = {name: getattr(base, name) for name in Flows.__dataclass_fields__}

    with pytest.raises(ValueError, match="at least 0"):
        gilmore_bound(Flows(**{**fields, "weight_F": np.full(5, -1.0)}))
