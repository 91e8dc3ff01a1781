"""What the search does after the rounds that improve placements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from search.worlds import ALL_FIELDS, planned

from pipette_launch.facts import Batch, Layout, Links
from pipette_launch.search import search_loop


def test_single_ranks_change_hosts_at_last_on_more_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine hosts of four slots on drawn links: nine replicas fit them better once single ranks have changed hosts."""
    speed_HH = 10 ** np.random.default_rng(0).uniform(7, 9, (9, 9))
    links = Links(latency_s=np.full((9, 9), 1e-5), bandwidth_bytes_per_s=np.minimum(speed_HH, speed_HH.T))
    measurements = tiny_measurements(replace(tiny_cluster(9, 4), between_hosts=links))
    job = tiny_job(36, own=Layout(pp=4, dp=9), batch=Batch(global_batch_size=36), pinned=frozenset(ALL_FIELDS))
    plan = planned(job, measurements, margin=0.0)
    monkeypatch.setattr(search_loop, "ANNEALED_SLOTS", range(0))
    without = planned(job, measurements, margin=0.0)

    assert plan.chosen.step_time_s < 0.97 * without.chosen.step_time_s
