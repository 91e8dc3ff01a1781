"""What the warm-up asks whoever advises it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipette_launch.errors import FactError
from pipette_launch.facts.job import Job
from pipette_launch.facts.measurements import Measurements


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is known so far of a job and of the machines, and how long an answer may take."""

    KIND: ClassVar[str] = "question"
    SCHEMA_VERSION: ClassVar[int] = 1

    job: Job
    measurements: Measurements
    """What was measured so far; what is still to come is empty."""
    budget_s: float
    """Seconds that the search for plans may take."""

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise FactError(f"an answer needs time, got budget_s={self.budget_s}")
