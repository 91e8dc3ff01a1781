"""Settle seats on places: every bijection where there are few, else annealing that prices batches of moves."""

# Q = seats, K = bijections priced at once.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, permutations

import numpy as np
from numpy.typing import ArrayLike

from pipette_launch.search.assignment.batches import walk
from pipette_launch.search.assignment.problem import Flows, Ints
from pipette_launch.search.assignment.step import Step
from pipette_launch.search.assignment.tempering import temper

FEW = 9
"""Up to so many seats every bijection is priced, where the moves allow as many prices."""
SMALL = 40
"""Up to so many seats moves are priced in full, so that whole segments can move."""
BLOCK = 40_320


@dataclass(frozen=True, kw_only=True, eq=False)
class Settled:
    """The best bijection seen, its exact cost in seconds, and how many proposals were priced."""

    place_Q: Ints
    cost: float
    moves: int
    is_optimal: bool = False
    """Every bijection was priced: no other is cheaper."""


def settle(
    flows: Flows,
    place_Q: ArrayLike,
    *,
    moves: int,
    rng: np.random.Generator,
    clock: Callable[[], float],
    deadline_s: float,
) -> Settled:
    """Look for a cheaper bijection; the start is returned where none is found.

    The course depends on the problem, the start and `rng`; `moves` and the clock only cut it short, and where moves
    allow to try every bijection that is done instead. So more of either is never worse.

    Args:
        flows: the problem.
        place_Q: where to begin: the place of each seat.
        moves: after how many priced proposals to stop, to the end of a batch.
        rng: the only source of chance.
        clock: seconds, on the scale of `deadline_s`.
        deadline_s: when to stop.

    """
    start_Q = np.array(place_Q, dtype=np.int64)
    seats = flows.num_seats
    if not np.array_equal(np.sort(start_Q), np.arange(seats)):
        raise ValueError(f"place_Q must name each of {seats} places once, got {start_Q.tolist()[:20]}")
    best = Settled(place_Q=start_Q, cost=flows.cost(start_Q), moves=0, is_optimal=seats == 1)
    all_of_them = math.factorial(seats) if seats <= FEW else math.inf
    steps = _all(flows) if all_of_them <= moves else (temper if seats <= SMALL else walk)(flows, start_Q, rng)
    while best.moves < moves and not best.is_optimal and clock() < deadline_s:
        best = _after(best, next(steps), all_of_them if all_of_them <= moves else math.inf)
    return best


def _after(best: Settled, step: Step, all_of_them: float) -> Settled:
    """The better of two, and how many were priced by now."""
    place_Q, cost = (step.place_Q, step.cost) if step.cost < best.cost else (best.place_Q, best.cost)
    moves = best.moves + step.priced
    return Settled(place_Q=place_Q, cost=cost, moves=moves, is_optimal=moves >= all_of_them)


def _all(flows: Flows) -> Iterator[Step]:
    """Every bijection, in lexicographic order of places."""
    todo = permutations(range(flows.num_seats))
    while block := list(islice(todo, BLOCK)):
        place_KQ = np.array(block, dtype=np.int64)
        cost_K = flows.costs(place_KQ)
        least = int(np.argmin(cost_K))
        yield Step(place_Q=place_KQ[least], cost=float(cost_K[least]), priced=len(block))
