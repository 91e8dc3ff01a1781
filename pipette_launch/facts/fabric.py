"""Networks between hosts that a file describes: levels (tiers) of switches from the inside out, and slow hosts."""

# H = hosts.

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Links
from pipette_launch.facts.devices import DeviceSpec, Link
from pipette_launch.text import listed, rate_text

DOMAIN = "NVLink domain"
MOST_NAMED = 4
"""Largest number of slow hosts that a message names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One level of the network: groups of hosts, and the link between devices of two hosts in one group."""

    name: str
    hosts_per_group: int | None = None
    """Number of successive hosts in a group. With None, all hosts are one group, unless `groups` is set."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Names of the hosts in each group, for groups of unequal size or of hosts that are not successive."""
    link: Literal["card", "nvlink"] = "card"
    """`card`: the device's share of its host's network cards. `nvlink`: the link between devices of one host."""
    share: float | None = None
    """Share of the bandwidth that remains when all devices send: 0.5 behind switches with 2:1 oversubscription."""
    bandwidth_bytes_per_s: float | None = None
    """Bandwidth of one device when all devices send. A tier with a stated bandwidth has no `share`."""
    latency_s: float | None = None
    """Latency of the tier in seconds. With None, the tier has the latency of the device's card or NVLink."""

    def __post_init__(self) -> None:
        group, share, bandwidth, latency = self.hosts_per_group, self.share, self.bandwidth_bytes_per_s, self.latency_s
        problem = ""
        if group is not None and (group < 1 or self.groups):
            problem = f"hosts_per_group={group} must be at least 1, and needs a tier without groups"
        elif share is not None and not 0 < share <= 1:
            problem = f"share must be above 0 and at most 1, got {share:g}"
        elif bandwidth is not None and (share is not None or not bandwidth > 0):
            problem = f"bandwidth_bytes_per_s={bandwidth:g} must be above 0, and share left out"
        elif latency is not None and latency < 0:
            problem = f"latency_s must not be negative, got {latency:g}"
        twice = [name for name, count in Counter(name for group in self.groups for name in group).items() if count > 1]
        if twice and not problem:
            problem = f"{twice[0]} is in its groups more than once"
        if problem:
            raise FactError(f"tier {self.name!r}: {problem}")

    def _carrier(self, device: DeviceSpec) -> Link:
        return device.between_hosts if self.link == "card" else device.within_host

    def bandwidth(self, device: DeviceSpec) -> float:
        """Return the bytes per second of one device in one direction while all devices send."""
        share = 1.0 if self.share is None else self.share
        return self.bandwidth_bytes_per_s or self._carrier(device).fair_bytes_per_s * share

    def latency(self, device: DeviceSpec) -> float:
        """Return the latency of the tier: seconds until the first byte of a message arrives."""
        return self._carrier(device).latency_s if self.latency_s is None else self.latency_s

    def words(self, device: DeviceSpec) -> str:
        """Return name, size and bandwidth of the tier."""
        size = f" of {self.hosts_per_group} hosts" if self.hosts_per_group else ""
        size = f" of {len(self.groups)} groups" if self.groups else size
        return f"{self.name}{size} {rate_text(self.bandwidth(device))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FabricSpec:
    """A file that describes a network. The innermost tier that two hosts share gives the link between the two hosts.

    Each bandwidth is the bandwidth of one device in one direction while all devices send. A device type with an NVLink
    domain (`DeviceSpec.domain_hosts`) adds this domain, unless the file has a tier with `link: nvlink`.
    """

    KIND: ClassVar[str] = "fabric"

    source: str
    """Origin of the network's figures, as one sentence that plans repeat."""
    tiers: tuple[Tier, ...]
    """Levels of the network, the smallest groups of hosts first. The last tier contains all hosts of the job."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts in torchrun's order, as plans for real hosts need them. Empty = host0, host1 and so on."""
    network_factor: dict[str, float] = field(default_factory=dict)
    """Share of the usual bandwidth that a host with slower network cards reaches, by name of the host."""
    compute_factor: dict[str, float] = field(default_factory=dict)
    """Share of the usual speed that a host with slower devices reaches, by name of the host."""

    def __post_init__(self) -> None:
        if not self.tiers:
            raise FactError("tiers: a fabric needs at least one tier that holds all hosts")
        names = Counter(self.hosts)
        if len(names) < len(self.hosts):
            raise FactError(f"hosts: {names.most_common(1)[0][0]} is named more than once")
        for what, factors in (("network_factor", self.network_factor), ("compute_factor", self.compute_factor)):
            for host, factor in factors.items():
                if not 0 < factor <= 1:
                    raise FactError(f"{what}: {host} must be above 0 and at most 1, got {factor:g}")
                if self.hosts and host not in names:
                    raise FactError(f"{what}: {host} is not among hosts")
        sizes = [tier.hosts_per_group for tier in self.tiers if tier.hosts_per_group and tier.link == "card"]
        for inner, outer in pairwise(sizes):
            if outer <= inner or outer % inner:
                raise FactError(
                    f"tiers: hosts_per_group must grow from the inside out in multiples, got {outer} around {inner}"
                )

    def host_names(self, num_hosts: int) -> tuple[str, ...]:
        """Return the names of the hosts. Raise FactError if the file names more or fewer hosts than the job has."""
        if not self.hosts:
            return made_up_names(num_hosts)
        if len(self.hosts) != num_hosts:
            raise FactError(
                f"hosts: {len(self.hosts)} hosts are named, but the job has {num_hosts}; name all of them, or leave "
                f"hosts out"
            )
        return self.hosts

    def links(self, num_hosts: int, device: DeviceSpec) -> Links:
        """Return the links between hosts, H x H, for one device of each host while all devices send.

        Raise FactError if a named host is not in the job, or if the outermost tier does not hold all hosts.
        """
        names = self.host_names(num_hosts)
        bandwidth_HH = np.zeros((num_hosts, num_hosts))
        latency_s_HH = np.zeros_like(bandwidth_HH)
        factor_H = _factors_H(self.network_factor, names, "network_factor")
        slower_HH = np.minimum(factor_H[:, None], factor_H[None, :])
        for tier in reversed(self.tiers_on(device, num_hosts)):
            group_H = _groups_H(tier, names)
            same_HH = group_H[:, None] == group_H[None, :]
            slowed_HH = slower_HH if tier.link == "card" else np.ones_like(slower_HH)
            np.copyto(bandwidth_HH, tier.bandwidth(device) * slowed_HH, where=same_HH)
            np.copyto(latency_s_HH, tier.latency(device), where=same_HH)
        if not bandwidth_HH.all():
            first, second = (names[index] for index in np.argwhere(bandwidth_HH == 0)[0])
            raise FactError(
                f"tiers: {first} and {second} have no common group; the last tier must hold all {num_hosts} hosts, so "
                f"leave out its hosts_per_group"
            )
        for matrix in (bandwidth_HH, latency_s_HH):
            np.fill_diagonal(matrix, 0.0)
        return Links(latency_s=latency_s_HH, bandwidth_bytes_per_s=bandwidth_HH)

    def slot_speed(self, num_hosts: int, devices_per_host: int) -> tuple[float, ...]:
        """Return the speed of each slot relative to the median slot."""
        factor_H = _factors_H(self.compute_factor, self.host_names(num_hosts), "compute_factor")
        speed_S = np.repeat(factor_H / np.median(factor_H), devices_per_host)
        return tuple(speed_S.tolist())

    def tiers_on(self, device: DeviceSpec, num_hosts: int | None = None) -> tuple[Tier, ...]:
        """Return the tiers of the file, after the tier of NVLink domains that the device type may add."""
        if device.domain_hosts == 1 or any(tier.link == "nvlink" for tier in self.tiers):
            return self.tiers
        share = self._domain_share(device, num_hosts)
        return (Tier(name=DOMAIN, hosts_per_group=share, link="nvlink"), *self.tiers)

    def _domain_share(self, device: DeviceSpec, num_hosts: int | None) -> int:
        """Return the number of hosts that a job gets from each NVLink domain.

        Schedulers that know the domains give a job the same number of hosts in each domain (SLURM's `--segment`), so
        that groups of ranks need not cross domains. The result is the largest equal share. If the equal share is below
        half of a domain or does not divide another tier, the job fills whole domains one after the other.
        """
        whole = device.domain_hosts
        if num_hosts is None or num_hosts <= whole or any(tier.groups for tier in self.tiers):
            return whole
        share = max(hosts for hosts in range(1, whole + 1) if num_hosts % hosts == 0)
        crosses = any((tier.hosts_per_group or share) % share for tier in self.tiers)
        return whole if crosses or 2 * share < whole else share

    def domain_words(self, device: DeviceSpec, num_hosts: int) -> str:
        """Return a sentence on the assumed number of hosts in each NVLink domain; empty if nothing is assumed."""
        if self.tiers_on(device) == self.tiers or num_hosts <= device.domain_hosts:
            return ""
        share, whole = self._domain_share(device, num_hosts), device.domain_hosts
        if share < whole:
            assumed = f"get {share} of the {whole} hosts of each {DOMAIN}, as with SLURM's --segment={share}"
        else:
            assumed = f"fill {DOMAIN}s of {whole} hosts one after the other"
        return f"The job is assumed to {assumed}; describe other shares with --fabric."

    def words(self, device: DeviceSpec, num_hosts: int | None = None) -> str:
        """Describe the tiers between the hosts in a few words, without tiers that are larger than the job."""
        tiers = self.tiers_on(device, num_hosts)
        fills = [index for index, tier in enumerate(tiers) if (tier.hosts_per_group or 0) >= (num_hosts or 1 << 62)]
        return ", ".join(tier.words(device) for tier in tiers[: fills[0] + 1 if fills else None])

    def laggards(self) -> Iterator[str]:
        """Yield a sentence on hosts with slow devices, and a sentence on hosts with slow network cards."""
        for what, factors in (("Devices", self.compute_factor), ("Network cards", self.network_factor)):
            if factors:
                named = listed([f"{host} {factor:g}" for host, factor in factors.items()], MOST_NAMED)
                yield f"{what} of these hosts are slower than the others by these factors: {named}."


UNIFORM = FabricSpec(source="All links between hosts are assumed to be equal.", tiers=(Tier(name="network"),))
BUILT_IN = ("uniform", "fat-tree-2:1", "fat-tree-4:1")
"""Names of built-in networks, which need no file. Messages list these names."""
LEAF_HOSTS = 32
"""Number of hosts of a scalable unit in NVIDIA's reference designs for DGX H100 and later."""


def made_up_names(num_hosts: int) -> tuple[str, ...]:
    """Return host0, host1 and so on."""
    return tuple(f"host{index}" for index in range(num_hosts))


def built_in_fabric(name: str) -> FabricSpec | None:
    """Return the fabric with a built-in name, `uniform` or `fat-tree-N:1`. Return None for another name."""
    if name == "uniform":
        return UNIFORM
    found = re.fullmatch(r"fat-tree-(\d{1,3}):1", name)
    if not found or int(found[1]) < 1:
        return None
    ratio = int(found[1])
    return FabricSpec(
        source=f"Groups of {LEAF_HOSTS} hosts are assumed, with {ratio}:1 oversubscription between groups.",
        tiers=(Tier(name="leaf", hosts_per_group=LEAF_HOSTS), Tier(name="spine", share=1 / ratio)),
    )


def _factors_H(factors: Mapping[str, float], names: Sequence[str], what: str) -> NDArray[np.float64]:
    factor_H = np.ones(len(names))
    for host, factor in factors.items():
        factor_H[_index(host, names, what)] = factor
    return factor_H


def _groups_H(tier: Tier, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the index of each host's group in a tier. A host without a group forms its own group."""
    if not tier.groups:
        return np.arange(len(names)) // (tier.hosts_per_group or len(names))
    group_H = len(tier.groups) + np.arange(len(names))
    for number, group in enumerate(tier.groups):
        for host in group:
            group_H[_index(host, names, f"tier {tier.name!r}")] = number
    return group_H


def _index(host: str, names: Sequence[str], what: str) -> int:
    if host not in names:
        raise FactError(f"{what}: {host} is not one of the job's hosts {names[0]} to {names[-1]}")
    return names.index(host)
