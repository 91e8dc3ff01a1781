"""Go downhill from a good start: swap seats of the largest groups, many at a time, those that gain most first."""

# Q = seats, H = places, K = near places, F = flows, G = groups, P = proposed swaps, A = accepted ones.

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipette_launch.search.assignment.problem import Arrangement, Floats, Flows, Ints
from pipette_launch.search.assignment.swap_deltas import Position, SwapPrices

PROPOSALS_PER_SEAT = 2
FEWEST_PROPOSALS, MOST_PROPOSALS = 128, 2048
SOFTEST, HARDEST = 0.05, 0.002
"""Softness of the families' maxima at first and at last, in parts of `_spread`."""
PATIENCE = 8
"""Batches without a swap for the better, after which no more is tried."""
INFORMED = 0.5
"""Part of the proposals that bring a seat near to one that it shares a flow with; the others take any place."""


def descend(
    flows: Flows,
    place_Q: Ints,
    *,
    near_HK: Ints,
    steps: int,
    rng: np.random.Generator,
    is_late: Callable[[], bool],
    group_H: Ints | None = None,
) -> Arrangement:
    """Look for a cheaper bijection near a given one; never worse than it.

    A family costs as much as its largest group, so only a swap in the largest group can help, and after each swap
    another group may be the largest. So the descent replaces maxima by soft ones, which it hardens step by step: it
    draws seats by their share in the soft maxima, and makes all swaps together that lower the soft cost and share no
    flow.

    Args:
        flows: the problem.
        place_Q: where to begin: the place of each seat.
        near_HK: some near places of each place.
        steps: batches of proposals.
        rng: the only source of chance.
        is_late: whether to stop.
        group_H: the group of each place, where seats must stay in theirs.

    """
    prices = SwapPrices(flows)
    best = here = prices.position(np.array(place_Q, dtype=np.int64))
    # Of a plain sum, whose families have one group each, nothing is softened.
    scale_s = (_spread(flows, here) or here.cost_s) if flows.num_flows else 0.0
    idle = 0
    for softness in np.geomspace(SOFTEST, HARDEST, steps) if scale_s > 0 else ():
        if is_late() or idle >= PATIENCE:
            break
        softness_s = softness * scale_s
        share_G = prices.shares(here, softness_s)
        one_P, two_P = _proposals(prices, here, near_HK, share_G, rng)
        rise_P = prices.rises(here, one_P, two_P, share_G, softness_s)
        is_better_P = (rise_P < 0) & (one_P != two_P)
        if group_H is not None:
            is_better_P &= group_H[here.place_Q[one_P]] == group_H[here.place_Q[two_P]]
        better = np.flatnonzero(is_better_P)
        idle = 0 if len(better) else idle + 1
        if not idle:
            better = better[np.argsort(rise_P[better], kind="stable")]
            one_A, two_A = one_P[better], two_P[better]
            made = prices.apart(one_A, two_A)
            place_Q = here.place_Q.copy()
            place_Q[one_A[made]], place_Q[two_A[made]] = here.place_Q[two_A[made]], here.place_Q[one_A[made]]
            here = prices.position(place_Q)
        if here.cost_s < best.cost_s:
            best = here
    return Arrangement(place_Q=best.place_Q, cost_s=best.cost_s)


def _spread(flows: Flows, here: Position) -> float:
    """Seconds between the largest and the median group, over all families."""
    families = [here.group_seconds_G[flows.family_G == family] for family in range(flows.num_families)]
    return float(sum(group.max() - np.median(group) for group in families))


def _proposals(
    prices: SwapPrices, here: Position, near_HK: Ints, share_G: Floats, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Slots by their share in the soft maxima, and where to take each."""
    flows, seats = prices.flows, prices.flows.num_seats
    size = int(np.clip(PROPOSALS_PER_SEAT * seats, FEWEST_PROPOSALS, MOST_PROPOSALS))
    weight_F = share_G[flows.group_F]
    weight_Q = np.bincount(np.concatenate([flows.sender_F, flows.receiver_F]), np.tile(weight_F, 2), seats)
    level_Q = np.cumsum(weight_Q + 1e-3 * weight_Q.mean())
    one_P = np.minimum(np.searchsorted(level_Q, rng.random(size) * level_Q[-1]), seats - 1)
    any_P = rng.integers(seats, size=size)
    degree_P = prices.degree_Q[one_P]
    flow_P = (rng.random(size) * degree_P).astype(np.int64)
    near_P = near_HK[here.beside_QD[one_P, flow_P], rng.integers(near_HK.shape[1], size=size)]
    is_informed_P = (degree_P > 0) & (np.arange(size) < INFORMED * size)
    return one_P, np.where(is_informed_P, here.seat_H[near_P], any_P)
