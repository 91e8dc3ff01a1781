"""What the warm-up asks before it measures links, and the answer: links, groups and stages of good plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from pipette_launch.errors import FactError
from pipette_launch.facts.checks import check_numbers
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Measurements

CollectiveKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuringQuestion:
    """What is known so far of a job and of the machines, and how long an answer may take."""

    KIND: ClassVar[str] = "question"
    SCHEMA_VERSION: ClassVar[int] = 1

    job: Job
    measurements: Measurements
    """What was measured so far; what is still to come is empty."""
    budget_s: float
    """Seconds that the search for plans may take."""

    def __post_init__(self) -> None:
        check_numbers(self, "budget_s", limit=0, above=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """Groups of slots that communicate at the same time, so they are measured at the same time."""

    name: str
    """The parallel dimension, such as `dp`, or what else the groups have in common."""
    kinds: tuple[CollectiveKind, ...]
    """The collectives that it uses."""
    groups: tuple[tuple[int, ...], ...]
    """Each of two or more slots, ascending, as torch sorts them; no slot is in two."""
    most_bytes: int = 0
    """The largest full tensor that is exchanged there in one piece; 0 = unknown."""

    def __post_init__(self) -> None:
        members = [slot for group in self.groups for slot in group]
        if len(set(members)) != len(members) or any(len(group) < 2 for group in self.groups):
            raise FactError(f"{self.name}: groups need two or more slots each, and no slot twice, got {self.groups}")
        if any(list(group) != sorted(group) for group in self.groups):
            raise FactError(f"{self.name}: the slots of a group must ascend, got {self.groups}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCase:
    """One pipeline rank of a layout."""

    layout: Layout
    pp_rank: int
    predicted_bytes: int = 0
    """Predicted peak of its tensors; 0 = no prediction."""

    def __post_init__(self) -> None:
        if not 0 <= self.pp_rank < self.layout.pp:
            raise FactError(f"pp_rank={self.pp_rank} is not one of the layout's {self.layout.pp}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What the plans that may win would use."""

    KIND: ClassVar[str] = "advice"
    SCHEMA_VERSION: ClassVar[int] = 1

    host_pairs: tuple[tuple[int, ...], ...] = ()
    """Indices of hosts whose link they use, the lower first."""
    dimensions: tuple[Dimension, ...] = ()
    """Most important first."""
    stages: tuple[StageCase, ...] = ()
    """Stages whose memory decides, most promising first."""
    words: str = ""
    """Which plans were considered, or why there is no advice, one sentence."""

    def __post_init__(self) -> None:
        bad = [pair for pair in self.host_pairs if len(pair) != 2 or not 0 <= pair[0] < pair[1]]
        if bad:
            raise FactError(f"a link is between two hosts, the lower first, got {bad[0]}")
