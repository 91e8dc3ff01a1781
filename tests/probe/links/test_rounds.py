"""Tests of who talks to whom in which round."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.probe.links.rounds import in_turns, least_rounds, local_groups, matching_rounds, rail_groups


@pytest.mark.parametrize("count", range(2, 10))
def test_rounds_are_matchings_that_meet_every_pair_once(count: int) -> None:
    """By brute force: each pair in exactly one round, nobody twice in a round."""
    rounds = matching_rounds(count)

    assert list(combinations(range(count), 2)) == sorted(pair for pairs in rounds for pair in pairs)
    assert all(len({place for pair in pairs for place in pair}) == 2 * len(pairs) for pairs in rounds)
    assert all(len(pairs) == count // 2 for pairs in rounds)


@pytest.mark.parametrize(("count", "least"), [(2, 1), (3, 3), (4, 3), (5, 5), (6, 5), (7, 7), (8, 7), (9, 9)])
def test_there_are_as_few_rounds_as_can_be(count: int, least: int) -> None:
    """N-1 for even N; N for odd N, as one place rests: all pairs over the most that a round holds."""
    pairs = count * (count - 1) // 2

    assert least == len(matching_rounds(count)) == least_rounds(count)
    assert least == -(-pairs // (count // 2))


@given(count=st.integers(0, 200))
def test_every_round_is_full(count: int) -> None:
    """For any number of places."""
    rounds = matching_rounds(count)

    assert least_rounds(count) == len(rounds)
    assert count * (count - 1) // 2 == len({pair for pairs in rounds for pair in pairs})
    assert all(len(pairs) == count // 2 for pairs in rounds)


def test_four_places_by_hand() -> None:
    """Three rounds of two pairs."""
    assert (((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3))) == tuple(
        sorted(matching_rounds(4), key=lambda pairs: -pairs[0][1])
    )


def test_rails_of_two_hosts_by_hand() -> None:
    """Hosts 0 and 2 of two devices each: both rails are one group."""
    assert (((0, 4), (1, 5)),) == rail_groups([(0, 2)], 2)


def test_local_pairs_of_two_hosts_by_hand() -> None:
    """The same pair in each host, each a group of its own."""
    assert (((0, 2),), ((3, 5),)) == local_groups([(0, 2)], 2, 3)


@given(hosts=st.integers(1, 9), devices=st.integers(1, 9))
def test_slots_never_do_two_things_at_once(hosts: int, devices: int) -> None:
    """No slot appears twice in a round, and every rail and every local pair is there once."""
    rounds = [
        rail_groups(pairs, devices) if is_between else local_groups(pairs, hosts, devices)
        for is_between, _, pairs in in_turns(matching_rounds(hosts), matching_rounds(devices))
    ]
    slots = [[slot for group in groups for pair in group for slot in pair] for groups in rounds]
    pairs = [pair for groups in rounds for group in groups for pair in group]

    assert all(len(busy) == len(set(busy)) for busy in slots)
    assert len(pairs) == len(set(pairs))
    assert hosts * devices * (devices - 1) // 2 + devices * hosts * (hosts - 1) // 2 == len(pairs)


def test_rounds_between_and_within_hosts_take_turns() -> None:
    """Three rounds between hosts, one within: the second is the one within."""
    order = [(is_between, number) for is_between, number, _ in in_turns(matching_rounds(4), matching_rounds(2))]

    assert [(True, 1), (False, 1), (True, 2), (True, 3)] == order
