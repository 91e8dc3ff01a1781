"""Predicted against measured, counted from logged lines."""

from __future__ import annotations

import pytest

from pipette_launch.facts import Choice, Layout
from pipette_launch.launch.outcome import OutcomeTracker
from pipette_launch.megatron import Iteration

CHOICE = Choice(
    layout=Layout(dp=2),
    placement=(1, 0),
    schedule="no-pipelining",
    step_time_s=1.0,
    breakdown_s={},
    peak_memory_bytes=(1,),
    memory_limit_bytes=2,
    bound_s=1.0,
)


def line(iteration: int, step_time_s: float = 1.25) -> Iteration:
    """One logged line."""
    return Iteration(iteration=iteration, total=100, step_time_s=step_time_s, loss="5.0E+00")


@pytest.mark.parametrize(
    ("logged", "num_warm_ups", "num_values"),
    [(range(1, 21), 5, 15), ([1, 10, 20], 1, 2), ([100, 200], 1, 1), (range(301, 321), 5, 15)],
    ids=["every iteration", "every tenth", "every hundredth", "resumed"],
)
def test_twenty_iterations_make_an_outcome(logged: list[int], num_warm_ups: int, num_values: int) -> None:
    """Whatever the log interval, the outcome comes with the line that completes twenty iterations."""
    tracker = OutcomeTracker("key", CHOICE)

    *early, outcome = [tracker.add(line(iteration)) for iteration in logged]

    assert {None} == set(early)
    assert outcome is not None
    assert (num_warm_ups, num_values) == (len(outcome.measured_step.warmup_s), len(outcome.measured_step.values_s))
    assert -0.2 == pytest.approx(outcome.error)


def test_an_outcome_comes_once() -> None:
    """Later lines say nothing new."""
    tracker = OutcomeTracker("key", CHOICE)
    for iteration in range(1, 21):
        tracker.add(line(iteration))

    assert tracker.add(line(21)) is None
