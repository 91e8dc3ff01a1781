"""The links between any two slots, looked up between hosts or within one: never a matrix of all slots by all slots."""

# S = slots, H = hosts, D = devices of one host, U = different matrices within hosts, L = all links that are kept.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts.cluster import Cluster, Links

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


def spanning_tree(cost_HH: Floats) -> list[tuple[float, int, int]]:
    """Return the links that join all hosts, cheapest first: those of a minimum spanning tree (Prim 1957).

    Hosts that are apart in it without the links above some cost are apart without any link above that cost. A pair of
    hosts counts by its cheaper way, so what is apart here is apart for every ring.
    """
    cost: Floats = np.minimum(cost_HH, cost_HH.T)
    hosts = len(cost)
    left = np.ones(hosts, dtype=bool)
    left[0] = False
    near_H = cost[0].copy()
    via_H = np.zeros(hosts, dtype=np.int64)
    near_H[0] = np.inf
    found = []
    for _ in range(hosts - 1):
        host = int(near_H.argmin())
        found.append((float(near_H[host]), int(via_H[host]), host))
        left[host] = False
        near_H[host] = np.inf
        closer_H = left & (cost[host] < near_H)
        near_H[closer_H] = cost[host][closer_H]
        via_H[closer_H] = host
    return sorted(found)


class Bottlenecks:
    """How slow the slowest link is, at least, of a group that has members on several places."""

    def __init__(self, links: Links) -> None:
        byte_s_HH = np.where(np.eye(len(links.latency_s), dtype=bool), np.inf, links.seconds_per_byte())
        self._tree = spanning_tree(byte_s_HH)
        self._leave_H: Floats = np.maximum(byte_s_HH.min(axis=0), byte_s_HH.min(axis=1))
        self._known: dict[int, Floats] = {}

    def slowness_H(self, fewest: int) -> Floats:
        """Seconds per byte of the slowest link, at least, of a group that lies on each place, and on `fewest` or more.

        A group leaves each of its places and comes back, and links no slower than its slowest one connect them all. So
        each of its places lies in a connected part of so many places at least.

        Args:
            fewest: places, two or more.

        """
        if fewest not in self._known:
            joined_H = np.zeros(len(self._leave_H))
            part_of = [[place] for place in range(len(joined_H))]
            for byte_s, one, other in self._tree:
                small, large = sorted((part_of[one], part_of[other]), key=len)
                for part in (small, large):
                    if len(part) < fewest <= len(small) + len(large):
                        joined_H[part] = byte_s
                large += small
                for place in small:
                    part_of[place] = large
            self._known[fewest] = np.maximum(joined_H, self._leave_H)
        return self._known[fewest]


def _front(latency_s: Floats, byte_s: Floats) -> tuple[tuple[float, float], ...]:
    front: list[tuple[float, float]] = []
    while len(latency_s):
        least_s = latency_s.min()
        per_byte = byte_s[latency_s == least_s].min()
        front.append((float(least_s), float(per_byte)))
        left = byte_s < per_byte
        latency_s, byte_s = latency_s[left], byte_s[left]
    return tuple(front)
