"""A block placement problem in the making: types, families, groups and flows are added one after the other."""

# Q = seats, H = places (as many), F = flows, G = groups.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipette_launch.search.assignment.problem import Flows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Draft:
    """Collects the parts of a `Flows` problem."""

    def __init__(self, num_seats: int) -> None:
        self.num_seats = num_seats
        self._matrices_HH: list[Floats] = []
        self._flows: list[tuple[Ints, Ints, Ints, Floats, Ints]] = []
        self._offsets: list[Floats] = []
        self._families: list[Ints] = []
        self._num_groups = 0
        self._num_families = 0

    def kind(self, seconds_HH: Floats) -> int:
        """Add a type of flow: seconds for a unit of it, by place of sender and of receiver."""
        self._matrices_HH.append(seconds_HH)
        return len(self._matrices_HH) - 1

    def family(self, offset_G: ArrayLike) -> Ints:
        """Add a family with a group for each offset, of which the largest counts, and return its groups."""
        offsets = np.atleast_1d(np.asarray(offset_G, dtype=np.float64))
        if not len(offsets):
            return np.zeros(0, dtype=np.int64)
        self._offsets.append(offsets)
        self._families.append(np.full(len(offsets), self._num_families))
        self._num_families += 1
        self._num_groups += len(offsets)
        return np.arange(self._num_groups - len(offsets), self._num_groups)

    def add(self, kind: int, sender: Ints, receiver: Ints, weight: ArrayLike, group: Ints) -> None:
        """Add flows of one type; what stays on its seat, or weighs nothing, is no flow."""
        weight_F = np.broadcast_to(np.asarray(weight, dtype=np.float64), sender.shape)
        moves = (sender != receiver) & (weight_F != 0)
        kinds = np.full(int(moves.sum()), kind)
        self._flows.append((sender[moves], receiver[moves], kinds, weight_F[moves], group[moves]))

    def flows(self) -> Flows:
        """The problem."""
        size = self.num_seats
        sender, receiver, kinds, weight, group = (
            np.concatenate([part[column] for part in self._flows]) if self._flows else np.zeros(0)
            for column in range(5)
        )
        matrices = np.stack(self._matrices_HH) if self._matrices_HH else np.zeros((1, size, size))
        matrices.setflags(write=False)
        return Flows(
            seconds_THH=matrices,
            sender_F=sender.astype(np.int64),
            receiver_F=receiver.astype(np.int64),
            type_F=kinds.astype(np.int64),
            weight_F=weight.astype(np.float64),
            group_F=group.astype(np.int64),
            offset_G=np.concatenate(self._offsets) if self._offsets else np.zeros(1),
            family_G=np.concatenate(self._families) if self._families else np.zeros(1, dtype=np.int64),
            seat_type_Q=np.zeros(size, dtype=np.int64),
            seat_seconds_UH=np.zeros((0, size)),
            seat_group_Q=np.full(size, -1),
        )
