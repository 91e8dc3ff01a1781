"""Parallel tempering: many copies of a block problem at fixed temperatures, with Pipette's moves, priced in full."""

# Q = seats, R = copies (replicas), K = moves, L = lines: orders of all seats along which they are moved.

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipette_launch.search.assignment.problem import Arrangement, Floats, Flows, Ints

COPIES = 32
COLDEST, HOTTEST = 0.003, 0.3
"""Temperatures of the copies, in parts of what a typical move for the worse costs at the start."""
EXCHANGE_EVERY = 8
AHEAD = 64
"""Turns whose moves are drawn at once; they do not depend on where the copies are."""


def temper(
    flows: Flows, start_Q: Ints, *, moves: int, rng: np.random.Generator, is_late: Callable[[], bool]
) -> Arrangement:
    """Walk with copies at fixed temperatures; copies of neighbouring temperatures are exchanged at times.

    The result is never worse than the start.

    The walk depends on the problem, the start and `rng`; `moves` and the deadline only cut it short, so more of either
    is never worse. Source of the moves: Pipette's annealer, `mh_simulated_annealing_opt.py`
    (yimjinkyu1/date2024_pipette@a2b0683).

    Args:
        flows: the problem.
        start_Q: where to begin: the place of each seat.
        moves: after how many priced moves to stop, to the end of a turn of all copies.
        rng: the only source of chance.
        is_late: whether to stop.

    """
    best = Arrangement(place_Q=start_Q, cost_s=flows.cost(start_Q))
    lines_LQ = lines(flows)
    place_RQ = np.repeat(start_Q[None, :], COPIES, axis=0)
    cost_R = flows.costs(place_RQ)
    temperature_R = _scale(flows, place_RQ, lines_LQ, rng) * np.geomspace(COLDEST, HOTTEST, COPIES)
    for turn in range(1, -(-moves // COPIES) + 1):
        if is_late():
            break
        if turn % AHEAD == 1:
            from_ARQ = drawn_moves(lines_LQ, AHEAD * COPIES, rng).reshape(AHEAD, COPIES, -1)
        moved_RQ = np.take_along_axis(place_RQ, from_ARQ[(turn - 1) % AHEAD], axis=1)
        moved_R = flows.costs(moved_RQ)
        accepted_R = moved_R - cost_R <= temperature_R * rng.standard_exponential(COPIES)
        place_RQ = np.where(accepted_R[:, None], moved_RQ, place_RQ)
        cost_R = np.where(accepted_R, moved_R, cost_R)
        least = int(np.argmin(moved_R))
        if moved_R[least] < best.cost_s:
            best = Arrangement(place_Q=moved_RQ[least], cost_s=float(moved_R[least]))
        if turn % EXCHANGE_EVERY == 0:
            order_R = _exchanged(cost_R, temperature_R, turn // EXCHANGE_EVERY % 2, rng)
            place_RQ, cost_R = place_RQ[order_R], cost_R[order_R]
    return best


def lines(flows: Flows) -> Ints:
    """Orders of the seats in which neighbours share a flow: seat order, and one for each type. Shape (L, Q)."""
    found = [list(range(flows.num_seats))]
    for kind in range(len(flows.seconds_THH)):
        beside: list[list[int]] = [[] for _ in range(flows.num_seats)]
        for flow in np.flatnonzero(flows.type_F == kind):
            beside[flows.sender_F[flow]].append(int(flows.receiver_F[flow]))
            beside[flows.receiver_F[flow]].append(int(flows.sender_F[flow]))
        found.append(_chained(beside))
    return np.unique(np.array(found, dtype=np.int64), axis=0)


def drawn_moves(lines_LQ: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Draw moves, each on a random line: swap two seats, reverse a segment, or move a segment, turned or not.

    Returns:
        The seat whose place each seat takes: shape (count, Q).

    """
    line_KQ = lines_LQ[rng.integers(len(lines_LQ), size=count)]
    source_KQ = np.take_along_axis(line_KQ, _sources(count, lines_LQ.shape[1], rng), axis=1)
    from_KQ = np.empty_like(source_KQ)
    np.put_along_axis(from_KQ, line_KQ, source_KQ, axis=1)
    return from_KQ


def _sources(count: int, seats: int, rng: np.random.Generator) -> Ints:
    """Position on the line that each position takes its place from: `count` random moves."""
    at_1Q = np.arange(seats)[None, :]
    first_R1, cut_R1, last_R1 = np.sort(rng.integers(seats, size=(3, count, 1)), axis=0)
    kind_R1 = rng.integers(5, size=(count, 1))
    inside_RQ = (at_1Q >= first_R1) & (at_1Q <= last_R1)
    reversed_RQ = first_R1 + last_R1 - at_1Q
    swapped_RQ = np.where((at_1Q == first_R1) | (at_1Q == last_R1), reversed_RQ, at_1Q)
    # A migration turns the segment first..last about: what follows the cut comes first. Of one seat, in kind 2.
    cut_R1 = np.where(kind_R1 == 2, np.where(cut_R1 % 2, first_R1, np.maximum(last_R1 - 1, first_R1)), cut_R1)
    behind_R1 = last_R1 - cut_R1
    ahead_RQ = at_1Q < first_R1 + behind_R1
    shifted_RQ = np.where(ahead_RQ, at_1Q + cut_R1 - first_R1 + 1, at_1Q - behind_R1)
    turned_RQ = np.where(ahead_RQ, shifted_RQ, cut_R1 + first_R1 + behind_R1 - at_1Q)
    kinds_RQ = np.select([kind_R1 == 0, kind_R1 == 1, kind_R1 <= 3], [swapped_RQ, reversed_RQ, shifted_RQ], turned_RQ)
    return np.where(inside_RQ, kinds_RQ, at_1Q)


def _chained(beside: list[list[int]]) -> list[int]:
    """Follow neighbours from the ends of paths, then around what is left; depth first."""
    order: list[int] = []
    seen: set[int] = set()
    for start in sorted(range(len(beside)), key=lambda seat: (len(set(beside[seat])) != 1, seat)):
        todo = [start]
        while todo:
            seat = todo.pop()
            if seat not in seen:
                seen.add(seat)
                order.append(seat)
                todo.extend(reversed(beside[seat]))
    return order


def _scale(flows: Flows, place_RQ: Ints, lines_LQ: Ints, rng: np.random.Generator) -> float:
    """Median of what a move for the worse costs, in seconds."""
    from_RQ = drawn_moves(lines_LQ, len(place_RQ), rng)
    rise_R = flows.costs(np.take_along_axis(place_RQ, from_RQ, axis=1)) - flows.costs(place_RQ)
    worse_R = rise_R[rise_R > 0]
    return float(np.median(worse_R)) if len(worse_R) else 1e-3 * flows.cost(place_RQ[0])


def _exchanged(cost_R: Floats, temperature_R: Floats, odd: int, rng: np.random.Generator) -> Ints:
    """Order of the copies after neighbours in temperature had the chance to change places."""
    order_R = np.arange(len(cost_R))
    cold = np.arange(odd, len(cost_R) - 1, 2)
    gain = (cost_R[cold] - cost_R[cold + 1]) * (1 / temperature_R[cold] - 1 / temperature_R[cold + 1])
    change = cold[-gain <= rng.standard_exponential(len(cold))]
    order_R[change], order_R[change + 1] = change + 1, change
    return order_R
