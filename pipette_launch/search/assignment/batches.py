"""Anneal by many swaps at a time: priced together, and made together where they do not meet."""

# R = copies side by side, X = seats of all copies (copy * Q + seat), P = proposed swaps, A = accepted ones.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipette_launch.search.assignment.problem import Floats, Flows, Ints
from pipette_launch.search.assignment.step import Step
from pipette_launch.search.assignment.swap_deltas import Board, Position

ROWS, MOST_COPIES = 512, 4
"""Small problems are annealed several times side by side, so that a batch is worth its overhead."""
PROPOSALS_PER_SEAT = 2
INFORMED = 0.92
"""Part of the proposals that bring a seat near to one that it talks to."""
FIRST_ROUND_PER_SEAT = 64
HOT, HOTTEST, COLD = 0.05, 0.4, 0.003
"""Temperatures of a round, in parts of the typical rise of an informed swap at the start; copies start apart."""
SOFTNESS = 16.0
"""Of the families' maxima, in temperatures. A soft maximum that hardens slowly leads swaps to the largest group, which
few of them touch."""


def walk(flows: Flows, start_Q: Ints, rng: np.random.Generator) -> Iterator[Step]:
    """Anneal in rounds of doubling length, each from the best so far, without end.

    Where a round ends does not depend on how many batches will be asked for, so a longer walk begins with a shorter.
    """
    copies = int(np.clip(ROWS // flows.num_seats, 1, MOST_COPIES))
    board = Board(flows, copies)
    size = PROPOSALS_PER_SEAT * flows.num_seats * copies
    best_Q, best_cost = start_Q, np.inf
    here = board.position(np.tile(start_Q, copies))
    scale = _typical_rise(board, here, size, rng)
    batches = FIRST_ROUND_PER_SEAT // PROPOSALS_PER_SEAT
    while True:
        hot_R = np.geomspace(HOT, HOTTEST, MOST_COPIES)[:copies]
        here = board.position(np.tile(best_Q, copies))
        for cooled in np.linspace(0.0, 1.0, batches):
            here = _stepped(board, here, scale * hot_R * (COLD / hot_R) ** cooled, size, rng)
            least = int(np.argmin(here.cost_R))
            place_Q, cost = here.place_X.reshape(copies, -1)[least], float(here.cost_R[least])
            if cost < best_cost:
                best_Q, best_cost = place_Q, cost
            yield Step(place_Q=place_Q, cost=cost, priced=size)
        batches *= 2


def _typical_rise(board: Board, position: Position, size: int, rng: np.random.Generator) -> float:
    """Seconds that a swap for the worse costs; temperatures are parts of it, whatever the problem's scale."""
    # Of sums: most swaps do not touch the largest group of a family, and would seem to cost nothing.
    rise_P = board.sums(position, *_proposals(board, position, size, rng))
    worse_P = rise_P[rise_P > 0]
    return float(np.median(worse_P)) if len(worse_P) else max(float(position.cost_R[0]), 1e-300)


def _stepped(board: Board, here: Position, temperature_R: Floats, size: int, rng: np.random.Generator) -> Position:
    """Propose, accept by Metropolis' rule, and make those swaps whose prices the others leave true."""
    one_P, two_P = _proposals(board, here, size, rng)
    rise_P = board.rises(here, one_P, two_P, SOFTNESS * temperature_R)
    allowed_P = temperature_R[one_P // board.flows.num_seats] * rng.standard_exponential(size)
    accepted = np.flatnonzero((rise_P <= allowed_P) & (one_P != two_P))
    if not len(accepted):
        return here
    made = accepted[_apart(board, one_P[accepted], two_P[accepted])]
    one_A, two_A = one_P[made], two_P[made]
    place_X = here.place_X.copy()
    place_X[one_A], place_X[two_A] = here.place_X[two_A], here.place_X[one_A]
    return board.position(place_X)


def _proposals(board: Board, position: Position, size: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Pairs of seats of a copy: most bring a seat near to one that it talks to, the others are any two."""
    seats = board.flows.num_seats
    one_P, chance_P = rng.integers(seats * board.copies, size=size), rng.random(size)
    copy_P, seat_P = np.divmod(one_P, seats)
    any_P = copy_P * seats + rng.integers(seats, size=size)
    degree_P = board.degree_Q[seat_P]
    flow_P = (chance_P * degree_P).astype(np.int64)
    wanted_P = board.near_HK[position.beside_XD[one_P, flow_P], rng.integers(board.near_HK.shape[1], size=size)]
    is_informed_P = (degree_P > 0) & (np.arange(size) < INFORMED * size)
    return one_P, np.where(is_informed_P, position.seat_RH[copy_P, wanted_P], any_P)


def _apart(board: Board, one_A: Ints, two_A: Ints) -> Ints:
    """Which swaps to make: those that come before every other one on their seats and on the seats these talk to."""
    turn_A = np.arange(len(one_A))
    first_X = np.full(len(board.other_XD), len(one_A))
    # Assigned in reverse, so that the first swap of a seat is what stays.
    first_X[np.stack([one_A, two_A], axis=1).ravel()[::-1]] = np.repeat(turn_A, 2)[::-1]
    around_A = [first_X[end_A] for end_A in (one_A, two_A)]
    around_A += [first_X[board.other_XD[end_A]].min(axis=1) for end_A in (one_A, two_A)]
    return np.flatnonzero(np.minimum.reduce(around_A) == turn_A)
