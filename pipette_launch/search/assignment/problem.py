"""What moves between the seats of a placement, and how many seconds each bijection of seats and places makes of it."""

# Q = seats, H = places (as many), F = flows, G = groups, T = types of flow, U = types of seat, K = bijections.
# A bijection is place_Q: the place of each seat.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

AT_ONCE = 1 << 21
"""Flows that are priced together: about 16 MiB for each of a few arrays."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Flows:
    """A block placement problem: which place each seat should take.

    The cost is the sum over families of the largest of the family's groups, and a group is its offset, plus
    weight * seconds of its flows, plus its seats' own seconds. A plain sum is one family with one group; the slowest
    link of a ring is a family in which every link is its own group; Pipette's T_PP is one with a group per pipeline.
    A seat may be a device, a host, or whatever is moved as one; places are of the same kind.

    Raises:
        ValueError: shapes or indices that do not fit together, or numbers that are not finite.

    """

    seconds_THH: Floats
    """Seconds for a unit of flow of a type, by place of sender and place of receiver; the diagonal is not used."""
    sender_F: Ints
    receiver_F: Ints
    type_F: Ints
    weight_F: Floats
    """Units of each flow."""
    group_F: Ints
    offset_G: Floats
    """Seconds of a group whatever the bijection."""
    family_G: Ints
    """Family of each group, counted from 0 without gaps."""
    seat_type_Q: Ints
    seat_seconds_UH: Floats
    """Own seconds of a seat of a type on each place (a slow host, for one); no rows where no seat has any."""
    seat_group_Q: Ints
    """Group that a seat's own seconds belong to; -1 where it has none."""

    def __post_init__(self) -> None:
        """Take read-only copies, and check them once."""
        for name in ("sender_F", "receiver_F", "type_F", "group_F", "family_G", "seat_type_Q", "seat_group_Q"):
            object.__setattr__(self, name, _frozen(getattr(self, name), np.int64))
        for name in ("seconds_THH", "weight_F", "offset_G", "seat_seconds_UH"):
            object.__setattr__(self, name, _frozen(getattr(self, name), np.float64))
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"{name} holds numbers that are not finite")
        self._check_shapes()
        self._check_indices()

    @property
    def num_seats(self) -> int:
        """Q, which is H."""
        return len(self.seat_type_Q)

    @property
    def num_places(self) -> int:
        """H, which is Q."""
        return int(self.seconds_THH.shape[1])

    @property
    def num_flows(self) -> int:
        """F."""
        return len(self.sender_F)

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.offset_G)

    @cached_property
    def is_sum(self) -> bool:
        """Whether every family has one group, so that nothing but sums is left."""
        return len(np.unique(self.family_G)) == self.num_groups

    def cost(self, place_Q: ArrayLike) -> float:
        """Seconds of one bijection; the digits are those of `costs`."""
        return float(self.costs(np.asarray(place_Q)[None, :])[0])

    def costs(self, place_KQ: ArrayLike) -> Floats:
        """Seconds of each of K bijections, in pieces that bound the memory."""
        places_KQ = np.asarray(place_KQ, dtype=np.int64)
        step = max(1, AT_ONCE // max(1, self.num_flows + self.num_groups))
        pieces = [self.largest(self.group_seconds(places_KQ[at : at + step])) for at in range(0, len(places_KQ), step)]
        return np.concatenate(pieces) if pieces else np.zeros(0)

    def largest(self, group_seconds_KG: Floats) -> Floats:
        """Sum over families of the largest of their groups' seconds: what K bijections cost."""
        largest_KN = np.maximum.reduceat(group_seconds_KG[:, self._by_family_G], self._family_starts_N, axis=1)
        # One family after another, as the order of additions must not depend on K.
        total_K = np.zeros(len(group_seconds_KG))
        for largest_K in largest_KN.T:
            total_K += largest_K
        return total_K

    def group_seconds(self, place_KQ: Ints) -> Floats:
        """Seconds of every group under K bijections: shape (K, G)."""
        count = len(place_KQ)
        base_K1 = np.arange(count)[:, None] * self.num_groups
        # `bincount` adds in the order given, whatever K is.
        at_KF = place_KQ[:, self.sender_F] * self.num_places + place_KQ[:, self.receiver_F]
        value_KF = self.weight_F * self.seconds_THH.take(self._matrix_F + at_KF)
        sums_KG = np.bincount(
            (base_K1 + self.group_F).ravel(), weights=value_KF.ravel(), minlength=count * self.num_groups
        ).reshape(count, self.num_groups)
        seats = self._seats_with_seconds
        if len(seats):
            own_KQ = self.seat_seconds_UH[self.seat_type_Q[seats], place_KQ[:, seats]]
            sums_KG += np.bincount(
                (base_K1 + self.seat_group_Q[seats]).ravel(), weights=own_KQ.ravel(), minlength=sums_KG.size
            ).reshape(sums_KG.shape)
        return self.offset_G + sums_KG

    @cached_property
    def _matrix_F(self) -> Ints:
        return self.type_F * self.num_places**2

    @cached_property
    def _by_family_G(self) -> Ints:
        return np.argsort(self.family_G, kind="stable")

    @cached_property
    def _family_starts_N(self) -> Ints:
        return np.searchsorted(self.family_G[self._by_family_G], np.arange(self.family_G.max() + 1))

    @cached_property
    def _seats_with_seconds(self) -> Ints:
        return np.flatnonzero(self.seat_group_Q >= 0)

    def _check_shapes(self) -> None:
        types, hosts = self.seconds_THH.shape[:2] if self.seconds_THH.ndim == 3 else (0, 0)
        if self.seconds_THH.shape != (types, hosts, hosts) or hosts != self.num_seats:
            raise ValueError(
                f"seconds_THH has shape {self.seconds_THH.shape}, which is not (types, {self.num_seats}, "
                f"{self.num_seats}): there must be as many places as seats"
            )
        flows = {
            name: getattr(self, name).shape for name in ("sender_F", "receiver_F", "type_F", "weight_F", "group_F")
        }
        if len(set(flows.values())) > 1 or self.sender_F.ndim != 1:
            raise ValueError(f"the flows' arrays differ in shape: {flows}")
        if self.offset_G.shape != self.family_G.shape or self.offset_G.ndim != 1 or not self.num_groups:
            raise ValueError(
                f"offset_G {self.offset_G.shape} and family_G {self.family_G.shape} must agree, and not be empty"
            )
        if self.seat_group_Q.shape != (self.num_seats,) or self.seat_seconds_UH.ndim != 2:
            raise ValueError(f"seat_group_Q has shape {self.seat_group_Q.shape} for {self.num_seats} seats")
        if self.seat_seconds_UH.shape[1] != hosts:
            raise ValueError(f"seat_seconds_UH has {self.seat_seconds_UH.shape[1]} columns for {hosts} places")

    def _check_indices(self) -> None:
        seats, own = self.num_seats, self.seat_group_Q >= 0
        for name, indices, limit in (
            ("sender_F", self.sender_F, seats),
            ("receiver_F", self.receiver_F, seats),
            ("type_F", self.type_F, len(self.seconds_THH)),
            ("group_F", self.group_F, self.num_groups),
            ("family_G", self.family_G, self.num_groups),
            ("seat_group_Q", self.seat_group_Q[own], self.num_groups),
            ("seat_type_Q", self.seat_type_Q[own], len(self.seat_seconds_UH)),
        ):
            if indices.size and not (indices.min() >= 0 and indices.max() < limit):
                raise ValueError(f"{name} must be at least 0 and below {limit}, got {indices.min()} to {indices.max()}")
        if (self.sender_F == self.receiver_F).any():
            raise ValueError("a flow goes from a seat to itself")
        if len(np.unique(self.family_G)) != self.family_G.max() + 1:
            raise ValueError(f"families must be counted from 0 without gaps, got {np.unique(self.family_G)}")


def _frozen(values: ArrayLike, dtype: type[np.generic]) -> NDArray[np.generic]:
    """Give a read-only array: the same one where it is read-only already, else a copy."""
    array = np.asarray(values, dtype=dtype, order="C")
    if array.flags.writeable:
        array = array.copy()
        array.setflags(write=False)
    return array
