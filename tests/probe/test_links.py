"""Tests of the rounds in which links are measured."""

from collections import deque
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import OneRankStore, tiny_options

from pipette_launch.facts import Samples
from pipette_launch.probe import links
from pipette_launch.probe.harness import Budget, Conductor
from pipette_launch.probe.links import matching_rounds, one_way, slot_rounds


@pytest.mark.parametrize("count", range(2, 10))
def test_rounds_are_matchings_that_meet_every_pair_once(count: int) -> None:
    """By brute force: each pair in exactly one round, nobody twice in a round, as few rounds as can be."""
    rounds = matching_rounds(count)

    assert list(combinations(range(count), 2)) == sorted(pair for pairs in rounds for pair in pairs)
    assert all(len({place for pair in pairs for place in pair}) == 2 * len(pairs) for pairs in rounds)
    assert all(len(pairs) == count // 2 for pairs in rounds)
    assert len(rounds) == (count - 1 if count % 2 == 0 else count)


def test_four_places_by_hand() -> None:
    """Three rounds of two pairs."""
    assert (((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3))) == tuple(
        sorted(matching_rounds(4), key=lambda pairs: -pairs[0][1])
    )


def test_one_place_has_no_rounds() -> None:
    """A single host or device has nobody to talk to."""
    assert () == matching_rounds(1)


def test_slots_of_two_hosts_by_hand() -> None:
    """First the hosts by their first devices, then the local pair of each host at the same time."""
    assert (((0, 2),), ((0, 1), (2, 3))) == slot_rounds(2, 2)


@given(hosts=st.integers(1, 6), devices=st.integers(1, 6))
def test_slots_never_do_two_things_at_once(hosts: int, devices: int) -> None:
    """No slot appears twice in a round, and all wanted pairs are there."""
    rounds = slot_rounds(hosts, devices)
    pairs = {pair for round_ in rounds for pair in round_}

    assert all(len({slot for pair in round_ for slot in pair}) == 2 * len(round_) for round_ in rounds)
    assert len(pairs) == hosts * devices * (devices - 1) // 2 + hosts * (hosts - 1) // 2


def test_one_way_takes_the_acknowledgement_off() -> None:
    """A tiny message of 2 s there and back costs 1 s; so a round trip of 5 s is a message of 4 s."""
    tiny, large = one_way([Samples(values_s=(2.0,)), Samples(values_s=(5.0, 1.5), warmup_s=(9.0,))])

    assert Samples(values_s=(1.0,)) == tiny
    assert Samples(values_s=(4.0, 1.0), warmup_s=(9.0,)) == large


@pytest.mark.parametrize(
    ("hosts", "devices", "times", "measured", "note"),
    [
        (4, 1, [0.0, 99.0], 2, ("links: 1 of 3 rounds were skipped, the budget was spent",)),
        (4, 1, [99.0], 1, ("links: 2 of 3 rounds were skipped, the budget was spent",)),
        (2, 4, [99.0], 2, ("links: 2 of 4 rounds were skipped, the budget was spent",)),
        (4, 1, [0.0, 0.0], 3, ()),
    ],
)
def test_a_spent_budget_cuts_rounds_but_not_the_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hosts: int,
    devices: int,
    times: list[float],
    measured: int,
    note: tuple[str, ...],
) -> None:
    """One round of each kind is measured whatever the clock says; then the clock is asked before each."""
    rounds: list[object] = []
    monkeypatch.setattr(links, "align", rounds.append)
    monkeypatch.setattr(links, "_time_pair", lambda *_: None)
    clock = deque(times)
    found = links.measure(
        tiny_options(tmp_path, hosts=hosts, devices=devices),
        rank=0,
        conductor=Conductor(store=OneRankStore(), rank=0, world_size=1, timeout_s=1),
        budget=Budget(started_s=0, budget_s=10, clock=clock.popleft),
    )

    assert (measured, note) == (len(rounds), found.notes)
    assert not clock
