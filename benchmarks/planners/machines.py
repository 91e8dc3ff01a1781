"""Pipette's two kinds of cluster, with links between hosts from its own measured matrix or drawn in tiers."""

# H = hosts, G = hosts of the measured matrix.

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts import Links, Measurements
from pipette_launch.facts.accelerators import DeviceSpec, Link
from pipette_launch.facts.known_devices import device_named

MEASURED = Path(__file__).parents[2] / "tests" / "data" / "pipette_links_time0.csv"
DEVICES_PER_HOST = 8
LEAF_HOSTS = 4
POD_HOSTS = 8
TIERS = (1.0, 0.8, 0.6)
"""Bandwidth within a leaf, within a pod, and across the core."""
NOISE = 0.08
BAD = 0.6

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One of Pipette's clusters; compute and NVLink as in our table of devices."""

    device: str
    nominal_bytes_per_s: float
    """Bandwidth of one device's own network card, from the measured matrix: four flows of a host at 19 GB/s each."""
    transformer_impl: str
    attention_backend: str

    @property
    def spec(self) -> DeviceSpec:
        """The device with the cluster's nominal link between hosts."""
        spec = device_named(self.device)
        link = Link(latency_s=spec.between_hosts.latency_s, bytes_per_s=self.nominal_bytes_per_s)
        return replace(spec, between_hosts=link)

    @property
    def words(self) -> str:
        """In one line."""
        return (
            f"{self.device}, 8 a host, {self.nominal_bytes_per_s / 1e9:g} GB/s a device between hosts, "
            f"{self.transformer_impl} with {self.attention_backend} attention"
        )


MACHINES = {
    # Flash attention needs Ampere.
    "V100": Machine(
        device="V100-SXM2-32GB",
        nominal_bytes_per_s=12.5e9,
        transformer_impl="local",
        attention_backend="unfused",
    ),
    "A100": Machine(
        device="A100-80GB",
        nominal_bytes_per_s=25e9,
        transformer_impl="transformer_engine",
        attention_backend="flash",
    ),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Shares of the nominal bandwidth between hosts in torchrun's order, and the switches that were declared."""

    share_HH: Array
    switches_H: tuple[tuple[int, ...], ...] = ()


def measured(hosts: int, rng: np.random.Generator) -> Network:
    """Draw hosts from the 16 measured ones: some of them, all in a drawn order, or more with repetition.

    Two copies of one host are as far apart as that host and a drawn other one. Nobody declared switches there.
    """
    share_GG = _measured_shares()
    size = len(share_GG)
    drawn_H = rng.permutation(size)[:hosts] if hosts <= size else rng.integers(0, size, hosts)
    share_HH = share_GG[np.ix_(drawn_H, drawn_H)]
    for a, b in np.argwhere(drawn_H[:, None] == drawn_H[None, :]):
        other = (drawn_H[a] + rng.integers(1, size)) % size
        share_HH[a, b] = share_GG[drawn_H[a], other]
    return Network(share_HH=share_HH)


def tiered(hosts: int, rng: np.random.Generator) -> Network:
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
    switches = tuple((int(pod), int(leaf)) for pod, leaf in zip(pod_H, leaf_H, strict=True))
    return Network(share_HH=share_HH * np.minimum(bad_H[:, None], bad_H[None, :]), switches_H=switches)


def mixed_cards(hosts: int, rng: np.random.Generator) -> Network:
    """Draw tiers as above where every other host, at random, has half as many cards."""
    network = tiered(hosts, rng)
    cards_H = np.where(rng.permutation(hosts) % 2, 0.5, 1.0)
    return replace(network, share_HH=network.share_HH * np.minimum(cards_H[:, None], cards_H[None, :]))


NETWORKS: dict[str, Callable[[int, np.random.Generator], Network]] = {
    "measured": measured,
    "tiered": tiered,
    "mixed cards": mixed_cards,
}


def with_network(measurements: Measurements, network: Network) -> Measurements:
    """Put a network between the hosts of equal machines.

    Collectives across hosts were imagined on equal links; they slow down as the slowest link of their group does.
    """
    before = measurements.cluster.between_hosts
    bandwidth_HH = np.asarray(before.bandwidth_bytes_per_s) * network.share_HH
    np.fill_diagonal(bandwidth_HH, 0.0)
    links = Links(latency_s=before.latency_s, bandwidth_bytes_per_s=bandwidth_HH)
    devices = measurements.cluster.devices_per_host

    def slower(slots: tuple[int, ...]) -> float:
        hosts = [slot // devices for slot in slots]
        shares = [network.share_HH[a, b] for a, b in zip(hosts, hosts[1:] + hosts[:1], strict=True) if a != b]
        return 1 / min(shares, default=1.0)

    return replace(
        measurements,
        cluster=replace(measurements.cluster, between_hosts=links),
        collectives=tuple(
            replace(one, seconds_per_byte=one.seconds_per_byte * slower(one.slots)) for one in measurements.collectives
        ),
    )


def _measured_shares() -> Array:
    """Bandwidth over the best, sender by receiver (key 0 of the file)."""
    with MEASURED.open() as file:
        rows = [row for row in csv.DictReader(line for line in file if not line.startswith("#")) if row["key"] == "0"]
    size = 1 + max(int(row["src_index"]) for row in rows)
    rate_GG = np.zeros((size, size))
    for row in rows:
        if row["diagonal"] == "0":
            rate_GG[int(row["src_index"]), int(row["dst_index"])] = float(row["bandwidth_MBps"])
    return rate_GG / rate_GG.max()
