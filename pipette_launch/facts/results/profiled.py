"""The passes of one rank that a profiler measured in a training."""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.facts.checks import check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledRank:
    """The passes of one rank, in the order in which they began."""

    rank: int
    world_size: int
    kind_A: tuple[str, ...]
    """`F` forward, `B` backward."""
    start_s_A: tuple[float, ...]
    """By the clock of the rank's host."""
    end_s_A: tuple[float, ...]

    def __post_init__(self) -> None:
        check_numbers(self, "rank", "world_size", limit=0)
