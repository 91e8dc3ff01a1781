"""Which slots share a host and which an NVLink domain, and blocks of ranks that must lie inside one of these."""

# H = hosts, S = slots, B = blocks, K = ranks of a block.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipette_launch.facts.machines.cluster import Cluster, Links
from pipette_launch.facts.machines.known_devices import spec_of_cluster

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBlock:
    """Every `size` consecutive ranks, counted from rank 0, must lie inside one room."""

    size: int
    room: Literal["host", "domain"]
    """A host, or an NVLink domain."""
    kind: str
    """What the ranks are to each other: `tensor-parallel`."""
    asked_by: str
    """The flag or the library that asks for it."""

    @property
    def words(self) -> str:
        """Name the blocks: `blocks of 8 expert-parallel ranks`."""
        return f"blocks of {self.size} {self.kind} ranks"

    @property
    def inside(self) -> str:
        """Name one of the rooms."""
        return "a host" if self.room == "host" else "an NVLink domain"

    @property
    def sentence(self) -> str:
        """Say what a plan keeps to."""
        return f"Each of the {self.words} lies inside {self.inside}, as {self.asked_by} demands."


@dataclass(frozen=True, kw_only=True, slots=True)
class Rooms:
    """The hosts of a job and their NVLink domains."""

    devices_per_host: int
    domain_H: tuple[int, ...] = ()
    """The NVLink domain of each host, numbered in their order; empty where it is not known."""

    @classmethod
    def of(cls, cluster: Cluster) -> Rooms:
        """Find the domains in the links: hosts of a type that has such domains, linked as by NVLink."""
        device, links = spec_of_cluster(cluster), cluster.between_hosts
        if device is None or device.domain_hosts == 1:
            return cls(devices_per_host=cluster.devices_per_host, domain_H=tuple(range(links.size)))
        middle = math.sqrt(device.within_host.fair_bytes_per_s * device.between_hosts.fair_bytes_per_s)
        return cls(devices_per_host=cluster.devices_per_host, domain_H=_domains(links, middle))

    @property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """The hosts of each domain."""
        return tuple(
            tuple(host for host, domain in enumerate(self.domain_H) if domain == one)
            for one in dict.fromkeys(self.domain_H)
        )

    @property
    def domain_devices(self) -> frozenset[int]:
        """How many devices domains have."""
        return frozenset(count * self.devices_per_host for count in Counter(self.domain_H).values())

    def first(self, num_hosts: int) -> Rooms:
        """Leave the last hosts out; domains are not known for more hosts than there are."""
        domain_H = self.domain_H[:num_hosts] if num_hosts <= len(self.domain_H) else ()
        return Rooms(devices_per_host=self.devices_per_host, domain_H=domain_H)

    def split(self, blocks: Sequence[RankBlock], placement: ArrayLike) -> RankBlock | None:
        """Return a block that a placement does not keep inside a room, or None; domains that are unknown split none.

        Args:
            blocks: which ranks must lie together.
            placement: RANK of each slot, host by host.

        """
        slot_R = np.argsort(np.asarray(placement), axis=None)
        for block in blocks:
            host_BK = slot_R.reshape(-1, block.size) // self.devices_per_host
            room_BK = host_BK if block.room == "host" else _at(self.domain_H, host_BK)
            if (room_BK != room_BK[:, :1]).any():
                return block
        return None


def _at(domain_H: Sequence[int], host_BK: Ints) -> Ints:
    return np.asarray(domain_H, dtype=np.int64)[host_BK] if domain_H else np.zeros_like(host_BK)


@lru_cache(maxsize=4)
def _domains(links: Links, least_bytes_per_s: float) -> tuple[int, ...]:
    """Number the domain of each host; a link counts as NVLink above the geometric mean of NVLink and network card."""
    near_HH = np.asarray(links.bandwidth_bytes_per_s) >= least_bytes_per_s
    domain_H = np.full(links.size, -1)
    for host in range(links.size):
        if domain_H[host] < 0:
            near_H = near_HH[host] & (domain_H < 0)
            near_H[host] = True
            domain_H[near_H] = domain_H.max() + 1
    return tuple(domain_H.tolist())
