"""Which rank sits on which slot: the search for the placement with the least step time."""

from __future__ import annotations

import random

from pipette_launch.cost.step.placed import PlacementCost
from pipette_launch.search.placement.annealing import annealed
from pipette_launch.search.placement.blocks import rearranged, shuffled
from pipette_launch.search.placement.exhaustive import AT_ONCE, exhaustion, num_placements
from pipette_launch.search.placement.slots import IsLate, Placed, PlacementProblem, faster
from pipette_launch.search.placement.starts import starts

ROUNDS = 4
"""Improvements of one layout's placement, after which nothing new is tried."""
MANY_STARTS = 24
FEW_STARTS = 6
"""Of many hosts, at first; the first round prices the others."""
MANY_HOSTS = 64
ANNEALING = ((64, 60), (256, 20))
"""Up to so many slots, single devices change places too, in so many steps of annealing.

Where the devices of a host are linked unevenly and numbered without regard to that, it is worth 3 %.
"""
KICKED = 0.1
"""Share of the hosts that every other round moves away from the best first."""


def begin(problem: PlacementProblem, *, is_late: IsLate) -> Placed:
    """Return the best of a few starts or, for a few slots, of all placements."""
    most = FEW_STARTS if problem.slots.num_hosts > MANY_HOSTS else MANY_STARTS
    best = problem.best_of(starts(problem.layout, problem.cluster, most=most))
    if num_placements(problem.layout, problem.slots) <= AT_ONCE and not best.is_optimal:
        *_, best = best, *exhaustion(problem, best, is_late=is_late)
    return best


def improve(problem: PlacementProblem, best: Placed, *, turn: int, rng: random.Random, is_late: IsLate) -> Placed:
    """Go one bounded piece of work further from the best placement so far, never worse.

    Whole hosts change places first, then, on a few slots, single devices by annealing. The first turn goes on from the
    best, later ones from other starts and from around the best in turn, so that not every one ends in one valley.

    Args:
        problem: what is placed where.
        best: the best so far.
        turn: how often this was done before.
        rng: the only source of chance.
        is_late: whether to stop.

    """
    slots = problem.slots
    start = _start(problem, best, turn, rng)
    if isinstance(problem.objective, PlacementCost) and slots.num_hosts > 1:
        start = rearranged(problem, start, model=problem.objective, rng=rng, is_late=is_late)
    found = faster(best, start)
    steps = next((steps for most, steps in ANNEALING if slots.num_slots <= most), 0)
    if steps and not found.is_optimal:
        found = annealed(problem, start, steps=steps, rng=rng, is_late=is_late)
    return faster(best, found)


def _start(problem: PlacementProblem, best: Placed, turn: int, rng: random.Random) -> Placed:
    """Where a turn begins: the best of all starts, another start, or hosts moved away from the best."""
    num_hosts = problem.slots.num_hosts
    if turn == 0:
        rest = starts(problem.layout, problem.cluster, most=MANY_STARTS)[FEW_STARTS:] if num_hosts > MANY_HOSTS else []
        return faster(best, problem.best_of(rest)) if rest else best
    if num_hosts > MANY_HOSTS:
        # A turn does not come to its end there, and goes on where the last stopped.
        return best
    if turn % 2 == 0 and num_hosts > 1:
        return problem.best_of([shuffled(best.placement, num_hosts, rng, share=KICKED)])
    candidates = starts(problem.layout, problem.cluster, most=MANY_STARTS)
    return problem.best_of([candidates[(turn + 1) // 2 % len(candidates)]])
