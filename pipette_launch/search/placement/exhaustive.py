"""Every allowed placement of a layout on a few slots, up to what symmetry makes equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from pipette_launch.facts import Layout
from pipette_launch.search.placement.allowed import Objective, Placed, Placement, Seats

AT_ONCE = 720
"""Up to so many placements (six slots) trying them all is cheaper than annealing."""
EXACT = 10_080
"""Up to so many placements (most layouts on eight slots) all are tried for the best layout."""
EXACT_QUANTUM = 128


def exhaustion(
    layout: Layout, seats: Seats, best: Placed, *, objective: Objective, clock: Callable[[], float], deadline_s: float
) -> Iterator[Placed]:
    """Try every placement that symmetry leaves, in one fixed order; the last one yielded is optimal."""
    todo = placements(layout, seats)
    while clock() < deadline_s:
        piece = list(islice(todo, EXACT_QUANTUM))
        if not piece:
            yield Placed(placement=best.placement, cost_s=best.cost_s, is_optimal=True)
            return
        costs = objective.costs(np.array(piece, dtype=np.int64))
        least = int(costs.argmin())
        if costs[least] < best.cost_s:
            best = Placed(placement=piece[least], cost_s=float(costs[least]), is_optimal=False)
        yield best


def num_placements(layout: Layout, seats: Seats) -> int:
    """How many placements are left when those that differ only by turning their rings count once."""
    hosts, devices = seats.num_hosts, seats.devices_per_host
    if seats.num_slots > 64:
        # Far too many to need the number, which takes long to multiply out.
        return EXACT * EXACT
    allowed = math.factorial(seats.num_slots)
    if seats.keeps_residues:
        allowed = math.prod([math.factorial(hosts)] * devices + [math.factorial(devices)] * hosts)
    return allowed // (layout.dp * layout.tp if _turns(layout) else 1)


def placements(layout: Layout, seats: Seats) -> Iterator[Placement]:
    """Yield every allowed placement, one of each set that differs only by turning its rings.

    Shifting all data-parallel indices by one, or all tensor-parallel ones, leaves every group's members and the order
    around its ring as they were, so slot 0 may be given index 0 in both. Expert groups are cut out of the
    data-parallel index, which breaks that symmetry.
    """
    cells = [layout.cell_of(rank) for rank in range(seats.num_slots)]
    first = [rank for rank, cell in enumerate(cells) if not _turns(layout) or cell.dp == cell.tp == 0]
    chosen: list[int] = []

    def extend() -> Iterator[Placement]:
        if len(chosen) == seats.num_slots:
            yield tuple(chosen)
            return
        size = seats.devices_per_host
        beside = chosen[len(chosen) // size * size :]
        taken = {rank % size for rank in beside} if seats.keeps_residues else set()
        for rank in first if not chosen else range(seats.num_slots):
            if rank not in chosen and rank % size not in taken:
                chosen.append(rank)
                yield from extend()
                chosen.pop()

    return extend()


def _turns(layout: Layout) -> bool:
    return layout.ep == 1 and layout.etp == layout.tp
