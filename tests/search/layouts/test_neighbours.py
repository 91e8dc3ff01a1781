"""What differs from a layout in one choice, and that a search tries it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from facts_for_tests import tiny_job, tiny_measurements
from search.worlds import PROVENANCE, two_racks

from pipette_launch.facts import Layout
from pipette_launch.facts.job import Batch
from pipette_launch.search.candidates import SearchInputs
from pipette_launch.search.frontier import Frontier
from pipette_launch.search.layouts.enumerate import Cuts, cuts
from pipette_launch.search.solve import SolveOptions, solve

JOB = tiny_job(4, own=Layout(pp=2, dp=2), batch=Batch(global_batch_size=16))


def legal(device_kind: str = "cuda") -> Cuts:
    """All cuts of the job on two hosts."""
    return cuts(JOB, world_size=4, devices_per_host=2, device_kind=device_kind)  # type: ignore[arg-type]


def without(layout: Layout, *names: str) -> Layout:
    """The layout with some of its fields at their defaults."""
    plain: dict[str, Any] = {name: getattr(Layout(), name) for name in names}
    return replace(layout, **plain)


@pytest.mark.parametrize("place", range(0, 400, 37))
def test_neighbours_differ_in_one_choice(place: int) -> None:
    """They are the legal layouts that are the same once one choice, and what follows it, is taken out."""
    found = legal()
    _, every = found.spread(np.arange(len(found.columns)))
    layouts = [every.layout(row) for row in range(len(every))]
    layout = layouts[place % len(layouts)]
    chunks = ("vpp", "layers_per_chunk", "microbatch_group_size")
    choices = (
        ("micro_batch_size", "microbatch_group_size"),
        chunks,
        ("sequence_parallel",),
        ("use_distributed_optimizer", "overlap_param_gather"),
        ("overlap_grad_reduce", "overlap_param_gather"),
        ("recompute",),
    )
    expected = {
        other
        for other in layouts
        if other != layout and any(without(other, *names) == without(layout, *names) for names in choices)
    }
    columns = found.neighbours(layout)

    assert expected == {columns.layout(row) for row in range(len(columns))}


def test_a_plan_does_not_lose_to_itself_with_one_choice_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that is handed nothing but the user's own layout tries all neighbours of its best in its placement."""
    measurements = tiny_measurements(two_racks())
    for name in ("dive", "take", "runners_up"):
        monkeypatch.setattr(Frontier, name, lambda *_, **__: [])
    plan = solve(JOB, measurements, options=SolveOptions(margin=0.0), clock=lambda: 0.0, provenance=PROVENANCE)
    inputs = SearchInputs.of(JOB, measurements, memory_margin=0.08)
    best = plan.chosen
    found = cuts(JOB, world_size=4, devices_per_host=2, device_kind="cpu", table=inputs.predictor.compute)
    columns = found.neighbours(best.layout)
    near = [columns.layout(row) for row in range(len(columns))]

    assert near
    assert best.step_time_s <= min(inputs.predictor.step_time(one, best.placement).total_s for one in near)
