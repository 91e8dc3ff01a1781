"""What is placed where: the slots of a cluster, the placements that are allowed on them, and how they are priced."""

# H = hosts, D = devices of one host, S = slots, K = placements. A placement gives the RANK of each slot.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from pipette_launch.facts import Cluster, Layout
from pipette_launch.facts.co_location import RankBlock, Rooms
from pipette_launch.search.assignment.problem import Floats, Ints

Placement = tuple[int, ...]
IsLate = Callable[[], bool]
"""Whether the time is up."""


class Objective(Protocol):
    """Prices placements: `cost.step.placed.PlacementCost`, or something smaller in a test."""

    def costs(self, placement_KW: Ints) -> Floats:
        """Seconds per step of each of K placements; no price depends on what else is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """The slots of a cluster, and which placements are allowed on them.

    On CUDA the RANKs of a host must differ modulo D: then LOCAL_RANK = RANK % D with one CUDA_VISIBLE_DEVICES list
    for the host puts every rank on its slot, and whatever takes RANK modulo the device count finds its own device.
    """

    num_hosts: int
    devices_per_host: int
    keeps_residues: bool
    blocks: tuple[RankBlock, ...] = ()
    """Ranks that must lie together, on CUDA."""
    domain_H: tuple[int, ...] = ()
    """The NVLink domain of each host, where a block must lie inside one."""

    @classmethod
    def of(cls, cluster: Cluster, blocks: tuple[RankBlock, ...] = ()) -> Slots:
        """Take the slots of a cluster, and blocks of ranks that must lie together on them."""
        in_domains = any(block.room == "domain" for block in blocks)
        return cls(
            num_hosts=len(cluster.hosts),
            devices_per_host=cluster.devices_per_host,
            keeps_residues=cluster.keeps_residues,
            blocks=blocks,
            domain_H=Rooms.of(cluster).domain_H if in_domains else (),
        )

    @property
    def num_slots(self) -> int:
        """S."""
        return self.num_hosts * self.devices_per_host

    def host(self, index: int) -> range:
        """Slots of a host."""
        return range(index * self.devices_per_host, (index + 1) * self.devices_per_host)

    @property
    def host_groups(self) -> tuple[tuple[int, ...], ...]:
        """Hosts that may exchange all they hold whatever the placement: those of each domain, or all of them."""
        if self.domain_H:
            return Rooms(devices_per_host=self.devices_per_host, domain_H=self.domain_H).domains
        return (tuple(range(self.num_hosts)),)

    @property
    def ranks_of_a_host_unit(self) -> int:
        """So many consecutive ranks stay on one host, and may change places with as many of another: 1 = any rank."""
        return math.lcm(*(block.size for block in self.blocks if block.room == "host"))

    @property
    def ranks_of_a_unit(self) -> int:
        """The same of ranks that may change places with those of any other host."""
        return math.lcm(*(block.size for block in self.blocks))

    def first(self) -> Placement:
        """Place rank i on slot i, as torchrun does, or where that splits a block, domain by domain.

        Blocks are such that they fill every room, so ranks in order keep them inside rooms that are filled in order.
        """
        order = [host for group in self.host_groups for host in group]
        ranks_HD = np.empty((self.num_hosts, self.devices_per_host), dtype=np.int64)
        ranks_HD[order] = np.arange(self.num_slots).reshape(ranks_HD.shape)
        in_domains = tuple(ranks_HD.ravel().tolist())
        return next(filter(self.allows, (host_order(self.num_slots), in_domains)))

    def allows(self, placement: ArrayLike) -> bool:
        """Whether each host's ranks differ modulo D, and no block is split, where they must."""
        if not self.keeps_residues:
            return True
        if self.blocks:
            rooms = Rooms(devices_per_host=self.devices_per_host, domain_H=self.domain_H)
            if rooms.split(self.blocks, placement):
                return False
        residue_HD = np.asarray(placement).reshape(self.num_hosts, -1) % self.devices_per_host
        return bool((np.sort(residue_HD, axis=1) == np.arange(self.devices_per_host)).all())


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """The best placement so far."""

    placement: Placement
    cost_s: float
    is_optimal: bool
    """No other allowed placement is faster under the same model: all were tried, or this one meets the bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementProblem:
    """A layout to be placed on the slots of a cluster."""

    layout: Layout
    cluster: Cluster
    objective: Objective
    """Prices placements; whole hosts change places only if it is a `PlacementCost`."""
    bound_s: float
    """No placement is faster."""
    blocks: tuple[RankBlock, ...] = ()
    """Ranks that must lie together."""

    @property
    def slots(self) -> Slots:
        """Where the ranks may sit."""
        return Slots.of(self.cluster, self.blocks)

    def placed(self, placement: Placement, cost_s: float) -> Placed:
        """Judge a placement that was priced."""
        return Placed(placement=placement, cost_s=cost_s, is_optimal=meets(cost_s, self.bound_s))

    def best_of(self, candidates: Sequence[Placement] | Ints) -> Placed:
        """Price some placements together and return the fastest; of equal ones the first."""
        placement_KW = np.asarray(candidates, dtype=np.int64)
        costs_s = self.objective.costs(placement_KW)
        least = int(costs_s.argmin())
        return self.placed(tuple(placement_KW[least].tolist()), float(costs_s[least]))


def host_order(num_slots: int) -> Placement:
    """Place rank i on slot i, as torchrun does."""
    return tuple(range(num_slots))


def meets(cost_s: float, bound_s: float) -> bool:
    """Whether a step time is as good as its lower bound, but for rounding."""
    return cost_s <= bound_s * (1 + 1e-9)


def faster(one: Placed, other: Placed) -> Placed:
    """The faster of two; the first where they are equal."""
    return min(one, other, key=lambda placed: placed.cost_s)
