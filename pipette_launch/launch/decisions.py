"""Writes what is decided: words and variables of a plan, or of the user's own configuration where planning fails."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from pipette_launch import megatron
from pipette_launch.errors import PipetteError, UsageError
from pipette_launch.launch.device_orders import check_before, failed, needs_check, passed
from pipette_launch.launch.nodes import joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipette_launch.facts import Job, Plan
    from pipette_launch.facts.messages import Decision, TrialReport
    from pipette_launch.launch.options import Options
    from pipette_launch.launch.plans.planner import Planner
    from pipette_launch.launch.trials.run import TrialCoordinator
    from pipette_launch.launch.user_script import Script

logger = logging.getLogger(__name__)


class DecisionWriter:
    """Turns plans and errors into decisions for all nodes."""

    def __init__(
        self,
        options: Options,
        script: Script,
        planner: Planner,
        trials: TrialCoordinator,
        *,
        interruption: type[Exception],
    ) -> None:
        """Begin.

        Args:
            options: what the user asked for.
            script: as the user named it.
            planner: knows the job.
            trials: come before a plan's training.
            interruption: what a signal raises; it is no failure of a plan.

        """
        self._options = options
        self._script = script
        self._planner = planner
        self._trials = trials
        self._interruption = interruption
        self.is_start = True
        """No round came before this one."""

    def train(
        self, bare: Decision, job: Job, plan: Plan, *, attempt: int, reason: str, is_tried: bool = True
    ) -> Decision:
        """Write the decision to run a plan's candidate, with the words that its script is given."""
        following = replace(bare, phase="train", plan=plan, attempt=attempt, proven=False, reason=reason)
        choice = following.choice
        needed = self._script.environment(choice.layout if choice else job.own, plan.device_kind, is_own=choice is None)
        following = replace(
            following,
            script_arguments=self._script.words(job, choice.layout if choice else job.own),
            environment=needed,
            patches=self._planner.patches,
        )
        # Before trials: steps in an order that is given up again would show nothing.
        if needs_check(following) and not self._options.dry_run:
            return check_before(following)
        if attempt == 0 and is_tried and (following := self._trials.open(following, job)).phase == "trial":
            return following
        self._script.leave_record(plan, following.choice)
        return replace(following, phase="stop") if self._options.dry_run else following

    def after_check(self, bare: Decision, ended: Decision, report: TrialReport) -> Decision:
        """Write the decision to try or train the order that was checked, or device order where the check failed.

        Args:
            bare: the training without its plan's words.
            ended: the check.
            report: how it ended.

        """
        planner = self._planner
        # --pipette-quiet prints every reason of a decision, so a check that passed gives none.
        plan, told = failed(ended, report.failure) if report.failure else (passed(ended), "")
        given = ended.script_arguments
        batch = megatron.global_batch_size(given) if given else None
        job = planner.read_job(sum(bare.num_slots), plan.device_kind, global_batch_size=batch)
        known = planner.measurements
        if report.failure and known is not None and plan.hosts == tuple(host.name for host in known.cluster.hosts):
            # The planner is imported when there is something to predict.
            from pipette_launch.launch.plans.planning import priced_anew

            outcomes = planner.cache.outcomes(known.cluster.hosts[0])
            plan = priced_anew(plan, job, known, outcomes, options=planner.options)
        if plan.provenance.source != "file" and not ended.is_refitted:
            planner.keep(plan, job)
        following = self.train(bare, job, plan, attempt=ended.attempt, reason=told, is_tried=not ended.is_refitted)
        return replace(following, proven=ended.proven, is_refitted=ended.is_refitted)

    def guarded(self, bare: Decision, decide: Callable[[], Decision]) -> Decision:
        """Decide; when that fails, train with the user's own configuration, or stop if the user wants or erred."""
        self._planner.job = None
        is_misuse = False
        try:
            return decide()
        except self._interruption:
            raise
        except PipetteError as error:
            reason = str(error)
            # Once a job runs, hosts may go: that their plan is for others is then nobody's error.
            is_misuse = isinstance(error, UsageError) and self.is_start and self._options.on_error != "train"
        except Exception as error:
            logger.exception("planning failed")
            reason = f"planning failed by an error of pipette-launch itself: {type(error).__name__}: {error}"
        reason = joined(bare.reason, reason)
        if is_misuse or self._options.on_error == "fail" or self._options.only_looks:
            return replace(bare, phase="stop", failed=True, is_misuse=is_misuse, reason=reason)
        reason = f"{reason}; training with your own configuration as torchrun would"
        following = replace(bare, patches=self._planner.patches, reason=reason)
        return following if self._planner.job is None else self._as_checkpoint_demands(following, self._planner.job)

    def _as_checkpoint_demands(self, following: Decision, job: Job) -> Decision:
        """Put in the sizes that a checkpoint dictates, without which it cannot be loaded; other words stay."""
        try:
            words = self._script.words(job, job.own)
        except PipetteError:
            return following
        needed = self._script.environment(job.own, self._planner.device_kind, is_own=True)
        return replace(following, script_arguments=words, environment=needed)
