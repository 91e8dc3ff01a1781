"""Ranks that must share a host or an NVLink domain, the domains of a job's hosts, and the device of each rank.

A group that must share a host or an NVLink domain has successive ranks in both of Megatron's rank orders. A
tensor-parallel group begins at a multiple of tp, and an expert group (EP and ETP together) at a multiple of ep*etp.
Every plan on GPUs has LOCAL_RANK = RANK modulo the number of devices of a host, as Userbuffers, DeepEP and HybridEP
expect.

- Userbuffers (`--tp-comm-overlap`, TransformerEngine from 2.2 on): each tensor-parallel group lies inside a host.
- DeepEP (`--moe-token-dispatcher-type flex`): RANK / 8 within the expert group is the network rank, and RANK % 8 is the
  NVLink rank. So each block of 8 successive ranks lies inside a host. A group of fewer than 8 ranks lies inside a host
  as a whole.
- HybridEP and NCCL EP (`--moe-flex-dispatcher-backend`) follow the same rule as DeepEP, with the number of ranks of an
  NVLink domain instead of 8. An expert group has the same number of ranks in each domain in which it has ranks.
"""

# Array axes: H = hosts, S = slots, B = blocks, K = ranks of a block.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pipette_launch.errors import LayoutError
from pipette_launch.facts.cluster import Cluster, Links
from pipette_launch.facts.job import PerformanceOptions, flag_of
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec

DEEPEP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Sizes of an expert group (number of ranks) for which DeepEP has settings (`Buffer.get_dispatch_config`)."""
DEEPEP_NVLINK = 8
BY_DOMAIN = {"hybridep": "HybridEP", "ncclep": "NCCL EP"}
"""Backends of the flex dispatcher that depend on NVLink domains. The flex dispatcher's default is DeepEP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBlock:
    """Demand that each block of `size` successive ranks, counted from rank 0, lies inside one host or NVLink domain."""

    size: int
    within: Literal["host", "domain"]
    kind: str
    """Type of the parallel groups in blocks, such as `tensor-parallel`."""
    asked_by: str
    """Flag or library that requires the block."""

    @property
    def words(self) -> str:
        """Description of the blocks, such as `blocks of 8 expert-parallel ranks`."""
        return f"blocks of {self.size} {self.kind} ranks"

    @property
    def inside(self) -> str:
        """Place that must hold a whole block: `a host` or `an NVLink domain`."""
        return "a host" if self.within == "host" else "an NVLink domain"

    @property
    def sentence(self) -> str:
        """Sentence for the plan that states which ranks share a host or domain, and why."""
        return f"Each of the {self.words} lies inside {self.inside}, as {self.asked_by} requires."


@dataclass(frozen=True, kw_only=True, slots=True)
class Domains:
    """The NVLink domains of a job's hosts."""

    devices_per_host: int
    domain_H: tuple[int, ...] = ()
    """Index of the NVLink domain of each host. Empty = unknown."""

    @classmethod
    def of(cls, cluster: Cluster) -> Domains:
        """Find the NVLink domains: groups of hosts whose links to each other are about as fast as NVLink."""
        device, links = cluster.spec, cluster.between_hosts
        if device is None or device.domain_hosts == 1:
            return cls(devices_per_host=cluster.devices_per_host, domain_H=tuple(range(links.size)))
        least = math.sqrt(device.within_host.fair_bytes_per_s * device.between_hosts.fair_bytes_per_s)
        return cls(devices_per_host=cluster.devices_per_host, domain_H=_linked_hosts(links, least))

    @property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the hosts in each NVLink domain."""
        return tuple(
            tuple(host for host, domain in enumerate(self.domain_H) if domain == one)
            for one in dict.fromkeys(self.domain_H)
        )

    @property
    def domain_devices(self) -> frozenset[int]:
        """Sizes of the NVLink domains in devices, each different size once."""
        return frozenset(count * self.devices_per_host for count in Counter(self.domain_H).values())

    @property
    def smallest(self) -> int:
        """Devices of the smallest NVLink domain, by which exchanges of experts are priced.

        Without NVLink between hosts, each host is a domain. Backends that depend on domains need groups that fill each
        domain, so no group that may run is larger than the smallest domain but smaller than another.
        """
        return min(self.domain_devices)

    def first(self, num_hosts: int) -> Domains:
        """Return the domains of the first `num_hosts` hosts. The domains are unknown if the job has fewer hosts."""
        domain_H = self.domain_H[:num_hosts] if num_hosts <= len(self.domain_H) else ()
        return Domains(devices_per_host=self.devices_per_host, domain_H=domain_H)

    def split(self, blocks: Sequence[RankBlock], placement: ArrayLike) -> RankBlock | None:
        """Return the first block whose ranks a placement (RANK of each slot) puts into several hosts or domains.

        Return None if each block stays inside one host or domain. Blocks within domains are not checked if the domains
        are unknown.
        """
        slot_R = np.argsort(np.asarray(placement), axis=None)
        for block in blocks:
            place_BK = slot_R.reshape(-1, block.size) // self.devices_per_host
            if block.within == "domain":
                if not self.domain_H:
                    continue
                place_BK = np.asarray(self.domain_H, dtype=np.int64)[place_BK]
            if (place_BK != place_BK[:, :1]).any():
                return block
        return None


@lru_cache(maxsize=4)
def _linked_hosts(links: Links, least_bytes_per_s: float) -> tuple[int, ...]:
    """Return the index of each host's NVLink domain. Hosts with a link of at least this bandwidth share a domain."""
    near_HH = links.bandwidth_bytes_per_s >= least_bytes_per_s
    domain_H = np.full(links.size, -1)
    for host in range(links.size):
        if domain_H[host] < 0:
            near_H = near_HH[host] & (domain_H < 0)
            near_H[host] = True
            domain_H[near_H] = domain_H.max() + 1
    return tuple(domain_H.tolist())


def blocks_of(model: ModelSpec, options: PerformanceOptions, layout: Layout, domains: Domains) -> tuple[RankBlock, ...]:
    """Return the blocks of ranks that must stay together on GPUs; LayoutError if a host or domain is not filled."""
    found = [tensor_block(options, layout.tp, domains)]
    if model.num_experts:
        found.append(expert_block(options, layout.ep * layout.etp, domains))
    return tuple(block for block in found if block)


def tensor_block(options: PerformanceOptions, tp: int, domains: Domains) -> RankBlock | None:
    """Return the block that keeps a tensor-parallel group inside a host, or None; LayoutError if no host is filled."""
    if not options.tp_comm_overlap or tp == 1:
        return None
    flag = flag_of("tp_comm_overlap")
    if domains.devices_per_host % tp:
        raise LayoutError(f"{flag} needs tp groups that fill hosts of {domains.devices_per_host}")
    return RankBlock(size=tp, within="host", kind="tensor-parallel", asked_by=flag)


def expert_block(options: PerformanceOptions, group: int, domains: Domains) -> RankBlock | None:
    """Return the block of the flex dispatcher for expert groups of ep*etp ranks, or None.

    Raise LayoutError if blocks do not fill hosts or domains, or if DeepEP has no settings for the group.
    """
    if options.moe_token_dispatcher_type != "flex" or group == 1:  # noqa: S105  this token is text
        return None
    backend = options.moe_flex_dispatcher_backend
    if backend in BY_DOMAIN and not options.moe_enable_deepep:
        return _block_in_a_domain(BY_DOMAIN[backend], group, domains)
    size, devices = min(group, DEEPEP_NVLINK), domains.devices_per_host
    if group not in DEEPEP_SIZES:
        raise LayoutError(f"DeepEP has no settings for groups of ep*etp={group}")
    if devices % size:
        raise LayoutError(f"DeepEP needs blocks of {size} ranks of ep*etp that fill hosts of {devices}")
    return RankBlock(size=size, within="host", kind="expert-parallel", asked_by="DeepEP")


def _block_in_a_domain(asked_by: str, group: int, domains: Domains) -> RankBlock | None:
    """Return the block that keeps an expert group inside one NVLink domain, or on whole domains of equal size."""
    sizes, kind = domains.domain_devices, "expert-parallel"
    if not sizes:
        return None
    # A group that fits into a host stays there, at no cost, because links inside a host and a domain are equally fast.
    if domains.devices_per_host % group == 0:
        return RankBlock(size=group, within="host", kind=kind, asked_by=asked_by)
    size = group if len(sizes) > 1 else min(group, *sizes)
    if group % size or any(devices % size for devices in sizes):
        shown = " and ".join(map(str, sorted(sizes)))
        raise LayoutError(f"{asked_by} needs groups of ep*etp that fill NVLink domains of {shown}, or whole domains")
    within: Literal["host", "domain"] = "host" if size == domains.devices_per_host else "domain"
    return RankBlock(size=size, within=within, kind=kind, asked_by=asked_by)


class DeviceBinding(NamedTuple):
    """RANK and device of one worker. The i-th binding of a node belongs to the worker with LOCAL_RANK i."""

    rank: int
    device: int


def bindings(ranks: Sequence[int], *, keep_devices: bool = False) -> tuple[DeviceBinding, ...]:
    """Bind the ranks of a node's devices (in device order) to its workers.

    Parts of Megatron, Transformer Engine and DeepEP use `RANK % devices` as the device. If the node's ranks are
    distinct modulo the number of devices, LOCAL_RANK becomes RANK modulo that number, and CUDA_VISIBLE_DEVICES is
    reordered to match. If two ranks are equal modulo that number, or with `keep_devices`, the worker with LOCAL_RANK i
    keeps device i.
    """
    size = len(ranks)
    if keep_devices or len({rank % size for rank in ranks}) < size:
        return tuple(DeviceBinding(rank=rank, device=device) for device, rank in enumerate(ranks))
    by_remainder = {rank % size: DeviceBinding(rank=rank, device=device) for device, rank in enumerate(ranks)}
    return tuple(by_remainder[remainder] for remainder in range(size))
