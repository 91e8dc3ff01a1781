"""Go downhill from a good start: swap the seats of the groups that bind, many at a time, those that gain most first."""

# Q = seats, F = flows, G = groups, N = families, P = proposed swaps.

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipette_launch.search.assignment.problem import Floats, Flows, Ints
from pipette_launch.search.assignment.settle import Settled
from pipette_launch.search.assignment.swap_deltas import Board, Position

PROPOSALS_PER_SEAT = 2
FEWEST_PROPOSALS, MOST_PROPOSALS = 128, 2048
SOFTEST, HARDEST = 0.05, 0.002
"""Softness of the families' maxima at first and at last, in parts of what parts their largest from typical groups."""
PATIENCE = 8
"""Batches without a swap for the better, after which no more is tried."""
INFORMED = 0.5
"""Part of the proposals that bring a seat near to one that it talks to; the others take any place."""


def descend(
    flows: Flows,
    place_Q: Ints,
    *,
    near_HK: Ints,
    steps: int,
    rng: np.random.Generator,
    clock: Callable[[], float],
    deadline_s: float,
) -> Settled:
    """Look for a cheaper bijection near a given one; never worse than it.

    A family costs what its largest group does, so only swaps of a seat of its largest groups can help, and after each
    another is the largest. So maxima are softened, less and less: seats are drawn by their share in them, and all swaps
    that lower the soft cost and do not meet are made together.

    Args:
        flows: the problem.
        place_Q: where to begin: the place of each seat.
        near_HK: some near places of each place.
        steps: batches of proposals.
        rng: the only source of chance.
        clock: seconds, on the scale of `deadline_s`.
        deadline_s: when to stop.

    """
    board = Board(flows, 1)
    here = board.position(np.array(place_Q, dtype=np.int64))
    best_Q, best_cost = here.place_X, float(here.cost_R[0])
    scale = _spread(flows, here)
    priced = idle = 0
    for softness in np.geomspace(SOFTEST, HARDEST, steps) if scale > 0 else ():
        if clock() >= deadline_s or idle >= PATIENCE:
            break
        one_P, two_P = _proposals(board, here, near_HK, softness * scale, rng)
        priced += len(one_P)
        rise_P = board.rises(here, one_P, two_P, np.array([softness * scale]))
        better = np.flatnonzero((rise_P < 0) & (one_P != two_P))
        idle = 0 if len(better) else idle + 1
        if not idle:
            here = _swapped(board, here, one_P[better], two_P[better], rise_P[better])
        if here.cost_R[0] < best_cost:
            best_Q, best_cost = here.place_X, float(here.cost_R[0])
    return Settled(place_Q=best_Q, cost=flows.cost(best_Q), moves=priced)


def _swapped(board: Board, here: Position, one_A: Ints, two_A: Ints, rise_A: Floats) -> Position:
    """Make the swaps that do not meet a better one."""
    order = np.argsort(rise_A, kind="stable")
    made = order[_apart(board, one_A[order], two_A[order])]
    place_X = here.place_X.copy()
    place_X[one_A[made]], place_X[two_A[made]] = here.place_X[two_A[made]], here.place_X[one_A[made]]
    return board.position(place_X)


def _spread(flows: Flows, here: Position) -> float:
    """Seconds between the largest and the median group, over all families."""
    seconds_G = here.group_seconds_RG[0]
    families = [seconds_G[flows.family_G == family] for family in range(int(flows.family_G.max()) + 1)]
    return float(sum(group.max() - np.median(group) for group in families))


def _proposals(
    board: Board, here: Position, near_HK: Ints, softness_s: float, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Seats by their share in the soft maxima, and where to take each."""
    flows, seats = board.flows, board.flows.num_seats
    size = int(np.clip(PROPOSALS_PER_SEAT * seats, FEWEST_PROPOSALS, MOST_PROPOSALS))
    share_G = _shares(flows, here.group_seconds_RG[0], softness_s)
    weight_F = share_G[flows.group_F]
    weight_Q = np.bincount(np.concatenate([flows.sender_F, flows.receiver_F]), np.tile(weight_F, 2), seats)
    level_Q = np.cumsum(weight_Q + 1e-3 * weight_Q.mean())
    one_P = np.minimum(np.searchsorted(level_Q, rng.random(size) * level_Q[-1]), seats - 1)
    any_P = rng.integers(seats, size=size)
    degree_P = board.degree_Q[one_P]
    flow_P = (rng.random(size) * degree_P).astype(np.int64)
    near_P = near_HK[here.beside_XD[one_P, flow_P], rng.integers(near_HK.shape[1], size=size)]
    is_informed_P = (degree_P > 0) & (np.arange(size) < INFORMED * size)
    return one_P, np.where(is_informed_P, here.seat_RH[0, near_P], any_P)


def _shares(flows: Flows, seconds_G: Floats, softness_s: float) -> Floats:
    """Share of each group in its family's soft maximum."""
    families = int(flows.family_G.max()) + 1
    largest_N = np.full(families, -np.inf)
    np.maximum.at(largest_N, flows.family_G, seconds_G)
    height_G = np.exp((seconds_G - largest_N[flows.family_G]) / softness_s)
    share_G: Floats = height_G / np.bincount(flows.family_G, height_G)[flows.family_G]
    return share_G


def _apart(board: Board, one_A: Ints, two_A: Ints) -> Ints:
    """Swaps that come before all others on their seats and on the seats these talk to."""
    turn_A = np.arange(len(one_A))
    first_X = np.full(len(board.other_XD), len(one_A))
    first_X[np.stack([one_A, two_A], axis=1).ravel()[::-1]] = np.repeat(turn_A, 2)[::-1]
    around_A = [first_X[end_A] for end_A in (one_A, two_A)]
    around_A += [first_X[board.other_XD[end_A]].min(axis=1) for end_A in (one_A, two_A)]
    return np.flatnonzero(np.minimum.reduce(around_A) == turn_A)
