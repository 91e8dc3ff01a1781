"""Links between hosts from Pipette's measured matrix, or drawn in tiers, as shares of a nominal bandwidth."""

# H = hosts, G = hosts of the measured matrix.

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts import Links, Measurements

MEASURED = Path(__file__).parents[1] / "tests" / "data" / "pipette_links_time0.csv"
LEAF_HOSTS = 4
POD_HOSTS = 8
TIERS = (1.0, 0.8, 0.6)
"""Bandwidth within a leaf, within a pod, and across the core."""
NOISE = 0.08
BAD = 0.6

Array = NDArray[np.float64]


def measured(hosts: int, rng: np.random.Generator) -> Array:
    """Draw hosts from the 16 measured ones: some of them, all in a drawn order, or more with repetition.

    Two copies of one host are as far apart as that host and a drawn other one.
    """
    share_GG = measured_shares()
    size = len(share_GG)
    drawn_H = rng.permutation(size)[:hosts] if hosts <= size else rng.integers(0, size, hosts)
    share_HH = share_GG[np.ix_(drawn_H, drawn_H)]
    for a, b in np.argwhere(drawn_H[:, None] == drawn_H[None, :]):
        other = (drawn_H[a] + rng.integers(1, size)) % size
        share_HH[a, b] = share_GG[drawn_H[a], other]
    return share_HH


def tiered(hosts: int, rng: np.random.Generator) -> Array:
    """Draw leaves of 4 hosts and pods of 8 at 1.0, 0.8 and 0.6, noise of 8 %, and one host in 25 at 0.6; shuffled."""
    place_H = rng.permutation(hosts)
    leaf_H, pod_H = place_H // LEAF_HOSTS, place_H // POD_HOSTS
    share_HH = np.where(
        leaf_H[:, None] == leaf_H[None, :],
        TIERS[0],
        np.where(pod_H[:, None] == pod_H[None, :], TIERS[1], TIERS[2]),
    )
    share_HH = share_HH / (1 + np.abs(rng.normal(0, NOISE, (hosts, hosts))))
    bad_H = np.ones(hosts)
    bad_H[rng.permutation(hosts)[: math.ceil(hosts / 25)]] = BAD
    tiered_HH: Array = share_HH * np.minimum(bad_H[:, None], bad_H[None, :])
    return tiered_HH


def mixed_cards(hosts: int, rng: np.random.Generator) -> Array:
    """Draw tiers as above where every other host, at random, has half as many cards."""
    share_HH = tiered(hosts, rng)
    cards_H = np.where(rng.permutation(hosts) % 2, 0.5, 1.0)
    mixed_HH: Array = share_HH * np.minimum(cards_H[:, None], cards_H[None, :])
    return mixed_HH


NETWORKS: dict[str, Callable[[int, np.random.Generator], Array]] = {
    "measured": measured,
    "tiered": tiered,
    "mixed cards": mixed_cards,
}


def with_network(measurements: Measurements, share_HH: Array) -> Measurements:
    """Return the measurements of equal machines with these shares of the bandwidth between their hosts.

    Collectives across hosts were imagined on equal links; they slow down as the slowest link of their group does.
    """
    before = measurements.cluster.between_hosts
    bandwidth_HH = np.asarray(before.bandwidth_bytes_per_s) * share_HH
    np.fill_diagonal(bandwidth_HH, 0.0)
    links = Links(latency_s=before.latency_s, bandwidth_bytes_per_s=bandwidth_HH)
    devices = measurements.cluster.devices_per_host

    def slower(slots: tuple[int, ...]) -> float:
        hosts = [slot // devices for slot in slots]
        shares = [share_HH[a, b] for a, b in zip(hosts, hosts[1:] + hosts[:1], strict=True) if a != b]
        return 1 / min(shares, default=1.0)

    return replace(
        measurements,
        cluster=replace(measurements.cluster, between_hosts=links),
        collectives=tuple(
            replace(one, seconds_per_byte=one.seconds_per_byte * slower(one.slots)) for one in measurements.collectives
        ),
    )


def measured_shares() -> Array:
    """Return the measured bandwidths as shares of the best, sender by receiver (key 0 of the file)."""
    with MEASURED.open() as file:
        rows = [row for row in csv.DictReader(line for line in file if not line.startswith("#")) if row["key"] == "0"]
    size = 1 + max(int(row["src_index"]) for row in rows)
    rate_GG = np.zeros((size, size))
    for row in rows:
        if row["diagonal"] == "0":
            rate_GG[int(row["src_index"]), int(row["dst_index"])] = float(row["bandwidth_MBps"])
    share_GG: Array = rate_GG / rate_GG.max()
    return share_GG
