"""A block assignment problem: assign seats (such as the ranks of a host) to places (such as hosts) at the least cost.

A flow is traffic from one seat to another. The problem is a quadratic assignment problem (Koopmans and Beckmann 1957),
extended by families. A family consists of groups of flows, and only its group with the largest cost counts.
"""

# Q = seats, H = places (equally many), F = flows, G = groups, N = families, T = types of flow, K = bijections.
# A bijection assigns each seat to one place, as the array place_Q.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipette_launch.facts.layout import Floats, Ints

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

    Raises:
        ValueError: shapes or indices that do not fit together, or numbers that are not finite.

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
        """Take read-only copies of the arrays, and check the arrays once."""
        for name in ("sender_F", "receiver_F", "type_F", "group_F", "family_G"):
            object.__setattr__(self, name, _frozen(getattr(self, name), np.int64))
        for name in ("seconds_THH", "weight_F", "offset_G"):
            object.__setattr__(self, name, _frozen(getattr(self, name), np.float64))
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"{name} holds numbers that are not finite")
        self._check()

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

    def _check(self) -> None:
        if self.seconds_THH.ndim != 3 or self.seconds_THH.shape[1] != self.seconds_THH.shape[2]:
            raise ValueError(f"seconds_THH has shape {self.seconds_THH.shape}, which is not (types, places, places)")
        names = ("sender_F", "receiver_F", "type_F", "weight_F", "group_F")
        shapes = {name: getattr(self, name).shape for name in names}
        if len(set(shapes.values())) > 1 or self.sender_F.ndim != 1:
            raise ValueError(f"the flows' arrays differ in shape: {shapes}")
        if self.offset_G.shape != self.family_G.shape or self.offset_G.ndim != 1 or not len(self.offset_G):
            raise ValueError(
                f"offset_G {self.offset_G.shape} and family_G {self.family_G.shape} must agree, and not be empty"
            )
        seats, groups = self.num_seats, len(self.offset_G)
        limits = (seats, seats, len(self.seconds_THH), groups, groups)
        for name, limit in zip(("sender_F", "receiver_F", "type_F", "group_F", "family_G"), limits, strict=True):
            indices = getattr(self, name)
            if indices.size and not (indices.min() >= 0 and indices.max() < limit):
                raise ValueError(f"{name} must be at least 0 and below {limit}, got {indices.min()} to {indices.max()}")
        if (self.sender_F == self.receiver_F).any():
            raise ValueError("a flow goes from a seat to itself")
        if len(np.unique(self.family_G)) != self.num_families:
            raise ValueError(f"families must be counted from 0 without gaps, got {np.unique(self.family_G)}")


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrangement:
    """An assignment of seats to places, and its cost in seconds."""

    place_Q: Ints
    cost_s: float


def _frozen(values: ArrayLike, dtype: type[np.generic]) -> NDArray[np.generic]:
    """Return the array itself if the array is read-only, else a read-only copy."""
    array = np.asarray(values, dtype=dtype, order="C")
    if array.flags.writeable:
        array = array.copy()
        array.setflags(write=False)
    return array
