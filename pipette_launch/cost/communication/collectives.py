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

# G = groups of one kind, K = members of a group in ring order, L = links of a group, T = groups of any kinds.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.links import Bottlenecks, LinkTable, best_links
from pipette_launch.cost.communication.scales import MeasuredGroups, Scale
from pipette_launch.cost.communication.steps import (
    Kind,
    chunk_share,
    links_together,
    num_steps,
    ring_shift,
    spread_over_hosts,
)
from pipette_launch.facts.cluster import Cluster
from pipette_launch.facts.co_location import Rooms
from pipette_launch.facts.measurements import CollectiveTime

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
        self.domain_slots = min(Rooms.of(cluster).domain_devices)
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
