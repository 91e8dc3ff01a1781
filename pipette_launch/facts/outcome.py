"""Predicted against measured: what became of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The file outcome.json, written once enough iterations of a plan were logged."""

    KIND: ClassVar[str] = "outcome"
    SCHEMA_VERSION: ClassVar[int] = 1

    key: str
    """Of the plan (`Provenance.key`)."""
    layout: Layout
    placement: tuple[int, ...]
    predicted_step_s: float
    measured_step: Samples
    """Step times as the script printed them; the first ones are warm-ups."""
    first_iteration: int
    last_iteration: int
    """One logged line may stand for several iterations."""
    losses: tuple[str, ...]
    """The loss of each of those iterations, as printed; empty text where none was."""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted_step_s - self.measured_step.median_s) / self.measured_step.median_s
