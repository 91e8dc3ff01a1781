"""Seconds for an all-reduce, all-gather, reduce-scatter, all-to-all or send over given links.

Every collective is a sequence of equal steps in which each member sends one chunk, and each step takes as long as its
slowest link (alpha-beta model; Thakur, Rabenseifner, Gropp 2005, sections 4.1 to 4.5):

    all_reduce      2(k - 1) steps of bytes / k around the ring
    all_gather       (k - 1) steps of bytes / k around the ring
    reduce_scatter   (k - 1) steps of bytes / k around the ring
    all_to_all       (k - 1) steps of bytes / k, over every pair
    send                   1 step of bytes

`bytes` is the full tensor on one rank: before a reduce-scatter, after an all-gather. Where a group of the same or of a
near shape was measured, its fit corrects this formula, so a group that was measured costs what was measured: time per
byte in proportion, so that slower links cost more; latency beyond that of the links as an addition to each step, as it
is the library's, not the link's. A send is not corrected: the links themselves are measured by sends. Groups that run
at the same time are priced each by itself: their contention is in the price as far as it was in the measurement.
"""

# S = slots, G = groups of one kind, K = members of a group in ring order.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Cluster, Links
from pipette_launch.facts.measurements import CollectiveTime

T = TypeVar("T", float, NDArray[np.float64])
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]

# Which kind stands in where one was not measured: the same ring, only run once or twice.
_STAND_IN: dict[Kind, tuple[Kind, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "all_gather": ("reduce_scatter", "all_reduce"),
    "reduce_scatter": ("all_gather", "all_reduce"),
    "all_to_all": (),
    "send": (),
}


def num_steps(kind: Kind, size: int) -> int:
    """How many chunks each member of a group of `size` sends, one after the other."""
    if size < 2:
        return 0
    if kind == "send":
        return 1
    return 2 * (size - 1) if kind == "all_reduce" else size - 1


def chunk_share(kind: Kind, size: int) -> float:
    """The part of the tensor that one step moves."""
    return 1.0 if kind == "send" else 1.0 / size


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How a collective was measured to differ from the formula; entry h is for groups on h hosts, 0 is unused."""

    latency_factor: NDArray[np.float64]
    """On each link's latency, at most 1."""
    extra_latency_s: NDArray[np.float64]
    """Of each step, on top of its link's."""
    bytes_factor: NDArray[np.float64]
    """On each link's time per byte."""
    is_measured: bool


class Fabric:
    """The links of an allocation, with what was measured on groups of them."""

    def __init__(self, cluster: Cluster, collectives: Sequence[CollectiveTime] = ()) -> None:
        self.cluster = cluster
        self.latency_s_SS = cluster.latency_s_SS()
        self.seconds_per_byte_SS = cluster.seconds_per_byte_SS()
        self.host_S = np.arange(cluster.num_slots) // cluster.devices_per_host
        self._best_across = _best_links([cluster.between_hosts])
        self._best_within = _best_links(cluster.within_host)
        self._collectives = tuple(collectives)
        self._scales: dict[tuple[Kind, int], Scale] = {}
        for measured in self._collectives:
            if not all(0 <= slot < cluster.num_slots for slot in measured.slots) or len(measured.slots) < 2:
                raise FactError(
                    f"{measured.kind} was measured on slots {measured.slots}; a group needs two or more of the "
                    f"{cluster.num_slots} slots of this cluster"
                )

    def seconds(self, kind: Kind, slots: Sequence[int], size_bytes: float) -> float:
        """Price one group; its ring runs in the order of `slots`."""
        return float(self.seconds_G(kind, np.array([slots], dtype=np.int64), size_bytes)[0])

    def seconds_G(
        self, kind: Kind, slots_GK: NDArray[np.int64], size_bytes: float | NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Price groups of one size, each by itself; `size_bytes` may differ from group to group."""
        size = slots_GK.shape[1]
        steps = num_steps(kind, size)
        if steps == 0:
            return np.zeros(slots_GK.shape[0])
        scale = self.scale(kind, size)
        hosts_G = self._num_hosts(slots_GK)
        sender, receiver = _links(kind, slots_GK)
        chunk_G = np.broadcast_to(np.asarray(size_bytes, dtype=np.float64), hosts_G.shape) * chunk_share(kind, size)
        step_G = _step_s(
            self.latency_s_SS[sender, receiver] * scale.latency_factor[hosts_G][:, None],
            self.seconds_per_byte_SS[sender, receiver] * scale.bytes_factor[hosts_G][:, None],
            chunk_G[:, None],
        ).max(axis=1)
        seconds: NDArray[np.float64] = steps * (step_G + scale.extra_latency_s[hosts_G])
        return seconds

    def bound_s(self, kind: Kind, size: int, size_bytes: float) -> float:
        """No group of `size` slots, wherever it lies, is faster than this: its slowest link is at best the best one.

        A group on one host has only links within hosts; one on several crosses hosts at least once.
        """
        steps = num_steps(kind, size)
        if steps == 0:
            return 0.0
        scale = self.scale(kind, size)
        chunk = size_bytes * chunk_share(kind, size)
        fewest = -(-size // self.cluster.devices_per_host)
        most = min(size, len(self.cluster.hosts))
        best = min(
            _step_s(latency_s * scale.latency_factor[hosts], byte_s * scale.bytes_factor[hosts], chunk)
            + scale.extra_latency_s[hosts]
            for hosts in range(fewest, most + 1)
            for latency_s, byte_s in (self._best_across if hosts > 1 else self._best_within)
        )
        return steps * float(best)

    def scale(self, kind: Kind, size: int) -> Scale:
        """Return what the nearest measured group says about groups of this kind and size, for each number of hosts."""
        if (kind, size) not in self._scales:
            self._scales[kind, size] = self._scale(kind, size)
        return self._scales[kind, size]

    def _scale(self, kind: Kind, size: int) -> Scale:
        hosts = len(self.cluster.hosts)
        rows = np.tile([1.0, 0.0, 1.0], (hosts + 1, 1))
        candidates: list[CollectiveTime] = []
        for name in (kind, *_STAND_IN[kind]) if kind != "send" else ():
            candidates = candidates or [measured for measured in self._collectives if measured.kind == name]
        for count in range(1, hosts + 1) if candidates else ():
            rows[count] = self._correction(min(candidates, key=lambda measured: self._distance(measured, size, count)))
        return Scale(
            latency_factor=rows[:, 0],
            extra_latency_s=rows[:, 1],
            bytes_factor=rows[:, 2],
            is_measured=bool(candidates),
        )

    def _distance(self, measured: CollectiveTime, size: int, hosts: int) -> tuple[bool, float, float, tuple[int, ...]]:
        """Within a host or across hosts first, then members, then hosts; the slots break ties, so order does not."""
        spans = len({self.cluster.host_of(slot) for slot in measured.slots})
        return (
            (spans > 1) != (hosts > 1),
            abs(math.log(len(measured.slots) / size)),
            abs(math.log(spans / hosts)),
            measured.slots,
        )

    def _correction(self, measured: CollectiveTime) -> tuple[float, float, float]:
        """Latency factor, extra latency of a step and byte factor that make the formula give the measured times."""
        slots_GK = np.array([measured.slots], dtype=np.int64)
        size = len(measured.slots)
        sender, receiver = _links(measured.kind, slots_GK)
        steps = num_steps(measured.kind, size)
        link_s = float(self.latency_s_SS[sender, receiver].max())
        step_s = measured.latency_s / steps
        byte_s = steps * chunk_share(measured.kind, size) * float(self.seconds_per_byte_SS[sender, receiver].max())
        factor = step_s / link_s if step_s < link_s else 1.0
        return factor, max(step_s - link_s, 0.0), measured.seconds_per_byte / byte_s

    def _num_hosts(self, slots_GK: NDArray[np.int64]) -> NDArray[np.int64]:
        hosts_GK = np.sort(self.host_S[slots_GK], axis=1)
        counts: NDArray[np.int64] = 1 + (hosts_GK[:, 1:] != hosts_GK[:, :-1]).sum(axis=1)
        return counts


def _best_links(matrices: Sequence[Links]) -> tuple[tuple[float, float], ...]:
    """(latency, seconds per byte) of the links that no other beats in both."""
    pairs: set[tuple[float, float]] = set()
    for links in dict.fromkeys(matrices):
        chosen = ~np.eye(links.size, dtype=bool)
        latency_s, byte_s = np.array(links.latency_s)[chosen], links.seconds_per_byte()[chosen]
        pairs.update(zip(latency_s.tolist(), byte_s.tolist(), strict=True))
    front: list[tuple[float, float]] = []
    for latency, per_byte in sorted(pairs):
        if not front or per_byte < front[-1][1]:
            front.append((latency, per_byte))
    return tuple(front)


def _links(kind: Kind, slots_GK: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sender and receiver of every link that a collective of these groups uses."""
    if kind == "send":
        return slots_GK[:, :1], slots_GK[:, 1:2]
    if kind != "all_to_all":
        return slots_GK, np.roll(slots_GK, -1, axis=1)
    size = slots_GK.shape[1]
    sender = np.tile(slots_GK, (1, size - 1))
    receiver = np.concatenate([np.roll(slots_GK, -shift, axis=1) for shift in range(1, size)], axis=1)
    return sender, receiver


def _step_s(latency_s: T, seconds_per_byte: T, size_bytes: T | float) -> T:
    return latency_s + seconds_per_byte * size_bytes
