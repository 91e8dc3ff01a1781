"""The problem to assign seats (sets of ranks) to places (hosts) at the least cost, and a descent by swaps of two seats.

Each step makes many swaps, and begins with the swaps that gain most. The descent mostly swaps seats of the groups that
decide the cost.
"""

# Q = seats, H = places (equally many), F = flows, G = groups, N = families, T = types of flow. D = most flows of a
# seat, M = distinct link matrices, P = proposed swaps, A = accepted swaps, S = 2D terms of a swap: the flows of both
# seats. K = bijections or near places. A bijection assigns each seat to one place, as the array place_Q.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.installed import compiled

AT_ONCE = 1 << 21
"""One numpy call prices at most this number of flows, with a few arrays of about 16 MiB each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Flows:
    """A block assignment problem of seats and places, with flows between seats.

    The cost is the sum over families of the seconds of the largest group in each family. The seconds of a group are an
    offset plus the sum of weight * seconds over the flows of the group. A plain sum of seconds is modelled as one
    family with one group. The slowest link of a ring is modelled as a family with one group for each link. The pipeline
    time T_PP of the Pipette paper is modelled as a family with one group for each pipeline. A seat is a set of ranks
    that moves as a whole: the ranks of a device, or of a host. If a seat holds the ranks of a device, places are
    devices. If a seat holds the ranks of a host, places are hosts.
    """

    seconds_THH: Floats
    """Seconds of one unit of flow, by type, place of the sender and place of the receiver; the diagonal is unused."""
    sender_F: Ints
    receiver_F: Ints
    type_F: Ints
    weight_F: Floats
    """Weight of each flow: the number of units that one seat sends to another."""
    group_F: Ints
    offset_G: Floats
    """Constant seconds of each group, independent of the assignment."""
    family_G: Ints
    """Family of each group, numbered from 0 without gaps."""

    def __post_init__(self) -> None:
        """Take read-only copies of the arrays."""
        for name in ("sender_F", "receiver_F", "type_F", "group_F", "family_G"):
            object.__setattr__(self, name, _frozen(getattr(self, name), np.int64))
        for name in ("seconds_THH", "weight_F", "offset_G"):
            object.__setattr__(self, name, _frozen(getattr(self, name), np.float64))
        # The C code reads the links at these indices.
        assert max(self.sender_F.max(initial=0), self.receiver_F.max(initial=0)) < self.num_seats

    @property
    def num_seats(self) -> int:
        """Number of seats, equal to the number of places."""
        return int(self.seconds_THH.shape[1])

    @property
    def num_flows(self) -> int:
        """Number of flows."""
        return len(self.sender_F)

    @cached_property
    def num_families(self) -> int:
        """Number of families."""
        return int(self.family_G.max()) + 1

    def cost(self, place_Q: ArrayLike) -> float:
        """Return the seconds of one assignment, exactly equal to the result of `costs`."""
        return float(self.costs(np.asarray(place_Q)[None, :])[0])

    def costs(self, place_KQ: ArrayLike) -> Floats:
        """Return the seconds of each of K assignments."""
        places_KQ = np.asarray(place_KQ, dtype=np.int64)
        step = max(1, AT_ONCE // (self.num_flows + len(self.offset_G)))
        pieces = [self.largest(self.group_seconds(places_KQ[at : at + step])) for at in range(0, len(places_KQ), step)]
        return np.concatenate(pieces) if pieces else np.zeros(0)

    def largest(self, group_seconds_KG: Floats) -> Floats:
        """Return the sum over families of the seconds of the largest group, for K assignments."""
        starts_N = np.searchsorted(self.family_G[self._by_family_G], np.arange(self.num_families))
        largest_KN = np.maximum.reduceat(group_seconds_KG[:, self._by_family_G], starts_N, axis=1)
        # Add one family after another, so that the order of additions, and thus the rounding, does not depend on K.
        return np.asarray(sum(largest_KN.T))

    def group_seconds(self, place_KQ: Ints) -> Floats:
        """Return the seconds of every group under K assignments: shape (K, G)."""
        count, groups = len(place_KQ), len(self.offset_G)
        base_K1 = np.arange(count)[:, None] * groups
        at_KF = place_KQ[:, self.sender_F] * self.num_seats + place_KQ[:, self.receiver_F]
        value_KF = self.weight_F * self.seconds_THH.take(self.matrix_F + at_KF)
        # `bincount` adds in the order of its input, which does not depend on K.
        sums = np.bincount((base_K1 + self.group_F).ravel(), weights=value_KF.ravel(), minlength=count * groups)
        return self.offset_G + sums.reshape(count, groups)

    @cached_property
    def matrix_F(self) -> Ints:
        """Index in the flattened `seconds_THH` at which the matrix of each flow's type begins."""
        return self.type_F * self.num_seats**2

    @cached_property
    def _by_family_G(self) -> Ints:
        return np.argsort(self.family_G, kind="stable")


class ProblemBuilder:
    """Collects types of flow, families, groups and flows for a `Flows` problem."""

    def __init__(self, num_seats: int) -> None:
        self.num_seats = num_seats
        self._matrices_HH: list[Floats] = []
        self._flows: list[tuple[Ints, Ints, Ints, Floats, Ints]] = []
        self._offsets: list[Floats] = []

    def add_type(self, seconds_HH: Floats) -> int:
        """Add a type of flow, with the seconds of one unit by place of sender and of receiver; return its number."""
        self._matrices_HH.append(seconds_HH)
        return len(self._matrices_HH) - 1

    def add_family(self, offset_G: ArrayLike) -> Ints:
        """Add a family with one group for each offset in seconds; return the numbers of the groups."""
        offsets = np.atleast_1d(np.asarray(offset_G, dtype=np.float64))
        first = sum(map(len, self._offsets))
        if len(offsets):
            self._offsets.append(offsets)
        return np.arange(first, first + len(offsets))

    def add_flows(self, kind: int, sender: Ints, receiver: Ints, weight: ArrayLike, group: Ints) -> None:
        """Add flows of one type from seats to seats, except flows from a seat to itself and flows of weight 0."""
        weight_F = np.broadcast_to(np.asarray(weight, dtype=np.float64), sender.shape)
        moves = (sender != receiver) & (weight_F != 0)
        kinds = np.full(int(moves.sum()), kind)
        self._flows.append((sender[moves], receiver[moves], kinds, weight_F[moves], group[moves]))

    def flows(self) -> Flows:
        """Return the problem with all types, families, groups and flows that were added."""
        sender, receiver, kinds, weight, group = (
            np.concatenate([part[column] for part in self._flows]) if self._flows else np.zeros(0)
            for column in range(5)
        )
        matrices = np.stack(self._matrices_HH) if self._matrices_HH else np.zeros((1, self.num_seats, self.num_seats))
        matrices.setflags(write=False)
        offsets = self._offsets or [np.zeros(1)]
        return Flows(
            seconds_THH=matrices,
            sender_F=sender.astype(np.int64),
            receiver_F=receiver.astype(np.int64),
            type_F=kinds.astype(np.int64),
            weight_F=weight.astype(np.float64),
            group_F=group.astype(np.int64),
            offset_G=np.concatenate(offsets),
            family_G=np.repeat(np.arange(len(offsets)), [len(each) for each in offsets]),
        )


def _frozen(values: ArrayLike, dtype: type[np.generic]) -> NDArray[np.generic]:
    """Return the array itself if the array is read-only, else a read-only copy."""
    array = np.asarray(values, dtype=dtype, order="C")
    if array.flags.writeable:
        array = array.copy()
        array.setflags(write=False)
    return array


IN_C = compiled("search.assignment._swaps")

STEEPEST = 80.0
"""Largest exponent in a soft maximum, far below overflow. A swap with a larger exponent is never accepted."""
LEAST = 1e-12
"""A swap leaves at least this share of a family's sum of exponentials, because float64 resolves no smaller share."""
PROPOSALS_PER_SEAT = 2
FEWEST_PROPOSALS, MOST_PROPOSALS = 128, 2048
SOFTEST, HARDEST = 0.05, 0.002
"""First and last softness s of the soft maxima, s * log(sum of exp(seconds / s)), as a share of `_spread`."""
PATIENCE = 8
"""Number of batches without an accepted swap after which the descent ends."""
INFORMED = 0.5
"""Share of the proposals that move a seat near a seat with which it shares a flow; the other proposals are random."""

Entry = TypeVar("Entry", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Position:
    """An assignment of seats to places, and its cost."""

    place_Q: Ints
    seat_H: Ints
    cost_s: float
    group_seconds_G: Floats


class SwapPrices:
    """Prices swaps of two seats, by tables of the flows (traffic to another seat) of each seat."""

    def __init__(self, flows: Flows) -> None:
        self.flows = flows
        self.degree_Q: Ints = np.bincount(np.concatenate([flows.sender_F, flows.receiver_F]), minlength=flows.num_seats)
        depth = max(1, int(self.degree_Q.max(initial=0)))
        links_MHH, as_sender_T, as_receiver_T = views(flows.seconds_THH)
        self._seconds: NDArray[np.float32] = links_MHH.astype(np.float32).ravel()
        matrix_2F = np.concatenate([as_sender_T[flows.type_F], as_receiver_T[flows.type_F]])
        own_QD = np.repeat(np.arange(flows.num_seats)[:, None], depth, axis=1)
        # Each row has D entries; missing entries are flows of weight 0 from the seat to itself.
        self.other_QD: Ints = self._padded(np.concatenate([flows.receiver_F, flows.sender_F]), own_QD)
        self._weight_QD = self._padded(np.tile(flows.weight_F, 2), np.zeros(own_QD.shape)).astype(np.float32)
        self._matrix_QD = self._padded(matrix_2F * flows.num_seats**2, np.zeros_like(own_QD))
        self._group_QD = self._padded(np.tile(flows.group_F, 2), np.zeros_like(own_QD))
        self._is_alone_G = np.bincount(flows.family_G)[flows.family_G] == 1

    @property
    def tables(self) -> tuple[NDArray[Any], ...]:
        """Tables that the functions in C take as first arguments."""
        seats = self._seconds, self.other_QD, self._weight_QD, self._matrix_QD, self._group_QD, self.degree_Q
        return (*seats, self.flows.family_G, self._is_alone_G)

    def position(self, place_Q: Ints) -> Position:
        """Price an assignment of seats to places."""
        group_seconds_1G = self.flows.group_seconds(place_Q[None, :])
        return Position(
            place_Q=place_Q,
            seat_H=np.argsort(place_Q),
            cost_s=float(self.flows.largest(group_seconds_1G)[0]),
            group_seconds_G=group_seconds_1G[0],
        )

    def shares(self, position: Position, softness_s: float) -> Floats:
        """Return the share of each group in its family's soft maximum, s * log(sum over groups of exp(seconds / s))."""
        family_G = self.flows.family_G
        largest_N = np.full(self.flows.num_families, -np.inf)
        np.maximum.at(largest_N, family_G, position.group_seconds_G)
        height_G = np.exp((position.group_seconds_G - largest_N[family_G]) / softness_s)
        return np.asarray(height_G / np.bincount(family_G, weights=height_G)[family_G])

    def rises(self, position: Position, one_P: Ints, two_P: Ints, share_G: Floats, softness_s: float) -> Floats:
        """Return the seconds by which each swap of two seats raises the sum of soft maxima, with float32 precision.

        A soft maximum also reflects swaps that do not touch the largest group. The soft maximum of a single group is
        the group itself. The change of one family's soft maximum is cut to at most +80 and at least -27 times the
        softness. `share_G` is the result of `shares` for the same position and softness.
        """
        log_share_G = np.log(np.maximum(share_G, 1e-300))
        family_G, families, alone_G = self.flows.family_G, self.flows.num_families, self._is_alone_G
        terms_PS = self._terms(position, one_P, two_P)
        groups_PS = np.concatenate([self._group_QD[one_P], self._group_QD[two_P]], axis=1)
        # If a swap changes several terms of one group, each term gets an equal part of the group's change.
        same_PSS = groups_PS[:, :, None] == groups_PS[:, None, :]
        group_rise_PS = np.einsum("pij,pj->pi", same_PSS, terms_PS)
        steps_PS = np.minimum(group_rise_PS / softness_s + log_share_G[groups_PS], STEEPEST)
        change_PS = (np.exp(steps_PS) - share_G[groups_PS]) / same_PSS.sum(axis=2)
        change_PS[alone_G[groups_PS]] = 0.0
        at_PS = np.arange(len(groups_PS))[:, None] * families + family_G[groups_PS]
        change_PN = np.bincount(at_PS.ravel(), weights=change_PS.ravel(), minlength=len(groups_PS) * families)
        soft_PN = np.log1p(np.maximum(change_PN, LEAST - 1.0)).reshape(-1, families)
        alone_P = np.where(alone_G[groups_PS], terms_PS, 0.0).sum(axis=1)
        return np.asarray(alone_P + softness_s * soft_PN.sum(axis=1))

    def apart(self, one_A: Ints, two_A: Ints) -> Ints:
        """Return swaps that do not change each other's price; earlier swaps have priority.

        A swap is taken if no earlier swap changes its two seats, or a seat that shares a flow with one of the two.
        """
        turn_A = np.arange(len(one_A))
        first_Q = np.full(len(self.other_QD), len(one_A))
        # Assign in reverse order, so that the first swap of each seat remains in the table.
        first_Q[np.stack([one_A, two_A], axis=1).ravel()[::-1]] = np.repeat(turn_A, 2)[::-1]
        around_A = [first_Q[end_A] for end_A in (one_A, two_A)]
        around_A += [first_Q[self.other_QD[end_A]].min(axis=1) for end_A in (one_A, two_A)]
        return np.flatnonzero(np.minimum.reduce(around_A) == turn_A)

    def _terms(self, position: Position, one_P: Ints, two_P: Ints) -> Floats:
        """Return the seconds that a swap adds, for each flow of the two swapped seats: shape (P, S)."""
        count = len(one_P)
        seat_2P, partner_2P = np.concatenate([one_P, two_P]), np.concatenate([two_P, one_P])
        there_2P, here_2P = position.place_Q[partner_2P], position.place_Q[seat_2P]
        # A flow between the two seats only changes direction. Both seats list this flow, so each entry counts half.
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
        """Put the values of each flow into the rows of its sender and of its receiver."""
        seat_2F = np.concatenate([self.flows.sender_F, self.flows.receiver_F])
        order = np.argsort(seat_2F, kind="stable")
        starts_Q = np.cumsum(self.degree_Q) - self.degree_Q
        column = np.arange(len(seat_2F)) - starts_Q[seat_2F[order]]
        table_QD: NDArray[Entry] = empty_QD.copy()
        table_QD[seat_2F[order], column] = value_2F[order]
        return table_QD


def views(seconds_THH: Floats) -> tuple[Floats, Ints, Ints]:
    """Return the distinct link matrices, and for each type of flow the matrix of its senders and of its receivers."""
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


def descend(
    flows: Flows,
    place_Q: Ints,
    *,
    near_HK: Ints,
    steps: int,
    rng: np.random.Generator,
    is_late: Callable[[], bool],
    group_H: Sequence[int] | Ints = (),
) -> Position:
    """Search for a cheaper assignment near a given assignment, and return the cheapest one seen.

    The cost of a family is the cost of its largest group. So only a swap that shortens a family's largest group helps,
    and another group may then be the largest. The descent therefore replaces maxima by soft maxima, which become harder
    step by step. The descent proposes seats by their share in the soft maxima. In each of `steps` batches, the descent
    makes all proposed swaps that lower the soft cost and share no flow. `near_HK` has K near places of each place. With
    `group_H`, seats may only move inside a group of places.
    """
    prices = SwapPrices(flows)
    best = here = prices.position(np.array(place_Q, dtype=np.int64))
    near_HK, domain_H = np.ascontiguousarray(near_HK), np.asarray(group_H, dtype=np.int64)
    size = int(np.clip(PROPOSALS_PER_SEAT * flows.num_seats, FEWEST_PROPOSALS, MOST_PROPOSALS))
    # If each family has one group, there is no maximum to soften, so the cost itself sets the scale.
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
    return best


def _spread(flows: Flows, here: Position) -> float:
    """Return the sum over families of the seconds between the largest and the median group."""
    families = [here.group_seconds_G[flows.family_G == family] for family in range(flows.num_families)]
    return float(sum(group.max() - np.median(group) for group in families))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """One batch of proposed swaps: the random numbers of each swap, and the domains of the places."""

    seat_P: Floats
    """Random number that draws the first seat, as a fraction of the sum of all weights."""
    any_P: Ints
    """Second seat of a swap, if the proposal is random."""
    flow_P: Floats
    """Random number below 1 that chooses a flow (exchange) of the first seat."""
    near_P: Ints
    """Column of `near_HK`: chooses a place near the partner with which the first seat exchanges data."""
    near_HK: Ints
    domain_H: Ints
    """Domain of each place. Seats must stay in their domain; empty = seats may go anywhere."""
    softness_s: float

    @classmethod
    def drawn(cls, rng: np.random.Generator, size: int, near_HK: Ints, domain_H: Ints, softness_s: float) -> _Step:
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
        """Make the swaps that lower the cost; return None if no swap lowers it."""
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
        """Make the same swaps as `in_c`, without compiled code."""
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
        return round(INFORMED * len(self.any_P))

    def _proposals(self, prices: SwapPrices, here: Position, share_G: Floats) -> tuple[Ints, Ints]:
        """Return first seats, drawn by their share in the soft maxima, and the seats to swap with them."""
        flows, seats = prices.flows, prices.flows.num_seats
        weight_F = share_G[flows.group_F]
        weight_Q = np.bincount(np.concatenate([flows.sender_F, flows.receiver_F]), np.tile(weight_F, 2), seats)
        level_Q = np.cumsum(weight_Q + 1e-3 * weight_Q.mean())
        one_P = np.minimum(np.searchsorted(level_Q, self.seat_P * level_Q[-1]), seats - 1)
        degree_P = prices.degree_Q[one_P]
        beside_P = here.place_Q[prices.other_QD[one_P, (self.flow_P * degree_P).astype(np.int64)]]
        is_informed_P = (degree_P > 0) & (np.arange(len(one_P)) < self._num_informed)
        return one_P, np.where(is_informed_P, here.seat_H[self.near_HK[beside_P, self.near_P]], self.any_P)
