"""Plans side by side, each priced by the same models."""

# schema_version history of comparison.json
# 1  2026-11-21  first version

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipette_launch.errors import FactError
from pipette_launch.facts.results.plan import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One of the plans: a file's, or a planner's pick."""

    name: str
    choice: Choice | None
    """None where there is no plan, or nothing prices it."""
    gap: float | None
    """Of the step time over what was proven for all layouts; None where nothing was."""
    num_moved: int | None
    """Ranks that sit on another device than under the first entry; None where the machines are others."""
    faults: tuple[str, ...]
    """Why it cannot run, one sentence each; empty where it can."""
    remarks: tuple[str, ...]
    """What else to know, one sentence each."""

    @property
    def runs(self) -> bool:
        """Whether it can be compared with others that can."""
        return self.choice is not None and not self.faults


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `pipette compare --json` prints; the others are compared with the first entry."""

    KIND: ClassVar[str] = "comparison"
    SCHEMA_VERSION: ClassVar[int] = 1

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    """What makes the entries unlike in more than their plans, and what their prices rest on."""

    def __post_init__(self) -> None:
        if not self.entries:
            raise FactError("a comparison needs at least one entry")
