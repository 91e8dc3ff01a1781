"""Trials, from decisions alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from hypothesis import given
from hypothesis import strategies as st
from launch.worlds import coordinator, options, plan, records, value

from pipette_launch.facts import Layout, Plan, Samples, files
from pipette_launch.facts.messages import Decision, Failure, TrialReport
from pipette_launch.facts.plan import Trial, Trials
from pipette_launch.launch.coordinator import Coordinator
from pipette_launch.launch.trials import (
    noise_s,
    outruns,
    trial_line,
    tried,
    winner,
    with_winner,
)
from pipette_launch.megatron import failure_of
from pipette_launch.probe.messages import WarmupOrder

LAYOUTS = (Layout(pp=2, dp=2), Layout(tp=2, dp=2), Layout(pp=4), Layout(tp=4))
PLAN = plan(*LAYOUTS)
MARGIN = 0.02


def run(index: int | None, *steps_s: float) -> Trial:
    """Return a trial of the i-th plan, or of the user's own configuration; without steps the trial failed."""
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
    return with_winner(made, Trials(asked=3, iterations=3, runs=runs), margin=MARGIN)


steps = st.lists(st.floats(0.1, 10), min_size=3, max_size=7)
plans = st.lists(st.one_of(st.just([]), steps), min_size=1, max_size=4)


@given(st.one_of(st.just([]), steps), plans)
def test_it_never_ends_slower_than_the_users_own(own_s: list[float], plans_s: list[list[float]]) -> None:
    """The winner was measured at least as fast, and a winning plan faster by the margin and beyond noise."""
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
    """A gain that was predicted as too small may be measured as large enough."""
    kept = replace(PLAN, chosen=PLAN.own, alternatives=PLAN.contenders(), keeps_own=True)
    made = settled(run(None, 1.0, 1.0, 1.0), run(0, 0.8, 0.8, 0.8), made=kept)

    assert (LAYOUTS[0], False) == (made.chosen.layout, made.keeps_own)


def test_without_the_users_own_the_line_is_as_long_as_before() -> None:
    """It did not run: plans that ran come first, then those that were only predicted, and not those that failed."""
    made = settled(run(None), run(0, 0.9, 0.9, 0.9), run(1))

    assert [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]] == [choice.layout for choice in made.candidates()]
    assert "your own configuration did not run: rank 0 ended with signal 9" in made.reasons[0]


def test_when_all_fail_the_prediction_stands() -> None:
    """The plan stays, with the trials as evidence."""
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


TWO = plan(Layout(pp=2, dp=2), Layout(tp=2, dp=2))


def asked(folder: Path, *more: str, made: Plan = TWO, **changes: Any) -> Coordinator:
    """Return a coordinator of a user who wants trials of the plan in a file."""
    files.write(folder / "mine.json", made)
    return coordinator(folder, options(*more, **{"plan": folder / "mine.json", "trials": 2, **changes}))


def report(*steps_s: float, failure: Failure | None = None) -> TrialReport:
    """Return the report of a trial."""
    return TrialReport(step_s=(5.0, 5.0, *steps_s), failure=failure, took_s=3.0)


def play(judge: Coordinator, first: Decision, steps_s: dict[Layout, float]) -> list[Decision]:
    """Give each layout a step time, and return all decisions."""
    decisions = [first]
    while decisions[-1].phase == "trial":
        now = decisions[-1]
        layout = now.choice.layout if now.choice else Layout(dp=4)
        step_s = steps_s.get(layout)
        decisions.append(
            judge.after_trial(now, report(*[step_s] * 5) if step_s else report(failure=Failure(cause="it died")))
        )
    return decisions


def test_the_users_own_and_the_best_plans_are_tried_one_by_one(tmp_path: Path) -> None:
    """Each trial runs without arguments that write files; the measured best trains with all of them."""
    judge = asked(tmp_path, "--save", str(tmp_path / "ckpt"), "--save-interval", "5")
    first = judge.decide(records(), None)

    own, one, two, last = play(judge, first, {Layout(dp=4): 1.0, Layout(pp=2, dp=2): 0.9, Layout(tp=2, dp=2): 0.5})

    assert ["trial-0", "trial-1", "trial-2", "train"] == [step.key for step in (own, one, two, last)]
    assert [None, Layout(pp=2, dp=2), Layout(tp=2, dp=2)] == [
        step.choice.layout if step.choice else None for step in (own, one, two)
    ]
    assert {7} == {step.iterations for step in (own, one, two)}
    assert {(None, "10", "1")} == {
        (value(step, "--save"), value(step, "--train-iters"), value(step, "--log-interval")) for step in (own, one, two)
    }
    assert ["2", None] == [value(one, "--pipeline-model-parallel-size"), value(two, "--pipeline-model-parallel-size")]
    assert (3, 2) == (one.ranks_of("token-node0")[0], one.ranks_of("token-node0")[1])
    assert (0, 1) == own.ranks_of("token-node0")
    assert last.choice is not None
    assert (Layout(tp=2, dp=2), str(tmp_path / "ckpt")) == (last.choice.layout, value(last, "--save"))
    assert (None, 0) == (value(last, "--log-interval"), last.attempt)
    assert "measured 500 ms a step" in last.reason
    assert "your own configuration: measured 1.00 s a step" in one.reason


def test_no_record_lies_beside_checkpoints_before_the_choice(tmp_path: Path) -> None:
    """The folder of --save is not touched while plans are tried."""
    judge = asked(tmp_path, "--save", str(tmp_path / "ckpt"), "--save-interval", "5")
    steps = play(judge, judge.decide(records(), None), {Layout(dp=4): 1.0})

    assert steps[-1].plan is not None
    assert (None, True) == (steps[-1].choice, steps[-1].plan.keeps_own)
    assert files.read(tmp_path / "ckpt" / "pipette-plan.json", Plan).keeps_own


def test_the_next_start_believes_the_trials(tmp_path: Path) -> None:
    """The cached plan has its trials; more plans or iterations are tried again."""
    asks: dict[str, Any] = {"cache": tmp_path / "cache", "trials": 1}
    first = coordinator(tmp_path, options(**asks))
    warmup = first.decide(records(), None)
    orders = files.loads(WarmupOrder, warmup.order, "orders")
    files.write(first.measured_at(), tiny_measurements(tiny_cluster(), orders.cases))
    started = first.after_warmup(warmup, "")
    ended = play(first, started, {Layout(dp=4): 1.0})[-1]

    def again(**changes: Any) -> Decision:
        return coordinator(tmp_path, options(**{**asks, **changes})).decide(records(), None)

    assert ("trial", "train") == (started.phase, ended.phase)
    believed = again()
    assert believed.plan is not None
    assert ended.plan is not None
    assert ("train", ended.plan.trials) == (believed.phase, believed.plan.trials)
    assert ["train", "trial", "trial"] == [
        again(**changes).phase for changes in ({"trials": 0}, {"trials": 2}, {"trial_iters": 6})
    ]


def test_when_nothing_runs_the_prediction_stands_and_is_not_believed_later(tmp_path: Path) -> None:
    """The training begins as without trials, with the reason."""
    judge = asked(tmp_path)
    last = play(judge, judge.decide(records(), None), {})[-1]

    assert ("train", TWO.chosen) == (last.phase, last.choice)
    assert "it died; no trial finished, so the predicted plan stays" in last.reason


def test_a_script_that_cannot_run_is_tried_once(tmp_path: Path) -> None:
    """A death that no plan can avoid ends the job in its first trial, as it would in the training."""
    judge = asked(tmp_path)
    missing = replace(
        failure_of("FileNotFoundError: [Errno 2] No such file or directory: '/data'"), rank=1, exit_code=1
    )
    last = judge.after_trial(judge.decide(records(), None), TrialReport(step_s=(), failure=missing, took_s=3.0))

    assert ("stop", True) == (last.phase, last.failed)
    assert (
        f"{missing.sentence}; no other plan is tried: the missing file or module is missing under every plan"
        == last.reason
    )


@pytest.mark.parametrize(
    ("failure", "phases"),
    [
        (failure_of("KeyError: 'tokens'"), ["trial", "trial", "stop"]),
        (failure_of("ValueError: bad shape of a tensor"), ["trial", "trial", "trial", "train"]),
        (
            Failure(cause="out of memory: the host's memory is exhausted", kind="out-of-host-memory"),
            ["trial", "trial", "trial", "train"],
        ),
    ],
)
def test_the_same_death_in_two_trials_ends_the_job(failure: Failure, phases: list[str], tmp_path: Path) -> None:
    """If neither layout nor memory can be the cause, two layouts prove it. Else every trial runs."""
    judge = asked(tmp_path)
    seen = [judge.decide(records(), None)]
    while seen[-1].phase == "trial":
        told = replace(failure, rank=len(seen), exit_code=1)
        seen.append(judge.after_trial(seen[-1], TrialReport(step_s=(), failure=told, took_s=3.0)))

    assert phases == [step.phase for step in seen]


def test_a_trial_that_has_trained_ends_no_job(tmp_path: Path) -> None:
    """A script that dies after its first iteration can run under some plan, so the next trial begins."""
    judge = asked(tmp_path)
    missing = replace(
        failure_of("FileNotFoundError: [Errno 2] No such file or directory: '/data'"), rank=1, exit_code=1
    )
    last = judge.after_trial(judge.decide(records(), None), TrialReport(step_s=(5.0,), failure=missing, took_s=3.0))

    assert "trial" == last.phase


@pytest.mark.parametrize(
    ("more", "changes", "expected"),
    [
        (("--train-iters", "7"), {}, "the job has 7 iterations, and a trial needs 7; omit --pipette-trials"),
        (("--my-folder", "x"), {}, "--my-folder: no flag of Megatron"),
        ((), {"is_function": True}, "--run-path: the script runs as a function"),
        ((), {"made": replace(TWO, chosen=TWO.own, alternatives=(), keeps_own=True)}, "there is no plan except"),
    ],
)
def test_what_cannot_be_tried_is_said(
    tmp_path: Path, more: tuple[str, ...], changes: dict[str, Any], expected: str
) -> None:
    """The training goes on without trials and says why; a user who wants to stop at errors is obeyed."""
    decided = asked(tmp_path, *more, **changes).decide(records(), None)
    stopped = asked(tmp_path, *more, **changes, on_error="fail").decide(records(), None)

    assert "train" == decided.phase
    assert f"plans are not tried: {expected}" in decided.reason
    assert ("stop", True) == (stopped.phase, stopped.failed)
    assert expected in stopped.reason


def test_a_dry_run_tries_nothing(tmp_path: Path) -> None:
    """It stops before workers of the user's script would start."""
    assert "stop" == asked(tmp_path, dry_run=True).decide(records(), None).phase


def test_a_round_that_breaks_begins_anew(tmp_path: Path) -> None:
    """Another node in the middle of a trial is a new set of hosts, and no failure of a plan."""
    judge = asked(tmp_path)
    held = judge.decide(records(), None)
    anew = judge.decide(records(), held)

    assert (held.trial, "trial", 0) == (0, anew.phase, anew.trial)
