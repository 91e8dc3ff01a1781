"""Layouts come by rising bound, and what cannot win is never opened."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements

from pipette_launch.cost.bound_columns import BoundColumns
from pipette_launch.facts import Job, Measurements, Recompute
from pipette_launch.facts.layout import NO_RECOMPUTE
from pipette_launch.search import frontier as frontier_module
from pipette_launch.search.candidates import OVER_MEMORY, Field
from pipette_launch.search.enumerate import Cuts, cuts, layouts
from pipette_launch.search.frontier import Frontier, Promising, recomputes_no_more


def opened(
    job: Job, measurements: Measurements | None = None, *, memory_margin: float = 0.08
) -> tuple[Frontier, Cuts, Field]:
    """A frontier over all cuts of a job."""
    measurements = measurements or tiny_measurements(tiny_cluster())
    found = cuts(job, world_size=4, devices_per_host=2, device_kind="cpu")
    field = Field.of(job, measurements, memory_margin=memory_margin)
    return Frontier(field, found, BoundColumns.of(job, measurements)), found, field


def test_every_layout_but_the_own_comes_once_by_rising_bound() -> None:
    """Taking all, spare ones too, hands out what `layouts` lists, sorted."""
    job = tiny_job(4)
    frontier, _, field = opened(job)
    taken = frontier.take(10_000)
    spare = frontier.lean(10_000, most_bytes=math.inf)
    listed = layouts(job, world_size=4, devices_per_host=2, device_kind="cpu").layouts
    priced = [layout for layout in listed[1:] if field.predictor.can_price(layout)]

    assert {one.layout for one in (*taken, *spare)} == set(priced)
    assert len(taken) + len(spare) == len(priced)
    assert [one.least_s for one in taken] == sorted(one.least_s for one in taken)
    assert frontier.num_left == 0
    assert frontier.least_s == math.inf


def test_what_cannot_win_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a step time that only some layouts may beat, the other cuts are never opened."""
    monkeypatch.setattr(frontier_module, "CUTS_AT_ONCE", 1)
    monkeypatch.setattr(frontier_module, "BOUNDED_AT_ONCE", 4)
    frontier, found, _ = opened(tiny_job(4))
    everything, _, _ = opened(tiny_job(4))
    bounds_s = [one.least_s for one in everything.take(10_000)]
    limit_s = bounds_s[len(bounds_s) // 10]
    taken = frontier.take(10_000, below_s=limit_s)

    assert [one.least_s for one in taken] == [bound_s for bound_s in bounds_s if bound_s < limit_s]
    assert len(taken) < frontier.num_left
    assert frontier.num_met < everything.num_met == found.num_layouts
    assert frontier.least_s >= limit_s


def test_what_does_not_fit_is_counted() -> None:
    """With too little memory for most layouts, the leanest are left and the rest are counted."""
    everything, _, _ = opened(tiny_job(4))
    needs = sorted(max(one.peak_bytes) for one in everything.take(10_000))
    tight = tiny_measurements(tiny_cluster(memory_bytes=needs[len(needs) // 4]))
    frontier, found, _ = opened(tiny_job(4), tight, memory_margin=0.0)
    taken = [*frontier.take(10_000), *frontier.lean(10_000, most_bytes=math.inf)]

    assert all(max(one.peak_bytes) <= needs[len(needs) // 4] for one in taken)
    assert found.num_layouts - 1 == len(taken) + frontier.dropped[OVER_MEMORY]


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


def test_what_recomputes_more_than_one_that_fits_is_spare() -> None:
    """Where a layout fits as it is, its twins that run more again are no better anywhere, and only leaner."""
    frontier, _, _ = opened(tiny_job(4))
    taken = frontier.take(10_000)
    kinds = Counter(replace(one.layout, recompute=NO_RECOMPUTE) for one in taken)

    assert set(kinds.values()) == {1}
    assert all(one.layout.recompute == NO_RECOMPUTE for one in taken)
    assert any(one.layout.recompute.granularity == "full" for one in frontier.lean(50, most_bytes=math.inf))


SELECTIVE = Recompute(granularity="selective", modules=("core_attn",))
MORE = Recompute(granularity="selective", modules=("core_attn", "layernorm"))
BLOCKS = [Recompute(granularity="full", method="block", num_layers=layers) for layers in (1, 2)]
WHOLE = Recompute(granularity="full", method="uniform", num_layers=1)


@pytest.mark.parametrize(
    ("one", "others"),
    [
        (NO_RECOMPUTE, [NO_RECOMPUTE, SELECTIVE, MORE, *BLOCKS, WHOLE]),
        (SELECTIVE, [SELECTIVE, MORE, WHOLE]),
        (MORE, [MORE, WHOLE]),
        (BLOCKS[0], [*BLOCKS, WHOLE]),
        (BLOCKS[1], [BLOCKS[1], WHOLE]),
        (WHOLE, [WHOLE]),
    ],
)
def test_which_recompute_runs_no_more_again(one: Recompute, others: list[Recompute]) -> None:
    """Nothing within everything, fewer modules within more, fewer layers within more, and all within the whole."""
    every = [NO_RECOMPUTE, SELECTIVE, MORE, *BLOCKS, WHOLE]

    assert others == [other for other in every if recomputes_no_more(one, other)]
