"""Tests of the phase that measures links."""

from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import OneRankStore, tiny_options

from pipette_launch.facts import Samples
from pipette_launch.probe.harness import Budget, Lockstep
from pipette_launch.probe.links import pairs
from pipette_launch.probe.links.meter import LinkMeter, local_groups, one_way, rail_groups
from pipette_launch.probe.links.pairs import MAX_MEASUREMENTS, direction_s, in_turns, settled
from pipette_launch.probe.links.sampling import all_pairs
from pipette_launch.probe.options import LinkSamples

SIZES = (8, 5 << 20)


def test_one_way_takes_the_acknowledgement_off() -> None:
    """A tiny message of 2 s there and back costs 1 s; so a round trip of 5 s is a message of 4 s."""
    tiny, large = one_way([Samples(values_s=(2.0,)), Samples(values_s=(5.0, 1.5), warmup_s=(9.0,))])

    assert Samples(values_s=(1.0,)) == tiny
    assert Samples(values_s=(4.0, 1.0), warmup_s=(9.0,)) == large


@pytest.mark.parametrize(
    ("left_s", "rounds", "seconds"), [(24.0, 24, 0.5), (24.0, 2, 1.0), (-5.0, 7, 0.1), (1.0, 0, 0.5)]
)
def test_a_direction_gets_its_share_of_the_time(left_s: float, rounds: int, seconds: float) -> None:
    """Half a round's share, no more than a second, and something even when nothing is left."""
    assert seconds == direction_s(left_s, rounds, "cpu")


@pytest.mark.parametrize(
    ("hosts", "devices", "times", "measured", "note"),
    [
        (4, 1, [0.0, 0.0, 99.0], 2, ("links: 1 of 3 rounds were skipped, the budget was spent",)),
        (4, 1, [0.0, 99.0], 1, ("links: 2 of 3 rounds were skipped, the budget was spent",)),
        (2, 4, [0.0, 99.0, 99.0], 2, ("links: 2 of 4 rounds were skipped, the budget was spent",)),
        (4, 1, [0.0, 0.0, 0.0], 3, ()),
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
    """One round of each kind is measured whatever the clock says; it is asked before all others."""
    rounds: list[object] = []
    monkeypatch.setattr(LinkMeter, "_round", lambda _, groups: rounds.append(groups))
    monkeypatch.setattr(pairs, "suspect_rounds", lambda *_: ())
    clock = deque(times)
    found = pairs.measure(
        tiny_options(tmp_path, hosts=hosts, devices=devices),
        lockstep=Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1),
        budget=Budget(started_s=0, budget_s=10, clock=clock.popleft),
    )

    assert (measured, note) == (len(rounds), found.notes)
    assert not clock


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
        for is_between, _, pairs in in_turns(all_pairs(range(hosts)), all_pairs(range(devices)))
    ]
    slots = [[slot for group in groups for pair in group for slot in pair] for groups in rounds]
    pairs = [pair for groups in rounds for group in groups for pair in group]

    assert all(len(busy) == len(set(busy)) for busy in slots)
    assert len(pairs) == len(set(pairs))
    assert hosts * devices * (devices - 1) // 2 + devices * hosts * (hosts - 1) // 2 == len(pairs)


def test_rounds_between_and_within_hosts_take_turns() -> None:
    """Three rounds between hosts, one within: the second is the one within."""
    order = [(is_between, number) for is_between, number, _ in in_turns(all_pairs(range(4)), all_pairs(range(2)))]

    assert [(True, 1), (False, 1), (True, 2), (True, 3)] == order


def measured(rate: float) -> tuple[LinkSamples]:
    """One link whose large message goes at so many bytes/s."""
    samples = tuple(Samples(values_s=(size / rate,)) for size in SIZES)
    return (LinkSamples(source=0, target=1, sizes_bytes=SIZES, samples=samples),)


@pytest.mark.parametrize(
    ("rates", "count", "best"),
    [
        ([300e6, 310e6, 1.0], 2, 310e6),
        ([39e6, 290e6, 310e6, 1.0], 3, 310e6),
        ([300e6, 150e6, 1.0], 2, 300e6),
        ([1e6 * 2**power for power in range(9)], MAX_MEASUREMENTS, 1e6 * 2 ** (MAX_MEASUREMENTS - 1)),
    ],
    ids=["steady", "slow-at-first", "disturbed-later", "ever-faster"],
)
def test_a_transfer_that_is_slow_at_first_is_repeated_until_two_agree(
    rates: list[float], count: int, best: float
) -> None:
    """A steady link is measured twice, one that was cold until two measurements agree, and none without end."""
    left = iter(rates)
    (found,) = settled(lambda: measured(next(left)), lambda own: own, lambda: True)

    assert pytest.approx(best) == SIZES[-1] / found.samples[-1].median_s
    assert count == len(rates) - len(list(left))


def test_what_another_rank_saw_counts() -> None:
    """The link of one rank is steady; as long as another rank's became faster, all measure again."""
    left, others = iter([3e8] * 9), iter([3.0, 1.0])
    settled(lambda: measured(next(left)), lambda own: max(own, next(others)), lambda: True)

    assert 6 == len(list(left))


def test_without_time_links_are_measured_once() -> None:
    """The budget is spent."""
    left = iter([3e8] * 9)
    settled(lambda: measured(next(left)), lambda own: own, lambda: False)

    assert 8 == len(list(left))


def test_a_slot_without_a_partner_has_nothing_to_tell() -> None:
    """Of three slots one sits out each round."""
    assert () == settled(lambda: (), lambda own: own, lambda: True)
