"""Which rank sits on which slot: the search for the placement with the least step time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np

from pipette_launch.cost.step.placed import PlacementCost
from pipette_launch.facts import Cluster, Layout
from pipette_launch.search.placement.allowed import Objective, Placed, Placement, Seats, best_of, meets
from pipette_launch.search.placement.annealing import Cooling, anneal
from pipette_launch.search.placement.blocks import rearranged, shuffled
from pipette_launch.search.placement.exhaustive import AT_ONCE, exhaustion, num_placements
from pipette_launch.search.placement.moves import neighbour
from pipette_launch.search.placement.starts import starts

ROUNDS = 4
"""Improvements of one layout's placement, after which nothing new is tried."""
MANY_STARTS = 24
FEW_STARTS = 6
"""Of many hosts, at first; the first round prices the others."""
MANY_HOSTS = 64
POLISHING = ((64, 60), (256, 20))
"""Up to so many slots, single devices change places too, in so many steps of annealing."""
WIDTH = 32
"""Neighbours that are priced together: so many cost little more than one."""
PATIENCE = 20
START_TEMPERATURE = 0.01
END_TEMPERATURE = 0.001
KICKED = 0.1
"""Share of the hosts that every other round moves away from the best first."""


def begin(
    layout: Layout,
    cluster: Cluster,
    *,
    objective: Objective,
    bound_s: float,
    clock: Callable[[], float],
    deadline_s: float,
) -> Placed:
    """Return the best of a few starts or, for a few slots, of all placements."""
    seats = Seats.of(cluster)
    most = FEW_STARTS if seats.num_hosts > MANY_HOSTS else MANY_STARTS
    best = best_of(starts(layout, cluster, most=most), objective, bound_s)
    if num_placements(layout, seats) <= AT_ONCE and not best.is_optimal:
        *_, best = (
            best,
            *exhaustion(layout, seats, best, objective=objective, clock=clock, deadline_s=deadline_s),
        )
    return best


def improve(
    layout: Layout,
    cluster: Cluster,
    best: Placed,
    *,
    objective: Objective,
    bound_s: float,
    turn: int,
    rng: random.Random,
    clock: Callable[[], float],
    deadline_s: float,
) -> Placed:
    """Go one bounded piece of work further from the best placement so far, never worse.

    Whole hosts change places first, then, on a few slots, single devices by annealing. The first turn goes on from the
    best, later ones from other starts and from around the best in turn, so that not every one ends in one valley.

    Args:
        layout: what is placed.
        cluster: the slots.
        best: the best so far.
        objective: prices placements; hosts change places only if it is a `PlacementCost`.
        bound_s: no placement is faster.
        turn: how often this was done before.
        rng: the only source of chance.
        clock: seconds, on the scale of `deadline_s`.
        deadline_s: when to stop.

    """
    seats = Seats.of(cluster)
    start = _start(layout, cluster, best, objective=objective, bound_s=bound_s, turn=turn, rng=rng)
    if isinstance(objective, PlacementCost) and seats.num_hosts > 1:
        start = rearranged(
            start, seats.num_hosts, model=objective, bound_s=bound_s, rng=rng, clock=clock, deadline_s=deadline_s
        )
    found = min(best, start, key=lambda one: one.cost_s)
    steps = next((steps for slots, steps in POLISHING if seats.num_slots <= slots), 0)
    if steps and not found.is_optimal:
        cooling = Cooling(start=START_TEMPERATURE, end=END_TEMPERATURE, steps=steps, width=WIDTH, patience=PATIENCE)
        found = _polished(
            start,
            seats,
            cooling,
            objective=objective,
            bound_s=bound_s,
            rng=rng,
            clock=clock,
            deadline_s=deadline_s,
        )
    return min(best, found, key=lambda one: one.cost_s)


def improvements(
    layout: Layout,
    cluster: Cluster,
    *,
    objective: Objective,
    bound_s: float,
    rng: random.Random,
    clock: Callable[[], float],
    deadline_s: float,
) -> Iterator[Placed]:
    """Yield ever better placements of one layout, each after a bounded piece of work, until nothing is left to try.

    First the starts, then for a few slots every placement, else some rounds of `improve`. The course depends on the
    arguments and `rng` alone; whoever stops asking, or the deadline, only cuts it short.
    """
    best = begin(layout, cluster, objective=objective, bound_s=bound_s, clock=clock, deadline_s=deadline_s)
    yield best
    if num_placements(layout, Seats.of(cluster)) <= AT_ONCE:
        return
    for turn in range(ROUNDS):
        if best.is_optimal or clock() >= deadline_s:
            return
        best = improve(
            layout,
            cluster,
            best,
            objective=objective,
            bound_s=bound_s,
            turn=turn,
            rng=rng,
            clock=clock,
            deadline_s=deadline_s,
        )
        yield best


def _start(
    layout: Layout,
    cluster: Cluster,
    best: Placed,
    *,
    objective: Objective,
    bound_s: float,
    turn: int,
    rng: random.Random,
) -> Placed:
    """Where a turn begins: the best of all starts, another start, or hosts moved away from the best."""
    seats = Seats.of(cluster)
    if turn == 0:
        rest = starts(layout, cluster, most=MANY_STARTS)[FEW_STARTS:] if seats.num_hosts > MANY_HOSTS else []
        others = best_of(rest, objective, bound_s) if rest else best
        return min(best, others, key=lambda one: one.cost_s)
    if seats.num_hosts > MANY_HOSTS:
        # A turn does not come to its end there, and goes on where the last stopped.
        return best
    if turn % 2 == 0 and seats.num_hosts > 1:
        return best_of([shuffled(best.placement, seats.num_hosts, rng, share=KICKED)], objective, bound_s)
    candidates = starts(layout, cluster, most=MANY_STARTS)
    return best_of([candidates[(turn + 1) // 2 % len(candidates)]], objective, bound_s)


def _polished(
    start: Placed,
    seats: Seats,
    cooling: Cooling,
    *,
    objective: Objective,
    bound_s: float,
    rng: random.Random,
    clock: Callable[[], float],
    deadline_s: float,
) -> Placed:
    """Anneal single devices and hosts on the step time itself."""

    def step(placement: Placement, chance: random.Random) -> Placement:
        return neighbour(placement, seats, chance)

    annealed = anneal(
        start.placement,
        costs=lambda some: objective.costs(np.array(some, dtype=np.int64)).tolist(),
        neighbour=step,
        cooling=cooling,
        scale=start.cost_s - bound_s,
        rng=rng,
        clock=clock,
        deadline_s=deadline_s,
    )
    if annealed.cost >= start.cost_s:
        return start
    return Placed(placement=annealed.state, cost_s=annealed.cost, is_optimal=meets(annealed.cost, bound_s))
