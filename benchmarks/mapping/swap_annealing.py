"""Anneal a plain sum of flows by many swaps at a time: priced together, and made together where they do not meet."""

# Q = seats, H = places, K = near places, P = proposed swaps, A = accepted ones.

from __future__ import annotations

import numpy as np

from pipette_launch.facts.layout import Ints
from pipette_launch.search.assignment.descent import Flows, Position, SwapPrices

NEAREST = 8
"""Number of near places from which an informed proposal chooses."""
PROPOSALS_PER_SEAT = 2
INFORMED = 0.92
"""Share of proposals that bring a seat near to a seat with which it exchanges messages."""
FIRST_ROUND_PER_SEAT = 64
HOT, COLD = 0.05, 0.003
"""Temperatures of a round, in parts of the typical rise of an informed swap at the start."""


def annealed(flows: Flows, start_Q: Ints, *, moves: int, rng: np.random.Generator) -> Position:
    """Anneal in rounds of doubling length, each from the best so far, until the given number of swaps was priced.

    Args:
        flows: one family with one group.
        start_Q: where to begin: the place of each seat.
        moves: swaps to price, to the end of a batch.
        rng: the only source of chance.

    """
    prices = SwapPrices(flows)
    near_HK = _nearest(flows)
    size = PROPOSALS_PER_SEAT * flows.num_seats
    best = here = prices.position(start_Q)
    scale_s = _typical_rise(prices, here, near_HK, size, rng)
    batches, priced = FIRST_ROUND_PER_SEAT // PROPOSALS_PER_SEAT, 0
    while priced < moves:
        here = best
        for cooled in np.linspace(0.0, 1.0, batches):
            here = _stepped(prices, here, near_HK, scale_s * HOT * (COLD / HOT) ** cooled, size, rng)
            best = min(best, here, key=lambda one: one.cost_s)
            priced += size
            if priced >= moves:
                break
        batches *= 2
    return best


def _nearest(flows: Flows) -> Ints:
    """The nearest places of each place, over all types of flow as much as they are used."""
    use_T = np.bincount(flows.type_F, weights=np.abs(flows.weight_F), minlength=len(flows.seconds_THH))
    distance_HH = np.tensordot(use_T, flows.seconds_THH, axes=1)
    distance_HH = distance_HH + distance_HH.T
    np.fill_diagonal(distance_HH, np.inf)
    count = min(NEAREST, flows.num_seats - 1)
    return np.argpartition(distance_HH, count - 1, axis=1)[:, :count]


def _typical_rise(prices: SwapPrices, here: Position, near_HK: Ints, size: int, rng: np.random.Generator) -> float:
    """Seconds that a swap for the worse costs; temperatures are fractions of it, so they fit problems of any scale."""
    rise_P = prices.rises(here, *_proposals(prices, here, near_HK, size, rng), np.ones(1), 1.0)
    worse_P = rise_P[rise_P > 0]
    return float(np.median(worse_P)) if len(worse_P) else max(here.cost_s, 1e-300)


def _stepped(
    prices: SwapPrices, here: Position, near_HK: Ints, temperature_s: float, size: int, rng: np.random.Generator
) -> Position:
    """Propose, accept by Metropolis' rule, and make those swaps whose prices the others leave true."""
    one_P, two_P = _proposals(prices, here, near_HK, size, rng)
    rise_P = prices.rises(here, one_P, two_P, np.ones(1), 1.0)
    accepted = np.flatnonzero((rise_P <= temperature_s * rng.standard_exponential(size)) & (one_P != two_P))
    if not len(accepted):
        return here
    made = accepted[prices.apart(one_P[accepted], two_P[accepted])]
    place_Q = here.place_Q.copy()
    place_Q[one_P[made]], place_Q[two_P[made]] = here.place_Q[two_P[made]], here.place_Q[one_P[made]]
    return prices.position(place_Q)


def _proposals(
    prices: SwapPrices, here: Position, near_HK: Ints, size: int, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Pairs of seats: most bring a seat near to a seat with which it exchanges messages, the others are random."""
    seats = prices.flows.num_seats
    one_P, any_P = rng.integers(seats, size=(2, size))
    degree_P = prices.degree_Q[one_P]
    flow_P = (rng.random(size) * degree_P).astype(np.int64)
    beside_P = here.place_Q[prices.other_QD[one_P, flow_P]]
    wanted_P = near_HK[beside_P, rng.integers(near_HK.shape[1], size=size)]
    is_informed_P = (degree_P > 0) & (np.arange(size) < INFORMED * size)
    return one_P, np.where(is_informed_P, here.seat_H[wanted_P], any_P)
