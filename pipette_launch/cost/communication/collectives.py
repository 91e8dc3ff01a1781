"""Seconds for an all-reduce, all-gather, reduce-scatter, all-to-all or send over given links.

Every collective is a sequence of equal steps in which each member sends one chunk, and each step takes as long as its
slowest link (alpha-beta model; Thakur, Rabenseifner, Gropp 2005, sections 4.1 to 4.5):

    all_reduce      2(k - 1) steps of bytes / k around the ring
    all_gather       (k - 1) steps of bytes / k around the ring
    reduce_scatter   (k - 1) steps of bytes / k around the ring
    all_to_all       (k - 1) steps of bytes / k, over every pair
    send                   1 step of bytes

`bytes` is the full tensor on one rank: before a reduce-scatter, after an all-gather. Where a group of the same or of a
near shape was measured, its fit corrects this formula, so that a measured group costs what was measured. Time per byte
is corrected by a factor: slower links still cost more, and the links of all members on a host count together. Latency
beyond that of the links comes from the library, so it is added: to each step or, over gloo, to the whole operation. A
send is not corrected: the links themselves are measured by sends. Groups that run at the same time are priced each by
itself: their contention is in the price as far as it was in the measurement.
"""

# S = slots, H = hosts, D = devices of one host, U = different matrices within hosts, L = all links that are kept.
# H = hosts, M = measured groups.
# G = groups of one kind, K = members of a group in ring order, L = links of a group, T = groups of any kinds.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Cluster, Links
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.measurements import CollectiveTime

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]

_DOWNWARDS: dict[str, tuple[Kind, ...]] = {"cpu": ("all_reduce", "reduce_scatter"), "cuda": ()}
"""Rings in which each member sends to the one before it. So gloo reduces, and gathers the other way: on four hosts
whose links carry 25 MB/s to the next and 100 MB/s back, an all-gather of 20 MB takes 630 ms, where links of 100 MB/s
both ways give 170; a reduce-scatter takes its 340 as ever. NCCL's direction has not been measured."""


def ring_shift(kind: Kind, device_kind: Literal["cuda", "cpu"]) -> int:
    """To which member of a ring each sends, counted from itself: 1 = the next, -1 = the one before."""
    return -1 if kind in _DOWNWARDS[device_kind] else 1


def num_steps(kind: Kind, size: int) -> int:
    """How many chunks each member of a group of `size` sends, one after the other."""
    if size < 2:
        return 0
    if kind == "send":
        return 1
    return 2 * (size - 1) if kind == "all_reduce" else size - 1


def library_share(kind: Kind, device_kind: Literal["cuda", "cpu"]) -> float:
    """How many times the steps of a ring the library is known to take: gloo runs a reduce-scatter as an all-reduce."""
    return 2.0 if device_kind == "cpu" and kind == "reduce_scatter" else 1.0


def chunk_share(kind: Kind, size: int) -> float:
    """The part of the tensor that one step moves."""
    return 1.0 if kind == "send" else 1.0 / size


def spread_over_hosts(host_GK: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the hosts of each group, and its members on the host with the fewest of them; 1 on a single host.

    Args:
        host_GK: the host of every member of every group.

    """
    if (host_GK[:, 1:] < host_GK[:, :-1]).any():
        host_GK = np.sort(host_GK, axis=1)
    begins_GK = np.ones(host_GK.shape, dtype=bool)
    np.not_equal(host_GK[:, 1:], host_GK[:, :-1], out=begins_GK[:, 1:])
    hosts_G = begins_GK.sum(axis=1)
    if hosts_G.max(initial=1) == 1 or host_GK.shape[1] == 2:
        return hosts_G, np.ones_like(hosts_G)
    first = np.flatnonzero(begins_GK)
    # In place: placements are priced by the million.
    members = np.empty_like(first)
    members[:-1] = first[1:]
    members[-1] = host_GK.size
    members -= first
    fewest_G = np.minimum.reduceat(members, hosts_G.cumsum() - hosts_G)
    fewest_G[hosts_G == 1] = 1
    return hosts_G, fewest_G


def links_together(kind: Kind, fewest: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many links between two hosts carry a group's traffic at the same time.

    Links are measured while all slots of two hosts send, so the rate of a link is one slot's share. A ring crosses each
    pair of hosts over the links of all members on a host: one wire that they share, or their own network cards. Each
    byte passes every host, so the host with the fewest members limits the ring: NCCL gives a host with one member one
    network card. Unequal shares of one wire are therefore priced too high. In an all-to-all all members send at once.

    Args:
        kind: of the collective.
        fewest: members on the host that has the fewest, from `spread_over_hosts`.

    """
    return np.ones_like(fewest) if kind == "all_to_all" else fewest


def most_links_together(kind: Kind, size: int, num_hosts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the largest `links_together` of any group of this size, by hosts: members in equal shares."""
    return links_together(kind, np.where(num_hosts > 1, np.maximum(size // np.maximum(num_hosts, 1), 1), 1))


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


# Which kind stands in where one was not measured: the same ring, only run once or twice.
_STAND_IN: dict[Kind, tuple[Kind, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "all_gather": ("reduce_scatter", "all_reduce"),
    "reduce_scatter": ("all_gather", "all_reduce"),
    "all_to_all": (),
    "send": (),
}
LIBRARYS_SHARE = 2.0
"""NCCL may send up to so many times the bytes of a ring."""


def most_from_within(kind: Kind, device_kind: Literal["cuda", "cpu"]) -> float:
    """Return the largest factor on time per byte that groups inside hosts may give to groups across hosts.

    It is asked for where no group across hosts was measured. The factor counts as far as the library's algorithm
    explains it: gloo's reduce-scatter is an all-reduce, its other rings send what a ring must, and NCCL's algorithm is
    not known. A larger factor comes from processors that share a host and does not hold for links between hosts: with
    it, a step of 8 CPU ranks on slow links was predicted to take 22 s, and took 2.9.
    """
    return LIBRARYS_SHARE if device_kind == "cuda" else library_share(kind, device_kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How a collective was measured to differ from the formula; entry h is for groups on h hosts, 0 is unused."""

    latency_factor: NDArray[np.float64]
    """On each link's latency, at most 1."""
    extra_latency_s: NDArray[np.float64]
    """Of each step, on top of its link's."""
    bytes_factor: NDArray[np.float64]
    """On each link's time per byte, which a group's `links_together` divide."""
    least_bytes_factor: NDArray[np.float64]
    """The same, divided by the most links that a group can use together: a lower bound for any group."""
    is_measured: bool


class MeasuredGroups:
    """The groups of slots on which collectives were measured."""

    def __init__(self, cluster: Cluster, collectives: Sequence[CollectiveTime], table: LinkTable) -> None:
        self._hosts = len(cluster.hosts)
        self._devices = cluster.devices_per_host
        self._device_kind = cluster.device_kind
        self._table = table
        self._collectives = tuple(collectives)
        self._scales: dict[tuple[Kind, int], Scale] = {}
        self._corrections: dict[int, tuple[float, float, float]] = {}
        self._spreads: dict[int, tuple[int, int]] = {}
        for measured in self._collectives:
            slots = measured.slots
            if len(slots) < 2 or min(slots) < 0 or max(slots) >= cluster.num_slots:
                raise FactError(
                    f"{measured.kind} was measured on slots {slots}; a group needs two or more of the "
                    f"{cluster.num_slots} slots of this cluster"
                )

    @property
    def any(self) -> bool:
        """Whether any collective was measured, sends apart: these are never corrected."""
        return any(measured.kind != "send" for measured in self._collectives)

    def scale(self, kind: Kind, size: int) -> Scale:
        """Return what the nearest measured group says about groups of this kind and size, for each number of hosts."""
        if (kind, size) in self._scales:
            return self._scales[kind, size]
        rows = np.tile([1.0, 0.0, 1.0], (self._hosts + 1, 1))
        candidates: list[CollectiveTime] = []
        for name in (kind, *_STAND_IN[kind]) if kind != "send" else ():
            candidates = candidates or [measured for measured in self._collectives if measured.kind == name]
        for counts, across in ((np.arange(1, 2), False), (np.arange(2, self._hosts + 1), True)):
            if candidates and len(counts):
                nearest = self._nearest(candidates, size, across=across)
                corrections = np.array([self._carried(measured, kind, size) for measured in nearest])
                spans = np.array([self._num_hosts(measured) for measured in nearest])
                rows[counts] = corrections[np.abs(np.log(spans / counts[:, None])).argmin(axis=1)]
                if across and spans.max() == 1:
                    rows[counts, 2] = np.minimum(rows[counts, 2], most_from_within(kind, self._device_kind))
        together = most_links_together(kind, size, np.arange(self._hosts + 1)) if candidates else 1
        self._scales[kind, size] = Scale(
            latency_factor=rows[:, 0],
            extra_latency_s=rows[:, 1],
            bytes_factor=rows[:, 2],
            least_bytes_factor=rows[:, 2] / together,
            is_measured=bool(candidates),
        )
        return self._scales[kind, size]

    def _nearest(self, candidates: Sequence[CollectiveTime], size: int, *, across: bool) -> list[CollectiveTime]:
        """Within a host or across hosts first, then members; what is left is in the order of its slots.

        So of those that are on equally near numbers of hosts the slots decide, not the order in which they were given.
        """
        same = [measured for measured in candidates if (self._num_hosts(measured) > 1) == across] or candidates
        distances = [abs(np.log(len(measured.slots) / size)) for measured in same]
        near = [measured for measured, distance in zip(same, distances, strict=True) if distance == min(distances)]
        return sorted(near, key=lambda measured: measured.slots)

    def _num_hosts(self, measured: CollectiveTime) -> int:
        return self._spread(measured)[0]

    def _spread(self, measured: CollectiveTime) -> tuple[int, int]:
        """Return the hosts of a measured group, and its members on the host with the fewest."""
        # Groups of several kinds share one tuple of slots.
        key = id(measured.slots)
        if key not in self._spreads:
            hosts, fewest = spread_over_hosts(self._table.host_S[np.array([measured.slots])])
            self._spreads[key] = int(hosts[0]), int(fewest[0])
        return self._spreads[key]

    def _carried(self, measured: CollectiveTime, kind: Kind, size: int) -> tuple[float, float, float]:
        """What a measured group says of each step of another operation."""
        if id(measured) not in self._corrections:
            self._corrections[id(measured)] = self._correction(measured)
        latency_factor, extra_s, bytes_factor = self._corrections[id(measured)]
        more = library_share(kind, self._device_kind) / library_share(measured.kind, self._device_kind)
        bytes_factor *= more
        if self._device_kind == "cpu":
            # What members wait for each other grows with the steps, but less: all-reduces of 4 slots on 2 hosts took
            # 10 ms as those of 2 slots took 7, reduce-scatters of 4 hosts 9 as those of 2 hosts took 3.
            longer = max(num_steps(kind, size), 1) / num_steps(measured.kind, len(measured.slots))
            extra_s *= math.sqrt(longer * more) / longer
        return latency_factor, extra_s, bytes_factor

    def _correction(self, measured: CollectiveTime) -> tuple[float, float, float]:
        """Latency factor, extra latency of a step and byte factor that make the formula give the measured times."""
        slots, size = np.array(measured.slots), len(measured.slots)
        is_ring = measured.kind != "all_to_all"
        shifts = [ring_shift(measured.kind, self._device_kind)] if is_ring else range(1, size)
        used = np.concatenate([self._table.links(slots, np.roll(slots, -shift)) for shift in shifts])
        # The slowest of the links that the group used.
        link_s = float(self._table.latency_s_L[used].max(initial=0.0))
        per_byte_s = float(self._table.seconds_per_byte_L[used].max(initial=0.0))
        steps = num_steps(measured.kind, size)
        step_s = measured.latency_s / steps
        together = float(links_together(measured.kind, np.array(self._spread(measured)[1])))
        byte_s = steps * chunk_share(measured.kind, size) * per_byte_s / together
        factor = step_s / link_s if step_s < link_s else 1.0
        return factor, max(step_s - link_s, 0.0), measured.seconds_per_byte / byte_s


__all__ = ["Fabric", "Kind", "Routes", "chunk_share", "num_steps"]

LINKS_AT_ONCE = 1 << 19
"""An all-to-all is priced in pieces of about so many links, some tens of MB."""


_Spread: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Number of hosts of each group, and number of its members on the host with the fewest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """The links of rings or sends, looked up once and priced for any number of sizes."""

    hosts_G: NDArray[np.int64]
    """Hosts that each group lies on; 0 where no measurement asks for it."""
    fewest_G: NDArray[np.int64]
    """Members on the host that has the fewest; 1 on a single host, and where no measurement asks for it."""
    latency_s_GL: NDArray[np.float64]
    seconds_per_byte_GL: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsOnHosts:
    """What is known of where some groups lie."""

    size_T: NDArray[np.int64]
    """Members of each."""
    fewest_T: NDArray[np.int64]
    """Hosts that it lies on, at least."""
    among_T: NDArray[np.int64]
    """It has a slot on one of so many of the hosts, those with the slowest links; of no matter if one host may do."""


class Fabric:
    """The links of an allocation, with what was measured on groups of them.

    It holds the H x H links between hosts and the D x D within each different one, never S x S.
    """

    def __init__(self, cluster: Cluster, collectives: Sequence[CollectiveTime] = ()) -> None:
        self.cluster = cluster
        self._table = LinkTable.of(cluster)
        self.host_S = self._table.host_S
        self.domain_slots = min(Domains.of(cluster).domain_devices)
        """Slots of an NVLink domain, or of a host that is one."""
        self._best_across = best_links([cluster.between_hosts])
        self._best_within = best_links(cluster.within_host)
        self._measured = MeasuredGroups(cluster, collectives, self._table)
        self._bound_lines: dict[tuple[Kind, int, int, int | None], list[tuple[float, float]]] = {}

    @cached_property
    def _bottlenecks(self) -> Bottlenecks:
        return Bottlenecks(self.cluster.between_hosts)

    @cached_property
    def _slowest_first_H(self) -> NDArray[np.int64]:
        return np.argsort(-self._bottlenecks.slowness_H(2), kind="stable")

    @cached_property
    def slowness_falling_H(self) -> NDArray[np.float64]:
        """Seconds per byte of each host's best link out or in, whichever is slower; the slowest host first."""
        return self._bottlenecks.slowness_H(2)[self._slowest_first_H]

    def seconds(self, kind: Kind, slots: Sequence[int], size_bytes: float) -> float:
        """Price one group; its ring runs in the order of `slots`."""
        return float(self.seconds_G(kind, np.array([slots], dtype=np.int64), size_bytes)[0])

    def seconds_G(
        self, kind: Kind, slots_GK: NDArray[np.int64], size_bytes: float | NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Price groups of one size, each by itself; `size_bytes` may differ from group to group."""
        size = slots_GK.shape[1]
        if num_steps(kind, size) == 0:
            return np.zeros(slots_GK.shape[0])
        if kind != "all_to_all":
            return self.routed_s_G(kind, size, self.routes(kind, slots_GK), size_bytes)
        spread = self._spread(slots_GK)
        step_s_G = np.zeros(len(slots_GK))
        at_once = max(1, LINKS_AT_ONCE // max(slots_GK.size, 1))
        for first in range(1, size, at_once):
            # To the receivers of each member, shift by shift.
            shifts = range(first, min(first + at_once, size))
            receiver_GL = np.concatenate([np.roll(slots_GK, -shift, axis=1) for shift in shifts], axis=1)
            routes = self._routes(spread, np.tile(slots_GK, (1, len(shifts))), receiver_GL)
            step_s_G = np.maximum(step_s_G, self._step_s_G(kind, size, routes, size_bytes))
        return self._steps_s(kind, size, spread[0], step_s_G)

    def send_s(self, sender: NDArray[np.int64], receiver: NDArray[np.int64], size_bytes: float) -> NDArray[np.float64]:
        """Price sends from slots to slots of equal shape."""
        links = self._table.links(sender, receiver)
        seconds = self._table.seconds_per_byte_L.take(links)
        seconds *= size_bytes
        seconds += self._table.latency_s_L.take(links)
        return seconds

    def routes(self, kind: Kind, slots_GK: NDArray[np.int64]) -> Routes:
        """Look up the links of rings, or of sends from the first to the second of each pair.

        Rings over the same slots have the same routes where `ring_shift` is the same. An all-to-all has too many links
        for this; `seconds_G` prices it piece by piece.
        """
        if kind == "send":
            return self._routes(_not_asked(len(slots_GK)), slots_GK[:, :1], slots_GK[:, 1:2])
        return self._routes(self._spread(slots_GK), slots_GK, np.roll(slots_GK, -self.ring_shift(kind), axis=1))

    def ring_shift(self, kind: Kind) -> int:
        """To which member of a ring each sends: 1 = the next, -1 = the one before."""
        return ring_shift(kind, self.cluster.device_kind)

    def routed_s_G(
        self, kind: Kind, size: int, routes: Routes, size_bytes: float | NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Price groups of `size` slots whose links were looked up by `routes`."""
        return self._steps_s(kind, size, routes.hosts_G, self._step_s_G(kind, size, routes, size_bytes))

    def _routes(self, spread: _Spread, sender: NDArray[np.int64], receiver: NDArray[np.int64]) -> Routes:
        links = self._table.links(sender, receiver)
        return Routes(
            hosts_G=spread[0],
            fewest_G=spread[1],
            latency_s_GL=self._table.latency_s_L.take(links),
            seconds_per_byte_GL=self._table.seconds_per_byte_L.take(links),
        )

    def _step_s_G(
        self, kind: Kind, size: int, routes: Routes, size_bytes: float | NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Slowest link of one step."""
        scale = self.scale(kind, size)
        latency_s, per_byte_s = routes.latency_s_GL, routes.seconds_per_byte_GL
        if scale.is_measured:
            latency_s = latency_s * scale.latency_factor[routes.hosts_G][:, None]
            factor_G = scale.bytes_factor[routes.hosts_G] / links_together(kind, routes.fewest_G)
            per_byte_s = per_byte_s * factor_G[:, None]
        chunk = np.asarray(size_bytes, dtype=np.float64) * chunk_share(kind, size)
        step_s_GL = per_byte_s * (chunk[:, None] if chunk.ndim else chunk)
        step_s_GL += latency_s
        return np.asarray(step_s_GL.max(axis=1))

    def _steps_s(
        self, kind: Kind, size: int, hosts_G: NDArray[np.int64], step_s_G: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        scale = self.scale(kind, size)
        if scale.is_measured:
            step_s_G = step_s_G + scale.extra_latency_s[hosts_G]
        return num_steps(kind, size) * step_s_G

    def bound_s(self, kind: Kind, size: int, size_bytes: float) -> float:
        """No group of `size` slots, wherever it lies, is faster than this: its slowest link is at best the best one.

        A group on one host has only links within hosts; one on several crosses hosts at least once.
        """
        return min(fixed_s + byte_s * size_bytes for fixed_s, byte_s in self._bound_lines_of(kind, size))

    def bounds_s(
        self, kind: Kind, size: int, size_bytes: NDArray[np.int64 | np.float64], *, fewest: int = 1
    ) -> NDArray[np.float64]:
        """Return `bound_s` of many sizes at once; what has nothing to send takes no time.

        Args:
            kind: of the collective.
            size: members of each group.
            size_bytes: of any shape.
            fewest: hosts that each group lies on, at least.

        """
        found = np.full(size_bytes.shape, np.inf)
        for fixed_s, byte_s in self._bound_lines_of(kind, size, fewest):
            found = np.minimum(found, fixed_s + byte_s * size_bytes)
        return np.where(size_bytes > 0, found, 0.0)

    def groups_bound_s(self, kind: Kind, lie: GroupsOnHosts, bytes_TVP: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the bounds of groups of many kinds, by those of the first axis of `bytes_TVP`."""
        if not (lie.size_T.max() > 1 and bytes_TVP.any()):
            return np.zeros(bytes_TVP.shape)
        keys = [*zip(lie.size_T.tolist(), lie.fewest_T.tolist(), lie.among_T.tolist(), strict=True)]
        place = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        lines = [self._bound_lines_of(kind, *key) for key in place]
        most = max(map(len, lines))
        lines_UL2 = np.array([[*one, *([one[-1]] * (most - len(one)))] for one in lines])
        row_T = np.array([place[key] for key in keys])
        found = np.full(bytes_TVP.shape, np.inf)
        for fixed_U, byte_U in lines_UL2.transpose(1, 2, 0):
            found = np.minimum(found, fixed_U[row_T][:, None, None] + byte_U[row_T][:, None, None] * bytes_TVP)
        return np.where(bytes_TVP > 0, found, 0.0)

    def _bound_lines_of(
        self, kind: Kind, size: int, fewest: int = 1, among: int | None = None
    ) -> list[tuple[float, float]]:
        """Return fixed seconds and seconds per byte of some lines, the lowest of which is the bound at every size.

        Without `among` these are of the best link alone: it does not count that a group's slowest link joins its hosts.
        """
        key = kind, size, fewest, among
        if key not in self._bound_lines:
            self._bound_lines[key] = self._new_bound_lines(*key)
        return self._bound_lines[key]

    def _new_bound_lines(self, kind: Kind, size: int, fewest: int, among: int | None) -> list[tuple[float, float]]:
        steps, hosts = num_steps(kind, size), len(self.cluster.hosts)
        if steps == 0:
            return [(0.0, 0.0)]
        scale = self.scale(kind, size)
        fewest = max(fewest, -(-size // self.cluster.devices_per_host))
        across = slice(max(fewest, 2), min(size, hosts) + 1)
        if among is None or fewest < 2:
            ways = [(slice(fewest, 2), self._best_within), (across, self._best_across)]
        else:
            # Which of these hosts it lies on is not known: the fastest counts.
            slowest = float(self._bottlenecks.slowness_H(fewest)[self._slowest_first_H[:among]].min())
            ways = [(across, tuple((latency_s, max(byte_s, slowest)) for latency_s, byte_s in self._best_across))]
        pieces = []
        for counts, links in ways:
            for latency_s, byte_s in links:
                fixed_s = latency_s * scale.latency_factor[counts] + scale.extra_latency_s[counts]
                per_byte_s = byte_s * scale.least_bytes_factor[counts] * chunk_share(kind, size)
                pieces.append(np.stack([fixed_s, per_byte_s]))
        lines_2L = steps * np.unique(np.concatenate(pieces, axis=1), axis=1)
        # Sorted by the fixed part: a line counts where it is cheaper by the byte than all before it.
        cheaper_L = np.append(True, lines_2L[1, 1:] < np.minimum.accumulate(lines_2L[1])[:-1])
        return [(fixed_s, byte_s) for fixed_s, byte_s in lines_2L[:, cheaper_L].T.tolist()]

    def scale(self, kind: Kind, size: int) -> Scale:
        """Return what the nearest measured group says about groups of this kind and size, for each number of hosts."""
        return self._measured.scale(kind, size)

    def _spread(self, slots_GK: NDArray[np.int64]) -> _Spread:
        """Count each group's hosts, and its members on the host with the fewest, where a measurement asks for them."""
        return spread_over_hosts(self.host_S[slots_GK]) if self._measured.any else _not_asked(len(slots_GK))


def _not_asked(num_groups: int) -> _Spread:
    return np.zeros(num_groups, dtype=np.int64), np.ones(num_groups, dtype=np.int64)
