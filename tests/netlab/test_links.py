"""The warm-up's own link measurement on hosts whose links are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import warm
from labs import needs_lab
from probe.workers import ROOT, tiny_options

from benchmarks.netlab import Lab, everywhere, topology
from pipette_launch.facts import files

pytestmark = [pytest.mark.timeout(120), pytest.mark.processes, needs_lab]
WORKER = Path(__file__).parent / "link_worker.py"
PATH = (ROOT, ROOT / "patches")
BUSY = 0.20
"""The benchmark holds 10 % on a quiet machine; here others may compute."""


def test_uneven_links_are_measured_as_they_are_and_rank_as_they_should(tmp_path: Path) -> None:
    """Six directions of six rates: each within the tolerance of its rate, and in the right order."""
    made = topology.uneven(3, [80, 120, 180, 270, 400, 600], seed=5, symmetric=False)
    options = tiny_options(tmp_path, hosts=3, devices=1, message_sizes_bytes=(8, 1 << 16, 1 << 18, 1 << 20))
    order = tmp_path / "order.json"
    files.write(order, options)
    with Lab(made) as lab:
        failed = everywhere.run(
            lab, [warm.python().path, str(WORKER), str(order), str(tmp_path)], env=warm.environment(PATH)
        )
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    got = {(f"n{a}", f"n{b}"): rate for one in found for a, b, rate in one["rates"]}

    assert (0, "") == failed
    assert {3} == {one["rounds"] for one in found}
    assert made.paths.keys() == got.keys()
    assert sorted(made.paths, key=lambda way: made.paths[way].rate_mbit) == sorted(got, key=lambda way: got[way])
    errors = {way: rate / made.paths[way].rate_mbit - 1 for way, rate in got.items()}
    assert all(abs(error) < BUSY for error in errors.values()), errors
