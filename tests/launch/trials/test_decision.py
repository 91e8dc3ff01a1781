"""Who wins the trials, decided by measured step times alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch.worlds import plan

from pipette_launch.facts import Layout, Plan, Samples, files
from pipette_launch.facts.messages import Failure, TrialReport
from pipette_launch.facts.plan import Trial, Trials
from pipette_launch.launch.trials.decision import noise_s, outruns, settle, trial_line, tried, winner

LAYOUTS = (Layout(pp=2, dp=2), Layout(tp=2, dp=2), Layout(pp=4), Layout(tp=4))
PLAN = plan(*LAYOUTS)
MARGIN = 0.02


def run(index: int | None, *steps_s: float) -> Trial:
    """A trial of the i-th plan, or of the user's own configuration; without steps one that failed."""
    what = PLAN.own if index is None else PLAN.contenders()[index]
    return Trial(
        layout=what.layout,
        placement=what.placement,
        is_own=index is None,
        predicted_step_s=1.0,
        step=Samples(values_s=steps_s) if steps_s else None,
        failure="" if steps_s else "rank 0 ended with signal 9",
        took_s=10.0,
    )


def settled(*runs: Trial, made: Plan = PLAN) -> Plan:
    """The plan after these trials."""
    return settle(made, Trials(asked=3, iterations=3, runs=runs), margin=MARGIN)


steps = st.lists(st.floats(0.1, 10), min_size=3, max_size=7)
plans = st.lists(st.one_of(st.just([]), steps), min_size=1, max_size=4)


@given(st.one_of(st.just([]), steps), plans)
def test_it_never_ends_slower_than_the_users_own(own_s: list[float], plans_s: list[list[float]]) -> None:
    """Whoever wins was measured at least as fast; a plan that wins, faster by the margin and beyond noise."""
    own = run(None, *own_s)
    runs = [own, *(run(index, *steps_s) for index, steps_s in enumerate(plans_s))]
    best = winner(runs, margin=MARGIN)

    if best is None:
        assert all(one.step is None for one in runs)
        return
    won = runs[best]
    assert won.step is not None
    assert won.median_s <= own.median_s
    if own.step is not None and not won.is_own:
        assert own.median_s - won.median_s > noise_s(won.step, own.step)
        assert won.median_s < (1 - MARGIN) * own.median_s
    better = [one for one in runs[1:] if outruns(one, own, margin=MARGIN)]
    assert won.median_s == min((one.median_s for one in better), default=own.median_s)


@given(steps, steps, st.floats(0.01, 100))
def test_the_unit_of_time_decides_nothing(own_s: list[float], plan_s: list[float], factor: float) -> None:
    """All times multiplied give the same winner, but for the last digits."""
    first, second = run(None, *own_s), run(0, *plan_s)
    assert first.step is not None
    assert second.step is not None
    gap = first.median_s - second.median_s - max(MARGIN * first.median_s, noise_s(first.step, second.step))
    scaled = [replace(one, step=one.step.times(factor)) for one in (first, second) if one.step]

    if abs(gap) > 1e-9:
        assert winner([first, second], margin=MARGIN) == winner(scaled, margin=MARGIN)


@pytest.mark.parametrize(
    ("own_s", "plan_s", "expected"),
    [
        ([1.0, 1.0, 1.0], [0.97, 0.97, 0.97], 1),
        ([1.0, 1.0, 1.0], [0.99, 0.99, 0.99], 0),
        ([1.0, 1.0, 1.0], [1.5, 1.5, 1.5], 0),
        # 10 % faster, but the steps scatter by 20 %.
        ([0.8, 1.0, 1.2], [0.7, 0.9, 1.1], 0),
        ([], [9.0, 9.0, 9.0], 1),
        ([1.0, 1.0, 1.0], [], 0),
        ([], [], None),
    ],
)
def test_who_wins(own_s: list[float], plan_s: list[float], expected: int | None) -> None:
    """By more than the margin and the scatter, or because the other did not run."""
    assert expected == winner([run(None, *own_s), run(0, *plan_s)], margin=MARGIN)


def test_noise_falls_with_the_number_of_steps() -> None:
    """Two standard errors of the difference of two medians, worked by hand: spread 0.1, so 2 x 1.858 x 0.1 / root n."""
    few, many = Samples(values_s=(0.9, 1.0, 1.1)), Samples(values_s=(0.9, 1.0, 1.1) * 4)

    assert noise_s(few, few) == pytest.approx(2 * 1.4826 * 1.2533 * 0.1 * math.sqrt(2 / 3))
    assert noise_s(many, many) == pytest.approx(noise_s(few, few) / 2)


def test_the_measured_best_is_the_plan() -> None:
    """The fastest is chosen; those that outran the user's own are next in line, and nothing else is tried before it."""
    made = settled(run(None, 1.0, 1.0, 1.0), run(0, 0.9, 0.9, 0.9), run(1, 0.5, 0.5, 0.5), run(2))

    assert (LAYOUTS[1], False) == (made.chosen.layout, made.keeps_own)
    assert [LAYOUTS[1], LAYOUTS[0]] == [choice.layout for choice in made.candidates()]
    assert set(LAYOUTS) == {choice.layout for choice in made.contenders()}
    assert "took 500 ms a step, 50.0% less than your own configuration" in made.reasons[0]
    assert f"Predicted best, by the model alone, was {LAYOUTS[0].words()}." == made.reasons[1]
    assert files.loads(Plan, files.dumps(made), "it") == made


def test_the_users_own_stays_when_nothing_outruns_it() -> None:
    """It is the plan, and the contenders stay in the file."""
    made = settled(run(None, 1.0, 1.0, 1.0), run(0, 1.1, 1.1, 1.1), run(1))

    assert (PLAN.own, True, ()) == (made.chosen, made.keeps_own, made.candidates())
    assert [LAYOUTS[2], LAYOUTS[3], LAYOUTS[0], LAYOUTS[1]] == [choice.layout for choice in made.contenders()]


def test_a_plan_that_kept_the_users_own_may_lose_to_an_alternative() -> None:
    """What was predicted as not worth it may be measured as worth it."""
    kept = replace(PLAN, chosen=PLAN.own, alternatives=PLAN.contenders(), keeps_own=True)
    made = settled(run(None, 1.0, 1.0, 1.0), run(0, 0.8, 0.8, 0.8), made=kept)

    assert (LAYOUTS[0], False) == (made.chosen.layout, made.keeps_own)


def test_without_the_users_own_the_line_is_as_long_as_before() -> None:
    """It did not run: plans that ran come first, then those that were only predicted, and not those that failed."""
    made = settled(run(None), run(0, 0.9, 0.9, 0.9), run(1))

    assert [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]] == [choice.layout for choice in made.candidates()]
    assert "your own configuration did not run: rank 0 ended with signal 9" in made.reasons[0]


def test_when_all_fail_the_prediction_stands() -> None:
    """The plan is what it was, with the evidence."""
    made = settled(run(None), run(0))

    assert replace(PLAN, trials=made.trials) == made


def test_a_trial_counts_what_lies_behind_its_warm_ups() -> None:
    """Too few steps are a failure with the reason that is known, and too many are cut off."""
    steps_s = (9.0, 8.0, 1.0, 1.2, 1.1, 7.0)
    report = TrialReport(step_s=steps_s, failure=None, took_s=1.0)
    hung = replace(report, step_s=(), failure=Failure(cause="it hung"))
    whole = tried(PLAN.own, report, is_own=True, warm_ups=2, iterations=3)
    short = tried(PLAN.own, replace(report, step_s=steps_s[:4]), is_own=True, warm_ups=2, iterations=3)
    died = tried(PLAN.chosen, hung, is_own=False, warm_ups=2, iterations=3)

    assert Samples(values_s=(1.0, 1.2, 1.1), warmup_s=(9.0, 8.0)) == whole.step
    assert "your own configuration: measured 1.10 s a step, spread 9%, predicted 1.00 s" == trial_line(whole)
    assert "your own configuration: it ended after 4 of 5 iterations" == trial_line(short)
    assert f"{LAYOUTS[0].words()}: it hung" == trial_line(died)
