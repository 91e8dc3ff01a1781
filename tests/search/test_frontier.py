"""Layouts come by rising bound, and what cannot win is never opened."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from search.legal import legal_layouts

from pipette_launch.cost.step.step_bounds import BoundColumns
from pipette_launch.facts import ComputeCase, Job, Layout, Measurements
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.layout import NO_RECOMPUTE
from pipette_launch.search import frontier as frontier_module
from pipette_launch.search.candidates import NOT_MEASURED, OVER_MEMORY, SearchInputs
from pipette_launch.search.frontier import Frontier
from pipette_launch.search.layouts import BaseLayouts, base_layouts
from pipette_launch.search.slots import host_order

MANY = 10_000


def opened(
    job: Job, measurements: Measurements | None = None, *, memory_margin: float = 0.08
) -> tuple[Frontier, BaseLayouts, SearchInputs]:
    """A frontier over all cuts of a job."""
    measurements = measurements or tiny_measurements(tiny_cluster())
    found = base_layouts(job, world_size=4, domains=Domains(devices_per_host=2), device_kind="cpu")
    inputs = SearchInputs.of(job, measurements, memory_margin=memory_margin)
    return Frontier(inputs, found, BoundColumns(job, measurements)), found, inputs


def every_layout(job: Job, inputs: SearchInputs) -> list[Layout]:
    """All legal layouts but the user's own that fit and can be priced."""
    listed = legal_layouts(job, world_size=4, devices_per_host=2, device_kind="cpu")[1:]
    return [
        layout
        for layout in listed
        if inputs.predictor.can_price(layout) and max(inputs.predictor.peaks(layout)) <= inputs.limit_bytes(layout)
    ]


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_all_that_fit_come_once_by_rising_bound(share: float) -> None:
    """At any memory limit all layouts are returned, except those that only recompute more than another."""
    job = tiny_job(4)
    _, _, roomy = opened(job)
    needs = sorted(max(roomy.predictor.peaks(layout)) for layout in every_layout(job, roomy))
    tight = tiny_measurements(tiny_cluster(memory_bytes=needs[int(share * (len(needs) - 1))]))
    frontier, _, inputs = opened(job, tight, memory_margin=0.0)
    taken = frontier.take(MANY)
    fitting = every_layout(job, inputs)
    bare = [replace(layout, recompute=NO_RECOMPUTE) for layout in (*fitting, job.own)]

    assert {one.layout for one in taken} <= set(fitting)
    assert len(taken) == len({one.layout for one in taken})
    assert {replace(one.layout, recompute=NO_RECOMPUTE) for one in taken} | {job.own} >= set(bare)
    assert [one.least_s for one in taken] == sorted(one.least_s for one in taken)
    every = np.array([*permutations(range(4))])
    assert all(one.least_s <= inputs.predictor.placement_cost(one.layout).costs(every).min() for one in taken)
    assert all(one.peak_bytes == inputs.predictor.peaks(one.layout) for one in taken)
    assert frontier.least_s == math.inf


def test_what_cannot_win_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Base layouts are opened only while their rough bounds are below the step time to beat."""
    monkeypatch.setattr(frontier_module, "OPENED_AT_ONCE", 1)
    opened_rows: list[int] = []
    opens = Frontier._open

    def counted(self: Frontier, rows: np.ndarray, below_s: float) -> None:
        opened_rows.extend(rows.tolist())
        opens(self, rows, below_s)

    monkeypatch.setattr(Frontier, "_open", counted)
    frontier, _, _ = opened(tiny_job(4))
    limit_s = frontier._rough[3]

    assert frontier.take(MANY, below_s=limit_s) == []
    assert opened_rows == frontier._order_N[:3].tolist()
    assert frontier.least_s == limit_s


def test_once_it_is_late_nothing_more_is_opened() -> None:
    """The bound of unopened layouts still counts."""
    frontier, _, _ = opened(tiny_job(4))

    assert frontier.take(3, is_late=lambda: True) == []
    assert 0 < frontier.least_s < math.inf


def test_what_does_not_fit_and_what_was_not_measured_are_counted() -> None:
    """With no memory all that were measured are over the limit, and the others were not measured."""
    cases = (ComputeCase(tp=1, cp=1, micro_batch_size=1),)
    frontier, found, _ = opened(tiny_job(4), tiny_measurements(tiny_cluster(memory_bytes=1), cases))

    assert not frontier.find_any()
    assert frontier.dropped[NOT_MEASURED] > 0
    assert frontier.dropped[OVER_MEMORY] > 0
    assert found.num_layouts == frontier.dropped[NOT_MEASURED] + frontier.dropped[OVER_MEMORY]


def test_a_dive_finds_what_is_quick_and_what_is_lean() -> None:
    """The first of many cuts in their quickest and their leanest state; leaner layouts need no more than asked."""
    frontier, _, inputs = opened(tiny_job(4))
    dived = frontier.dive(6)
    most = 0.9 * max(dived[0].peak_bytes)
    leaner = frontier.leaner(3, most_bytes=most, below_s=math.inf)

    assert 6 <= len(dived) <= 9
    assert all(max(one.peak_bytes) <= inputs.limit_bytes(one.layout) for one in dived)
    assert len(leaner) == 3
    assert all(max(one.peak_bytes) <= most for one in leaner)
    assert [one.least_s for one in leaner] == sorted(one.least_s for one in leaner)
    steps_s = [inputs.predictor.step_time(one.layout, host_order(4)).total_s for one in dived]
    assert frontier.take(1)[0].least_s <= min(steps_s)


def test_the_leanest_variant_has_the_leanest_state() -> None:
    """No variant of a cut needs less than the best recompute in the state that is taken for the leanest."""
    _, found, inputs = opened(tiny_job(4))
    rows = np.arange(len(found))
    place_M, columns = found.variants(rows)
    lean = found.tables.leanest(found.columns)
    fullest_M = inputs.predictor.fullest_N(columns)
    states = ("sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    in_state_M = np.logical_and.reduce([getattr(columns, name) == getattr(lean, name)[place_M] for name in states])
    counts = Counter(place_M.tolist())

    for row in rows.tolist():
        assert fullest_M[place_M == row].min() == fullest_M[(place_M == row) & in_state_M].min()
    assert min(counts.values()) > 1
