"""Counts the iterations of a training run and sets its measured step time beside the predicted one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipette_launch.facts.measurements import Samples
from pipette_launch.facts.outcome import Outcome

if TYPE_CHECKING:
    from pipette_launch.facts import Choice
    from pipette_launch.megatron import Iteration

ITERATIONS = 20
"""How many iterations an outcome rests on; one logged line may stand for several."""
WARM_UPS = 5
"""The first ones, which carry compilation, lazy communicators and cold caches."""


class OutcomeTracker:
    """Collects the iteration lines of one attempt."""

    def __init__(self, key: str, choice: Choice) -> None:
        self._key = key
        self._choice = choice
        self._lines: list[Iteration] = []
        self._is_done = False

    def add(self, line: Iteration) -> Outcome | None:
        """Take one logged line; returns the outcome with the line that completes it, and never again."""
        if self._is_done:
            return None
        self._lines.append(line)
        first = self._lines[0].iteration
        steady = [seen for seen in self._lines[1:] if seen.iteration - first >= WARM_UPS]
        if not steady or line.iteration - first + 1 < ITERATIONS:
            return None
        self._is_done = True
        warm_ups = self._lines[: len(self._lines) - len(steady)]
        return Outcome(
            key=self._key,
            layout=self._choice.layout,
            placement=self._choice.placement,
            predicted_step_s=self._choice.step_time_s,
            measured_step=Samples(
                values_s=tuple(seen.step_time_s for seen in steady),
                warmup_s=tuple(seen.step_time_s for seen in warm_ups),
            ),
            first_iteration=first,
            last_iteration=line.iteration,
            losses=tuple(seen.loss or "" for seen in self._lines),
        )
