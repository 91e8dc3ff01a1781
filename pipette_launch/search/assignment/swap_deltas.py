"""What swaps of two seats would change, many at once, priced by the flows of the two seats only."""

# R = copies of the problem side by side, X = seats of all copies (copy * Q + seat), Q = seats of one, H = places,
# D = the most flows of a seat, M = distinct link matrices, P = proposed swaps, G = groups, N = families,
# S = 2D + 2 terms of a swap: the flows of both seats, and their own seconds.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.search.assignment.problem import Floats, Flows, Ints
from pipette_launch.search.assignment.softmax_delta import soft_rises

NEAREST = 8
"""How many near places an informed proposal chooses from."""

Entry = TypeVar("Entry", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Position:
    """A bijection for each copy, what they cost, and what the seats see from their places."""

    place_X: Ints
    seat_RH: Ints
    """Row (in X) of the seat on each place."""
    cost_R: Floats
    group_seconds_RG: Floats
    beside_XD: Ints
    """Place at the other end of each flow of a seat."""
    now_XD: NDArray[np.float32]
    """Seconds that each of them takes."""


class Board:
    """Tables of a problem, once for each copy: the flows of a seat as seen from there, padded to the most of any."""

    def __init__(self, flows: Flows, copies: int) -> None:
        self.flows, self.copies = flows, copies
        self.degree_Q: Ints = np.bincount(np.concatenate([flows.sender_F, flows.receiver_F]), minlength=flows.num_seats)
        depth = max(1, int(self.degree_Q.max(initial=0)))
        links_MHH, as_sender_T, as_receiver_T = views(flows.seconds_THH)
        self._seconds: NDArray[np.float32] = links_MHH.astype(np.float32).ravel()
        matrix_2F = np.concatenate([as_sender_T[flows.type_F], as_receiver_T[flows.type_F]])
        own_QD = np.repeat(np.arange(flows.num_seats)[:, None], depth, axis=1)
        # The padding has weight 0 and leads from the seat to itself.
        other_QD = self._padded(np.concatenate([flows.receiver_F, flows.sender_F]), own_QD)
        weight_QD = self._padded(np.tile(flows.weight_F, 2), np.zeros(own_QD.shape)).astype(np.float32)
        matrix_QD = self._padded(matrix_2F * flows.num_places**2, np.zeros_like(own_QD))
        group_QD = self._padded(np.tile(flows.group_F, 2), np.zeros_like(own_QD))
        self._has_own = bool((flows.seat_group_Q >= 0).any())
        if self._has_own:
            group_QD = np.column_stack([group_QD, np.maximum(flows.seat_group_Q, 0)])
        copy_X1 = np.repeat(np.arange(copies), flows.num_seats)[:, None]
        self.other_XD: Ints = np.tile(other_QD, (copies, 1)) + copy_X1 * flows.num_seats
        self._weight_XD = np.tile(weight_QD, (copies, 1))
        self._matrix_XD = np.tile(matrix_QD, (copies, 1))
        self._group_XS = np.tile(group_QD, (copies, 1)) + copy_X1 * flows.num_groups

    @cached_property
    def near_HK(self) -> Ints:
        """The nearest places of each place, over all types of flow as much as they are used."""
        flows = self.flows
        use_T = np.bincount(flows.type_F, weights=np.abs(flows.weight_F), minlength=len(flows.seconds_THH))
        distance_HH = np.tensordot(use_T, flows.seconds_THH, axes=1)
        distance_HH = distance_HH + distance_HH.T
        np.fill_diagonal(distance_HH, np.inf)
        count = min(NEAREST, flows.num_places - 1)
        return np.argpartition(distance_HH, count - 1, axis=1)[:, :count]

    def position(self, place_X: Ints) -> Position:
        """Look at a bijection of each copy from every seat."""
        place_RQ = place_X.reshape(self.copies, -1)
        seat_RH = np.empty_like(place_RQ)
        np.put_along_axis(seat_RH, place_RQ, np.arange(len(place_X)).reshape(self.copies, -1), axis=1)
        beside_XD = place_X[self.other_XD]
        at_XD = self._matrix_XD + place_X[:, None] * self.flows.num_places + beside_XD
        group_seconds_RG = self.flows.group_seconds(place_RQ)
        return Position(
            place_X=place_X,
            seat_RH=seat_RH,
            cost_R=self.flows.largest(group_seconds_RG),
            group_seconds_RG=group_seconds_RG,
            beside_XD=beside_XD,
            now_XD=self._weight_XD * self._seconds.take(at_XD),
        )

    def rises(self, position: Position, one_P: Ints, two_P: Ints, softness_R: Floats) -> Floats:
        """Seconds that each swap alone would add to its copy, to the precision of float32.

        A family of several groups counts by its soft maximum (`soft_rises`), softened by `softness_R` seconds.
        """
        terms_PS = self._terms(position, one_P, two_P)
        if self.flows.is_sum:
            rise_P: Floats = terms_PS.sum(axis=1)
            return rise_P
        groups_PS = np.concatenate([self._group_XS[one_P], self._group_XS[two_P]], axis=1)
        return soft_rises(self.flows.family_G, position.group_seconds_RG, groups_PS, terms_PS, softness_R)

    def sums(self, position: Position, one_P: Ints, two_P: Ints) -> Floats:
        """Seconds that each swap alone would add to all groups together."""
        rise_P: Floats = self._terms(position, one_P, two_P).sum(axis=1)
        return rise_P

    def _terms(self, position: Position, one_P: Ints, two_P: Ints) -> Floats:
        """What each flow of both seats, and their own seconds, would add: shape (P, S)."""
        count = len(one_P)
        seat_2P, partner_2P = np.concatenate([one_P, two_P]), np.concatenate([two_P, one_P])
        there_2P, here_2P = position.place_X[partner_2P], position.place_X[seat_2P]
        # A flow between the two stays between their places, turned around; both seats list it, so each counts half.
        mutual_2PD = self.other_XD[seat_2P] == partner_2P[:, None]
        beside_2PD = np.where(mutual_2PD, here_2P[:, None], position.beside_XD[seat_2P])
        at_2PD = self._matrix_XD[seat_2P] + (there_2P * self.flows.num_places)[:, None] + beside_2PD
        terms_2PD = self._weight_XD[seat_2P] * self._seconds.take(at_2PD) - position.now_XD[seat_2P]
        terms_2PD[mutual_2PD] *= 0.5
        if self._has_own:
            own_2P = self._own(seat_2P, there_2P) - self._own(seat_2P, here_2P)
            terms_2PD = np.column_stack([terms_2PD, own_2P])
        return np.concatenate([terms_2PD[:count], terms_2PD[count:]], axis=1)

    def _own(self, seat_P: Ints, place_P: Ints) -> Floats:
        seat_P = seat_P % self.flows.num_seats
        own_P = self.flows.seat_group_Q[seat_P] >= 0
        seconds_P: Floats = self.flows.seat_seconds_UH[np.where(own_P, self.flows.seat_type_Q[seat_P], 0), place_P]
        return np.where(own_P, seconds_P, 0.0)

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
