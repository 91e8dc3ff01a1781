"""Placements to begin with: near hosts get ranks that exchange most, for several guesses of which ranks these are."""

# H = hosts = blocks, D = devices of one host, P = pipeline ranks. A block is what one host holds: D ranks.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from pipette_launch.cost.communication.groups import rank_grid
from pipette_launch.facts import Cluster, Layout
from pipette_launch.facts.co_location import RankBlock
from pipette_launch.search.assignment.problem import Ints
from pipette_launch.search.placement.slots import Slots
from pipette_launch.search.placement.tiers import Tiers, tiers_of

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
    anywhere = replace(slots, blocks=tuple(block for block in slots.blocks if block.room == "host"), domain_H=())
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
