"""What a restart cost is told once, at the first iteration after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipette_launch.facts.messages import Decision
from pipette_launch.launch.training.recovery import Recovery


def recovery(*times_s: float) -> Recovery:
    """One whose clock shows these times, one after the other."""
    clock: Iterator[float] = iter(times_s)
    return Recovery(lambda: next(clock))


def train(**changes: Any) -> Decision:
    """A decision to train."""
    return Decision(phase="train", tokens=("a",), hosts=("n0",), num_slots=(1,), **changes)


def test_the_first_start_is_no_restart() -> None:
    """Nothing is lost, and nothing said."""
    made = recovery(0.0, 1.0)
    made.ended()
    made.decided(train())

    assert ("", 1) == (made.sees(1), made.iteration)


def test_lost_steps_are_counted_from_the_last_that_any_node_saw() -> None:
    """Iteration 11 after 13 were seen: 11, 12 and 13 are computed again; later iterations say nothing."""
    made = recovery(10.0, 11.5, 17.5)
    made.ended()
    made.decided(train(iteration=13))

    words = made.sees(11)

    assert words.startswith("training goes on with iteration 11: 3 steps of 13 lost; 1.50 s until")
    assert "6.00 s more until the first step was done" in words
    assert "" == made.sees(12)


def test_a_job_without_checkpoints_says_so() -> None:
    """It begins anew."""
    made = recovery(0.0, 1.0, 2.0)
    made.ended()
    made.decided(train(iteration=7))

    assert "goes on with the first step; no checkpoint was loaded: 7 steps of 7 lost" in made.sees(1)


def test_a_warmup_is_no_training() -> None:
    """What a warm-up's workers print is nobody's step; the training after it tells."""
    made = recovery(0.0, 1.0, 30.0, 36.0)
    made.ended()
    made.decided(Decision(phase="warmup", tokens=("a",), hosts=("n0",), num_slots=(1,), iteration=7))
    made.decided(train(iteration=7))

    assert "30.00 s until the nodes had agreed" in made.sees(6)
