"""Counts the iterations of a training run and sets its measured step time beside the predicted one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipette_launch.facts.measurements import Samples
from pipette_launch.facts.outcome import Outcome

if TYPE_CHECKING:
    from pipette_launch.facts import Choice
    from pipette_launch.megatron import Iteration

ITERATIONS = 20
"""How many logged iterations an outcome rests on."""
WARM_UPS = 5
"""The first ones, which carry compilation, lazy communicators and cold caches."""


class OutcomeTracker:
    """Collects the iteration lines of one attempt."""

    def __init__(self, key: str, choice: Choice) -> None:
        self._key = key
        self._choice = choice
        self._seen: list[Iteration] = []

    def add(self, iteration: Iteration) -> Outcome | None:
        """Take one iteration; returns the outcome with the iteration that completes it, and never again."""
        if len(self._seen) == ITERATIONS:
            return None
        self._seen.append(iteration)
        if len(self._seen) < ITERATIONS:
            return None
        times_s = tuple(seen.step_time_s for seen in self._seen)
        return Outcome(
            key=self._key,
            layout=self._choice.layout,
            placement=self._choice.placement,
            predicted_step_s=self._choice.step_time_s,
            measured_step=Samples(values_s=times_s[WARM_UPS:], warmup_s=times_s[:WARM_UPS]),
            first_iteration=self._seen[0].iteration,
            losses=tuple(seen.loss or "" for seen in self._seen),
        )
