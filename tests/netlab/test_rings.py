"""Which way gloo's rings go round: borrowed ground of the cost model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import warm
from labs import needs_lab
from probe.workers import ROOT

from benchmarks.netlab import Lab, everywhere, topology
from pipette_launch.cost.communication.collectives import COLLECTIVES, num_steps
from pipette_launch.cost.layers.loads import Collective

pytestmark = [pytest.mark.timeout(120), pytest.mark.processes, needs_lab]
WORKER = Path(__file__).parent / "ring_worker.py"
PATH = (ROOT, ROOT / "patches")
FAST_MBIT, SLOW_MBIT = 400.0, 40.0
SIZE_BYTES = 3 << 19


@pytest.mark.parametrize("fast_shift", [1, -1])
def test_rings_go_the_way_that_they_are_priced(tmp_path: Path, fast_shift: int) -> None:
    """Links are ten times as fast one way round: a ring that goes so is faster than slow ones allow, others are not."""
    ways = [(f"n{a}", f"n{(a + shift) % 3}", rate) for a in range(3) for shift, rate in _rates(fast_shift)]
    made = topology.parse({"hosts": 3, "link": [{"from": a, "to": b, "rate_mbit": rate} for a, b, rate in ways]})
    with Lab(made) as lab:
        failed = everywhere.run(lab, [warm.python().path, str(WORKER), str(tmp_path)], env=warm.environment(PATH))
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]

    assert (0, "") == failed
    assert found[0].keys() <= set(get_args(Collective))
    for kind in found[0]:
        took_s = max(one[kind] for one in found)
        # Half of what the slow links would take for the bytes of a ring, with which bursts have nothing to do.
        limit_s = num_steps(kind, 3) * SIZE_BYTES / 3 / (SLOW_MBIT * 1e6 / 8) / 2
        assert (COLLECTIVES[kind].gloo_shift == fast_shift) == (took_s < limit_s), (kind, took_s, limit_s)


def _rates(fast_shift: int) -> tuple[tuple[int, float], tuple[int, float]]:
    return ((fast_shift, FAST_MBIT), (-fast_shift, SLOW_MBIT))
