"""Trials of plans and of the user's own configuration, before the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

from pipette_launch import megatron
from pipette_launch.errors import MegatronError, PipetteError, PlanError
from pipette_launch.facts import Choice, Job, Layout, Plan, Samples
from pipette_launch.facts.messages import Failure, RunScript, RunTraining, RunTrial, Stop, TrialReport
from pipette_launch.facts.plan import Trial, Trials
from pipette_launch.launch.options import Options, Script
from pipette_launch.planning.replan import why_to_give_up
from pipette_launch.text import counted, joined, seconds_text

# -- lines for the user --------------------------------------------------------------------------------------------


def trial_progress(decision: RunTrial, num_iterations: int, elapsed_s: float, *, asked: int) -> str:
    """Return the progress line of a trial. Only the node of the last rank sees iterations."""
    seen = f"iteration {num_iterations} of {decision.iterations}, " if num_iterations else ""
    return f"{_trial_name(decision, asked)}, {seen}{elapsed_s:.0f} s"


def trial_words(decision: RunTrial, *, asked: int) -> str:
    """Announce a trial, with its number and the number of all trials."""
    return f"{_trial_name(decision, asked)}, {counted(decision.iterations, 'iteration')}"


def _trial_name(decision: RunTrial, asked: int) -> str:
    plan, choice = decision.plan, decision.choice
    what = choice.layout.words() if choice else "your own configuration"
    return f"trial {decision.trial + 1} of {min(asked, len(plan.contenders())) + 1}: {what}"


def trial_line(run: Trial) -> str:
    """Return the result of a trial on one line."""
    who = "your own configuration" if run.is_own else run.layout.words()
    if run.step is None:
        return f"{who}: {run.failure}"
    return (
        f"{who}: measured {seconds_text(run.median_s)} a step, spread {run.step.spread:.0%}, "
        f"predicted {seconds_text(run.predicted_step_s)}"
    )


# -- the winner ---------------------------------------------------------------------------------------------------


def tried(choice: Choice, report: TrialReport, *, is_own: bool, warm_ups: int, iterations: int) -> Trial:
    """Return the result of a trial: `iterations` steps after the first `warm_ups` steps, or the failure."""
    steps_s = report.step_s[: warm_ups + iterations]
    is_whole = len(steps_s) == warm_ups + iterations
    short = f"it ended after {len(steps_s)} of {counted(warm_ups + iterations, 'iteration')}"
    return Trial(
        layout=choice.layout,
        placement=choice.placement,
        is_own=is_own,
        predicted_step_s=choice.step_time_s,
        step=Samples(values_s=steps_s[warm_ups:], warmup_s=steps_s[:warm_ups]) if is_whole else None,
        failure="" if is_whole else report.failure.sentence if report.failure else short,
        took_s=report.took_s,
    )


ERRORS_APART = 2.0
"""Number of standard errors by which two measured steps must differ to count as different."""


def noise_s(one: Samples, other: Samples) -> float:
    """Return the largest difference (s) between the medians of two samples that noise can explain."""
    return ERRORS_APART * math.hypot(one.median_error_s, other.median_error_s)


def outruns(plan: Trial, own: Trial, *, margin: float) -> bool:
    """Return whether a plan was measured faster than the user's own configuration by the margin and beyond noise."""
    if plan.step is None or own.step is None:
        return plan.step is not None
    return own.median_s - plan.median_s > max(margin * own.median_s, noise_s(plan.step, own.step))


def winner(runs: Sequence[Trial], *, margin: float) -> int | None:
    """Return the winner's index: the fastest plan that outruns the user's own configuration, else this configuration.

    Return None if no trial finished.
    """
    own = next(run for run in runs if run.is_own)
    better = [index for index, run in enumerate(runs) if not run.is_own and outruns(run, own, margin=margin)]
    if better:
        return min(better, key=lambda index: runs[index].median_s)
    return None if own.step is None else runs.index(own)


class Standing(IntEnum):
    """Standing of a candidate after the trials, the best first."""

    FASTER = 0
    """Measured faster than the user's own configuration, beyond the margin and noise."""
    UNTRIED = 1
    SLOWER = 2
    FAILED = 3


def with_winner(plan: Plan, trials: Trials, *, margin: float) -> Plan:
    """Make the winner of the trials the chosen candidate. If no trial finished, the plan stays as predicted.

    Alternatives that outran the user's own configuration come first, in order of their measured step time. After a
    failure, no other alternative runs before the own configuration, unless the own configuration failed in its trial.
    """
    best = winner(trials.runs, margin=margin)
    if best is None:
        return replace(plan, trials=trials)
    won = trials.runs[best]
    own = next(run for run in trials.runs if run.is_own)
    runs = {(run.layout, run.placement): run for run in trials.runs if not run.is_own}

    def standing(choice: Choice) -> tuple[Standing, float]:
        run = runs.get((choice.layout, choice.placement))
        if run is None:
            return Standing.UNTRIED, 0.0
        if run.step is None:
            return Standing.FAILED, run.median_s
        return Standing.FASTER if outruns(run, own, margin=margin) else Standing.SLOWER, run.median_s

    contenders = {(one.layout, one.placement): one for one in plan.contenders()}
    chosen = plan.own if won.is_own else contenders.pop((won.layout, won.placement))
    others = sorted(contenders.values(), key=standing)
    # The own configuration ran in a trial, so running it is safer than running a plan that is only predicted.
    last = Standing.FASTER if own.step else Standing.SLOWER
    num_in_line = sum(standing(one)[0] <= last for one in others)
    finished = sum(run.step is not None for run in trials.runs)
    why = f"Settled by trials of {counted(trials.iterations, 'iteration')} each, {finished} of {len(trials.runs)} ran: "
    took = f"{won.layout.words()} took {seconds_text(won.median_s)} a step"
    if won.is_own:
        why += f"no plan was measured faster than your own configuration beyond noise and {margin:.0%}."
    elif own.step is None:
        why += f"{took}; your own configuration did not run: {own.failure}."
    else:
        gain = 1 - won.median_s / own.median_s
        why += f"{took}, {gain:.1%} less than your own configuration with {seconds_text(own.median_s)}."
    reasons = plan.reasons
    if (won.layout, won.placement) != (plan.chosen.layout, plan.chosen.placement):
        reasons = (f"Predicted best, by the model alone, was {plan.chosen.layout.words()}.",)
    return replace(
        plan,
        chosen=chosen,
        keeps_own=won.is_own,
        alternatives=tuple(others),
        num_in_line=num_in_line,
        reasons=(why, *reasons),
        trials=trials,
    )


# -- the sequence of trials ---------------------------------------------------------------------------------------


class TrialsResult(NamedTuple):
    """Result of all trials of a plan."""

    job: Job
    plan: Plan
    reason: str
    is_worth_keeping: bool
    """True if the plan should be kept in the cache for the next start of the job."""


class TrialCoordinator:
    """Orders the trials one by one on the deciding node, the user's own configuration first, and names the winner."""

    def __init__(self, options: Options, script: Script) -> None:
        self._options = options
        self._script = script
        self._tried: tuple[Job, Plan] | None = None
        """Job and plan whose trials run; None if no trials run."""
        self._warm_ups = 0
        self._runs: tuple[Trial, ...] = ()
        self._deaths: list[tuple[Layout, Failure]] = []
        """Layouts whose trial died early, with the failure of each."""

    def open(self, training: RunTraining, job: Job) -> RunTrial | RunTraining:
        """Return the decision to run the first trial, or `training` if the user wants no trials or no trial can run.

        Raises PlanError if no trial can run, and the user asked to stop after errors.
        """
        plan, options = training.plan, self._options
        if plan is None or not options.trials or options.only_looks:
            return training
        done = plan.trials
        if done is not None and done.asked >= options.trials and done.iterations >= options.trial_iters:
            return training
        try:
            self._warm_ups = self._check(training, plan, job)
        except PipetteError as error:
            reason = f"plans are not tried: {error}"
            if options.on_error == "fail":
                raise PlanError(reason) from error
            return replace(training, reason=joined(training.reason, reason))
        self._tried, self._runs, self._deaths = (job, plan), (), []
        return self._next(training, job, plan)

    def judge(self, ended: RunTrial, report: TrialReport) -> RunTrial | Stop | TrialsResult:
        """Take a trial's report; return the decision to run the next trial or to stop, or the result of all trials.

        The job ends if the script died of a cause that no plan can avoid, as after a training.
        """
        options = self._options
        assert self._tried is not None
        job, plan = self._tried
        run = tried(
            ended.choice or plan.own,
            report,
            is_own=ended.choice is None,
            warm_ups=self._warm_ups,
            iterations=options.trial_iters,
        )
        if report.failure and run.step is None:
            # The script has to die under other layouts too, before the layout is ruled out as the cause.
            before = [earlier for layout, earlier in self._deaths if layout != run.layout]
            written, given = options.script_arguments, ended.script_arguments
            hopeless = why_to_give_up([report.failure], before=before, written=written, given=given)
            if hopeless and not report.step_s:
                self._tried = None
                return Stop.of(replace(ended, reason=hopeless), failed=True)
            self._deaths.append((run.layout, report.failure))
        self._runs = (*self._runs, run)
        if len(self._runs) <= min(options.trials, len(plan.contenders())):
            return self._next(replace(ended, reason=trial_line(run)), job, plan)
        self._tried = None
        trials = Trials(asked=options.trials, iterations=options.trial_iters, runs=self._runs)
        settled = with_winner(plan, trials, margin=options.margin)
        if settled.setting is not None:
            words = self._script.words(job, settled.chosen.layout)
            settled = replace(settled, setting=replace(settled.setting, new_arguments=words))
        any_ran = any(one.step for one in self._runs)
        return TrialsResult(
            job=job,
            plan=settled,
            reason=joined(trial_line(run), "" if any_ran else "no trial finished, so the predicted plan stays"),
            # The launcher never overwrites a plan file that the user named.
            is_worth_keeping=any_ran and plan.provenance.source != "file",
        )

    def _check(self, training: RunTraining, plan: Plan, job: Job) -> int:
        """Return the number of warm-up iterations of a trial; raise MegatronError if no trial can run."""
        if self._options.is_function:
            raise MegatronError("--run-path: the script runs as a function, whose iterations the launcher cannot see")
        if not plan.contenders():
            raise MegatronError("there is no plan except your own configuration")
        if megatron.is_bridge(self._options.script_arguments, self._options.script):
            raise MegatronError("a trial of a Megatron-Bridge recipe may leave checkpoints and logs")
        _, warm_ups = megatron.trial_arguments(training.script_arguments or (), job.megatron_version)
        needed = warm_ups + self._options.trial_iters
        if job.train_iters is not None and job.train_iters <= needed:
            raise MegatronError(
                f"the job has {job.train_iters} iterations, and a trial needs {needed}; omit --pipette-trials, or "
                f"lower --pipette-trial-iters"
            )
        return warm_ups

    def _next(self, like: RunScript, job: Job, plan: Plan) -> RunTrial:
        iterations = self._warm_ups + self._options.trial_iters
        following = RunTrial.of(like, plan=plan, trial=len(self._runs), iterations=iterations, patches=like.patches)
        choice = following.choice
        layout = choice.layout if choice else job.own
        words, _ = megatron.trial_arguments(self._script.words(job, layout), job.megatron_version)
        environment = self._script.environment(job, layout, plan.device_kind, is_own=choice is None)
        return replace(following, script_arguments=words, environment=environment)
