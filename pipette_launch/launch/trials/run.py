"""Puts trials between a plan and its training, on the node that decides for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pipette_launch.errors import MegatronError, PipetteError, PlanError
from pipette_launch.facts.plan import Trial, Trials
from pipette_launch.launch.nodes import joined
from pipette_launch.replan import why_to_give_up

if TYPE_CHECKING:
    from pipette_launch.facts import Job, Layout, Plan
    from pipette_launch.facts.messages import Decision, Failure, TrialReport
    from pipette_launch.launch.options import Options
    from pipette_launch.launch.user_script import Script


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
        from pipette_launch.launch.trials.decision import settle, trial_line, tried

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
