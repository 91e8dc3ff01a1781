"""Tests of the phase that measures links."""

from collections import deque
from pathlib import Path

import pytest
from probe.workers import OneRankStore, tiny_options

from pipette_launch.facts import Samples
from pipette_launch.probe.harness import Budget, Conductor
from pipette_launch.probe.links import pairs
from pipette_launch.probe.links.pairs import LinkMeter, direction_s, one_way


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
    """One round of each kind is measured whatever the clock says; it is asked before the others and second looks."""
    rounds: list[object] = []
    monkeypatch.setattr(LinkMeter, "_round", lambda _, groups: rounds.append(groups))
    monkeypatch.setattr(pairs, "suspect_rounds", lambda *_: ())
    clock = deque(times)
    found = pairs.measure(
        tiny_options(tmp_path, hosts=hosts, devices=devices),
        rank=0,
        conductor=Conductor(store=OneRankStore(), rank=0, world_size=1, timeout_s=1),
        budget=Budget(started_s=0, budget_s=10, clock=clock.popleft),
    )

    assert (measured, note) == (len(rounds), found.notes)
    assert not clock
