"""The check of a device order before training: NCCL may return wrong slices on permuted devices, without an error."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pipette_launch.cost.learned.uncertainty import ERRORS_APART
from pipette_launch.errors import MegatronError, PipetteError, PlanError
from pipette_launch.facts import Samples
from pipette_launch.facts.cluster import in_device_order, is_in_device_order, shared_order
from pipette_launch.facts.plan import Trial, Trials
from pipette_launch.launch.nodes import joined
from pipette_launch.replan import why_to_give_up
from pipette_launch.text import seconds_text

if TYPE_CHECKING:
    from pipette_launch.facts import Choice, Plan
    from pipette_launch.facts.messages import Decision, Failure

CHECKED = "all-gather and reduce-scatter of 1 to 64 MB returned every value in its place"
SEE = "see NVIDIA/nccl#1906"


def needs_check(training: Decision) -> bool:
    """Return true if the candidate permutes GPUs inside hosts and was not checked on these hosts."""
    plan, choice = training.plan, training.choice
    if plan is None or choice is None or plan.device_kind != "cuda" or choice.is_order_checked:
        return False
    return not is_in_device_order(choice.placement, plan.devices_per_host)


def check_before(training: Decision) -> Decision:
    """Order the check of a candidate, for the nodes and devices that will train it."""
    assert training.plan is not None
    assert training.choice is not None
    place = training.plan.contenders().index(training.choice)
    return replace(training, phase="trial", checks_order=True, trial=place + 1, iterations=1)


def order_words(decision: Decision) -> str:
    """Name the order of devices that a decision gives to ranks."""
    plan, choice = decision.plan, decision.choice
    assert plan is not None
    assert choice is not None
    order_D = shared_order(choice.placement, plan.devices_per_host)
    return f"the device order {','.join(map(str, order_D))}" if order_D else "device orders that differ between hosts"


def check_words(decision: Decision) -> str:
    """Name the check on one line."""
    return f"checking NCCL with {order_words(decision)}: rank-coded all-gather and reduce-scatter"


def passed(ended: Decision) -> Plan:
    """Mark the candidate that was checked; the plan's first reason says that it was, as screens cut the later ones."""
    plan, choice = ended.plan, ended.choice
    assert plan is not None
    assert choice is not None

    def marked(one: Choice) -> Choice:
        return replace(one, is_order_checked=True) if one == choice else one

    alternatives = tuple(map(marked, plan.alternatives))
    reasons = (f"NCCL was checked with {order_words(ended)}: {CHECKED}.", *plan.reasons)
    return replace(plan, chosen=marked(plan.chosen), alternatives=alternatives, reasons=reasons)


def failed(ended: Decision, failure: Failure) -> tuple[Plan, str]:
    """Put all candidates of a plan and of its templates back into device order."""
    plan = ended.plan
    assert plan is not None
    told = f"devices stay in order inside hosts: with {order_words(ended)} {failure.cause} ({SEE})"
    back = _back_in_order(plan)
    templates = tuple(map(_back_in_order, plan.templates))
    return replace(back, templates=templates, reasons=(f"{told[0].upper()}{told[1:]}.", *plan.reasons)), told


def _back_in_order(plan: Plan) -> Plan:
    def back(one: Choice) -> Choice:
        return replace(one, placement=tuple(in_device_order(one.placement, plan.devices_per_host).tolist()))

    return replace(plan, chosen=back(plan.chosen), alternatives=tuple(map(back, plan.alternatives)))


if TYPE_CHECKING:
    from pipette_launch.facts.messages import Decision


def trial_progress(decision: Decision, num_iterations: int, elapsed_s: float, *, asked: int) -> str:
    """Return the progress line of a trial; only the node of the last rank sees iterations."""
    if decision.checks_order:
        return f"{check_words(decision)}, {elapsed_s:.0f} s"
    seen = f"iteration {num_iterations} of {decision.iterations}, " if num_iterations else ""
    return f"trial {_number(decision, asked=asked)}: {_what(decision)}, {seen}{elapsed_s:.0f} s"


def trial_words(decision: Decision, *, asked: int) -> str:
    """Say which trial begins, of how many."""
    if decision.checks_order:
        return check_words(decision)
    return f"trial {_number(decision, asked=asked)}: {_what(decision)}, {decision.iterations} iterations"


def _number(decision: Decision, *, asked: int) -> str:
    assert decision.plan is not None
    return f"{decision.trial + 1} of {min(asked, len(decision.plan.contenders())) + 1}"


def _what(decision: Decision) -> str:
    return decision.choice.layout.words() if decision.choice else "your own configuration"


if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipette_launch.facts import Choice, Plan
    from pipette_launch.facts.messages import TrialReport


def tried(choice: Choice, report: TrialReport, *, is_own: bool, warm_ups: int, iterations: int) -> Trial:
    """Put together what came of one trial.

    Args:
        choice: what ran.
        report: what the agents saw.
        is_own: whether it is the user's own configuration.
        warm_ups: iterations at the start that do not count.
        iterations: how many behind them do.

    """
    steps_s = report.step_s[: warm_ups + iterations]
    is_whole = len(steps_s) == warm_ups + iterations
    short = f"it ended after {len(steps_s)} of {warm_ups + iterations} iterations"
    return Trial(
        layout=choice.layout,
        placement=choice.placement,
        is_own=is_own,
        predicted_step_s=choice.step_time_s,
        step=Samples(values_s=steps_s[warm_ups:], warmup_s=steps_s[:warm_ups]) if is_whole else None,
        failure="" if is_whole else report.failure.sentence if report.failure else short,
        took_s=report.took_s,
    )


def noise_s(one: Samples, other: Samples) -> float:
    """By how much two medians may differ by chance."""
    return ERRORS_APART * math.hypot(one.median_error_s, other.median_error_s)


def outruns(plan: Trial, own: Trial, *, margin: float) -> bool:
    """Whether a plan was measured faster than the user's own configuration, beyond noise and by the margin."""
    if plan.step is None or own.step is None:
        return plan.step is not None
    return own.median_s - plan.median_s > max(margin * own.median_s, noise_s(plan.step, own.step))


def winner(runs: Sequence[Trial], *, margin: float) -> int | None:
    """Return the index of the best trial; None where none came to an end.

    A plan takes the place of the user's own configuration only if it outruns it; of those that do, the fastest wins.
    """
    own = next(run for run in runs if run.is_own)
    better = [index for index, run in enumerate(runs) if not run.is_own and outruns(run, own, margin=margin)]
    if better:
        return min(better, key=lambda index: runs[index].median_s)
    return None if own.step is None else runs.index(own)


def settle(plan: Plan, trials: Trials, *, margin: float) -> Plan:
    """Let the measured best be the plan; without any, the plan stays as it was predicted.

    Alternatives that outran the user's own configuration come first, the fastest in front, and no other is tried
    before it, unless it did not run itself.
    """
    best = winner(trials.runs, margin=margin)
    if best is None:
        return replace(plan, trials=trials)
    won = trials.runs[best]
    own = next(run for run in trials.runs if run.is_own)
    runs = {(run.layout, run.placement): run for run in trials.runs if not run.is_own}

    def rank(choice: Choice) -> tuple[int, float]:
        run = runs.get((choice.layout, choice.placement))
        if run is None:
            return 1, 0.0
        return 0 if outruns(run, own, margin=margin) else 2 if run.step else 3, run.median_s

    others = [one for one in plan.contenders() if (one.layout, one.placement) != (won.layout, won.placement)]
    chosen = next((one for one in plan.contenders() if one not in others), plan.own)
    others.sort(key=rank)
    # What was not tried is only predicted: the user's own configuration, which ran, is the safer one.
    in_line = [one for one in others if rank(one)[0] <= (0 if own.step else 2)]
    return replace(
        plan,
        chosen=plan.own if won.is_own else chosen,
        keeps_own=won.is_own,
        alternatives=tuple(others),
        num_in_line=len(in_line),
        reasons=(_why(trials, won, own, margin=margin), *_predicted(plan, won)),
        trials=trials,
    )


def trial_line(run: Trial) -> str:
    """Say in one line what came of a trial."""
    who = "your own configuration" if run.is_own else run.layout.words()
    if run.step is None:
        return f"{who}: {run.failure}"
    return (
        f"{who}: measured {seconds_text(run.median_s)} a step, spread {run.step.spread:.0%}, "
        f"predicted {seconds_text(run.predicted_step_s)}"
    )


def _why(trials: Trials, won: Trial, own: Trial, *, margin: float) -> str:
    finished = sum(run.step is not None for run in trials.runs)
    head = f"Settled by trials of {trials.iterations} iterations each, {finished} of {len(trials.runs)} ran: "
    if won.is_own:
        return f"{head}no plan was measured faster than your own configuration beyond noise and {margin:.0%}."
    took = f"{won.layout.words()} took {seconds_text(won.median_s)} a step"
    if own.step is None:
        return f"{head}{took}; your own configuration did not run: {own.failure}."
    gain = 1 - won.median_s / own.median_s
    return f"{head}{took}, {gain:.1%} less than your own configuration with {seconds_text(own.median_s)}."


def _predicted(plan: Plan, won: Trial) -> tuple[str, ...]:
    if (won.layout, won.placement) == (plan.chosen.layout, plan.chosen.placement):
        return plan.reasons
    return (f"Predicted best, by the model alone, was {plan.chosen.layout.words()}.",)


if TYPE_CHECKING:
    from pipette_launch.facts import Job, Layout, Plan
    from pipette_launch.facts.messages import Decision, Failure, TrialReport
    from pipette_launch.launch.options import Options, Script


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrialsInProgress:
    """What is tried, and what has come of it so far."""

    job: Job
    plan: Plan
    num_plans: int
    warm_ups: int
    runs: tuple[Trial, ...] = ()
    deaths: tuple[tuple[Layout, Failure], ...] = ()
    """Layouts that ended early, and why."""


class TrialsResult(NamedTuple):
    """How trials ended."""

    job: Job
    plan: Plan
    reason: str
    is_worth_keeping: bool
    """Whether the next start should believe it."""


class TrialCoordinator:
    """Orders the trials one by one, the user's own configuration first, and names the winner."""

    def __init__(self, options: Options, script: Script) -> None:
        self._options = options
        self._script = script
        self._in_progress: _TrialsInProgress | None = None

    def open(self, training: Decision, job: Job) -> Decision:
        """Return the first trial, or the training itself where the user wants no trials or none can be run.

        Raises:
            PlanError: none can be run, and the user wants to stop at errors.

        """
        plan = training.plan
        if plan is None or not self._wants(plan):
            return training
        try:
            warm_ups = self._check(training, job)
        except PipetteError as error:
            reason = f"plans are not tried: {error}"
            if self._options.on_error == "fail":
                raise PlanError(reason) from error
            return replace(training, reason=joined(training.reason, reason))
        num_plans = min(self._options.trials, len(plan.contenders()))
        self._in_progress = _TrialsInProgress(job=job, plan=plan, num_plans=num_plans, warm_ups=warm_ups)
        return self._next(training, self._in_progress)

    def judge(self, ended: Decision, report: TrialReport) -> Decision | TrialsResult:
        """Take what came of a trial; return the next one, in the end what was settled, or the end of the job.

        The job ends where the script died of what no plan can avoid, as it does in the training.
        """
        # What prices plans is imported when one was tried: a start from the cache does without it.
        from pipette_launch.launch.trials import settle, trial_line, tried

        in_progress = self._in_progress
        assert in_progress is not None
        run = tried(
            ended.choice or in_progress.plan.own,
            report,
            is_own=ended.choice is None,
            warm_ups=in_progress.warm_ups,
            iterations=self._options.trial_iters,
        )
        deaths = in_progress.deaths
        if report.failure and run.step is None:
            # Other layouts' deaths alone tell that it is not the layout's doing.
            before = [failure for layout, failure in deaths if layout != run.layout]
            hopeless = (
                ""
                if report.step_s
                else why_to_give_up(
                    [report.failure],
                    before=before,
                    written=self._options.script_arguments,
                    given=ended.script_arguments,
                )
            )
            if hopeless:
                self._in_progress = None
                return replace(ended, phase="stop", plan=None, failed=True, reason=hopeless)
            deaths = (*deaths, (run.layout, report.failure))
        self._in_progress = in_progress = replace(in_progress, runs=(*in_progress.runs, run), deaths=deaths)
        if len(in_progress.runs) <= in_progress.num_plans:
            return self._next(replace(ended, reason=trial_line(run)), in_progress)
        trials = Trials(asked=self._options.trials, iterations=self._options.trial_iters, runs=in_progress.runs)
        settled = settle(in_progress.plan, trials, margin=self._options.margin)
        self._in_progress = None
        any_ran = any(one.step for one in in_progress.runs)
        return TrialsResult(
            job=in_progress.job,
            plan=self._with_words(settled, in_progress.job),
            reason=joined(trial_line(run), "" if any_ran else "no trial came to its end, so the prediction stands"),
            # A file that the user named is the user's.
            is_worth_keeping=any_ran and in_progress.plan.provenance.source != "file",
        )

    def _wants(self, plan: Plan) -> bool:
        """Whether there is something to try that was not tried before."""
        if not self._options.trials or self._options.only_looks:
            return False
        done = plan.trials
        return done is None or done.asked < self._options.trials or done.iterations < self._options.trial_iters

    def _check(self, training: Decision, job: Job) -> int:
        """Return how many iterations of a trial are warm-ups; raises MegatronError where no trial can be run."""
        assert training.plan is not None
        if self._options.is_function:
            raise MegatronError("--run-path: the script runs as a function, whose iterations the launcher cannot see")
        if not training.plan.contenders():
            raise MegatronError("there is no plan but your own configuration")
        _, warm_ups = self._script.trial_words(training.script_arguments or (), job)
        needed = warm_ups + self._options.trial_iters
        if job.train_iters is not None and job.train_iters <= needed:
            raise MegatronError(
                f"the job has {job.train_iters} iterations and a trial {needed}; leave --pipette-trials away, or lower "
                f"--pipette-trial-iters"
            )
        return warm_ups

    def _next(self, like: Decision, in_progress: _TrialsInProgress) -> Decision:
        """Order the next trial, for the nodes of an earlier decision."""
        following = replace(
            like,
            phase="trial",
            plan=in_progress.plan,
            attempt=0,
            trial=len(in_progress.runs),
            iterations=in_progress.warm_ups + self._options.trial_iters,
        )
        choice = following.choice
        layout = choice.layout if choice else in_progress.job.own
        words, _ = self._script.trial_words(self._script.words(in_progress.job, layout), in_progress.job)
        return replace(
            following,
            script_arguments=words,
            environment=self._script.environment(layout, in_progress.plan.device_kind, is_own=choice is None),
        )

    def _with_words(self, plan: Plan, job: Job) -> Plan:
        """Let the plan's own record of the script's arguments follow its choice."""
        if plan.setting is None:
            return plan
        words = self._script.words(job, plan.chosen.layout)
        return replace(plan, setting=replace(plan.setting, new_arguments=words))
