"""What came of configurations that really ran for a few iterations before the training began."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One configuration that was tried."""

    layout: Layout
    placement: tuple[int, ...]
    is_own: bool
    """The user's own configuration in torchrun's order."""
    predicted_step_s: float
    step: Samples | None
    """None where it did not come to enough iterations; `failure` then says why."""
    failure: str
    took_s: float
    """From the start of the workers until their devices were free again."""

    @property
    def median_s(self) -> float:
        """The step time that was measured; infinite where none was."""
        return math.inf if self.step is None else self.step.median_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """Measured runs of the best plans and of the user's own configuration, before the training."""

    asked: int
    """How many plans were to be tried (`--pipette-trials`); there may have been fewer."""
    iterations: int
    """How many step times of each count, behind its warm-ups."""
    runs: tuple[Trial, ...]
    """In the order in which they ran."""

    @property
    def took_s(self) -> float:
        """All of them together."""
        return sum(run.took_s for run in self.runs)
