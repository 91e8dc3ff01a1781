"""What one node sees of a trial: its step times, and how long to wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipette_launch.launch import device_orders

if TYPE_CHECKING:
    from pipette_launch.facts.messages import Decision

START_S = 600.0
"""Imports, data, a checkpoint, compilation, the first step."""
HUNG_S = 120.0
"""Between two iterations; a validation may lie between them."""
HUNG_STEPS = 20
"""And so many predicted steps, where those take longer."""


class TrialWatch:
    """Collects the step times of the trial in progress, if there is one."""

    def __init__(self) -> None:
        self._is_trial = False
        self._steps_s: list[float] = []
        self._predicted_s = 0.0
        self._check_patience_s = 0.0
        """Above 0 in a check of a device order."""

    def begin(self, decision: Decision) -> None:
        """Forget an earlier trial."""
        self._steps_s = []
        self._is_trial = decision.phase == "trial"
        self._check_patience_s = device_orders.patience_s(decision) if decision.checks_order else 0.0
        if self._is_trial and decision.plan is not None:
            self._predicted_s = (decision.choice or decision.plan.own).step_time_s

    def add(self, step_time_s: float) -> None:
        """Take one logged line; those of the training are not kept, which may last for months."""
        if self._is_trial:
            self._steps_s.append(step_time_s)

    @property
    def steps_s(self) -> tuple[float, ...]:
        """The step times so far."""
        return tuple(self._steps_s)

    def words(self, decision: Decision, elapsed_s: float, *, asked: int) -> str:
        """Say how far the trial is; only the node of the last rank hears its iterations."""
        if decision.checks_order:
            return f"{device_orders.check_words(decision)}, {elapsed_s:.0f} s"
        heard = f"iteration {len(self._steps_s)} of {decision.iterations}, " if self._steps_s else ""
        return f"trial {_number(decision, asked=asked)}: {_what(decision)}, {heard}{elapsed_s:.0f} s"

    @property
    def patience_s(self) -> tuple[float, float]:
        """After how long without the first iteration, and without each later one, a trial counts as hung."""
        if self._check_patience_s:
            return self._check_patience_s, 0.0
        steps_s = HUNG_STEPS * self._predicted_s
        return START_S + steps_s, max(HUNG_S, steps_s)


def trial_words(decision: Decision, *, asked: int) -> str:
    """Say which trial begins, of how many."""
    if decision.checks_order:
        return device_orders.check_words(decision)
    return f"trial {_number(decision, asked=asked)}: {_what(decision)}, {decision.iterations} iterations"


def _number(decision: Decision, *, asked: int) -> str:
    assert decision.plan is not None
    return f"{decision.trial + 1} of {min(asked, len(decision.plan.contenders())) + 1}"


def _what(decision: Decision) -> str:
    return decision.choice.layout.words() if decision.choice else "your own configuration"
