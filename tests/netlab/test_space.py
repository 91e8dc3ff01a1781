"""Every layout and every order of hosts, each once."""

from __future__ import annotations

import random

import pytest

from benchmarks.netlab.suite.space import canonical, host_orders, placements, runs
from pipette_launch.facts import Layout


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (Layout(pp=4), 24),
        (Layout(dp=4), 6),
        (Layout(tp=4, etp=4), 6),
        (Layout(tp=2, etp=2, pp=2), 12),
        (Layout(pp=2, dp=2), 12),
        (Layout(tp=2, etp=2, dp=2), 6),
    ],
)
def test_symmetric_orders_count_once(layout: Layout, count: int) -> None:
    """Rings may turn: of four hosts' 24 orders a ring of four leaves 6, two of two leave 6, a pipeline all."""
    assert count == len(placements(layout, 4, 1))


def test_slots_of_a_host_are_alike() -> None:
    """Eight stages on four hosts have as many orders as there are orders of hosts."""
    assert len(placements(Layout(pp=8), 4, 2)) == 24
    assert canonical(Layout(pp=4), (1, 0, 3, 2), 2) == (0, 1, 2, 3)


def test_torchruns_own_order_stands_for_its_set() -> None:
    """It comes first, so no other of its set is run in its place."""
    assert next(iter(host_orders(3, 2))) == (0, 1, 2, 3, 4, 5)
    assert placements(Layout(dp=4), 4, 1)[0] == (0, 1, 2, 3)


def test_runs_hold_everything_once_in_an_order_by_chance() -> None:
    """As many as layouts times orders; the same seed gives the same order, another seed another."""
    layouts = (Layout(pp=4), Layout(dp=4))
    found = runs(layouts, 4, 1, random.Random(1))

    assert 30 == len(found) == len(set(found))
    assert found == runs(layouts, 4, 1, random.Random(1)) != runs(layouts, 4, 1, random.Random(2))
