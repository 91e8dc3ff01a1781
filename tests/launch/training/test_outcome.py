"""Predicted against measured, counted from logged lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipette_launch.facts import Choice, Layout
from pipette_launch.facts.plan import Rate
from pipette_launch.launch.training.outcome import OutcomeTracker, device_peaks
from pipette_launch.megatron import Iteration, MemoryLine

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
    """Whatever the log interval, the outcome comes with the line that completes twenty iterations."""
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
    lines = [replace(line(iteration, step_time_s), total=total) for iteration in range(1, total + 1)]

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
    """Later lines say nothing new."""
    tracker = OutcomeTracker("key", CHOICE)
    for iteration in range(1, 21):
        tracker.add(line(iteration))

    assert tracker.add(line(21)) is None


def memory(rank: int, iteration: int, peak_bytes: int) -> MemoryLine:
    """What Megatron printed of one rank."""
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
    """Corrections are taken out of the prediction, for it is the model's own error that is to be learned."""
    corrected = replace(
        CHOICE, step_correction=1.25, memory_correction=2.0, peak_memory_bytes=(800,), features={"tp": 0.0}
    )
    tracker = OutcomeTracker("key", corrected)
    tracker.add_memory(memory(0, 2, 500))
    (outcome,) = filter(None, [tracker.add(line(iteration, 1.6)) for iteration in range(1, 21)])

    assert (400, {"tp": 0.0}) == (outcome.peaks[0].predicted_bytes, outcome.features)
    assert 2.0 == pytest.approx(2.718281828**outcome.log_step_error)
    assert 1.25 == pytest.approx(2.718281828 ** (outcome.log_memory_error or 0.0))


def test_devices_are_set_beside_what_they_should_hold() -> None:
    """Each rank of this node beside its own stage; a choice that does not say it is compared with nothing."""
    choice = replace(
        CHOICE, layout=Layout(pp=2), peak_memory_bytes=(1, 1), placement=(0, 1), device_peak_bytes=(100, 200)
    )

    assert [(0, 0, 100, 110), (1, 1, 200, 190)] == [
        (peak.rank, peak.pp_rank, peak.predicted_bytes, peak.measured_bytes)
        for peak in device_peaks(choice, {1: 190, 0: 110})
    ]
    assert () == device_peaks(CHOICE, {0: 110})


def test_the_allocators_word_counts_for_more_than_the_devices() -> None:
    """Of several ranks the fullest; the driver's count only where Megatron printed nothing."""
    tracker = OutcomeTracker("key", replace(CHOICE, device_peak_bytes=(5,)))
    (outcome,) = filter(None, [tracker.add(line(iteration)) for iteration in range(1, 21)])
    device = device_peaks(replace(CHOICE, device_peak_bytes=(5,)), {0: 10})
    inside = replace(device[0], source="allocator", measured_bytes=7)

    assert outcome.fullest is None
    assert outcome.log_memory_error is None
    assert replace(outcome, peaks=device).fullest == device[0]
    assert replace(outcome, peaks=(*device, inside)).fullest == inside
