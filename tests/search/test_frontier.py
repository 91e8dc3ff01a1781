"""Layouts come by rising bound, and what cannot win is never opened."""

from __future__ import annotations

import math

from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements

from pipette_launch.cost.bound_columns import BoundColumns
from pipette_launch.facts import Job, Measurements
from pipette_launch.search.candidates import OVER_MEMORY, Field
from pipette_launch.search.enumerate import Cuts, cuts, layouts
from pipette_launch.search.frontier import Frontier, Promising


def opened(
    job: Job, measurements: Measurements | None = None, *, memory_margin: float = 0.08
) -> tuple[Frontier, Cuts, Field]:
    """A frontier over all cuts of a job."""
    measurements = measurements or tiny_measurements(tiny_cluster())
    found = cuts(job, world_size=4, devices_per_host=2, device_kind="cpu")
    field = Field.of(job, measurements, memory_margin=memory_margin)
    return Frontier(field, found, BoundColumns.of(job, measurements)), found, field


def test_every_layout_but_the_own_comes_once_by_rising_bound() -> None:
    """Taking all hands out what `layouts` lists, sorted."""
    job = tiny_job(4)
    frontier, _, field = opened(job)
    taken = frontier.take(10_000)
    listed = layouts(job, world_size=4, devices_per_host=2, device_kind="cpu").layouts
    priced = [layout for layout in listed[1:] if field.predictor.can_price(layout)]

    assert {one.layout for one in taken} == set(priced)
    assert len(taken) == len(priced)
    assert [one.least_s for one in taken] == sorted(one.least_s for one in taken)
    assert frontier.num_left == 0
    assert frontier.least_s == math.inf


def test_what_cannot_win_stays_closed() -> None:
    """Below a step time that only some layouts may beat, the other cuts are never opened."""
    frontier, found, _ = opened(tiny_job(4))
    everything, _, _ = opened(tiny_job(4))
    bounds_s = [one.least_s for one in everything.take(10_000)]
    limit_s = bounds_s[len(bounds_s) // 10]
    taken = frontier.take(10_000, below_s=limit_s)

    assert [one.least_s for one in taken] == [bound_s for bound_s in bounds_s if bound_s < limit_s]
    assert len(taken) < frontier.num_left
    assert frontier.num_met < everything.num_met == found.num_layouts - 1
    assert frontier.least_s >= limit_s


def test_what_does_not_fit_is_counted() -> None:
    """With too little memory for most layouts, the leanest are left and the rest are counted."""
    everything, _, _ = opened(tiny_job(4))
    needs = sorted(max(one.peak_bytes) for one in everything.take(10_000))
    tight = tiny_measurements(tiny_cluster(memory_bytes=needs[len(needs) // 4]))
    frontier, _, _ = opened(tiny_job(4), tight, memory_margin=0.0)
    taken = frontier.take(10_000)

    assert all(max(one.peak_bytes) <= needs[len(needs) // 4] for one in taken)
    assert len(needs) == len(taken) + frontier.dropped[OVER_MEMORY]


def test_lean_ones_are_handed_out_apart() -> None:
    """The next that need no more than so much, and none of them twice."""
    frontier, _, _ = opened(tiny_job(4))
    first: list[Promising] = frontier.take(1)
    most = 0.9 * max(first[0].peak_bytes)
    lean = frontier.lean(2, most_bytes=most)
    rest = frontier.take(10_000)

    assert all(max(one.peak_bytes) <= most for one in lean)
    assert not {one.layout for one in lean} & {one.layout for one in rest}
    assert sorted(lean) == lean
