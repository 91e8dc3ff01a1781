"""Drawn fabrics are what they claim to be."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.mapping.fabrics import Fabric, grid_flows


def test_a_fabric_is_shuffled_and_known() -> None:
    """Sorted order brings leaves together again, and the ring of each stage and the paths are in the flows."""
    fabric = Fabric.drawn(64, seed=0)
    flows = grid_flows(fabric.seconds_HH, stages=4)

    assert (64 + 48, 64 * 1.0 + 48 * 0.3) == (flows.num_flows, pytest.approx(flows.weight_F.sum()))
    assert flows.cost(fabric.sorted_H) < flows.cost(np.arange(64))
