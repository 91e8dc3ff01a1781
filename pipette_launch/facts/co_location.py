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

from pipette_launch.errors import LayoutError
from pipette_launch.facts.cluster import Cluster, Links
from pipette_launch.facts.job import PerformanceOptions, flag_of
from pipette_launch.facts.known_devices import spec_of_cluster
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec

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


DEEPEP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Ranks of an expert group for which DeepEP has settings (`Buffer.get_dispatch_config`)."""
DEEPEP_NVLINK = 8
BY_DOMAIN = {"hybridep": "HybridEP", "ncclep": "NCCL EP"}
"""Backends of the flex dispatcher that go by NVLink domains; any other is DeepEP."""


def blocks_of(model: ModelSpec, options: PerformanceOptions, layout: Layout, rooms: Rooms) -> tuple[RankBlock, ...]:
    """Return what a layout must keep together on GPUs; raises LayoutError where these rooms cannot hold it so."""
    found = [tensor_block(options, layout.tp, rooms)]
    if model.num_experts:
        found.append(expert_block(options, layout.ep * layout.etp, rooms))
    return tuple(block for block in found if block)


def tensor_block(options: PerformanceOptions, tp: int, rooms: Rooms) -> RankBlock | None:
    """Return what tensor parallelism must keep together, or None; raises LayoutError where no host can hold it."""
    if not options.tp_comm_overlap or tp == 1:
        return None
    flag = flag_of("tp_comm_overlap")
    if rooms.devices_per_host % tp:
        raise LayoutError(f"{flag} needs tp groups that fill hosts of {rooms.devices_per_host}")
    return RankBlock(size=tp, room="host", kind="tensor-parallel", asked_by=flag)


def expert_block(options: PerformanceOptions, group: int, rooms: Rooms) -> RankBlock | None:
    """Return what the flex dispatcher must keep together, or None; raises LayoutError where no room can hold it.

    Args:
        options: of the job.
        group: ranks of an expert group, ep*etp.
        rooms: where they may lie.

    """
    dispatcher = options.moe_token_dispatcher_type
    if dispatcher != "flex" or group == 1:
        return None
    backend = options.moe_flex_dispatcher_backend
    if backend in BY_DOMAIN and not options.moe_enable_deepep:
        return _block_in_a_domain(BY_DOMAIN[backend], group, rooms)
    size, devices = min(group, DEEPEP_NVLINK), rooms.devices_per_host
    if group not in DEEPEP_SIZES:
        raise LayoutError(f"DeepEP has no settings for groups of ep*etp={group}")
    if devices % size:
        raise LayoutError(f"DeepEP needs blocks of {size} ranks of ep*etp that fill hosts of {devices}")
    return RankBlock(size=size, room="host", kind="expert-parallel", asked_by="DeepEP")


def _block_in_a_domain(asked_by: str, group: int, rooms: Rooms) -> RankBlock | None:
    """Keep an expert group inside a domain, or on whole domains of one size."""
    if not rooms.domain_H:
        return None
    sizes = rooms.domain_devices
    kind = "expert-parallel"
    # Between the hosts of a domain links are as within, so that a group which fills a host's part gains nothing beyond.
    if rooms.devices_per_host % group == 0:
        return RankBlock(size=group, room="host", kind=kind, asked_by=asked_by)
    size = group if len(sizes) > 1 else min(group, *sizes)
    if group % size or any(devices % size for devices in sizes):
        shown = " and ".join(map(str, sorted(sizes)))
        raise LayoutError(f"{asked_by} needs groups of ep*etp that fill NVLink domains of {shown}, or whole domains")
    alone = size == rooms.devices_per_host
    return RankBlock(size=size, room="host" if alone else "domain", kind=kind, asked_by=asked_by)
