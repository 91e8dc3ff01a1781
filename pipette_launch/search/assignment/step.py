"""What one batch of a walk over bijections found."""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.search.assignment.problem import Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """The best bijection of a batch, its exact cost in seconds, and how many the batch priced."""

    place_Q: Ints
    cost: float
    priced: int
