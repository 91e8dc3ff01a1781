"""Descents end no higher than they begin, and near the optimum where it is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from c_for_tests import in_c
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from search.problems import any_flows, ring_and_path
from search.toys import after, never

from pipette_launch.search.assignment import descent
from pipette_launch.search.assignment.descent import Flows, Position, ProblemBuilder, SwapPrices, descend


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
    """Seconds that swaps add to the soft maxima."""
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
        # Values far beyond any temperature are limited.
        assume((np.abs(change_N) < 20 * softness_s).all() or len(flows.offset_G) == flows.num_families)

        assert change_N.sum() == pytest.approx(rise, abs=3e-5)


@given(st.integers(0, 10_000), st.integers(6, 40))
@settings(max_examples=30)
def test_swaps_made_together_add_up(seed: int, seats: int) -> None:
    """The swaps of a batch change a plain sum by the sum of their single changes."""
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
) -> Position:
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
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 12), st.integers(0, 1000), st.integers(0, 40))
def test_it_is_never_worse_than_its_start(half: int, seed: int, asked: int) -> None:
    """At any deadline the result is a bijection with its stated cost, at most the cost of the start."""
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
    """Families of one and of several groups, in both directions: the stated cost is exact."""
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


@given(st.integers(0, 10_000), st.integers(2, 30), st.booleans(), st.sampled_from([0.03, 0.3, 2.0]))
@settings(max_examples=60, deadline=None)
def test_a_step_in_c_goes_where_one_in_numpy_goes(seed: int, seats: int, halved: bool, softness_s: float) -> None:
    """Both make the same swaps of a batch, unless float32 rounding decides the order of two swaps."""
    rng = np.random.default_rng(seed)
    flows = any_flows(rng, seats)
    prices = SwapPrices(flows)
    here = prices.position(rng.permutation(seats))
    near_HK = np.array([[other for other in range(seats) if other != place] for place in range(seats)])
    step = descent._Step.drawn(rng, 128, near_HK, np.arange(seats) % 2 if halved else np.array([]), softness_s)
    one_P, two_P = step._proposals(prices, here, prices.shares(here, softness_s))
    rise_P = rises(prices, here, one_P, two_P, softness_s)
    swaps = np.unique(np.sort(np.stack([one_P, two_P]), axis=0)[:, one_P != two_P], axis=1, return_index=True)[1]
    rise_S = np.sort(np.append(rise_P[one_P != two_P][swaps], 0.0))
    assume((np.diff(rise_S) > 3e-5).all())
    found = step.in_c(in_c("search.assignment._swaps"), prices, here), step.in_numpy(prices, here)
    there_in_c, there_in_numpy = (there or here for there in found)

    assert there_in_c.place_Q.tolist() == there_in_numpy.place_Q.tolist()
    assert there_in_c.cost_s == there_in_numpy.cost_s
    if halved:
        assert (there_in_c.place_Q % 2 == here.place_Q % 2).tolist() == [True] * seats
