"""What a restart cost: which steps are lost, and how long its parts took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pipette_launch.text import plural, seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipette_launch.facts.messages import Decision


class Recovery:
    """Follows one node from the end of its workers to the first iteration that it sees afterwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.iteration = 0
        """The last iteration that this node has seen in this attempt at training."""
        self._reached = 0
        self._ended_s = self._decided_s = 0.0

    def ended(self) -> None:
        """Take note that the workers have ended and the agents meet."""
        self._ended_s = self._clock()

    def decided(self, decision: Decision) -> None:
        """Take note of what the agents have agreed on."""
        if decision.phase == "train":
            self._reached, self.iteration = decision.iteration, 0
        self._decided_s = self._clock()

    def sees(self, iteration: int) -> str:
        """Take note of an iteration; returns what the user reads at the first one after a restart, else nothing."""
        reached, self._reached, self.iteration = self._reached, 0, iteration
        if not reached:
            return ""
        lost = max(reached - iteration + 1, 0)
        since = "the first step; no checkpoint was loaded" if iteration == 1 else f"iteration {iteration}"
        steps = f"{lost} {plural('step', lost)} of {reached} lost"
        met = seconds_text(self._decided_s - self._ended_s)
        return (
            f"training goes on with {since}: {steps}; {met} until the nodes had agreed, "
            f"{seconds_text(self._clock() - self._decided_s)} more until the first step was done"
        )
