"""Every way to run a job that Megatron allows, each once: layouts, and orders of hosts up to symmetry. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import permutations

from benchmarks.rivals.pick import Placement
from pipette_launch.facts import Layout
from pipette_launch.facts.layout import Cell

Run = tuple[Layout, Placement]


def host_orders(num_hosts: int, devices_per_host: int) -> Iterator[Placement]:
    """Placements that keep the ranks of a host together, as torchrun can run them; its own order first."""
    for order in permutations(range(num_hosts)):
        yield tuple(host * devices_per_host + device for host in order for device in range(devices_per_host))


def canonical(layout: Layout, placement: Placement, devices_per_host: int) -> Placement:
    """The least of all placements that do the same as this one.

    Groups talk in rings, so turning all tensor-parallel or all data-parallel groups by as many places changes nothing;
    nor do the slots of one host differ.
    """
    turned = (
        tuple(_turned(layout, rank, tp=tp, dp=dp) for rank in placement)
        for tp in range(layout.tp)
        for dp in range(layout.dp)
    )
    return min(_within_hosts(ranks, devices_per_host) for ranks in turned)


def _turned(layout: Layout, rank: int, *, tp: int, dp: int) -> int:
    cell = layout.cell_of(rank)
    return layout.rank_of(Cell(pp=cell.pp, dp=(cell.dp + dp) % layout.dp, cp=cell.cp, tp=(cell.tp + tp) % layout.tp))


def _within_hosts(ranks: Placement, devices_per_host: int) -> Placement:
    hosts = (sorted(ranks[at : at + devices_per_host]) for at in range(0, len(ranks), devices_per_host))
    return tuple(rank for host in hosts for rank in host)


def placements(layout: Layout, num_hosts: int, devices_per_host: int) -> tuple[Placement, ...]:
    """Orders of the hosts under a layout, one of each symmetric set."""
    found = {}
    for order in host_orders(num_hosts, devices_per_host):
        found.setdefault(canonical(layout, order, devices_per_host), order)
    return tuple(found.values())


def runs(layouts: Sequence[Layout], num_hosts: int, devices_per_host: int, rng: random.Random) -> tuple[Run, ...]:
    """All of them in an order by chance, so that any beginning of it is a fair sample."""
    found = [(layout, order) for layout in layouts for order in placements(layout, num_hosts, devices_per_host)]
    rng.shuffle(found)
    return tuple(found)
