"""The coordinator of a job: decides for all nodes, after each start, warm-up, trial, failure and loss of a host."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from pipette_launch import megatron
from pipette_launch.errors import PipetteError, PlanError, ProbeError, UsageError
from pipette_launch.facts import Host, Job, Measurements, Plan, files
from pipette_launch.facts.health import DeviceCondition, Verdict
from pipette_launch.facts.measurements import without_hosts
from pipette_launch.facts.messages import Decision, NodeRecord, TrialReport
from pipette_launch.launch import cache
from pipette_launch.launch.cache import CLUSTER
from pipette_launch.launch.commands import links_options, probe_options
from pipette_launch.launch.hosts import (
    AS_TORCHRUN,
    Policy,
    Ruling,
    apart,
    hosts_of,
    in_held_order,
    in_order,
    in_order_of_links,
    notes_of,
    orders_hosts,
    unique_names,
)
from pipette_launch.launch.job_plans import Planner
from pipette_launch.launch.options import Options, Script
from pipette_launch.launch.trials import TrialCoordinator
from pipette_launch.planning import replan
from pipette_launch.probe.health.verdicts import faults_first, judge
from pipette_launch.probe.messages import WarmupOrder
from pipette_launch.text import joined

logger = logging.getLogger(__name__)
Judge: TypeAlias = "Callable[[Sequence[Host], Sequence[Sequence[DeviceCondition]]], Sequence[Verdict]]"
MEASURED = ("slow-device", "slow-host", "slow-link")
"""Kinds of verdicts that only a warm-up can give. The drivers' reports give all other verdicts at each start."""


class Coordinator:
    """Decides what all nodes do next. Every agent has a coordinator, but only the first node's coordinator decides."""

    def __init__(
        self,
        options: Options,
        measured_at: Callable[[], Path],
        *,
        interruption: type[Exception] = InterruptedError,
        judge: Judge = judge,
        least_nodes: int = 1,
        is_static: bool = False,
        later: cache.Later = lambda write: write(),
    ) -> None:
        """Begin; a warm-up leaves its measurements in the file that `measured_at` names.

        A signal raises `interruption`, which does not count as a failure of a plan. `judge` finds sick devices and
        hosts in the drivers' reports. `least_nodes` is MIN of --nnodes. If `is_static`, the rendezvous waits for all
        nodes and ignores --nnodes. `later` gets functions that write files which no decision needs.
        """
        self._options = options
        self.measured_at = measured_at
        self._judge = judge
        self._least_nodes = least_nodes
        self._policy = Policy(
            on_sick=options.on_sick, spares=options.spares, least_nodes=least_nodes, is_static=is_static
        )
        self._conditions: dict[str, tuple[DeviceCondition, ...]] = {}
        """Drivers' reports on the devices, by host."""
        self._driver_verdicts: tuple[Verdict, ...] = ()
        self._told_before_warmup: tuple[str, ...] = ()
        self._measures_anew = False
        self._held_order: tuple[str, ...] = ()
        """Order of the hosts in the last training without a plan; empty = torchrun's order, or no such training."""
        # Copy of the user's environment, because the agent adds a plan's variables to its own environment.
        environ = dict(os.environ)
        self._script = Script(options, environ)
        self.planner = Planner(options, self._script, environ, least_nodes=least_nodes, later=later)
        self._trials = TrialCoordinator(options, self._script)
        self._interruption = interruption
        self._is_start = True
        """True until the first round of the job has a decision."""

    # -- a new round ----------------------------------------------------------------------------------------------

    def decide(
        self, records: Sequence[NodeRecord], held: Decision | None, lost: Mapping[str, str] | None = None
    ) -> Decision:
        """Decide the next phase of all nodes.

        `held` is the last round's decision; None at first. `lost` maps hosts that are gone or out of reach to reasons.
        """
        self._is_start = held is None or held.only_links
        self._held_order = held.host_order if held else ()
        self._keep_batch(held)
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
        return replace(decision, iteration=reached or (held.iteration if held else 0), shortage=self.planner.shortage)

    def _keep_batch(self, last: Decision | None) -> None:
        """Let later layouts keep the global batch size of a decision, or of the job that a warm-up measured."""
        is_measured = last is not None and last.phase == "warmup"
        given = self._options.script_arguments if is_measured else last.script_arguments if last else None
        self.planner.batch = megatron.global_batch_size(given) if given else None

    def _decide(
        self, bare: Decision, records: Sequence[NodeRecord], held: Decision | None, lost: Mapping[str, str] | None
    ) -> Decision:
        words, least, planner = self._options.script_arguments, self._least_nodes, self.planner
        step = replan.decide(records, bare.hosts, held, written=words, lost=lost, least_nodes=least)
        planner.versions = records[0].versions
        self._script.capability = next((one.host.devices[0].compute_capability for one in records if one.host), None)
        if held is not None:
            planner.recall(held, records)
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
            following, plan = step, held.plan
            assert plan is not None

            def next_candidate() -> Decision:
                job = planner.read_job(sum(bare.num_slots), plan.device_kind)
                return self._train(bare, job, plan, attempt=following.attempt, reason=following.reason)

            return self._guarded(bare, next_candidate)
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

    def _use_fallback(self, bare: Decision, records: Sequence[NodeRecord], step: replan.UseFallback) -> Decision:
        """Train at once on the remaining hosts, with a fallback plan that was made before the loss."""
        training = tuple(host for host in hosts_of(records, bare.hosts) if host.name in step.plan.hosts)
        smaller = bare.leaving_out(set(bare.hosts) - set(step.plan.hosts))

        def use() -> Decision:
            try:
                job, plan = self.planner.fitted(step, training)
            except PipetteError as error:
                why = f"the fallback plan cannot be used: {error}"
                return self._first(bare, records, joined(step.changes, why))
            ran = replace(step, plan=plan, proven=step.proven and plan.chosen.layout == step.plan.chosen.layout)
            following = self._train(smaller, job, plan, reason=ran.reason, is_tried=False)
            return replace(following, proven=ran.proven, is_refitted=True)

        return self._guarded(smaller, use)

    # -- hosts without a plan -------------------------------------------------------------------------------------

    def _first(self, bare: Decision, records: Sequence[NodeRecord], reason: str) -> Decision:
        """Find a plan for new hosts, without the hosts that the health policy excludes."""
        hosts = hosts_of(records, bare.hosts)
        self._conditions = {host.name: record.conditions for host, record in zip(hosts, records, strict=True)}
        self._driver_verdicts = verdicts = tuple(self._judge(hosts, [*self._conditions.values()]))
        ruling = self._rule(verdicts, hosts)
        self._told_before_warmup = ruling.reasons
        # The training may need the little memory that other processes hold on healthy devices.
        small = [one.words() for one in verdicts if one.kind == "busy" and not one.is_sick]
        reason = joined(reason, *notes_of(records, bare.hosts), *small, *ruling.reasons)
        bare = replace(bare, reason=reason)
        if ruling.stops:
            return replace(bare, phase="stop", failed=True)
        smaller, rest = apart(bare, hosts, ruling)

        def find() -> Decision:
            try:
                return self._find(smaller, rest)
            except PipetteError as error:
                return self._aside(smaller, rest, error)

        return self._guarded(smaller, find)

    def _aside(self, bare: Decision, hosts: tuple[Host, ...], error: PipetteError) -> Decision:
        """Train without a plan, on hosts in the order of their links; the first start may measure the links before."""
        if isinstance(error, UsageError) or not orders_hosts(self._options, len(hosts)):
            raise error
        bare = replace(bare, reason=joined(bare.reason, str(error)))
        known = None if self._measures_anew else self.planner.surveyed_of(bare.hosts)
        if known is None and self._is_start and not self._measures_anew:
            known = self.planner.machine_measurements(hosts).load()
        if known is not None:
            return self._in_order(bare, known)
        if not (self._is_start or self._measures_anew):
            # The first node may be lost together with its measurements, and recovery must not wait for new ones.
            return in_held_order(self._unplanned(bare), self._held_order)
        order = links_options(hosts, options=self._options)
        return replace(bare, phase="warmup", probe_options=files.dumps(order), only_links=True)

    def _in_order(self, bare: Decision, measured: Measurements) -> Decision:
        self.planner.surveyed = measured
        return in_order_of_links(self._unplanned(bare), measured, self._options)

    def _find(self, bare: Decision, hosts: tuple[Host, ...]) -> Decision:
        """Find a plan in a file or in the cache, else order a warm-up."""
        planner, options = self.planner, self._options
        if options.plan is not None:
            # Hosts that the user's plan file does not name become spares, unless --pipette-spares allows fewer spares.
            in_plan = files.read(options.plan, Plan).hosts if options.spares and options.plan.is_file() else bare.hosts
            others = tuple(host.name for host in hosts if host.name not in in_plan)
            if 0 < len(others) <= min(options.spares, len(hosts) - self._least_nodes):
                bare, hosts = apart(bare, hosts, Ruling(spares=others))
            job = planner.read_keyed(hosts)
            return self._train(bare, job, planner.from_file(options.plan, job, hosts), reason=bare.reason)
        if options.probe_to is not None:
            return self._measure(bare, planner.read_keyed(hosts), hosts)
        job = planner.read_with_spares(hosts, options.spares)
        known = None if self._measures_anew else planner.cache.measurements()
        verdicts = known.verdicts if known else ()
        lasting = [one for one in verdicts if one.kind in MEASURED]
        ruling = self._rule(lasting, hosts, for_spares=verdicts if known else self._driver_verdicts)
        if not (ruling.stops or ruling.on_standby or self._measures_anew):
            cached, trouble = planner.from_cache(job, hosts)
            bare = replace(bare, reason=joined(bare.reason, trouble))
            if cached is not None:
                planner.measurements = planner.surveyed = known
                reason = joined(bare.reason, *ruling.reasons)
                return self._train(bare, job, replace(cached, other_hosts=()), reason=reason)
        elif known and ruling.on_standby and (remembered := self._remembered(bare, hosts, ruling, known)) is not None:
            return remembered
        surveyed = None if self._measures_anew or self._is_start else planner.surveyed_of(bare.hosts)
        if surveyed is not None:
            note = "nothing is measured again: the plan uses earlier measurements of these nodes"
            return self._plan(replace(bare, reason=joined(bare.reason, note)), hosts, job, surveyed)
        num_spares = len(ruling.spares)
        return self._measure(bare, planner.read_with_spares(hosts, num_spares), hosts, num_spares)

    def _measure(self, bare: Decision, job: Job, hosts: tuple[Host, ...], num_spares: int = 0) -> Decision:
        """Return the decision to run a warm-up."""
        # --pipette-probe measures everything anew and uses no earlier measurements.
        is_whole = self._measures_anew or self._options.probe_to is not None
        order = probe_options(
            job,
            hosts,
            options=self.planner.options,
            known=None if is_whole else self.planner.machine_measurements(hosts).path,
            num_training=len(hosts) - num_spares,
        )
        return replace(bare, phase="warmup", probe_options=files.dumps(order))

    def _remembered(
        self, bare: Decision, hosts: tuple[Host, ...], ruling: Ruling, known: Measurements
    ) -> Decision | None:
        """Return an earlier job's plan that leaves out the hosts on standby; None if the cache has no such plan."""
        planner = self.planner
        forget = f"to measure all nodes again, delete {planner.cache.path(CLUSTER)}" if ruling.leave_out else ""
        smaller, rest = apart(bare, hosts, ruling)
        job = planner.read_keyed(rest)
        cached, trouble = planner.from_cache(job, rest)
        if cached is None:
            return None
        plan = replace(cached, other_hosts=ruling.spares)
        planner.measurements, planner.surveyed = planner.cache.measurements(), known
        reason = joined(bare.reason, *ruling.reasons, forget, trouble)
        return self._guarded(smaller, lambda: self._train(smaller, job, plan, reason=reason))

    def _rule(
        self, verdicts: Sequence[Verdict], hosts: Sequence[Host], *, for_spares: Sequence[Verdict] | None = None
    ) -> Ruling:
        """Apply the health policy. `for_spares` are the verdicts by which spares are chosen; None for no spares."""
        names = [host.name for host in hosts]

        def why_not(some: tuple[str, ...]) -> str:
            return self.planner.why_not([host for host in hosts if host.name in some])

        ruling = self._policy.rule(verdicts, names, why_not)
        return ruling if for_spares is None else self._policy.with_spares(ruling, for_spares, names, why_not)

    # -- after a warm-up or a trial -------------------------------------------------------------------------------

    def after_warmup(self, decision: Decision, failure: str) -> Decision:
        """Make a plan from the measurements. `failure` is the reason why the warm-up failed, or empty."""
        bare = replace(decision, phase="train", probe_options="", only_links=False, reason="")

        def weigh() -> Decision:
            order = files.loads(WarmupOrder, decision.probe_options, "the order of the warm-up")
            self.planner.job = order.job
            if failure:
                raise ProbeError(failure)
            found = files.read(self.measured_at(), Measurements)
            earlier = self.planner.machine_measurements(order.hosts)
            if order.job is None:
                return self._in_order(bare, earlier.kept(found, self.planner.later))
            measurements = earlier.kept(self._with_conditions(found), self.planner.later)
            if self._options.probe_to is not None:
                self.planner.measurements = measurements
                files.write(self._options.probe_to, measurements, shared=True)
                return replace(bare, phase="stop")
            return self._plan(bare, order.hosts, order.job, measurements)

        return self._guarded(bare, weigh)

    def _with_conditions(self, found: Measurements) -> Measurements:
        """Add the drivers' reports and their verdicts. The workers of a warm-up do not need these long reports."""
        hosts = found.cluster.hosts
        conditions = [self._conditions.get(host.name, ()) for host in hosts]
        verdicts = faults_first([*judge(hosts, conditions), *found.verdicts])
        return replace(found, conditions=tuple(chain.from_iterable(conditions)), verdicts=verdicts)

    def _plan(self, bare: Decision, hosts: tuple[Host, ...], job: Job, measurements: Measurements) -> Decision:
        """Plan for the measured hosts, without spares and without hosts that the warm-up found sick."""
        ruling = self._rule(measurements.verdicts, hosts, for_spares=measurements.verdicts)
        # Leave out reasons that were printed before the warm-up.
        news = (reason for reason in ruling.reasons if reason not in self._told_before_warmup)
        bare = replace(bare, reason=joined(bare.reason, *news))
        if ruling.stops:
            return replace(bare, phase="stop", failed=True)
        # Save the measurements of the sick hosts, because the next start would otherwise measure these hosts again.
        trouble = self.planner.cache.save(CLUSTER, measurements) if ruling.on_standby else ""
        smaller, rest = apart(replace(bare, reason=joined(bare.reason, trouble)), hosts, ruling)

        def solve() -> Decision:
            job_of_rest = self.planner.read_keyed(rest) if ruling.on_standby else job
            left = without_hosts(measurements, ruling.on_standby)
            try:
                plan = self.planner.solve(job_of_rest, left, surveyed=measurements, spares=ruling.spares)
            except PlanError as error:
                self.planner.surveyed = measurements
                return self._aside(smaller, rest, error)
            return self._train(smaller, job_of_rest, plan, reason=smaller.reason)

        return self._guarded(smaller, solve)

    def after_trial(self, ended: Decision, report: TrialReport) -> Decision:
        """Return the decision to run the next trial, or to train with the plan that was fastest in the trials."""
        bare = replace(
            ended,
            phase="train",
            trial=0,
            iterations=0,
            script_arguments=None,
            environment={},
            reason="",
        )

        def decide() -> Decision:
            following = self._trials.judge(ended, report)
            if isinstance(following, Decision):
                return following
            plan = self.planner.without_what_cannot_load(following.plan, following.job)
            if following.is_worth_keeping:
                self.planner.keep(plan, following.job)
            return self._train(bare, following.job, plan, reason=following.reason)

        return self._guarded(replace(bare, plan=None), decide)

    # -- plans and errors as decisions ----------------------------------------------------------------------------

    def _train(
        self, bare: Decision, job: Job, plan: Plan, *, reason: str, attempt: int = 0, is_tried: bool = True
    ) -> Decision:
        """Return the decision to train with a plan's candidate, or to run trials before the training."""
        following = replace(bare, phase="train", plan=plan, attempt=attempt, proven=False, reason=reason)
        choice = following.choice
        layout = choice.layout if choice else job.own
        following = replace(
            following,
            script_arguments=self._script.words(job, layout),
            environment=self._script.environment(job, layout, plan.device_kind, is_own=choice is None),
            patches=self.planner.patches,
        )
        if attempt == 0 and is_tried and (following := self._trials.open(following, job)).phase == "trial":
            return following
        self._script.leave_record(plan, following.choice)
        return replace(following, phase="stop") if self._options.dry_run else following

    def _guarded(self, bare: Decision, decide: Callable[[], Decision]) -> Decision:
        """Call `decide`. After an error, train with the user's own configuration, or stop if the user asked to stop."""
        options = self._options
        self.planner.job = None
        is_misuse = False
        try:
            return decide()
        except self._interruption:
            raise
        except PipetteError as error:
            reason = str(error)
            # Hosts may leave a running job, so a plan file for other hosts is then not the user's mistake.
            is_misuse = isinstance(error, UsageError) and self._is_start and options.on_error != "train"
        except Exception as error:
            logger.exception("planning failed")
            reason = f"planning failed by an error of pipette-launch itself: {type(error).__name__}: {error}"
        reason = joined(bare.reason, reason)
        if is_misuse or options.on_error == "fail" or options.only_looks:
            return replace(bare, phase="stop", failed=True, is_misuse=is_misuse, reason=reason)
        return self._unplanned(replace(bare, reason=f"{reason}; {AS_TORCHRUN}"))

    def _unplanned(self, bare: Decision) -> Decision:
        """Return the decision to train with the user's own configuration, in torchrun's order."""
        following, planner = replace(bare, patches=self.planner.patches), self.planner
        if planner.job is None:
            return following
        # Write the model's sizes as in the checkpoint, because a model of other sizes could not load the checkpoint.
        # Other arguments stay as the user gave them.
        try:
            words = self._script.words(planner.job, planner.job.own)
        except PipetteError:
            return following
        needed = self._script.environment(planner.job, planner.job.own, planner.device_kind, is_own=True)
        return replace(following, script_arguments=words, environment=needed)
