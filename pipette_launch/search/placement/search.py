"""Search for the placement of a layout with the least step time: from several starts, by hosts and by ranks."""

from __future__ import annotations

import random

import numpy as np

from pipette_launch.cost.step.placed import PlacementCost
from pipette_launch.search.assignment.problem import Ints
from pipette_launch.search.placement.annealing import annealed
from pipette_launch.search.placement.blocks import rearranged, shuffled
from pipette_launch.search.placement.device_order import ordered
from pipette_launch.search.placement.exhaustive import are_few, exhaustion
from pipette_launch.search.placement.slots import IsLate, Placed, PlacementProblem, faster
from pipette_launch.search.placement.starts import starts

ROUNDS = 4
"""How often the placement of one layout is improved at most."""
FEW_STARTS = 6
"""Priced at first: on 512 GPUs the best of so many was 0.1 % worse than the best of all in the mean."""
MANY_STARTS = 24
"""The first round prices so many."""
MANY_HOSTS = 64
FEW_SLOTS = 32
"""Slots up to which single ranks change hosts in each round too. On four hosts of two devices this saved up to 11 % of
a step, where rings had to pass one host twice."""
ANNEALING_STEPS = 60
ANNEALED_SLOTS = range(FEW_SLOTS + 1, 257)
"""Numbers of slots on which single ranks change hosts once, after all rounds: on 64 slots this saved up to 5 % of a
step."""
STEPS_AT_LAST = 20
SHUFFLED = 0.1
"""Share of the hosts that every other round exchanges at random first."""


def begin(problem: PlacementProblem, *, is_late: IsLate) -> tuple[Placed, float]:
    """Return the best of a few starts or, for a few slots, of all placements; and the seconds of torchrun's order.

    That order is priced together with the starts, which takes little longer than one of them.
    """
    order_W = np.arange(problem.slots.num_slots)
    starts_KW = starts(problem.layout, problem.cluster, most=FEW_STARTS, blocks=problem.blocks)
    is_allowed = bool((starts_KW[0] == order_W).all())
    priced_KW = starts_KW if is_allowed else np.concatenate([order_W[None], starts_KW])
    costs_s = problem.objective.costs(priced_KW)
    first = 0 if is_allowed else 1
    least = first + int(costs_s[first:].argmin())
    best = problem.placed(tuple(priced_KW[least].tolist()), float(costs_s[least]))
    if are_few(problem.layout, problem.slots) and not best.is_optimal:
        *_, best = best, *exhaustion(problem, best, is_late=is_late)
    return faster(best, ordered(problem, best, is_late=is_late, thorough=False)), float(costs_s[0])


def improve(
    problem: PlacementProblem,
    best: Placed,
    *,
    turn: int,
    rng: random.Random,
    is_late: IsLate,
) -> Placed:
    """Search for a better placement by one bounded piece of work; never worse than the best so far.

    Whole hosts change places first, then on few slots single ranks, by annealing. The first turn goes on from the
    best, later ones in turn from the best with some hosts exchanged and from other starts, to find other minima.

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
    if slots.num_slots <= FEW_SLOTS and not found.is_optimal:
        found = annealed(problem, start, steps=ANNEALING_STEPS, rng=rng, is_late=is_late)
    return faster(best, _reordered(problem, found, is_late))


def exchange_devices(problem: PlacementProblem, best: Placed, *, rng: random.Random, is_late: IsLate) -> Placed:
    """Let single ranks change hosts after the last round, on as many slots as no round of `improve` does it on.

    Args:
        problem: what is placed where.
        best: the best so far; nothing worse is ever returned.
        rng: the only source of chance.
        is_late: whether to stop.

    """
    if best.is_optimal or problem.slots.num_slots not in ANNEALED_SLOTS:
        return best
    found = annealed(problem, best, steps=STEPS_AT_LAST, rng=rng, is_late=is_late)
    return faster(best, _reordered(problem, found, is_late))


def _reordered(problem: PlacementProblem, found: Placed, is_late: IsLate) -> Placed:
    """Judge the order of devices anew, as hosts have changed places since."""
    return ordered(problem, found, is_late=is_late, thorough=problem.slots.num_slots < ANNEALED_SLOTS.stop)


def _start(problem: PlacementProblem, best: Placed, turn: int, rng: random.Random) -> Placed:
    """Where a turn begins: the best of all starts, hosts moved away from the best, or another start."""
    slots = problem.slots
    num_hosts = slots.num_hosts

    def candidates() -> Ints:
        return starts(problem.layout, problem.cluster, most=MANY_STARTS, blocks=problem.blocks)

    if turn == 0:
        # The first few too: a layout may have come with the placement of another.
        return faster(best, problem.best_of(candidates()))
    if num_hosts > MANY_HOSTS:
        # A turn does not converge there, so each goes on from the result of the last.
        return best
    if turn % 2 == 1 and num_hosts > 1:
        return problem.best_of([shuffled(best.placement, slots, rng, share=SHUFFLED)])
    others_KW = candidates()
    chosen = turn // 2 % len(others_KW)
    return problem.best_of(others_KW[chosen : chosen + 1])
