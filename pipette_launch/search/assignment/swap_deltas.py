"""By how much swaps of two seats would change the cost: many swaps at once, priced by the flows of their seats."""

# Q = seats, H = places, D = the most flows of a seat, M = distinct link matrices, P = proposed swaps, G = groups,
# N = families, S = 2D terms of a swap: the flows of both seats.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.installed import compiled
from pipette_launch.search.assignment.problem import Floats, Flows, Ints

IN_C = compiled("search.assignment._swaps")

STEEPEST = 80.0
"""Largest exponent: far from overflow, and from any chance of being accepted."""
LEAST = 1e-12
"""Smallest part of a family's sum of exponentials that may be left: below it float64 has no digits."""

Entry = TypeVar("Entry", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Position:
    """A bijection and its cost."""

    place_Q: Ints
    seat_H: Ints
    """The seat on each place."""
    cost_s: float
    group_seconds_G: Floats


class SwapPrices:
    """Prices swaps by tables of the flows of each seat, padded to the largest number of any seat."""

    def __init__(self, flows: Flows) -> None:
        self.flows = flows
        self.degree_Q: Ints = np.bincount(np.concatenate([flows.sender_F, flows.receiver_F]), minlength=flows.num_seats)
        depth = max(1, int(self.degree_Q.max(initial=0)))
        links_MHH, as_sender_T, as_receiver_T = views(flows.seconds_THH)
        self._seconds: NDArray[np.float32] = links_MHH.astype(np.float32).ravel()
        matrix_2F = np.concatenate([as_sender_T[flows.type_F], as_receiver_T[flows.type_F]])
        own_QD = np.repeat(np.arange(flows.num_seats)[:, None], depth, axis=1)
        # The padding has weight 0 and leads from the seat to itself.
        self.other_QD: Ints = self._padded(np.concatenate([flows.receiver_F, flows.sender_F]), own_QD)
        self._weight_QD = self._padded(np.tile(flows.weight_F, 2), np.zeros(own_QD.shape)).astype(np.float32)
        self._matrix_QD = self._padded(matrix_2F * flows.num_seats**2, np.zeros_like(own_QD))
        self._group_QD = self._padded(np.tile(flows.group_F, 2), np.zeros_like(own_QD))
        self._is_alone_G = np.bincount(flows.family_G)[flows.family_G] == 1

    @property
    def tables(self) -> tuple[NDArray[Any], ...]:
        """What the functions in C take first."""
        seats = self._seconds, self.other_QD, self._weight_QD, self._matrix_QD, self._group_QD, self.degree_Q
        return (*seats, self.flows.family_G, self._is_alone_G)

    def position(self, place_Q: Ints) -> Position:
        """Price a bijection."""
        group_seconds_1G = self.flows.group_seconds(place_Q[None, :])
        return Position(
            place_Q=place_Q,
            seat_H=np.argsort(place_Q),
            cost_s=float(self.flows.largest(group_seconds_1G)[0]),
            group_seconds_G=group_seconds_1G[0],
        )

    def shares(self, position: Position, softness_s: float) -> Floats:
        """Share of each group in its family's soft maximum, s * log(sum over groups of exp(seconds / s))."""
        family_G = self.flows.family_G
        largest_N = np.full(self.flows.num_families, -np.inf)
        np.maximum.at(largest_N, family_G, position.group_seconds_G)
        height_G = np.exp((position.group_seconds_G - largest_N[family_G]) / softness_s)
        share_G: Floats = height_G / np.bincount(family_G, weights=height_G)[family_G]
        return share_G

    def rises(self, position: Position, one_P: Ints, two_P: Ints, share_G: Floats, softness_s: float) -> Floats:
        """By how much the sum of the families' soft maxima would rise with each swap alone, to float32's precision.

        The soft maximum also tells what a swap changes that does not touch the largest group.

        Args:
            position: the bijection now.
            one_P: a seat of each swap.
            two_P: the other one.
            share_G: what `shares` says of this position and softness.
            softness_s: s of the soft maximum, in seconds; a family of one group is its own maximum whatever s.

        Returns:
            Seconds for each swap; a family's rise is cut at 80 s and its fall at 27 s, which decide any swap.

        """
        log_share_G = np.log(np.maximum(share_G, 1e-300))
        if IN_C is None:
            return self._rises_in_numpy(position, one_P, two_P, (share_G, log_share_G), softness_s)
        rise_P = np.empty(len(one_P))
        of_swaps = one_P, two_P, share_G, log_share_G, rise_P
        IN_C.rises(*self.tables, position.place_Q, *of_swaps, softness_s, STEEPEST, LEAST)
        return rise_P

    def _rises_in_numpy(
        self, position: Position, one_P: Ints, two_P: Ints, shares_G: tuple[Floats, Floats], softness_s: float
    ) -> Floats:
        """Do as `rises` where C is not compiled, all swaps at once."""
        family_G, families = self.flows.family_G, self.flows.num_families
        alone_G, (share_G, log_share_G) = self._is_alone_G, shares_G
        terms_PS = self._terms(position, one_P, two_P)
        groups_PS = np.concatenate([self._group_QD[one_P], self._group_QD[two_P]], axis=1)
        # A swap may meet a group several times: sum its terms, and let each of them stand for its part of the group.
        same_PSS = groups_PS[:, :, None] == groups_PS[:, None, :]
        group_rise_PS = np.einsum("pij,pj->pi", same_PSS, terms_PS)
        steps_PS = np.minimum(group_rise_PS / softness_s + log_share_G[groups_PS], STEEPEST)
        change_PS = (np.exp(steps_PS) - share_G[groups_PS]) / same_PSS.sum(axis=2)
        change_PS[alone_G[groups_PS]] = 0.0
        at_PS = np.arange(len(groups_PS))[:, None] * families + family_G[groups_PS]
        change_PN = np.bincount(at_PS.ravel(), weights=change_PS.ravel(), minlength=len(groups_PS) * families)
        soft_PN = np.log1p(np.maximum(change_PN, LEAST - 1.0)).reshape(-1, families)
        alone_P: Floats = np.where(alone_G[groups_PS], terms_PS, 0.0).sum(axis=1)
        rise_P: Floats = alone_P + softness_s * soft_PN.sum(axis=1)
        return rise_P

    def apart(self, one_A: Ints, two_A: Ints) -> Ints:
        """Choose swaps that come before all others on their seats and on the seats that share a flow with them.

        So no chosen swap changes the price of another.
        """
        turn_A = np.arange(len(one_A))
        first_Q = np.full(len(self.other_QD), len(one_A))
        # Assigned in reverse, so that the first swap of a seat is what stays.
        first_Q[np.stack([one_A, two_A], axis=1).ravel()[::-1]] = np.repeat(turn_A, 2)[::-1]
        around_A = [first_Q[end_A] for end_A in (one_A, two_A)]
        around_A += [first_Q[self.other_QD[end_A]].min(axis=1) for end_A in (one_A, two_A)]
        return np.flatnonzero(np.minimum.reduce(around_A) == turn_A)

    def _terms(self, position: Position, one_P: Ints, two_P: Ints) -> Floats:
        """What each flow of both seats would add: shape (P, S)."""
        count = len(one_P)
        seat_2P, partner_2P = np.concatenate([one_P, two_P]), np.concatenate([two_P, one_P])
        there_2P, here_2P = position.place_Q[partner_2P], position.place_Q[seat_2P]
        # A flow between the two stays between their places, turned around; both seats list it, so each counts half.
        mutual_2PD = self.other_QD[seat_2P] == partner_2P[:, None]
        now_2PD = position.place_Q[self.other_QD[seat_2P]]
        then_2PD = np.where(mutual_2PD, here_2P[:, None], now_2PD)
        row_2PD, weight_2PD = self._matrix_QD[seat_2P], self._weight_QD[seat_2P]
        now_s_2PD = weight_2PD * self._seconds.take(row_2PD + (here_2P * self.flows.num_seats)[:, None] + now_2PD)
        then_s_2PD = weight_2PD * self._seconds.take(row_2PD + (there_2P * self.flows.num_seats)[:, None] + then_2PD)
        terms_2PD = then_s_2PD - now_s_2PD
        terms_2PD[mutual_2PD] *= 0.5
        return np.concatenate([terms_2PD[:count], terms_2PD[count:]], axis=1)

    def _padded(self, value_2F: NDArray[Entry], empty_QD: NDArray[Entry]) -> NDArray[Entry]:
        """Put one value of each flow's end into the row of its seat."""
        seat_2F = np.concatenate([self.flows.sender_F, self.flows.receiver_F])
        order = np.argsort(seat_2F, kind="stable")
        starts_Q = np.cumsum(self.degree_Q) - self.degree_Q
        column = np.arange(len(seat_2F)) - starts_Q[seat_2F[order]]
        table_QD: NDArray[Entry] = empty_QD.copy()
        table_QD[seat_2F[order], column] = value_2F[order]
        return table_QD


def views(seconds_THH: Floats) -> tuple[Floats, Ints, Ints]:
    """Distinct link matrices by (own place, other place), and which one a type's sender and its receiver look at."""
    found: list[Floats] = []
    as_sender, as_receiver = [], []
    for matrix_HH in seconds_THH:
        as_sender.append(len(found))
        found.append(matrix_HH)
        if not (matrix_HH == matrix_HH.T).all():
            found.append(matrix_HH.T)
        as_receiver.append(len(found) - 1)
    links_MHH = np.array(found).reshape(-1, *seconds_THH.shape[1:])
    return links_MHH, np.array(as_sender, dtype=np.int64), np.array(as_receiver, dtype=np.int64)
