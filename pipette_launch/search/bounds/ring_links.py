"""The allocation as rings through all hosts see it: every link as slow as the slowest that they must use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipette_launch.facts import Links, Measurements


def with_ring_links(measurements: Measurements) -> Measurements:
    """Give all pairs of hosts the best link of that host whose best is the worst, and the median latency.

    A ring through every host passes each of them by one link in and one out, so no ring is faster than this, and a
    good one is not much slower. It tells layouts apart where the best link of all would promise too much.
    """
    cluster = measurements.cluster
    size = len(cluster.hosts)
    if size < 2:
        return measurements
    bandwidth_HH = np.where(np.eye(size, dtype=bool), 0.0, cluster.between_hosts.bandwidth_bytes_per_s)
    latency_HH = np.asarray(cluster.between_hosts.latency_s)
    slowest = float(np.minimum(bandwidth_HH.max(axis=0), bandwidth_HH.max(axis=1)).min())
    latency_s = float(np.median(latency_HH[~np.eye(size, dtype=bool)]))
    links = Links.uniform(size, latency_s=latency_s, bandwidth_bytes_per_s=slowest)
    return replace(measurements, cluster=replace(cluster, between_hosts=links))
