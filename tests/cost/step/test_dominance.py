"""The choice of replicas, by hand and by what it must not lose."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.step.dominance import deciding_replicas, undominated


def testundominated_replicas_by_hand() -> None:
    """Of equal ones the first stays; one that is faster in everything goes."""
    assert undominated(np.array([[1.0, 2.0, 2.0], [1.0, 3.0, 3.0]])).tolist() == [1]
    assert undominated(np.array([[1.0, 2.0, 0.5, 1.0], [3.0, 1.0, 0.5, 3.0]])).tolist() == [0, 1]


@given(st.integers(1, 70), st.integers(1, 4), st.integers(0, 10**6))
def test_every_replica_is_below_one_that_stays(replicas: int, entries: int, seed: int) -> None:
    """So leaving the others out changes no maximum."""
    times = np.random.default_rng(seed).integers(0, 4, (entries, replicas)).astype(np.float64)
    kept = times[:, undominated(times)]

    assert all((times[:, [column]] <= kept).all(axis=0).any() for column in range(replicas))


@given(st.integers(1, 5), st.integers(1, 20), st.integers(1, 4), st.integers(0, 10**6))
def test_of_every_placement_the_slowest_replicas_are_simulated(
    placements: int, replicas: int, entries: int, seed: int
) -> None:
    """Each replica is below one of its own placement that stays, and what stays stands for one with its very times."""
    times = np.random.default_rng(seed).integers(0, 3, (entries, placements * replicas)).astype(np.float64)
    chosen, alike, placement = deciding_replicas(times, placements)
    kept = times[:, chosen][:, alike]

    assert sorted(placement.tolist()) == placement.tolist()
    assert set(range(placements)) == set(placement.tolist())
    for column in range(placements * replicas):
        own = kept[:, placement == column // replicas]
        assert (times[:, [column]] <= own).all(axis=0).any()
    for index, where in enumerate(placement.tolist()):
        same = (times[:, where * replicas : (where + 1) * replicas] == kept[:, [index]]).all(axis=0)
        assert same.any()


def test_replicas_that_are_alike_are_simulated_once() -> None:
    """Three placements of two replicas, of which all but one placement are the same."""
    times = np.array([[1.0, 2.0, 2.0, 1.0, 3.0, 1.0]])

    chosen, alike, placement = deciding_replicas(times, 3)

    assert ([2.0, 3.0], [0, 0, 1], [0, 1, 2]) == (times[0, chosen].tolist(), alike.tolist(), placement.tolist())
