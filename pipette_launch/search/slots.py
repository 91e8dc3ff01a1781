"""Slots of a cluster, groups of near hosts, allowed placements of ranks on slots, and good placements to start from.

Racks, leaves and pods are groups of near hosts. They are found in the measured links alone.
"""

# H = hosts, D = devices of one host, S = slots, K = placements, P = pipeline ranks. A placement is the RANK of each
# slot. Q = blocks of ranks, one for each host. L = tiers. Tier 0 is the finest; each group of a tier is a union of
# groups of the finer tier.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from pipette_launch.cost.communication.collectives import spanning_tree
from pipette_launch.cost.communication.exchanges import rank_grid
from pipette_launch.facts import Cluster, Layout, Links
from pipette_launch.facts.co_location import Domains, RankBlock
from pipette_launch.facts.layout import Degrees, Floats, Ints
from pipette_launch.probe.links.selection import slowness

TYPICAL_MESSAGE_BYTES = 4 << 20
"""Message size that defines the distance of two hosts; latency and bandwidth both matter at this size."""
LEAST_RATIO = 1.06
"""A tier ends if the next link between groups takes 1.06 times as long. Noise of 8 % does not reach this ratio, and
racks 1.25 times as far apart as their hosts exceed it, even if hosts differ in speed."""
OUTLIERS = 100
"""One of this number of joining links may lie inside the gap between two tiers. The gap's widest step is half of it."""
MOST_TIERS = 4
REACH = 0.25
"""The typical distance of a host (`reach_H`) is this quantile of its distances to all hosts."""
FASTEST, SLOW = 0.1, 1.3
"""A host is slow if its typical distance exceeds `SLOW` times the `FASTEST` quantile over all hosts."""
MANY_SLOW = 0.125
"""Slow hosts are ordered apart from fast hosts if at least this share of the hosts is slow."""
POWER = 4
"""Exponent of link times in the cost of a chain of hosts. A high exponent counts the slowest link most."""
_MOST_GAPS = 12
_TINY = np.finfo(float).tiny


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiers:
    """The hosts of an allocation as a hierarchy of groups of near hosts."""

    order_H: Ints
    """Hosts in an order with near hosts side by side; each group of each tier is contiguous in this order."""
    by_speed: tuple[Ints, ...]
    """Fast hosts, then slow hosts, each with near hosts side by side; empty if few hosts are slow.

    Hosts of a small rack beside a large rack count as slow too, because most hosts are far from the small rack."""
    group_LH: Ints
    """Group of each host in each tier, finest tier first, numbered from 0 along `order_H`. No rows = equal links."""

    @property
    def num_tiers(self) -> int:
        """Number of tiers: 0 if all links are alike."""
        return len(self.group_LH)

    def runs(self, tier: int) -> list[Ints]:
        """Return the hosts of each group of a tier, in the order of `order_H`."""
        sizes = np.bincount(self.group_LH[tier])
        return np.split(self.order_H, np.cumsum(sizes)[:-1])


@lru_cache(maxsize=4)
def tiers_of(links: Links) -> Tiers:
    """Cluster hosts by single linkage, and end tiers at the largest growth of the joining links. O(H^2 log H).

    Single linkage uses the best link between two groups, so noise on single links has little effect. If all links of a
    host are slow by a common factor, their times are first divided by this factor. After the division, the host stays
    in its rack.
    """
    distance_HH = distances_s(links)
    joints = spanning_tree(_without_slow_hosts(distance_HH))
    lengths = np.array([seconds for seconds, _, _ in joints])
    # The joining links are sorted by length. `gaps` has the number of links before each of the widest gaps in length.
    ratios = lengths[1:] / np.maximum(lengths[:-1], _TINY)
    widest = np.argsort(-ratios, kind="stable")[:_MOST_GAPS]
    # A few hosts with wrongly estimated links join within the gap. So the links just before the gap do not count.
    left_out = np.arange(len(ratios)) // OUTLIERS
    growth = lengths[1:] / np.maximum(lengths[np.arange(len(ratios)) - left_out], _TINY)
    is_gap = (growth >= LEAST_RATIO) & (ratios >= math.sqrt(LEAST_RATIO))
    gaps = [int(index) + 1 for index in widest if is_gap[index]]
    order_H, snapshots = _join(joints, distance_HH, gaps)
    rows = []
    for gap in sorted(_clear_gaps(snapshots, lengths)):
        # Number the groups along the order, in which each group is contiguous.
        along_H, group_H = snapshots[gap][order_H], np.empty_like(order_H)
        group_H[order_H] = np.concatenate(([0], np.cumsum(along_H[1:] != along_H[:-1])))
        rows.append(group_H)
    return Tiers(
        order_H=order_H,
        by_speed=_by_speed(distance_HH),
        group_LH=np.array(rows, dtype=np.int64).reshape(len(rows), links.size),
    )


def distances_s(links: Links) -> Floats:
    """Return the seconds of a typical message between two hosts, mean of both directions (H x H, diagonal 0)."""
    one_way_HH = np.asarray(links.latency_s) + TYPICAL_MESSAGE_BYTES * links.seconds_per_byte
    return np.asarray((one_way_HH + one_way_HH.T) / 2)


def _without_slow_hosts(distance_HH: Floats) -> Floats:
    """Divide the distances of each host by the factor by which the host is slower to near and far hosts alike."""
    if len(distance_HH) < 3:
        return distance_HH
    others_HH = distance_HH.copy()
    np.fill_diagonal(others_HH, np.nan)
    slow_H = slowness(-np.log(np.maximum(others_HH, _TINY)))
    # No link becomes faster than the fastest link, because an approximate factor must not make a slow host the best.
    usual_HH = np.maximum(others_HH / np.exp(np.maximum(slow_H[:, None], slow_H)), np.nanmin(others_HH))
    return np.asarray(np.nan_to_num(usual_HH, copy=False))


def _by_speed(distance_HH: Floats) -> tuple[Ints, ...]:
    reach_H = np.quantile(distance_HH, REACH, axis=1)
    is_slow_H = reach_H > SLOW * np.quantile(reach_H, FASTEST)
    if is_slow_H.mean() < MANY_SLOW:
        return ()
    orders = []
    for hosts in (np.flatnonzero(~is_slow_H), np.flatnonzero(is_slow_H)):
        among_HH = distance_HH[np.ix_(hosts, hosts)]
        orders.append(hosts[_join(spanning_tree(_without_slow_hosts(among_HH)), among_HH, [])[0]])
    return tuple(orders)


def _join(
    joints: Sequence[tuple[float, int, int]], distance_HH: Floats, gaps: Sequence[int]
) -> tuple[Ints, dict[int, Ints]]:
    """Join chains of hosts, link by link, to one chain; also return the group of each host at each gap."""
    size = len(distance_HH)
    lengths_HH = (distance_HH / max(distance_HH.max(), _TINY)) ** POWER
    reach_H = np.quantile(lengths_HH, REACH, axis=1)
    chains = {host: np.array([host]) for host in range(size)}
    name_H = np.arange(size)
    snapshots = {}
    for done, (_, one, other) in enumerate(joints, start=1):
        left, right = sorted((int(name_H[one]), int(name_H[other])))
        chain = _joined(chains[left], chains.pop(right), lengths_HH, reach_H)
        name_H[chain] = left
        chains[left] = chain
        if done in gaps:
            snapshots[done] = name_H.copy()
    return chains[0], snapshots


def _joined(near: Ints, far: Ints, lengths_HH: Floats, reach_H: Floats) -> Ints:
    """Join two chains at the least cost: end to end, or by inserting a single host into the other chain.

    The cost of a chain is the sum of its link lengths, plus the typical distance of the host at each end as the next
    link. Therefore a host that is far from all other hosts lies inside a chain, and well connected hosts lie at the
    ends.
    """
    if len(near) == 1:
        near, far = far, near
    turned = [(first, second) for first in (near, near[::-1]) for second in (far, far[::-1])]
    costs = [lengths_HH[first[-1], second[0]] - reach_H[first[-1]] - reach_H[second[0]] for first, second in turned]
    best = int(np.argmin(costs))
    if len(far) == 1:
        before, after, host = near[:-1], near[1:], far[0]
        inside = lengths_HH[before, host] + lengths_HH[host, after] - lengths_HH[before, after] - 2 * reach_H[host]
        if len(inside) and inside.min() < costs[best]:
            return np.insert(near, int(inside.argmin()) + 1, host)
    return np.concatenate(turned[best])


def _clear_gaps(snapshots: dict[int, Ints], lengths: Floats) -> list[int]:
    """Return the gaps that make tiers, widest first: two groups or more, and at most half of the hosts alone."""
    chosen = []
    for gap, name_H in snapshots.items():
        sizes = np.bincount(name_H)
        if (sizes > 1).sum() >= 2 and 2 * sizes[sizes > 1].sum() >= len(name_H):
            chosen.append(gap)
    chosen.sort(key=lambda gap: (-lengths[gap] / max(lengths[gap - 1], _TINY), gap))
    return chosen[:MOST_TIERS]


Placement = tuple[int, ...]
IsLate = Callable[[], bool]
"""Function that returns true once the search must end."""


class Objective(Protocol):
    """Prices placements: `PlacementCost`, or a smaller class in a test."""

    def costs(self, placement_KW: Ints) -> Floats:
        """Return the seconds per step of each placement, independent of the other placements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """The slots of a cluster, and the rules for placements on these slots.

    On CUDA the RANKs of a host must differ modulo D. Then LOCAL_RANK = RANK % D, and one CUDA_VISIBLE_DEVICES list for
    the host puts every rank on its slot. Code that takes RANK modulo the device count finds its own device too.
    """

    num_hosts: int
    devices_per_host: int
    keeps_residues: bool
    blocks: tuple[RankBlock, ...] = ()
    """Blocks of ranks that must lie on one host or in one NVLink domain, on CUDA."""
    domain_H: tuple[int, ...] = ()
    """NVLink domain of each host; empty if no block must lie inside a domain."""

    @classmethod
    def of(cls, cluster: Cluster, blocks: tuple[RankBlock, ...] = ()) -> Slots:
        """Take the slots of a cluster, and blocks of ranks that must share a host or an NVLink domain."""
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
        """Number of slots."""
        return self.num_hosts * self.devices_per_host

    def host(self, index: int) -> range:
        """Return the slots of a host."""
        return range(index * self.devices_per_host, (index + 1) * self.devices_per_host)

    @property
    def host_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of hosts that may exchange all their ranks under any placement: each NVLink domain, or all hosts."""
        if self.domain_H:
            return Domains(devices_per_host=self.devices_per_host, domain_H=self.domain_H).domains
        return (tuple(range(self.num_hosts)),)

    @property
    def ranks_of_a_host_unit(self) -> int:
        """Consecutive ranks that must stay on one host; units of this size may change hosts inside a host group."""
        return math.lcm(*(block.size for block in self.blocks if block.within == "host"))

    @property
    def ranks_of_a_unit(self) -> int:
        """Consecutive ranks that must stay on one host; units of this size may be exchanged between any two hosts."""
        return math.lcm(*(block.size for block in self.blocks))

    def first(self) -> Placement:
        """Return torchrun's placement: rank i on slot i. If a block is split, fill the NVLink domains in turn instead.

        Whole blocks fill every host or domain, so filling domains with ranks in order never splits a block.
        """
        order = [host for group in self.host_groups for host in group]
        ranks_HD = np.empty((self.num_hosts, self.devices_per_host), dtype=np.int64)
        ranks_HD[order] = np.arange(self.num_slots).reshape(ranks_HD.shape)
        in_domains = tuple(ranks_HD.ravel().tolist())
        return next(filter(self.allows, (host_order(self.num_slots), in_domains)))

    def allows(self, placement: ArrayLike) -> bool:
        """Return whether a placement is allowed: on CUDA, ranks of a host differ modulo D, and no block is split."""
        if not self.keeps_residues:
            return True
        if self.blocks:
            domains = Domains(devices_per_host=self.devices_per_host, domain_H=self.domain_H)
            if domains.split(self.blocks, placement):
                return False
        residue_HD = np.asarray(placement).reshape(self.num_hosts, -1) % self.devices_per_host
        return bool((np.sort(residue_HD, axis=1) == np.arange(self.devices_per_host)).all())


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A placement and its step time."""

    placement: Placement
    cost_s: float

    def or_faster(self, other: Placed) -> Placed:
        """Return the faster of two placements, or this placement if both are equally fast."""
        return other if other.cost_s < self.cost_s else self


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementProblem:
    """A layout whose ranks need slots of a cluster."""

    layout: Layout
    cluster: Cluster
    objective: Objective
    bound_s: float
    """Lower bound in seconds over all placements."""
    blocks: tuple[RankBlock, ...] = ()
    """Blocks of ranks that must lie on one host or in one NVLink domain."""
    has_linear_model: bool = True
    """True if `host_swaps` can make a linear model of the objective, which needs Megatron's own schedule."""

    @property
    def slots(self) -> Slots:
        """Slots of the cluster, and the rules for placements on these slots."""
        return Slots.of(self.cluster, self.blocks)

    def meets_bound(self, placed: Placed) -> bool:
        """Return whether no placement can be faster, because the step equals the bound (up to rounding)."""
        return placed.cost_s <= self.bound_s * (1 + 1e-9)

    def best_of(self, candidates: Sequence[Placement] | Ints) -> Placed:
        """Price placements together, and return the fastest; if several are equally fast, return the first of these."""
        placement_KW = np.asarray(candidates, dtype=np.int64)
        costs_s = self.objective.costs(placement_KW)
        least = int(costs_s.argmin())
        return Placed(placement=tuple(placement_KW[least].tolist()), cost_s=float(costs_s[least]))

    def starts(self, most: int) -> Ints:
        """Return up to `most` different start placements, the most promising first; the array (K, W) is read-only.

        Near hosts get the ranks that exchange most data. Torchrun's order comes first if the rules allow this order.
        """
        # Only the degrees decide the groups of ranks.
        degrees = Layout(**{name: getattr(self.layout, name) for name in Degrees._fields})
        return _starts(degrees, self.slots, tiers_of(self.cluster.between_hosts), most)


def host_order(num_slots: int) -> Placement:
    """Return torchrun's placement: rank i on slot i."""
    return tuple(range(num_slots))


@lru_cache(maxsize=64)
def _starts(degrees: Layout, slots: Slots, tiers: Tiers, most: int) -> Ints:
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
    """Yield placements: host-sized blocks of ranks in several orders, on hosts in several orders."""
    orders = [tiers.order_H]
    # Number of hosts of one tensor-parallel or expert group, whose ranks exchange data in every pass.
    unit = -(-max(layout.tp * layout.cp, layout.ep * layout.etp) // slots.devices_per_host)
    packed = _packed(tiers, unit)
    if unit > 1 and packed.tolist() != tiers.order_H.tolist():
        orders.insert(0, packed)
    if tiers.by_speed:
        # The first and the last stage often wait longest for their links. So one or both get hosts with fast links.
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
    """Return arrays (H, D) of ranks. Each array is a way to divide the ranks into H blocks, one block for each host.

    A block has consecutive ranks, or every H-th rank, or consecutive ranks of the other rank mapping, which puts whole
    pipelines on a host.
    """
    ranks = np.arange(layout.world_size)
    shape = slots.num_hosts, slots.devices_per_host
    grid_PDCT = rank_grid(layout)
    other = grid_PDCT if layout.use_tp_pp_dp_mapping else grid_PDCT.transpose(1, 0, 2, 3)
    candidates = [ranks.reshape(shape), other.reshape(shape), ranks.reshape(shape[::-1]).T]
    in_order = [np.sort(block_HD, axis=1) for block_HD in candidates]
    unique = {block_HD.tobytes(): block_HD for block_HD in reversed(in_order)}
    # NVLink domains are checked later, because the host of each block is not decided here.
    anywhere = replace(slots, blocks=tuple(block for block in slots.blocks if block.within == "host"), domain_H=())
    return [block_HD for block_HD in reversed(unique.values()) if anywhere.allows(block_HD)]


def _packed(tiers: Tiers, unit: int) -> Ints:
    """Order hosts so that sets of `unit` hosts lie inside a group of near hosts; hosts outside a set come last.

    The groups belong to the finest tier whose groups can hold `unit` hosts.
    """
    for tier in range(tiers.num_tiers):
        runs = tiers.runs(tier)
        if max(len(run) for run in runs) >= unit:
            halves = [np.split(run, [len(run) // unit * unit]) for run in runs]
            return np.concatenate([*(full for full, _ in halves), *(rest for _, rest in halves)])
    return tiers.order_H


def _sequences(layout: Layout, block_HD: Ints, tiers: Tiers, unit: int) -> Iterator[Ints]:
    """Yield orders of the blocks: by pipeline rank, by replica, or in stage x replica rectangles for a host group."""
    stage_Q = np.array([layout.cell_of(rank).pp for rank in block_HD[:, 0].tolist()])
    # Number of earlier blocks with the same pipeline rank.
    replica_Q = np.empty_like(stage_Q)
    for stage in range(layout.pp):
        held = np.flatnonzero(stage_Q == stage)
        replica_Q[held] = np.arange(len(held))
    squares = [(1, int(replica_Q.max()) + 1), (layout.pp, unit)]
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
