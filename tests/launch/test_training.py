"""Predicted against measured, counted from logged lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from facts_for_tests import memory_need, nodes
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.facts import Choice, Layout
from pipette_launch.facts.messages import RunTraining, RunWarmup
from pipette_launch.facts.plan import Rate
from pipette_launch.launch.training import (
    IGNORED_STEPS,
    WINDOW,
    OutcomeTracker,
    Recovery,
    Slowdown,
    device_peaks,
    has_trained,
)
from pipette_launch.megatron import Iteration, MemoryLine

CHOICE = Choice(
    layout=Layout(dp=2),
    placement=(1, 0),
    schedule="no-pipelining",
    step_time_s=1.0,
    breakdown_s={},
    memory=memory_need((1,), 2),
    bound_s=1.0,
)


def line(iteration: int, step_time_s: float = 1.25) -> Iteration:
    """One logged line."""
    return Iteration(iteration=iteration, total=100, step_time_s=step_time_s, loss="5.0E+00")


@pytest.mark.parametrize(
    ("logged", "num_warm_ups", "num_values"),
    [
        (range(1, 21), 5, 15),
        ([1, 10, 20], 2, 1),
        ([10, 20], 1, 1),
        ([100, 200], 1, 1),
        (range(301, 321), 5, 15),
        ([301, 310, 320], 2, 1),
    ],
    ids=["every one", "first and every tenth", "every tenth", "every hundredth", "resumed", "resumed, every tenth"],
)
def test_twenty_iterations_make_an_outcome(logged: list[int], num_warm_ups: int, num_values: int) -> None:
    """With any log interval, the outcome comes with the line that completes twenty iterations."""
    tracker = OutcomeTracker("key", CHOICE)

    *early, outcome = [tracker.add(line(iteration)) for iteration in logged]

    assert {None} == set(early)
    assert outcome is not None
    assert (num_warm_ups, num_values) == (len(outcome.measured_step.warmup_s), len(outcome.measured_step.values_s))
    assert -0.2 == pytest.approx(outcome.error)


@pytest.mark.parametrize(("step_time_s", "total", "last"), [(0.125, 500, 85), (0.125, 60, 60), (1.0, 500, 20)])
def test_an_outcome_rests_on_ten_seconds_where_the_run_is_so_long(step_time_s: float, total: int, last: int) -> None:
    """Steps of 0.125 s count until 80 of them are steady, or to the last iteration; longer ones to the twentieth."""
    tracker = OutcomeTracker("key", CHOICE)
    lines = [line(iteration, step_time_s)._replace(total=total) for iteration in range(1, total + 1)]

    found = [tracker.add(one) for one in lines]

    (outcome,) = filter(None, found)
    assert last == outcome.last_iteration == 1 + found.index(outcome)


def test_the_rate_is_that_of_the_measured_step() -> None:
    """A step of 1.25 s where 1 s was predicted has four fifths of the predicted tokens, FLOPs and MFU."""
    rate = Rate(tokens_per_s=1000.0, flops_per_s=5e14, mfu=0.5)
    tracker = OutcomeTracker("key", replace(CHOICE, rate=rate))

    outcome = [tracker.add(line(iteration)) for iteration in range(1, 21)][-1]

    assert outcome is not None
    assert Rate(tokens_per_s=800.0, flops_per_s=4e14, mfu=0.4) == outcome.rate


def test_an_outcome_comes_once() -> None:
    """Later lines give no outcome."""
    tracker = OutcomeTracker("key", CHOICE)
    for iteration in range(1, 21):
        tracker.add(line(iteration))

    assert tracker.add(line(21)) is None


def memory(rank: int, iteration: int, peak_bytes: int) -> MemoryLine:
    """Return a memory line of one rank."""
    return MemoryLine(
        rank=rank,
        iteration=iteration,
        allocated_bytes=1,
        max_allocated_bytes=peak_bytes,
        reserved_bytes=1,
        max_reserved_bytes=peak_bytes,
    )


@pytest.mark.parametrize(
    ("logged", "lines", "expected"),
    [
        (range(1, 21), [memory(1, 1, 500), memory(1, 2, 700)], [(1, 700)]),
        (range(1, 21), [memory(1, 1, 500)], []),
        ([10, 20, 30], [memory(0, 10, 900)], [(0, 900)]),
        (range(301, 321), [memory(0, 301, 500)], []),
        (range(301, 321), [memory(0, 302, 700), memory(1, 302, 800)], [(0, 700), (1, 800)]),
        (range(1, 21), [memory(0, 2, 0), memory(7, 2, 700)], []),
    ],
    ids=["the last line", "first iteration", "ten at once", "resumed", "two ranks", "a CPU, and a rank of nobody"],
)
def test_memory_counts_once_a_whole_step_was_seen(
    logged: list[int], lines: list[MemoryLine], expected: list[tuple[int, int]]
) -> None:
    """The first iteration's peak lacks the optimizer's states, which are made at its end."""
    tracker = OutcomeTracker("key", CHOICE)
    for seen in lines:
        tracker.add_memory(seen)

    outcomes = [tracker.add(line(iteration)) for iteration in logged]

    (outcome,) = filter(None, outcomes)
    assert expected == [(peak.rank, peak.measured_bytes) for peak in outcome.peaks]


def test_the_outcome_compares_with_the_model_alone() -> None:
    """The prediction is compared without corrections, because the error of the model itself is learned."""
    corrected = replace(
        CHOICE, step_correction=1.25, memory=memory_need((800,), 2, correction=2.0), configuration_digest="a"
    )
    tracker = OutcomeTracker("key", corrected)
    tracker.add_memory(memory(0, 2, 500))
    (outcome,) = filter(None, [tracker.add(line(iteration, 1.6)) for iteration in range(1, 21)])

    assert (400, "a") == (outcome.peaks[0].predicted_bytes, outcome.configuration_digest)
    assert 2.0 == pytest.approx(2.718281828**outcome.log_step_error)
    assert 1.25 == pytest.approx(2.718281828 ** (outcome.log_memory_error or 0.0))


def test_devices_are_set_beside_what_they_should_hold() -> None:
    """Each rank of this node is compared with its own stage, if the memory is that of the choice's own layout."""
    choice = replace(CHOICE, layout=Layout(pp=2), placement=(0, 1), memory=memory_need((100, 200), 300))

    assert [(0, 0, 100, 110), (1, 1, 200, 190)] == [
        (peak.rank, peak.pp_rank, peak.predicted_bytes, peak.measured_bytes)
        for peak in device_peaks(choice, {1: 190, 0: 110})
    ]
    assert () == device_peaks(replace(choice, memory=CHOICE.memory), {0: 110})


def test_the_allocators_word_counts_for_more_than_the_devices() -> None:
    """The fullest of several ranks counts. The driver's value counts only without a value from Megatron."""
    tracker = OutcomeTracker("key", replace(CHOICE, memory=memory_need((5,), 9)))
    (outcome,) = filter(None, [tracker.add(line(iteration)) for iteration in range(1, 21)])
    device = device_peaks(replace(CHOICE, memory=memory_need((5,), 9)), {0: 10})
    inside = replace(device[0], source="allocator", measured_bytes=7)

    assert outcome.fullest is None
    assert outcome.log_memory_error is None
    assert replace(outcome, peaks=device).fullest == device[0]
    assert replace(outcome, peaks=(*device, inside)).fullest == inside


def recovery(*times_s: float) -> Recovery:
    """Return a Recovery with a clock that shows these times."""
    clock: Iterator[float] = iter(times_s)
    return Recovery(lambda: next(clock))


def train(**changes: Any) -> RunTraining:
    """A decision to train."""
    return RunTraining(nodes=nodes("a"), plan=None, **changes)


def test_the_first_start_is_no_restart() -> None:
    """No step is lost, and there is no message."""
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
    assert "then 6.00 s until the first step was done" in words
    assert "" == made.sees(12)


def test_a_job_without_checkpoints_says_so() -> None:
    """It begins anew."""
    made = recovery(0.0, 1.0, 2.0)
    made.ended()
    made.decided(train(iteration=7))

    assert "goes on with the first step; no checkpoint was loaded: 7 steps of 7 lost" in made.sees(1)


def test_a_warmup_is_no_training() -> None:
    """The warm-up prints no steps; the message comes with the training."""
    made = recovery(0.0, 1.0, 30.0, 36.0)
    made.ended()
    made.decided(RunWarmup(nodes=nodes("a"), order="", iteration=7))
    made.decided(train(iteration=7))

    assert "30.00 s until the nodes agreed" in made.sees(6)


def words(*step_s: float, limit: float = 0.25) -> list[str]:
    """Return the messages at these step times."""
    watch = Slowdown(limit, restarts=False)
    return [text for text in (watch.add(one, at) for at, one in enumerate(step_s, 1)) if text]


def test_a_lasting_slowdown_is_told_once() -> None:
    """With both paces and how far the training was; the warm-up counts for nothing."""
    (text,) = words(*[9.0] * IGNORED_STEPS, *[1.0] * WINDOW, *[1.5] * (3 * WINDOW))

    assert text.startswith("steps take 1.50 times as long as at the start of this attempt: 1.50 s")
    assert f"up to iteration {IGNORED_STEPS + 2 * WINDOW})" in text


def test_a_slowdown_in_the_middle_is_found_when_most_of_the_last_steps_are_slow() -> None:
    """Not before."""
    steady = [1.0] * (IGNORED_STEPS + 5 * WINDOW)

    assert [] == words(*steady, *[2.0] * (WINDOW // 2 - 1))
    assert 1 == len(words(*steady, *[2.0] * (WINDOW // 2 + 1)))


def test_a_restart_is_wanted_where_the_user_wants_one() -> None:
    """With the reason that the agents are called for."""
    for restarts in (False, True):
        watch = Slowdown(0.25, restarts=restarts)
        for at in range(IGNORED_STEPS + 3 * WINDOW):
            watch.add(1.0 if at < IGNORED_STEPS + WINDOW else 2.0, at)
        assert restarts == watch.wants_restart.startswith("steps take 2.00 times as long")


@given(st.sets(st.integers(0, 300), max_size=WINDOW // 3), st.floats(1.0, 100.0))
def test_long_steps_here_and_there_are_no_slowdown(long: set[int], factor: float) -> None:
    """Evaluations and checkpoints come between."""
    assert [] == words(*[factor if step in long else 1.0 for step in range(300)])


def test_the_limit_is_the_users() -> None:
    """Twice the time gives no message if three times are allowed."""
    assert [] == words(*[1.0] * (IGNORED_STEPS + WINDOW), *[2.0] * WINDOW, limit=2.0)


MANY = replace(CHOICE, layout=Layout(dp=4096), placement=tuple(range(4096)))
DEAD_AT_ONCE: dict[str, Any] = {
    "lived_s": 5.0,
    "runs": None,
    "exit_codes": {1},
    "saved_before": "10",
    "saved_now": "10",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"saved_before": "", "saved_now": ""}, False),
        ({"saved_now": "20"}, True),
        ({"saved_before": "", "saved_now": "20"}, True),
        ({"exit_codes": {16}}, True),
        ({"exit_codes": {-15, 17}}, True),
        ({"exit_codes": {-9}}, False),
        ({"lived_s": 600.0}, True),
        ({"lived_s": 599.0, "runs": CHOICE}, False),
        ({"lived_s": 601.0, "runs": CHOICE}, True),
        ({"lived_s": 700.0, "runs": MANY}, False),
        ({"lived_s": 857.0, "runs": MANY}, True),
        ({"lived_s": 601.0, "runs": replace(CHOICE, step_time_s=60.0)}, False),
        ({"lived_s": 1200.0, "runs": replace(CHOICE, step_time_s=60.0)}, True),
    ],
)
def test_a_checkpoint_a_code_or_a_long_life_is_a_sign(changes: dict[str, Any], expected: bool) -> None:
    """A new checkpoint, Megatron's own call for a restart, or a life of many steps after a slow start; nothing else."""
    assert expected == has_trained(**{**DEAD_AT_ONCE, **changes})
