"""Settle seats on places: every bijection where there are few, else annealing that prices swaps in batches."""

# Q = seats, K = bijections or proposals priced at once.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, permutations

import numpy as np
from numpy.typing import ArrayLike

from pipette_launch.search.flows import Flows, Ints

FEW = 9
"""Up to so many seats every bijection is priced, where the moves allow as many prices."""
BLOCK = 40_320
BATCH = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Settled:
    """The best bijection seen, its exact cost in seconds, and how many proposals were priced."""

    place_Q: Ints
    cost: float
    moves: int
    is_optimal: bool = False
    """Every bijection was priced."""


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

    The course depends on the problem, the start and `rng`, not on `moves` or the clock, which only cut it short: more
    of either is never worse.

    Args:
        flows: the problem.
        place_Q: where to begin: the place of each seat.
        moves: how many bijections may be priced.
        rng: the only source of chance.
        clock: seconds, on the scale of `deadline_s`.
        deadline_s: when to stop.

    """
    start_Q = np.asarray(place_Q, dtype=np.int64)
    best = Settled(place_Q=start_Q, cost=flows.cost(start_Q), moves=0)
    tries = _all(flows) if _is_few(flows, moves) else _walk(flows, rng)
    for found in tries(best):
        best = found
        if best.moves >= moves or best.is_optimal or clock() >= deadline_s:
            break
    return best


def _is_few(flows: Flows, moves: int) -> bool:
    return flows.num_seats <= FEW and math.factorial(flows.num_seats) <= moves


def _better(best: Settled, place_KQ: Ints, cost_K: np.ndarray, *, is_optimal: bool = False) -> Settled:
    least = int(np.argmin(cost_K))
    place_Q, cost = (
        (place_KQ[least].copy(), float(cost_K[least])) if cost_K[least] < best.cost else (best.place_Q, best.cost)
    )
    return Settled(place_Q=place_Q, cost=cost, moves=best.moves + len(cost_K), is_optimal=is_optimal)


def _all(flows: Flows) -> Callable[[Settled], Iterator[Settled]]:
    def tries(best: Settled) -> Iterator[Settled]:
        todo = permutations(range(flows.num_seats))
        left = math.factorial(flows.num_seats)
        while left:
            place_KQ = np.array(list(islice(todo, BLOCK)), dtype=np.int64)
            left -= len(place_KQ)
            best = _better(best, place_KQ, flows.costs(place_KQ), is_optimal=not left)
            yield best

    return tries


def _walk(flows: Flows, rng: np.random.Generator) -> Callable[[Settled], Iterator[Settled]]:
    def tries(best: Settled) -> Iterator[Settled]:
        rows = np.arange(BATCH)
        while flows.num_seats > 1:
            place_KQ = np.repeat(best.place_Q[None, :], BATCH, axis=0)
            one, two = rng.integers(flows.num_seats, size=(2, BATCH))
            place_KQ[rows, one], place_KQ[rows, two] = best.place_Q[two], best.place_Q[one]
            best = _better(best, place_KQ, flows.costs(place_KQ))
            yield best
        yield Settled(place_Q=best.place_Q, cost=best.cost, moves=best.moves, is_optimal=True)

    return tries
