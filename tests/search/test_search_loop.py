"""What the search does after the rounds that improve placements."""

from __future__ import annotations

import pytest
from facts_for_tests import tiny_job
from search.worlds import ALL_FIELDS, planned, slow_neighbours

from pipette_launch.facts import Batch, Layout
from pipette_launch.search import search_loop


def test_single_devices_change_places_at_last_on_more_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 36 slots two neighbours have slow links, which only an exchange of single devices keeps out of a TP group."""
    measurements = slow_neighbours()
    own = Layout(tp=2, dp=18)
    job = tiny_job(36, own=own, batch=Batch(global_batch_size=36), pinned=frozenset(ALL_FIELDS))
    plan = planned(job, measurements, margin=0.0)
    monkeypatch.setattr(search_loop, "ANNEALED_SLOTS", range(0))
    without = planned(job, measurements, margin=0.0)

    assert plan.chosen.step_time_s == pytest.approx(plan.floor_s)
    assert plan.chosen.step_time_s < 0.9 * without.chosen.step_time_s
