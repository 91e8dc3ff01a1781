"""The links between any two slots, looked up between hosts or within one: never a matrix of all slots by all slots."""

# S = slots, H = hosts, D = devices of one host, U = different matrices within hosts, L = all links that are kept.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts.machines.cluster import Cluster, Links

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTable:
    """H * H links between hosts, and behind them D * D for each different matrix within a host, in one row."""

    latency_s_L: Floats
    """0 from a place to itself, as in `seconds_per_byte_L`."""
    seconds_per_byte_L: Floats
    host_S: Ints
    _between_S: Ints
    """Where the links of a slot's host to other hosts begin."""
    _within_S: Ints
    """Where the links of a slot to those of its own host begin."""
    _local_S: Ints

    @classmethod
    def of(cls, cluster: Cluster) -> LinkTable:
        """Lay out the links of a cluster."""
        hosts, devices = len(cluster.hosts), cluster.devices_per_host
        kinds: dict[Links, int] = {}
        kind_H = np.array([kinds.setdefault(links, len(kinds)) for links in cluster.within_host], dtype=np.int64)
        matrices = (cluster.between_hosts, *kinds)
        slots = np.arange(cluster.num_slots)
        host_S, local_S = slots // devices, slots % devices
        return cls(
            latency_s_L=np.concatenate(
                [np.where(np.eye(len(links.latency_s), dtype=bool), 0.0, links.latency_s).ravel() for links in matrices]
            ),
            seconds_per_byte_L=np.concatenate([links.seconds_per_byte().ravel() for links in matrices]),
            host_S=host_S,
            _between_S=host_S * hosts,
            _within_S=hosts * hosts + (kind_H[host_S] * devices + local_S) * devices,
            _local_S=local_S,
        )

    def links(self, sender: Ints, receiver: Ints) -> Ints:
        """Return the place of each link among L, from slots to slots of equal shape."""
        to_host = self.host_S.take(receiver)
        links = self._between_S.take(sender)
        links += to_host
        inside = self.host_S.take(sender) == to_host
        if inside.any():
            links[inside] = self._within_S[sender[inside]] + self._local_S[receiver[inside]]
        return links


def best_links(matrices: Sequence[Links]) -> tuple[tuple[float, float], ...]:
    """(latency, seconds per byte) of the links that no other beats in both, by rising latency."""
    # From a place to itself there is no link.
    different = [(links, ~np.eye(len(links.latency_s), dtype=bool)) for links in dict.fromkeys(matrices)]
    latency_s = np.concatenate([links.latency_s[apart] for links, apart in different])
    byte_s = np.concatenate([links.seconds_per_byte()[apart] for links, apart in different])
    return _front(latency_s, byte_s)


def best_links_of(links: Links, place: int) -> tuple[tuple[float, float], ...]:
    """The same of the links out of one place, or of those into it if the best of these is slower by the byte.

    Whoever passes through the place uses one of either.
    """
    others = np.arange(len(links.latency_s)) != place
    byte_s = links.seconds_per_byte()
    out_H, in_H = byte_s[place, others], byte_s[others, place]
    if out_H.min() >= in_H.min():
        return _front(links.latency_s[place, others], out_H)
    return _front(links.latency_s[others, place], in_H)


def slowness_of_places(links: Links) -> Floats:
    """Seconds per byte of the best link out of each place, or into it if that is slower; 0 for one alone."""
    byte_s = links.seconds_per_byte().copy()
    if len(byte_s) < 2:
        return np.zeros(len(byte_s))
    np.fill_diagonal(byte_s, np.inf)
    slowness: Floats = np.maximum(byte_s.min(axis=0), byte_s.min(axis=1))
    return slowness


def _front(latency_s: Floats, byte_s: Floats) -> tuple[tuple[float, float], ...]:
    front: list[tuple[float, float]] = []
    while len(latency_s):
        least_s = latency_s.min()
        per_byte = byte_s[latency_s == least_s].min()
        front.append((float(least_s), float(per_byte)))
        left = byte_s < per_byte
        latency_s, byte_s = latency_s[left], byte_s[left]
    return tuple(front)
