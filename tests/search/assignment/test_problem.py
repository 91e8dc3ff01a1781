"""Prices of bijections follow the definition, with the same digits alone and together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search.problems import any_flows, ring_and_path

from pipette_launch.search.assignment.problem import Flows


def by_hand(flows: Flows, place: list[int]) -> float:
    """The definition, in plain loops."""
    groups = [float(offset) for offset in flows.offset_G]
    for flow in range(flows.num_flows):
        sender, receiver = place[flows.sender_F[flow]], place[flows.receiver_F[flow]]
        seconds = flows.seconds_THH[flows.type_F[flow], sender, receiver]
        groups[flows.group_F[flow]] += float(flows.weight_F[flow] * seconds)
    families = set(flows.family_G.tolist())
    return sum(
        max(groups[group] for group in range(len(groups)) if flows.family_G[group] == family) for family in families
    )


@given(st.integers(0, 10_000), st.integers(2, 7))
def test_the_cost_is_the_sum_of_the_largest_groups(seed: int, seats: int) -> None:
    """Offsets and flows in both directions all count, each in its group."""
    rng = np.random.default_rng(seed)
    flows = any_flows(rng, seats)
    place = rng.permutation(seats).tolist()

    assert by_hand(flows, place) == pytest.approx(flows.cost(place), rel=1e-12)


@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 5))
def test_many_prices_have_the_digits_of_one(seed: int, seats: int, count: int) -> None:
    """Bijections have the same digits priced alone and together."""
    rng = np.random.default_rng(seed)
    flows = any_flows(rng, seats)
    place_KQ = np.array([rng.permutation(seats) for _ in range(count)])

    assert [flows.cost(place_Q) for place_Q in place_KQ] == flows.costs(place_KQ).tolist()


@given(st.integers(0, 10_000), st.integers(2, 8))
def test_renaming_places_changes_nothing(seed: int, seats: int) -> None:
    """Only what lies between places counts, not their numbers."""
    rng = np.random.default_rng(seed)
    flows, names, place_Q = any_flows(rng, seats), rng.permutation(seats), rng.permutation(seats)
    renamed = np.argsort(names)
    other = Flows(
        **{
            **{name: getattr(flows, name) for name in Flows.__dataclass_fields__},
            "seconds_THH": flows.seconds_THH[:, renamed][:, :, renamed],
        }
    )

    assert flows.cost(place_Q) == other.cost(names[place_Q])


def test_a_ring_and_a_path_by_hand() -> None:
    """Three seats in a ring of weight 1, and the path 0-1-2 of weight 2 in a family of its own."""
    seconds_HH = np.array([[0.0, 1, 2], [3, 0, 4], [5, 6, 0]])

    assert (1 + 4 + 5) + 2 * (1 + 4) == ring_and_path(seconds_HH, path_weight=2).cost([0, 1, 2])
    assert (2 + 6 + 3) + 2 * (2 + 6) == ring_and_path(seconds_HH, path_weight=2).cost([0, 2, 1])


def test_its_arrays_are_its_own() -> None:
    """Later changes to an array do not reach the problem, and its arrays are read-only."""
    seconds_HH = np.ones((3, 3))
    flows = ring_and_path(seconds_HH)
    seconds_HH[:] = 7

    assert flows.cost([0, 1, 2]) == 5
    with pytest.raises(ValueError, match="read-only"):
        flows.weight_F[0] = 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sender_F": np.array([0, 1, 3, 0, 1])}, "sender_F must be at least 0 and below 3"),
        ({"receiver_F": np.array([1, 1, 0, 1, 2])}, "from a seat to itself"),
        ({"weight_F": np.ones(4)}, "differ in shape"),
        ({"weight_F": np.array([1, np.inf, 1, 1, 1])}, "weight_F holds numbers that are not finite"),
        ({"family_G": np.array([0, 2])}, "family_G must be"),
        ({"family_G": np.array([1, 1])}, "without gaps"),
        ({"seconds_THH": np.ones((1, 3, 4))}, "is not .types, places, places."),
        ({"offset_G": np.zeros(3)}, "must agree"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, np.ndarray], words: str) -> None:
    """Each array is checked once, and the message names it."""
    flows = ring_and_path(np.ones((3, 3)))
    fields = {name: getattr(flows, name) for name in Flows.__dataclass_fields__}

    with pytest.raises(ValueError, match=words):
        Flows(**{**fields, **change})
