"""Rings are as slow as the best link of the worst host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from facts_for_tests import tiny_cluster, tiny_measurements

from pipette_launch.facts import Links
from pipette_launch.search.bounds.ring_links import with_ring_links


def test_the_worst_hosts_best_link_counts() -> None:
    """Host 2 sends at 3 at best and receives at 7: every link becomes 3, and the latency the median."""
    bandwidth = np.full((4, 4), 10.0)
    bandwidth[2], bandwidth[:, 2] = 2.0, 7.0
    bandwidth[2, 0] = 3.0
    latency = np.full((4, 4), 5.0)
    latency[0, 1] = 100.0
    links = Links(latency_s=latency, bandwidth_bytes_per_s=bandwidth)
    measurements = tiny_measurements(replace(tiny_cluster(4, 1), between_hosts=links))
    found = with_ring_links(measurements).cluster.between_hosts

    assert Links.uniform(4, latency_s=5.0, bandwidth_bytes_per_s=3.0) == found


def test_one_host_has_no_rings() -> None:
    """Nothing changes where there is nothing between hosts."""
    measurements = tiny_measurements(tiny_cluster(1, 2))

    assert with_ring_links(measurements) is measurements
