"""Every allowed placement of a layout on a few slots in device order, up to what symmetry makes equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from pipette_launch.facts import Layout
from pipette_launch.search.placement.device_order import are_uneven
from pipette_launch.search.placement.slots import IsLate, Placed, Placement, PlacementProblem, Slots, faster

AT_ONCE = 720 * 6**2
"""Placements times the square of their slots, up to which trying all of them is cheaper than annealing (six slots)."""
EXACT = 10_080
"""Up to so many placements (most layouts on eight slots) all are tried for the best layout."""
EXACT_QUANTUM = 128


def exhaustion(problem: PlacementProblem, best: Placed, *, is_late: IsLate) -> Iterator[Placed]:
    """Try every placement that symmetry leaves, in one fixed order; the last one is optimal if no order can pay."""
    todo = placements(problem.layout, problem.slots)
    while not is_late():
        piece = list(islice(todo, EXACT_QUANTUM))
        if not piece:
            yield replace(best, is_optimal=best.is_optimal or not are_uneven(problem.cluster.within_host))
            return
        best = faster(best, problem.best_of(piece))
        yield best


def are_few(layout: Layout, slots: Slots) -> bool:
    """Return true if the search tries all placements of every layout that it prices."""
    return num_placements(layout, slots) * slots.num_slots**2 <= AT_ONCE


def num_placements(layout: Layout, slots: Slots) -> int:
    """Count the placements in device order; those that differ only by turning their rings count once."""
    hosts, devices = slots.num_hosts, slots.devices_per_host
    if slots.num_slots > 64:
        # Far too many to need the number, which takes long to multiply out.
        return EXACT * EXACT
    allowed = math.factorial(slots.num_slots) // math.prod([math.factorial(devices)] * hosts)
    if slots.keeps_residues:
        allowed = math.prod([math.factorial(hosts)] * devices)
    return allowed // (layout.dp * layout.tp if _turns(layout, slots) else 1)


def placements(layout: Layout, slots: Slots) -> Iterator[Placement]:
    """Yield every allowed placement in device order; with one device a host, one of each set of turned rings.

    Shifting all data-parallel indices by one, or all tensor-parallel ones, leaves every group's members and the order
    around its ring as they were, so slot 0 may be given index 0 in both. Expert groups are cut out of the
    data-parallel index, which breaks that symmetry. With several devices a host a turn may break the rule of residues.
    """
    cells = [layout.cell_of(rank) for rank in range(slots.num_slots)]
    first = [rank for rank, cell in enumerate(cells) if not _turns(layout, slots) or cell.dp == cell.tp == 0]
    chosen: list[int] = []

    def extend() -> Iterator[Placement]:
        if len(chosen) == slots.num_slots:
            if not slots.blocks or slots.allows(chosen):
                yield tuple(chosen)
            return
        size = slots.devices_per_host
        beside = chosen[len(chosen) // size * size :]
        taken = {rank % size for rank in beside} if slots.keeps_residues else set()
        for rank in first if not chosen else range(slots.num_slots):
            if rank not in chosen and rank % size not in taken and (not beside or rank > beside[-1]):
                chosen.append(rank)
                yield from extend()
                chosen.pop()

    return extend()


def _turns(layout: Layout, slots: Slots) -> bool:
    return slots.devices_per_host == 1 and layout.ep == 1 and layout.etp == layout.tp
