"""Trials between a plan and its training, from decisions alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from launch.worlds import coordinator, options, plan, records, value

from pipette_launch.facts import Layout, Plan, files
from pipette_launch.facts.messages import Decision, Failure, TrialReport
from pipette_launch.launch.coordinator import Coordinator
from pipette_launch.megatron import failure_of
from pipette_launch.probe.messages import WarmupOrder

TWO = plan(Layout(pp=2, dp=2), Layout(tp=2, dp=2))


def asked(folder: Path, *more: str, made: Plan = TWO, **changes: Any) -> Coordinator:
    """A coordinator whose user wants trials of the plan in a file."""
    files.write(folder / "mine.json", made)
    return coordinator(folder, options(*more, **{"plan": folder / "mine.json", "trials": 2, **changes}))


def report(*steps_s: float, failure: Failure | None = None) -> TrialReport:
    """What came of a trial."""
    return TrialReport(step_s=(5.0, 5.0, *steps_s), failure=failure, took_s=3.0)


def play(judge: Coordinator, first: Decision, steps_s: dict[Layout, float]) -> list[Decision]:
    """Let each layout take so long a step; returns all decisions."""
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
    """Each gets its words without what writes, and the measured best trains with all of them."""
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
    assert (None, 0, 0) == (value(last, "--log-interval"), last.trial, last.attempt)
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
    """What was tried lies with the cached plan; more plans, or more iterations, are tried again."""
    asks: dict[str, Any] = {"cache": tmp_path / "cache", "trials": 1}
    first = coordinator(tmp_path, options(**asks))
    warmup = first.decide(records(), None)
    orders = files.loads(WarmupOrder, warmup.probe_options, "orders")
    files.write(Path(orders.output), tiny_measurements(tiny_cluster(), orders.cases))
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
    assert "it died; no trial came to its end, so the prediction stands" in last.reason


def test_a_script_that_cannot_run_is_tried_once(tmp_path: Path) -> None:
    """A death that no plan can avoid ends the job in its first trial, as it would in the training."""
    judge = asked(tmp_path)
    missing = replace(
        failure_of("FileNotFoundError: [Errno 2] No such file or directory: '/data'"), rank=1, exit_code=1
    )
    last = judge.after_trial(judge.decide(records(), None), TrialReport(step_s=(), failure=missing, took_s=3.0))

    assert ("stop", True, None) == (last.phase, last.failed, last.plan)
    assert f"{missing.sentence}; no other plan is tried: what is missing is missing under every plan" == last.reason


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
    """Where neither the layout nor memory may be the cause, two layouts settle it; else every trial has its turn."""
    judge = asked(tmp_path)
    seen = [judge.decide(records(), None)]
    while seen[-1].phase == "trial":
        told = replace(failure, rank=len(seen), exit_code=1)
        seen.append(judge.after_trial(seen[-1], TrialReport(step_s=(), failure=told, took_s=3.0)))

    assert phases == [step.phase for step in seen]


def test_a_trial_that_has_trained_ends_no_job(tmp_path: Path) -> None:
    """What dies behind its first iteration runs under some plan: the next trial begins."""
    judge = asked(tmp_path)
    missing = replace(
        failure_of("FileNotFoundError: [Errno 2] No such file or directory: '/data'"), rank=1, exit_code=1
    )
    last = judge.after_trial(judge.decide(records(), None), TrialReport(step_s=(5.0,), failure=missing, took_s=3.0))

    assert "trial" == last.phase


@pytest.mark.parametrize(
    ("more", "changes", "expected"),
    [
        (("--train-iters", "7"), {}, "the job has 7 iterations and a trial 7; leave --pipette-trials away"),
        (("--my-folder", "x"), {}, "--my-folder: no flag of Megatron"),
        ((), {"is_function": True}, "--run-path: the script runs as a function"),
        ((), {"made": replace(TWO, chosen=TWO.own, alternatives=(), keeps_own=True)}, "there is no plan but"),
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
