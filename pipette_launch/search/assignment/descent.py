"""Go downhill from a good start: swap seats of the largest groups, many at a time, those that gain most first."""

# Q = seats, H = places, K = near places, F = flows, G = groups, P = proposed swaps, A = accepted ones.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from pipette_launch.search.assignment.problem import Arrangement, Floats, Flows, Ints
from pipette_launch.search.assignment.swap_deltas import IN_C, LEAST, STEEPEST, Position, SwapPrices

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
    near_HK, domain_H = np.ascontiguousarray(near_HK), np.zeros(0, dtype=np.int64) if group_H is None else group_H
    size = int(np.clip(PROPOSALS_PER_SEAT * flows.num_seats, FEWEST_PROPOSALS, MOST_PROPOSALS))
    # Of a plain sum, whose families have one group each, nothing is softened.
    scale_s = (_spread(flows, here) or here.cost_s) if flows.num_flows else 0.0
    idle = 0
    for softness in np.geomspace(SOFTEST, HARDEST, steps) if scale_s > 0 else ():
        if is_late() or idle >= PATIENCE:
            break
        step = _Step.drawn(rng, size, near_HK, domain_H, softness * scale_s)
        there = step.in_numpy(prices, here) if IN_C is None else step.in_c(IN_C, prices, here)
        idle = 0 if there else idle + 1
        here = there or here
        if here.cost_s < best.cost_s:
            best = here
    return Arrangement(place_Q=best.place_Q, cost_s=best.cost_s)


def _spread(flows: Flows, here: Position) -> float:
    """Seconds between the largest and the median group, over all families."""
    families = [here.group_seconds_G[flows.family_G == family] for family in range(flows.num_families)]
    return float(sum(group.max() - np.median(group) for group in families))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """One batch of proposals: what chance says of each, and where seats may go."""

    seat_P: Floats
    """Which seat, as a part of all weights."""
    any_P: Ints
    """The seat that it changes places with, if no flow says which."""
    flow_P: Floats
    """Which flow of the seat, as a part of them."""
    near_P: Ints
    """Which of the places near to that flow's other end."""
    near_HK: Ints
    domain_H: Ints
    """Seats stay in the domain of their place; empty where they may go anywhere."""
    softness_s: float

    @classmethod
    def drawn(cls, rng: np.random.Generator, size: int, near_HK: Ints, domain_H: Ints, softness_s: float) -> _Step:
        """Draw all that is left to chance."""
        seats, near = near_HK.shape
        return cls(
            seat_P=rng.random(size),
            any_P=rng.integers(seats, size=size),
            flow_P=rng.random(size),
            near_P=rng.integers(near, size=size),
            near_HK=near_HK,
            domain_H=domain_H,
            softness_s=softness_s,
        )

    def in_c(self, module: ModuleType, prices: SwapPrices, here: Position) -> Position | None:
        """Make the swaps that gain; None where none does."""
        place_Q, seat_H, seconds_G = here.place_Q.copy(), here.seat_H.copy(), here.group_seconds_G.copy()
        flows = prices.flows
        of_flows = flows.sender_F, flows.receiver_F, flows.matrix_F, flows.weight_F, flows.group_F
        chance = self.seat_P, self.any_P, self.flow_P, self.near_P
        found, cost_s = module.step(
            *(*prices.tables, place_Q, *of_flows, flows.seconds_THH, flows.offset_G, self.near_HK, self.domain_H),
            *(*chance, seat_H, seconds_G, self.softness_s, STEEPEST, LEAST, self._num_informed, flows.num_families),
        )
        return Position(place_Q=place_Q, seat_H=seat_H, cost_s=cost_s, group_seconds_G=seconds_G) if found else None

    def in_numpy(self, prices: SwapPrices, here: Position) -> Position | None:
        """Do as `in_c` where C is not compiled."""
        share_G = prices.shares(here, self.softness_s)
        one_P, two_P = self._proposals(prices, here, share_G)
        rise_P = prices.rises(here, one_P, two_P, share_G, self.softness_s)
        is_better_P = (rise_P < 0) & (one_P != two_P)
        if len(self.domain_H):
            is_better_P &= self.domain_H[here.place_Q[one_P]] == self.domain_H[here.place_Q[two_P]]
        better = np.flatnonzero(is_better_P)
        if not len(better):
            return None
        better = better[np.argsort(rise_P[better], kind="stable")]
        one_A, two_A = one_P[better], two_P[better]
        made = prices.apart(one_A, two_A)
        place_Q = here.place_Q.copy()
        place_Q[one_A[made]], place_Q[two_A[made]] = here.place_Q[two_A[made]], here.place_Q[one_A[made]]
        return prices.position(place_Q)

    @property
    def _num_informed(self) -> int:
        """So many proposals bring a seat near to one that it shares a flow with."""
        return round(INFORMED * len(self.any_P))

    def _proposals(self, prices: SwapPrices, here: Position, share_G: Floats) -> tuple[Ints, Ints]:
        """Seats by their share in the soft maxima, and the seats that they change places with."""
        flows, seats = prices.flows, prices.flows.num_seats
        weight_F = share_G[flows.group_F]
        weight_Q = np.bincount(np.concatenate([flows.sender_F, flows.receiver_F]), np.tile(weight_F, 2), seats)
        level_Q = np.cumsum(weight_Q + 1e-3 * weight_Q.mean())
        one_P = np.minimum(np.searchsorted(level_Q, self.seat_P * level_Q[-1]), seats - 1)
        degree_P = prices.degree_Q[one_P]
        beside_P = here.place_Q[prices.other_QD[one_P, (self.flow_P * degree_P).astype(np.int64)]]
        is_informed_P = (degree_P > 0) & (np.arange(len(one_P)) < self._num_informed)
        return one_P, np.where(is_informed_P, here.seat_H[self.near_HK[beside_P, self.near_P]], self.any_P)
