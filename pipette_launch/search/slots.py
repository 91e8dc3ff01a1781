"""What is placed where: the slots of a cluster, the placements that are allowed on them, and how they are priced."""

# H = hosts, D = devices of one host, S = slots, K = placements. A placement gives the RANK of each slot.
# H = hosts = blocks, D = devices of one host, P = pipeline ranks. A block is what one host holds: D ranks.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from pipette_launch.cost.communication.groups import rank_grid
from pipette_launch.facts import Cluster, Layout
from pipette_launch.facts.co_location import Domains, RankBlock
from pipette_launch.search.assignment.problem import Floats, Ints
from pipette_launch.search.near_hosts import Tiers, tiers_of

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
        in_domains = any(block.within == "domain" for block in blocks)
        return cls(
            num_hosts=len(cluster.hosts),
            devices_per_host=cluster.devices_per_host,
            keeps_residues=cluster.keeps_residues,
            blocks=blocks,
            domain_H=Domains.of(cluster).domain_H if in_domains else (),
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
            return Domains(devices_per_host=self.devices_per_host, domain_H=self.domain_H).domains
        return (tuple(range(self.num_hosts)),)

    @property
    def ranks_of_a_host_unit(self) -> int:
        """So many consecutive ranks stay on one host, and may change places with as many of another: 1 = any rank."""
        return math.lcm(*(block.size for block in self.blocks if block.within == "host"))

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
            rooms = Domains(devices_per_host=self.devices_per_host, domain_H=self.domain_H)
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


_DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp", "use_tp_pp_dp_mapping")
"""What decides which ranks exchange how often."""


def starts(layout: Layout, cluster: Cluster, *, most: int, blocks: tuple[RankBlock, ...] = ()) -> Ints:
    """Give up to `most` different placements, host order first where it is allowed, the likelier ones before others.

    Returns:
        The RANK of each slot, a placement in each row; not to be written to.

    """
    degrees = Layout(**{name: getattr(layout, name) for name in _DEGREES})
    return _starts(degrees, Slots.of(cluster, blocks), tiers_of(cluster.between_hosts), most)


@lru_cache(maxsize=64)
def _starts(degrees: Layout, slots: Slots, tiers: Tiers, most: int) -> Ints:
    """Do as `starts` for all layouts of the same degrees: a search prices dozens of each."""
    first = np.array(slots.first(), dtype=np.int64)
    found = {first.tobytes(): first}
    for ranks_HD in _laid_out(degrees, slots, tiers):
        if len(found) == most:
            break
        if slots.allows(ranks_HD):
            found.setdefault(ranks_HD.tobytes(), ranks_HD.ravel())
    placement_KW = np.stack([*found.values()])
    placement_KW.setflags(write=False)
    return placement_KW


def _laid_out(layout: Layout, slots: Slots, tiers: Tiers) -> Iterator[Ints]:
    """Ranks of each host: blocks in some order along hosts in some order."""
    orders = [tiers.order_H]
    unit = _hosts_of_a_unit(layout, slots.devices_per_host)
    packed = _packed(tiers, unit)
    if unit > 1 and packed.tolist() != tiers.order_H.tolist():
        orders.insert(0, packed)
    if tiers.by_speed:
        # The first and the last stage often wait longest for their links, so fast hosts hold one or both.
        fast, slow = tiers.by_speed
        half = -(-len(fast) // 2)
        orders += [np.concatenate([fast, slow]), np.concatenate([fast[:half], slow, fast[half:]])]
    for block_HD in tilings(layout, slots):
        for sequence in _sequences(layout, block_HD, tiers, unit):
            for order_H in orders:
                ranks_HD = np.empty_like(block_HD)
                ranks_HD[order_H] = block_HD[sequence]
                yield ranks_HD


def tilings(layout: Layout, slots: Slots) -> list[Ints]:
    """Ways to cut the ranks into blocks that a host may hold, in shape (H, D).

    Consecutive ranks; cells in the order of the other rank mapping, which puts pipelines into a host; ranks dealt to
    the hosts in turn.
    """
    ranks = np.arange(layout.world_size)
    shape = slots.num_hosts, slots.devices_per_host
    grid_PDCT = rank_grid(layout)
    other = grid_PDCT if layout.use_tp_pp_dp_mapping else grid_PDCT.transpose(1, 0, 2, 3)
    candidates = [ranks.reshape(shape), other.reshape(shape), ranks.reshape(shape[::-1]).T]
    in_order = [np.sort(block_HD, axis=1) for block_HD in candidates]
    unique = {block_HD.tobytes(): block_HD for block_HD in reversed(in_order)}
    # Which host holds which of them is not settled yet.
    anywhere = replace(slots, blocks=tuple(block for block in slots.blocks if block.within == "host"), domain_H=())
    return [block_HD for block_HD in reversed(unique.values()) if anywhere.allows(block_HD)]


def _hosts_of_a_unit(layout: Layout, devices: int) -> int:
    """Hosts that exchange in every pass: those of a tensor-parallel or expert group that leaves its host."""
    widest = max(layout.tp * layout.cp, layout.ep * layout.etp)
    return -(-widest // devices)


def _packed(tiers: Tiers, unit: int) -> Ints:
    """Hosts in order, but each group of the finest tier that holds a unit gives whole units first, the rest last."""
    for tier in range(tiers.num_tiers):
        runs = tiers.runs(tier)
        if max(len(run) for run in runs) >= unit:
            full = [len(run) // unit * unit for run in runs]
            whole = [run[:size] for run, size in zip(runs, full, strict=True)]
            return np.concatenate(whole + [run[size:] for run, size in zip(runs, full, strict=True)])
    return tiers.order_H


def _sequences(layout: Layout, block_HD: Ints, tiers: Tiers, unit: int) -> Iterator[Ints]:
    """Orders of the blocks: by pipeline rank, by replica, or in squares of both that fill a group of a tier."""
    stage_W = np.empty(layout.world_size, dtype=np.int64)
    stage_W[rank_grid(layout)] = np.arange(layout.pp)[:, None, None, None]
    stage_Q = stage_W[block_HD[:, 0]]
    # How many blocks of the same pipeline rank come before each.
    replica_Q = np.empty_like(stage_Q)
    for stage in range(layout.pp):
        held = stage_Q == stage
        replica_Q[held] = np.arange(int(held.sum()))
    replicas = int(replica_Q.max()) + 1
    squares = [(1, replicas), (layout.pp, unit)]
    for tier in range(tiers.num_tiers):
        size = int(np.median([len(run) for run in tiers.runs(tier)]))
        widths = [width for width in range(1, min(layout.pp, size) + 1) if layout.pp % width == 0]
        squares += sorted(
            ((width, max(size // width // unit, 1) * unit) for width in widths), key=lambda pair: abs(pair[0] - pair[1])
        )
    yield np.arange(len(stage_Q))
    for stages, wide in dict.fromkeys(squares):
        key = (replica_Q % wide, stage_Q % stages, replica_Q // wide, stage_Q // stages)
        yield np.lexsort(key)
        yield np.lexsort((key[1], key[0], key[3], key[2]))
