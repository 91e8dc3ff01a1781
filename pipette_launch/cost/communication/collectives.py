"""Seconds for collectives and sends over the links of an allocation.

Every collective is a sequence of equal steps. In each step every member sends one chunk, and the step takes as long as
its slowest link (alpha-beta model; Thakur, Rabenseifner, Gropp 2005, sections 4.1 to 4.5). `COLLECTIVES` has the steps
of each kind. Sizes are the bytes of the full tensor on one rank: before a reduce-scatter, after an all-gather.

The measured time of a group of equal or similar size corrects the formula by a factor on the time per byte and an extra
latency for each step. With its correction, the formula returns the measured time for a measured group, and a longer
time for slower links. Predicted sends need no correction, because the warm-up measures links by sends. Groups that run
at the same time are priced one by one, because the warm-up also measured each group while similar groups were running.
"""

# Letters of array axes: G = groups of one kind, K = members of a group in ring order, L = links, T = groups of any
# kinds, S = slots, H = hosts, D = devices of one host.

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost import Memo
from pipette_launch.cost.layers.loads import Collective
from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Cluster, Links
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.facts.measurements import CollectiveTime

LINKS_AT_ONCE = 1 << 19
"""Number of links of all-to-alls that a numpy call prices together, so that its arrays need some tens of MB."""
LIBRARYS_SHARE = 2.0
"""Largest ratio of the bytes that NCCL's algorithms send to the bytes of a ring."""


class _Kind(NamedTuple):
    """Number of steps of one kind of collective, and the measurements that may correct its price."""

    rounds: int = 1
    """Number of times that each member's chunk travels around the ring, or to every other member (all-to-all)."""
    is_ring: bool = True
    """True if members send around a ring, which uses the links of all members on a host at the same time."""
    stand_ins: tuple[Collective, ...] = ()
    """Kinds that run the same ring once or twice. Their measurements replace missing measurements of this kind."""
    gloo_runs: float = 1.0
    """Number of rings that gloo runs: 2 for reduce-scatter, which gloo runs as an all-reduce."""
    gloo_shift: int = 1
    """Ring neighbour to which each member sends over gloo: 1 = the next, -1 = the previous."""


COLLECTIVES: dict[Collective, _Kind] = {
    "all_reduce": _Kind(rounds=2, stand_ins=("reduce_scatter", "all_gather"), gloo_shift=-1),
    "all_gather": _Kind(stand_ins=("reduce_scatter", "all_reduce")),
    "reduce_scatter": _Kind(stand_ins=("all_gather", "all_reduce"), gloo_runs=2.0, gloo_shift=-1),
    "all_to_all": _Kind(is_ring=False),
    "send": _Kind(),
}
"""Number of steps and use of measurements for every kind of collective. The direction of gloo's rings was measured on
four hosts whose links carry 25 MB/s to the next host and 100 MB/s back. An all-gather of 20 MB took 630 ms on these
links, and 170 ms on links of 100 MB/s in both directions. A reduce-scatter of gloo took 340 ms on both sets of links.
The direction of NCCL's rings has not been measured, and the model assumes that members send to the next rank."""


def num_steps(kind: Collective, size: int) -> int:
    """Return the number of chunks that each member of a group of `size` members sends, one after the other."""
    if size < 2:
        return 0
    return 1 if kind == "send" else COLLECTIVES[kind].rounds * (size - 1)


def chunk_share(kind: Collective, size: int) -> float:
    """Return the share of the full tensor that a single step of a collective moves."""
    return 1.0 if kind == "send" else 1.0 / size


def spread_over_hosts(host_GK: Ints) -> tuple[Ints, Ints]:
    """Count each group's hosts, and its members on the host with the fewest members; (1, 1) for a group on one host."""
    if (host_GK[:, 1:] < host_GK[:, :-1]).any():
        host_GK = np.sort(host_GK, axis=1)
    begins_GK = np.ones(host_GK.shape, dtype=bool)
    np.not_equal(host_GK[:, 1:], host_GK[:, :-1], out=begins_GK[:, 1:])
    hosts_G = begins_GK.sum(axis=1)
    if hosts_G.max(initial=1) == 1 or host_GK.shape[1] == 2:
        return hosts_G, np.ones_like(hosts_G)
    first = np.flatnonzero(begins_GK)
    members = np.diff(first, append=host_GK.size)
    fewest_G = np.minimum.reduceat(members, hosts_G.cumsum() - hosts_G)
    fewest_G[hosts_G == 1] = 1
    return hosts_G, fewest_G


def links_together(kind: Collective, fewest: Ints) -> Ints:
    """Return the number of links between two hosts that carry a group's traffic at the same time.

    Links are measured while all slots of two hosts send, so the rate of a link is one slot's share. A ring between
    hosts uses the links of all members on a host, and the host with the fewest members limits the ring. The
    collective's predicted time is too long if the members on one host share one network card. In an all-to-all each
    member uses only its own link. `fewest` is the least number of members on a host, from `spread_over_hosts`.
    """
    return fewest if COLLECTIVES[kind].is_ring else np.ones_like(fewest)


class LinkTable:
    """All links in one array: H * H links between hosts, then D * D links for each distinct matrix within hosts."""

    def __init__(self, cluster: Cluster) -> None:
        hosts, devices = len(cluster.hosts), cluster.devices_per_host
        kinds: dict[Links, int] = {}
        kind_H = np.array([kinds.setdefault(links, len(kinds)) for links in cluster.within_host], dtype=np.int64)
        matrices = (cluster.between_hosts, *kinds)
        self.latency_s_L: Floats = np.concatenate(
            [np.where(np.eye(len(links.latency_s), dtype=bool), 0.0, links.latency_s).ravel() for links in matrices]
        )
        """Latency of each link; 0 from a host or device to itself, as in `seconds_per_byte_L`."""
        self.seconds_per_byte_L: Floats = np.concatenate([links.seconds_per_byte.ravel() for links in matrices])
        slots = np.arange(cluster.num_slots)
        self.host_S: Ints = slots // devices
        self._local_S: Ints = slots % devices
        self._between_S: Ints = self.host_S * hosts
        """Index, in the array of all links, of the first link from a slot's host to the hosts."""
        self._within_S: Ints = hosts * hosts + (kind_H[self.host_S] * devices + self._local_S) * devices
        """Index, in the array of all links, of the first link from a slot to the slots of its own host."""

    def links(self, sender: Ints, receiver: Ints) -> Ints:
        """Return the index of the link from each sender to its receiver; both arrays have the same shape."""
        to_host = self.host_S.take(receiver)
        links = self._between_S.take(sender)
        links += to_host
        inside = self.host_S.take(sender) == to_host
        if inside.any():
            links[inside] = self._within_S[sender[inside]] + self._local_S[receiver[inside]]
        return links


def best_links(matrices: Sequence[Links]) -> tuple[tuple[float, float], ...]:
    """Return (latency, seconds per byte) of the links that no other link beats in both numbers, by rising latency."""
    # The diagonal of a matrix is not a link.
    different = [(links, ~np.eye(len(links.latency_s), dtype=bool)) for links in dict.fromkeys(matrices)]
    latency_s = np.concatenate([links.latency_s[apart] for links, apart in different])
    byte_s = np.concatenate([links.seconds_per_byte[apart] for links, apart in different])
    front: list[tuple[float, float]] = []
    while len(latency_s):
        least_s = latency_s.min()
        per_byte = byte_s[latency_s == least_s].min()
        front.append((float(least_s), float(per_byte)))
        left = byte_s < per_byte
        latency_s, byte_s = latency_s[left], byte_s[left]
    return tuple(front)


def spanning_tree(cost_HH: Floats) -> list[tuple[float, int, int]]:
    """Return (cost, host, host) of the links of a minimum spanning tree, cheapest first (Prim 1957).

    If the tree's links up to some cost do not connect two hosts, no other links up to this cost connect the two hosts.
    Each pair of hosts counts with the cheaper of its two directed links, so the tree's costs are lower bounds for any
    ring.
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


class Scale(NamedTuple):
    """Measured difference between a collective and the formula, by number of hosts; entry 0 of each array is unused."""

    latency_factor: Floats
    """Factor on each link's latency, at most 1."""
    extra_latency_s: Floats
    """Latency of each step beyond its link's latency."""
    bytes_factor: Floats
    """Factor on each link's time per byte, to be divided by a group's `links_together`."""
    least_bytes_factor: Floats
    """`bytes_factor` divided by the largest number of links that a group can use at the same time."""


class _MeasuredGroup:
    """A group of slots on which a collective was measured."""

    def __init__(self, measured: CollectiveTime, device_kind: str, table: LinkTable) -> None:
        self.measured, self.slots, self.size = measured, measured.slots, len(measured.slots)
        self._device_kind, self._table = device_kind, table
        hosts, fewest = spread_over_hosts(table.host_S[np.array([measured.slots])])
        self.hosts, self._fewest = int(hosts[0]), fewest

    @cached_property
    def _correction(self) -> tuple[float, float, float]:
        """Correction (latency factor, extra latency of a step, byte factor) that gives the measured time."""
        kind, size, slots = self.measured.kind, self.size, np.array(self.slots)
        shifts = [_ring_shift(kind, self._device_kind)] if COLLECTIVES[kind].is_ring else range(1, size)
        used = np.concatenate([self._table.links(slots, np.roll(slots, -shift)) for shift in shifts])
        # Latency and seconds per byte of the slowest link that the measured group used.
        link_s = float(self._table.latency_s_L[used].max(initial=0.0))
        per_byte_s = float(self._table.seconds_per_byte_L[used].max(initial=0.0))
        steps = num_steps(kind, size)
        step_s = self.measured.latency_s / steps
        byte_s = steps * chunk_share(kind, size) * per_byte_s / float(links_together(kind, self._fewest)[0])
        factor = step_s / link_s if step_s < link_s else 1.0
        return factor, max(step_s - link_s, 0.0), self.measured.seconds_per_byte / byte_s

    def carried(self, kind: Collective, size: int) -> tuple[float, float, float]:
        """Convert the correction into a correction for each step of another collective or group size."""
        latency_factor, extra_s, bytes_factor = self._correction
        more = _library_runs(kind, self._device_kind) / _library_runs(self.measured.kind, self._device_kind)
        if self._device_kind == "cpu":
            # With gloo, the time in which members wait for each other grows more slowly than the number of steps. An
            # all-reduce over gloo took 10 ms on 4 slots of 2 hosts, and 7 ms on 2 slots. A reduce-scatter over gloo
            # took 9 ms on 4 hosts, and 3 ms on 2 hosts.
            longer = max(num_steps(kind, size), 1) / num_steps(self.measured.kind, self.size)
            extra_s *= math.sqrt(longer * more) / longer
        return latency_factor, extra_s, bytes_factor * more


def _ring_shift(kind: Collective, device_kind: str) -> int:
    return COLLECTIVES[kind].gloo_shift if device_kind == "cpu" else 1


def _library_runs(kind: Collective, device_kind: str) -> float:
    return COLLECTIVES[kind].gloo_runs if device_kind == "cpu" else 1.0


class Routes(NamedTuple):
    """Links of rings or sends, looked up once to price tensors of many sizes."""

    hosts_G: Ints
    """Number of hosts of each group; 0 for sends, which no measurement corrects."""
    fewest_G: Ints
    """Members of each group on the host with the fewest members; 1 on a single host, and for sends."""
    latency_s_GL: Floats
    seconds_per_byte_GL: Floats


class Fabric:
    """Links of an allocation, with corrections from the collectives that were measured on this allocation."""

    def __init__(self, cluster: Cluster, collectives: Sequence[CollectiveTime] = ()) -> None:
        self.cluster = cluster
        self._table = LinkTable(cluster)
        self.host_S = self._table.host_S
        self.domain_slots = Domains.of(cluster).smallest
        self._best_across = best_links([cluster.between_hosts])
        self._best_within = best_links(cluster.within_host)
        for measured in collectives:
            slots = measured.slots
            if len(slots) < 2 or min(slots) < 0 or max(slots) >= cluster.num_slots:
                raise FactError(
                    f"{measured.kind} was measured on slots {slots}; a group needs two or more of the "
                    f"{cluster.num_slots} slots of this cluster"
                )
        self._measured = [
            _MeasuredGroup(one, cluster.device_kind, self._table) for one in collectives if one.kind != "send"
        ]
        self._scales: Memo[Scale] = Memo()
        self._bound_lines: Memo[list[tuple[float, float]]] = Memo()

    def seconds(self, kind: Collective, slots: Sequence[int], size_bytes: float) -> float:
        """Return the seconds of one group's collective, whose ring visits the members in the order of `slots`."""
        return float(self.seconds_G(kind, np.array([slots], dtype=np.int64), size_bytes)[0])

    def seconds_G(self, kind: Collective, slots_GK: Ints, size_bytes: float | Floats) -> Floats:
        """Return the seconds of each of several groups of one size; `size_bytes` may differ from group to group."""
        size = slots_GK.shape[1]
        if num_steps(kind, size) == 0:
            return np.zeros(slots_GK.shape[0])
        if kind != "all_to_all":
            return self.routed_s_G(kind, size, self.routes(kind, slots_GK), size_bytes)
        spread, step_s_G = self._spread(slots_GK), np.zeros(len(slots_GK))
        at_once = max(1, LINKS_AT_ONCE // max(slots_GK.size, 1))
        for first in range(1, size, at_once):
            # Links from each member to all its receivers: to the next member, the member two places on, and so on.
            shifts = range(first, min(first + at_once, size))
            receiver_GL = np.concatenate([np.roll(slots_GK, -shift, axis=1) for shift in shifts], axis=1)
            routes = self._routes(spread, np.tile(slots_GK, (1, len(shifts))), receiver_GL)
            step_s_G = np.maximum(step_s_G, self._step_s_G(kind, size, routes, size_bytes))
        return self._steps_s(kind, size, spread[0], step_s_G)

    def send_s(self, sender: Ints, receiver: Ints, size_bytes: float) -> Floats:
        """Return the seconds of the send from each sender to its receiver."""
        links = self._table.links(sender, receiver)
        return self._table.seconds_per_byte_L.take(links) * size_bytes + self._table.latency_s_L.take(links)

    def routes(self, kind: Collective, slots_GK: Ints) -> Routes:
        """Look up the links of rings or, for kind `send`, of sends from the first to the second slot of each pair.

        Two rings over the same slots have equal routes if their `ring_shift` is equal. An all-to-all uses too many
        links for one array, so `seconds_G` prices an all-to-all in pieces.
        """
        if kind == "send":
            alone_G = np.ones(len(slots_GK), dtype=np.int64)
            return self._routes((0 * alone_G, alone_G), slots_GK[:, :1], slots_GK[:, 1:2])
        return self._routes(self._spread(slots_GK), slots_GK, np.roll(slots_GK, -self.ring_shift(kind), axis=1))

    def ring_shift(self, kind: Collective) -> int:
        """Return the ring neighbour to which each member sends: 1 = the next, -1 = the previous."""
        return _ring_shift(kind, self.cluster.device_kind)

    def routed_s_G(self, kind: Collective, size: int, routes: Routes, size_bytes: float | Floats) -> Floats:
        """Return the seconds of groups of `size` slots whose links were looked up by the method `routes`."""
        return self._steps_s(kind, size, routes.hosts_G, self._step_s_G(kind, size, routes, size_bytes))

    def _routes(self, spread: tuple[Ints, Ints], sender: Ints, receiver: Ints) -> Routes:
        links = self._table.links(sender, receiver)
        return Routes(*spread, self._table.latency_s_L.take(links), self._table.seconds_per_byte_L.take(links))

    def _spread(self, slots_GK: Ints) -> tuple[Ints, Ints]:
        return spread_over_hosts(self.host_S[slots_GK])

    def _step_s_G(self, kind: Collective, size: int, routes: Routes, size_bytes: float | Floats) -> Floats:
        """Return the seconds of a chunk on the slowest link that the groups use in one step of a collective."""
        scale = self.scale(kind, size)
        latency_s = routes.latency_s_GL * scale.latency_factor[routes.hosts_G][:, None]
        factor_G = scale.bytes_factor[routes.hosts_G] / links_together(kind, routes.fewest_G)
        per_byte_s = routes.seconds_per_byte_GL * factor_G[:, None]
        chunk = np.asarray(size_bytes, dtype=np.float64) * chunk_share(kind, size)
        step_s_GL = per_byte_s * (chunk[:, None] if chunk.ndim else chunk)
        step_s_GL += latency_s
        return np.asarray(step_s_GL.max(axis=1))

    def _steps_s(self, kind: Collective, size: int, hosts_G: Ints, step_s_G: Floats) -> Floats:
        return num_steps(kind, size) * (step_s_G + self.scale(kind, size).extra_latency_s[hosts_G])

    def least_hosts(self, size: int, stride: int) -> int:
        """Return the least number of hosts of a group of `size` members whose ranks differ by multiples of `stride`.

        On CUDA, the ranks of a host differ modulo its devices, so members with equal remainders lie on different hosts.
        """
        devices = self.cluster.devices_per_host
        apart = math.gcd(stride, devices) if self.cluster.keeps_residues else 1
        return -(-size * apart // devices)

    def bound_s(self, kind: Collective, size: int, size_bytes: float, *, fewest: int = 1) -> float:
        """Return a lower bound of the seconds of any group of `size` slots, as if all its links were the best link.

        A group on one host uses only links within hosts. A group on several hosts uses at least one link between hosts.
        The group has members on at least `fewest` hosts.
        """
        return min(fixed_s + byte_s * size_bytes for fixed_s, byte_s in self._bound_lines_of(kind, size, fewest))

    def bounds_s(
        self,
        kind: Collective,
        size: int,
        size_bytes: NDArray[np.int64 | np.float64],
        *,
        fewest: int = 1,
        way: tuple[float, float] | None = None,
    ) -> Floats:
        """Return `bound_s` of an array of sizes; 0 s for 0 bytes.

        If `way` is given, the slowest link between hosts has at least this latency and these seconds per byte.
        """
        found = np.full(size_bytes.shape, np.inf)
        for fixed_s, byte_s in self._bound_lines_of(kind, size, fewest, way):
            found = np.minimum(found, fixed_s + byte_s * size_bytes)
        return np.where(size_bytes > 0, found, 0.0)

    def _bound_lines_of(
        self, kind: Collective, size: int, fewest: int, way: tuple[float, float] | None = None
    ) -> list[tuple[float, float]]:
        """Return (fixed seconds, seconds per byte) of lines whose minimum at any size bounds a collective's time."""
        key = kind, size, fewest, way
        return self._bound_lines.get(key, lambda: self._new_bound_lines(*key) if size > 1 else [(0.0, 0.0)])

    def _new_bound_lines(
        self, kind: Collective, size: int, fewest: int, way: tuple[float, float] | None
    ) -> list[tuple[float, float]]:
        scale = self.scale(kind, size)
        fewest = max(fewest, -(-size // self.cluster.devices_per_host))
        across = slice(max(fewest, 2), min(size, len(self.cluster.hosts)) + 1)
        pieces = []
        for counts, links in ((slice(fewest, 2), self._best_within), (across, (way,) if way else self._best_across)):
            for latency_s, byte_s in links:
                fixed_s = latency_s * scale.latency_factor[counts] + scale.extra_latency_s[counts]
                per_byte_s = byte_s * scale.least_bytes_factor[counts] * chunk_share(kind, size)
                pieces.append(np.stack([fixed_s, per_byte_s]))
        lines_2L = num_steps(kind, size) * np.unique(np.concatenate(pieces, axis=1), axis=1)
        # The lines are sorted by fixed seconds. A line is needed only if no earlier line has fewer seconds per byte.
        cheaper_L = np.append(True, lines_2L[1, 1:] < np.minimum.accumulate(lines_2L[1])[:-1])
        return [(fixed_s, byte_s) for fixed_s, byte_s in lines_2L[:, cheaper_L].T.tolist()]

    def scale(self, kind: Collective, size: int) -> Scale:
        """Return the correction of the nearest measured group for groups of this kind and size, by number of hosts."""
        return self._scales.get((kind, size), lambda: self._new_scale(kind, size))

    def _new_scale(self, kind: Collective, size: int) -> Scale:
        """Return the correction of a group, whose byte factor is limited if no group across hosts was measured.

        The limit of the byte factor is 2 for gloo's reduce-scatter (an all-reduce), 1 for gloo's other rings, and
        LIBRARYS_SHARE for NCCL. A byte factor above this limit comes from processes that share the cores of a host, so
        it does not apply to links between hosts. Without a limit of the byte factor, the predicted step of 8 CPU ranks
        on slow links was 22 s, but the measured step was 2.9 s.
        """
        num_hosts, device_kind = len(self.cluster.hosts), self.cluster.device_kind
        rows = np.tile([1.0, 0.0, 1.0], (num_hosts + 1, 1))
        candidates: list[_MeasuredGroup] = []
        for name in (kind, *COLLECTIVES[kind].stand_ins):
            candidates = candidates or [one for one in self._measured if one.measured.kind == name]
        for counts, across in ((np.arange(1, 2), False), (np.arange(2, num_hosts + 1), True)):
            if candidates and len(counts):
                nearest = _nearest(candidates, size, across=across)
                corrections = np.array([one.carried(kind, size) for one in nearest])
                spans = np.array([one.hosts for one in nearest])
                rows[counts] = corrections[np.abs(np.log(spans / counts[:, None])).argmin(axis=1)]
                if across and spans.max() == 1:
                    most = LIBRARYS_SHARE if device_kind == "cuda" else _library_runs(kind, device_kind)
                    rows[counts, 2] = np.minimum(rows[counts, 2], most)
        hosts = np.arange(num_hosts + 1)
        # A group uses most links at the same time if all its hosts have the same number of its members.
        fewest = np.where(hosts > 1, np.maximum(size // np.maximum(hosts, 1), 1), 1)
        return Scale(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 2] / links_together(kind, fewest))


def _nearest(candidates: Sequence[_MeasuredGroup], size: int, *, across: bool) -> list[_MeasuredGroup]:
    """Return the measured groups of the nearest size; if `across`, prefer groups on several hosts.

    Sorting by slots makes the result independent of the order of the measurements.
    """
    same = [one for one in candidates if (one.hosts > 1) == across] or candidates
    distances = [abs(np.log(one.size / size)) for one in same]
    near = [one for one, distance in zip(same, distances, strict=True) if distance == min(distances)]
    return sorted(near, key=lambda one: one.slots)
