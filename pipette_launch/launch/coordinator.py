"""The coordinator of a job: gets a plan from a file, the cache or a warm-up, and decides for all nodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from pipette_launch import megatron
from pipette_launch.errors import PipetteError, ProbeError, UsageError
from pipette_launch.facts import Host, Job, Measurements, Plan, files
from pipette_launch.facts.health import DeviceCondition, Verdict
from pipette_launch.facts.measurements import without_hosts
from pipette_launch.facts.messages import Decision, NodeRecord, TrialReport
from pipette_launch.launch.cache import CLUSTER, Cache
from pipette_launch.launch.health_policy import Policy, Ruling, WhyNot, apart, measured, small_holders
from pipette_launch.launch.nodes import hosts_of, in_order, joined, notes_of, unique_names
from pipette_launch.launch.options import Options, Script
from pipette_launch.launch.planner import Planner
from pipette_launch.launch.trials import TrialCoordinator, check_before, failed, needs_check, passed
from pipette_launch.planning import replan
from pipette_launch.probe.health.verdicts import judge
from pipette_launch.probe.messages import WarmupOrder

logger = logging.getLogger(__name__)

Judge: TypeAlias = "Callable[[Sequence[Host], Sequence[Sequence[DeviceCondition]]], Sequence[Verdict]]"


class Coordinator:
    """Decides for all nodes. Every agent has a coordinator, but only the first node's coordinator decides."""

    def __init__(
        self,
        options: Options,
        folder: Path,
        *,
        interruption: type[Exception] = InterruptedError,
        judge: Judge = judge,
        least_nodes: int = 1,
        is_static: bool = False,
    ) -> None:
        """Begin.

        Args:
            folder: private folder where the warm-up leaves its measurements.
            interruption: exception that a signal raises, which does not count as a failure of a plan.
            judge: function that finds sick devices and hosts in the drivers' reports.
            least_nodes: MIN of --nnodes.
            is_static: true if the rendezvous waits for all nodes and ignores --nnodes.

        """
        self._options = options
        self._folder = folder
        self._judge = judge
        self._least_nodes = least_nodes
        self._policy = Policy(
            on_sick=options.on_sick, spares=options.spares, least_nodes=least_nodes, is_static=is_static
        )
        self._conditions: dict[str, tuple[DeviceCondition, ...]] = {}
        self._told_by_drivers: tuple[Verdict, ...] = ()
        self._batch: int | None = None
        """Global batch size of the training so far, which does not change with the number of ranks."""
        self._told_before_warmup: tuple[str, ...] = ()
        self._measures_anew = False
        # Copy of the user's environment, because the agent adds a plan's variables to its own environment.
        environ = dict(os.environ)
        self._script = Script(options, environ)
        self._planner = Planner(options, self._script, environ, least_nodes=least_nodes)
        self._trials = TrialCoordinator(options, self._script)
        self._interruption = interruption
        self._is_start = True
        """True until the first round of the job has a decision."""

    @property
    def cache(self) -> Cache:
        """Cache folder of the plan that the job runs now."""
        return self._planner.cache

    @property
    def measurements(self) -> Measurements | None:
        """Measurements behind the plan that the job runs now; None if unknown."""
        return self._planner.measurements

    # -- a new round ----------------------------------------------------------------------------------------------

    def decide(
        self, records: Sequence[NodeRecord], held: Decision | None, lost: Mapping[str, str] | None = None
    ) -> Decision:
        """Decide the next phase of all nodes.

        Args:
            held: decision of the last round; None in the first round.
            lost: reason for each host that cannot train: the host is gone, or other hosts cannot reach the host.

        """
        self._is_start = held is None
        given = held.script_arguments if held else None
        self._batch = megatron.global_batch_size(given) if given else None
        ordered = in_order(records)
        bare = Decision(
            phase="train",
            tokens=tuple(record.token for record in ordered),
            hosts=unique_names(ordered, held.names if held else None),
            num_slots=tuple(record.num_slots for record in ordered),
            restarts_left=held.restarts_left if held else min(record.max_restarts for record in records),
        ).leaving_out(lost or ())
        able = [record for record in ordered if record.token in bare.tokens]
        decision = self._guarded(bare, lambda: self._decide(bare, able, held, lost))
        reached = max((record.iteration for record in records), default=0)
        return replace(decision, iteration=reached or (held.iteration if held else 0), shortage=self._planner.shortage)

    def _decide(
        self,
        bare: Decision,
        records: Sequence[NodeRecord],
        held: Decision | None,
        lost: Mapping[str, str] | None,
    ) -> Decision:
        words, least = self._options.script_arguments, self._least_nodes
        step = replan.decide(records, bare.hosts, held, written=words, lost=lost, least_nodes=least)
        self._planner.versions = records[0].versions
        self._script.device_name = next((record.host.devices[0].name for record in records if record.host), "")
        if held is not None:
            self._planner.recall(held, records, global_batch_size=self._batch)
        self._measures_anew = isinstance(step, replan.Measure) and step.anew
        if isinstance(step, replan.GiveUp | replan.Finish):
            return replace(bare, phase="stop", failed=isinstance(step, replan.GiveUp), reason=step.reason)
        if held is None or isinstance(step, replan.Measure):
            return self._first(bare, records, step.reason)
        if isinstance(step, replan.UseFallback):
            return self._use_fallback(bare, records, step)
        bare = bare.leaving_out(set(bare.hosts) - set(held.hosts))
        if isinstance(step, replan.TryNext):
            bare = replace(bare, failures=(*held.failures, *(one.failure for one in records if one.failure)))
            return self._guarded(bare, lambda: self._next(bare, held, step))
        return replace(
            held,
            tokens=bare.tokens,
            hosts=bare.hosts,
            num_slots=bare.num_slots,
            standby=bare.standby,
            standby_hosts=bare.standby_hosts,
            proven=step.proven,
            restarts_left=step.restarts_left,
            reason=step.reason,
        )

    def _next(self, bare: Decision, held: Decision, step: replan.TryNext) -> Decision:
        assert held.plan is not None
        job = self._planner.read_job(sum(bare.num_slots), held.plan.device_kind, global_batch_size=self._batch)
        return self._train(bare, job, held.plan, attempt=step.attempt, reason=step.reason)

    def _use_fallback(self, bare: Decision, records: Sequence[NodeRecord], step: replan.UseFallback) -> Decision:
        """Train at once on the remaining hosts, with a fallback plan that was made ahead."""
        hosts = hosts_of(records, bare.hosts)
        training = tuple(host for host in hosts if host.name in step.plan.hosts)
        smaller = bare.leaving_out(set(bare.hosts) - set(step.plan.hosts))

        def use() -> Decision:
            try:
                job, plan = self._planner.fitted(step, training, global_batch_size=self._batch)
            except PipetteError as error:
                told = f"the plan made for this cannot be used: {error}"
                return self._first(bare, records, joined(step.changes, told))
            ran = replace(step, plan=plan, proven=step.proven and plan.chosen.layout == step.plan.chosen.layout)
            following = self._train(smaller, job, plan, attempt=0, reason=ran.reason, is_tried=False)
            return replace(following, proven=ran.proven, is_refitted=True)

        return self._guarded(smaller, use)

    # -- hosts without a plan -------------------------------------------------------------------------------------

    def _first(self, bare: Decision, records: Sequence[NodeRecord], reason: str) -> Decision:
        """Find a plan for new hosts, without the hosts that the health policy excludes."""
        hosts = hosts_of(records, bare.hosts)
        self._conditions = {host.name: record.conditions for host, record in zip(hosts, records, strict=True)}
        self._told_by_drivers = verdicts = tuple(self._judge(hosts, [*self._conditions.values()]))
        ruling = self._rule(verdicts, hosts)
        self._told_before_warmup = ruling.reasons
        notes = notes_of(records, bare.hosts)
        bare = replace(bare, reason=joined(reason, *notes, *small_holders(verdicts), *ruling.reasons))
        if ruling.stops:
            return replace(bare, phase="stop", failed=True)
        smaller, rest = apart(bare, hosts, ruling)
        return self._guarded(smaller, lambda: self._find(smaller, rest))

    def _find(self, bare: Decision, hosts: tuple[Host, ...]) -> Decision:
        """Find a plan in a file or in the cache, else order a warm-up."""
        planner, options = self._planner, self._options
        if options.plan is not None:
            bare, hosts = self._without_spares_of(options.plan, bare, hosts)
            job = planner.read_keyed(hosts, global_batch_size=self._batch)
            named = planner.from_file(options.plan, job, hosts)
            return self._train(bare, job, named, attempt=0, reason=bare.reason)
        if options.probe_to is not None:
            return self._measure(bare, planner.read_keyed(hosts), hosts)
        job = planner.read_with_spares(hosts, options.spares, global_batch_size=self._batch)
        known = None if self._measures_anew else planner.cache.measurements()
        ruling = self._rule(measured(known.verdicts) if known else (), hosts)
        ruling = self._with_spares(ruling, known.verdicts if known else self._told_by_drivers, hosts)
        if not (ruling.stops or ruling.on_standby or self._measures_anew):
            cached, told = planner.from_cache(job, hosts)
            bare = replace(bare, reason=joined(bare.reason, told))
            if cached is not None:
                planner.measurements = planner.surveyed = known
                reason = joined(bare.reason, *ruling.reasons)
                return self._train(bare, job, replace(cached, other_hosts=()), attempt=0, reason=reason)
        elif known and ruling.on_standby and (remembered := self._remembered(bare, hosts, ruling, known)) is not None:
            return remembered
        surveyed = None if self._measures_anew or self._is_start else planner.surveyed_of(bare.hosts)
        if surveyed is not None:
            told = "nothing is measured again: the plan uses earlier measurements of these nodes"
            return self._plan(replace(bare, reason=joined(bare.reason, told)), hosts, job, surveyed)
        num_spares = len(ruling.spares)
        job = planner.read_with_spares(hosts, num_spares, global_batch_size=self._batch)
        return self._measure(bare, job, hosts, num_spares)

    def _without_spares_of(
        self, path: Path, bare: Decision, hosts: tuple[Host, ...]
    ) -> tuple[Decision, tuple[Host, ...]]:
        """Make spares of the hosts that the user's plan file does not name, up to --pipette-spares."""
        named = files.read(path, Plan).hosts if self._options.spares and path.is_file() else bare.hosts
        others = tuple(host.name for host in hosts if host.name not in named)
        if not 0 < len(others) <= min(self._options.spares, len(hosts) - self._least_nodes):
            return bare, hosts
        return apart(bare, hosts, Ruling(spares=others))

    def _measure(self, bare: Decision, job: Job, hosts: tuple[Host, ...], num_spares: int = 0) -> Decision:
        """Return the decision to run a warm-up."""
        # Imported here, because a start with a cached plan needs no warm-up.
        from pipette_launch.launch.commands import probe_options

        # --pipette-probe measures everything anew and uses no earlier measurements.
        is_whole = self._measures_anew or self._options.probe_to is not None
        order = probe_options(
            job,
            hosts,
            options=self._planner.options,
            folder=self._folder,
            known=None if is_whole else self._planner.machine_measurements(hosts).path,
            conditions=[one for host in hosts for one in self._conditions.get(host.name, ())],
            num_training=len(hosts) - num_spares,
        )
        return replace(bare, phase="warmup", probe_options=files.dumps(order))

    def _remembered(
        self, bare: Decision, hosts: tuple[Host, ...], ruling: Ruling, known: Measurements
    ) -> Decision | None:
        """Return an earlier job's plan that leaves out the hosts on standby; None if the cache has no such plan."""
        forget = f"to measure all nodes again, delete {self.cache.path(CLUSTER)}" if ruling.leave_out else ""
        smaller, rest = apart(bare, hosts, ruling)
        job = self._planner.read_keyed(rest, global_batch_size=self._batch)
        cached, told = self._planner.from_cache(job, rest)
        if cached is None:
            return None
        plan = replace(cached, other_hosts=ruling.spares)
        self._planner.measurements, self._planner.surveyed = self.cache.measurements(), known
        reason = joined(bare.reason, *ruling.reasons, forget, told)
        return self._guarded(smaller, lambda: self._train(smaller, job, plan, attempt=0, reason=reason))

    def _with_spares(self, ruling: Ruling, verdicts: Sequence[Verdict], hosts: tuple[Host, ...]) -> Ruling:
        return self._policy.with_spares(ruling, verdicts, [host.name for host in hosts], self._why_not(hosts))

    def _rule(self, verdicts: Sequence[Verdict], hosts: tuple[Host, ...]) -> Ruling:
        return self._policy.rule(verdicts, [host.name for host in hosts], self._why_not(hosts))

    def _why_not(self, hosts: tuple[Host, ...]) -> WhyNot:
        return lambda names: self._planner.why_not(tuple(host for host in hosts if host.name in names))

    # -- after a warm-up or a trial -------------------------------------------------------------------------------

    def after_warmup(self, decision: Decision, failure: str) -> Decision:
        """Make a plan from the measurements. `failure` is the reason why the warm-up failed, or empty."""
        from pipette_launch.launch.commands import warmup_order

        bare = replace(decision, phase="train", probe_options="", reason="")
        return self._guarded(bare, lambda: self._weigh(bare, warmup_order(decision), failure))

    def _weigh(self, bare: Decision, order: WarmupOrder, failure: str) -> Decision:
        self._planner.job = order.job
        if failure:
            raise ProbeError(failure)
        kept = self._planner.machine_measurements(order.hosts)
        measurements = kept.kept(files.read(self._folder / CLUSTER, Measurements))
        if self._options.probe_to is not None:
            self._planner.measurements = measurements
            files.write(self._options.probe_to, measurements, shared=True)
            return replace(bare, phase="stop")
        return self._plan(bare, order.hosts, order.job, measurements)

    def _plan(self, bare: Decision, hosts: tuple[Host, ...], job: Job, measurements: Measurements) -> Decision:
        """Plan for the measured hosts, without spares and without hosts that the warm-up found sick."""
        ruling = self._with_spares(self._rule(measurements.verdicts, hosts), measurements.verdicts, hosts)
        # The drivers reported some of these sick hosts before the warm-up.
        news = (reason for reason in ruling.reasons if reason not in self._told_before_warmup)
        bare = replace(bare, reason=joined(bare.reason, *news))
        if ruling.stops:
            return replace(bare, phase="stop", failed=True)
        # Kept because the next start would otherwise measure the sick hosts again.
        trouble = self.cache.save(CLUSTER, measurements) if ruling.on_standby else ""
        smaller, rest = apart(replace(bare, reason=joined(bare.reason, trouble)), hosts, ruling)

        def solve() -> Decision:
            job_of_rest = self._planner.read_keyed(rest, global_batch_size=self._batch) if ruling.on_standby else job
            left = without_hosts(measurements, ruling.on_standby)
            plan = self._planner.solve(job_of_rest, left, surveyed=measurements, spares=ruling.spares)
            return self._train(smaller, job_of_rest, plan, attempt=0, reason=smaller.reason)

        return self._guarded(smaller, solve)

    def after_trial(self, ended: Decision, report: TrialReport) -> Decision:
        """Return the decision to run the next trial, or to train with the plan that was fastest in the trials."""
        bare = replace(ended, phase="train", trial=0, iterations=0, script_arguments=None, environment={}, reason="")
        bare = replace(bare, checks_order=False)

        def decide() -> Decision:
            if ended.checks_order:
                return self._after_check(bare, ended, report)
            following = self._trials.judge(ended, report)
            if isinstance(following, Decision):
                return following
            plan = self._planner.without_what_cannot_load(following.plan, following.job)
            if following.is_worth_keeping:
                self._planner.keep(plan, following.job)
            return self._train(bare, following.job, plan, attempt=0, reason=following.reason)

        return self._guarded(replace(bare, plan=None), decide)

    # -- plans and errors as decisions --------------------------------------------------------------------------------

    def _train(
        self, bare: Decision, job: Job, plan: Plan, *, attempt: int, reason: str, is_tried: bool = True
    ) -> Decision:
        """Return the decision to train with a plan's candidate, or to run a check or trials before the training."""
        following = replace(bare, phase="train", plan=plan, attempt=attempt, proven=False, reason=reason)
        choice = following.choice
        layout = choice.layout if choice else job.own
        following = replace(
            following,
            script_arguments=self._script.words(job, layout),
            environment=self._script.environment(layout, plan.device_kind, is_own=choice is None),
            patches=self._planner.patches,
        )
        # The check comes before trials, because trials with a device order that the check rejects would be useless.
        if needs_check(following) and not self._options.dry_run:
            return check_before(following)
        if attempt == 0 and is_tried and (following := self._trials.open(following, job)).phase == "trial":
            return following
        self._script.leave_record(plan, following.choice)
        return replace(following, phase="stop") if self._options.dry_run else following

    def _after_check(self, bare: Decision, ended: Decision, report: TrialReport) -> Decision:
        """Return the decision to train in the checked order of devices, or in the default order if the check failed."""
        planner = self._planner
        # A passed check adds no reason to the decision, because even --pipette-quiet prints every reason.
        plan, told = failed(ended, report.failure) if report.failure else (passed(ended), "")
        given = ended.script_arguments
        batch = megatron.global_batch_size(given) if given else None
        job = planner.read_job(sum(bare.num_slots), plan.device_kind, global_batch_size=batch)
        known = planner.measurements
        if report.failure and known is not None and plan.hosts == tuple(host.name for host in known.cluster.hosts):
            # Imported here, because a start with a cached plan predicts nothing.
            from pipette_launch.planning.measured_plan import priced_anew

            outcomes = planner.cache.outcomes(known.cluster.hosts[0])
            plan = priced_anew(plan, job, known, outcomes, options=planner.options.search_options())
        if plan.provenance.source != "file" and not ended.is_refitted:
            planner.keep(plan, job)
        following = self._train(bare, job, plan, attempt=ended.attempt, reason=told, is_tried=not ended.is_refitted)
        return replace(following, proven=ended.proven, is_refitted=ended.is_refitted)

    def _guarded(self, bare: Decision, decide: Callable[[], Decision]) -> Decision:
        """Call `decide`. After an error, train with the user's own configuration, or stop if the user asked to stop."""
        self._planner.forget_job()
        is_misuse = False
        try:
            return decide()
        except self._interruption:
            raise
        except PipetteError as error:
            reason = str(error)
            # Hosts may leave a running job, so a plan file for other hosts is then not the user's mistake.
            is_misuse = isinstance(error, UsageError) and self._is_start and self._options.on_error != "train"
        except Exception as error:
            logger.exception("planning failed")
            reason = f"planning failed by an error of pipette-launch itself: {type(error).__name__}: {error}"
        reason = joined(bare.reason, reason)
        if is_misuse or self._options.on_error == "fail" or self._options.only_looks:
            return replace(bare, phase="stop", failed=True, is_misuse=is_misuse, reason=reason)
        reason = f"{reason}; training with your own configuration as torchrun would"
        following = replace(bare, patches=self._planner.patches, reason=reason)
        job = self._planner.job
        if job is None:
            return following
        # Sizes come from the checkpoint, which other sizes could not load. Other arguments stay as the user gave them.
        try:
            words = self._script.words(job, job.own)
        except PipetteError:
            return following
        needed = self._script.environment(job.own, self._planner.device_kind, is_own=True)
        return replace(following, script_arguments=words, environment=needed)
