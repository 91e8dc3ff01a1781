"""How collectives were measured to differ from the formula of equal steps (see `collectives`)."""

# H = hosts, M = measured groups.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.links import LinkTable
from pipette_launch.cost.communication.steps import (
    Kind,
    chunk_share,
    library_share,
    links_together,
    most_links_together,
    num_steps,
    ring_shift,
    spread_over_hosts,
)
from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Cluster
from pipette_launch.facts.measurements import CollectiveTime

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
