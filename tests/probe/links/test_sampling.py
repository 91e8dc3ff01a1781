"""Rounds of disjoint pairs: for any pairs, for all pairs, and blind ones for each tier of switches."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.probe.links.sampling import Pair, Round, all_pairs, blind_rounds, nested_groups, rounds_of

PAIRS = st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=90)


def are_matchings(rounds: Sequence[Round]) -> bool:
    """No host is in two pairs of a round."""
    return all(max(Counter(host for pair in one for host in pair).values(), default=0) <= 1 for one in rounds)


def degree(pairs: Sequence[Pair]) -> int:
    """Pairs of the busiest host."""
    return max(Counter(host for pair in pairs for host in pair).values(), default=0)


@given(pairs=PAIRS)
def test_any_pairs_need_one_round_more_than_the_busiest_host_has_pairs(pairs: list[Pair]) -> None:
    """Every pair is in exactly one round, rounds are matchings, and there are no more of them than Vizing says."""
    rounds = rounds_of(pairs)

    wanted = sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
    assert wanted == sorted(pair for one in rounds for pair in one)
    assert are_matchings(rounds)
    assert len(rounds) <= degree(wanted) + 1


@given(pairs=PAIRS, most=st.integers(1, 8))
def test_a_limit_keeps_what_comes_first(pairs: list[Pair], most: int) -> None:
    """The limit holds, and a pair is left out only where one of its hosts has as many earlier ones as may be."""
    rounds = rounds_of(pairs, most=most)

    kept = {pair for one in rounds for pair in one}
    assert len(rounds) <= most
    assert are_matchings(rounds)
    for one, other in pairs:
        pair = min(one, other), max(one, other)
        busiest = max(sum(host in there for there in kept) for host in pair)
        assert pair in kept or one == other or busiest >= max(most - 1, 1)


def test_a_plan_of_many_hosts_takes_few_rounds() -> None:
    """Rings along rows and paths along columns of 1,280 hosts, 4 links a host: 5 rounds or fewer."""
    seat_PR = np.arange(1280).reshape(16, 80)
    rings = zip(seat_PR.ravel().tolist(), np.roll(seat_PR, 1, axis=1).ravel().tolist(), strict=True)
    paths = zip(seat_PR[1:].ravel().tolist(), seat_PR[:-1].ravel().tolist(), strict=True)

    assert len(rounds_of([*rings, *paths])) <= 5


@pytest.mark.parametrize(("hosts", "rounds"), [(0, 0), (1, 0), (2, 1), (3, 3), (4, 3), (5, 5), (8, 7), (9, 9)])
def test_all_pairs_take_the_fewest_rounds(hosts: int, rounds: int) -> None:
    """The circle method needs N-1 rounds, N where N is odd, and meets every pair once."""
    found = all_pairs(range(hosts))

    assert rounds == len(found)
    assert are_matchings(found)
    assert sorted(pair for one in found for pair in one) == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]


@given(hosts=st.integers(2, 40), count=st.integers(1, 12), seed=st.integers(0, 99), tier=st.sampled_from([0, 1, 2]))
def test_blind_rounds_are_new_matchings(hosts: int, count: int, seed: int, tier: int) -> None:
    """Whatever is known of the switches: matchings, no pair twice, no round empty, and no more than asked for."""
    places = [("root", f"pod{host // 16}", f"leaf{host // 4}")[: tier + 1] for host in range(hosts)] if tier else []
    rounds = blind_rounds(hosts, places, count, np.random.default_rng(seed))

    pairs = [pair for one in rounds for pair in one]
    assert 1 <= len(rounds) <= count
    assert are_matchings(rounds)
    assert all(rounds)
    assert len(pairs) == len(set(pairs))


def test_every_tier_of_switches_gets_its_rounds() -> None:
    """Of 8 rounds, 4 stay under the leaves and 2 for each tier above, and in all nearly all hosts are busy."""
    places = [("root", f"pod{host // 64}", f"leaf{host // 8}") for host in range(256)]
    rounds = blind_rounds(256, places, 8, np.random.default_rng(1))

    shared = [Counter(sum(a == b for a, b in zip(places[i], places[j], strict=True)) for i, j in one) for one in rounds]
    assert [3, 2, 3, 1, 3, 2, 3, 1] == [max(one) for one in shared]
    assert all(len(one) == 1 for one in shared)
    assert min(len(one) for one in rounds) >= 110


def test_switches_that_tell_nothing_are_no_tier() -> None:
    """A switch over all hosts, one above each host alone, and a tier equal to the one above it are left out."""
    places = [("root", f"leaf{host // 2}", f"leaf{host // 2}", f"port{host}") for host in range(4)]

    assert [[[0, 1], [2, 3]], [[0, 1, 2, 3]]] == nested_groups(4, places)
    assert [[[0, 1, 2, 3]]] == nested_groups(4, [])
    assert [[[0, 1, 2, 3]]] == nested_groups(4, [*places[:3], ()])
