"""The coordinator of a job: decides for all nodes, after each start, warm-up, trial, failure and loss of a host."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from pipette_launch import megatron
from pipette_launch.errors import PipetteError, PlanError, ProbeError, UsageError
from pipette_launch.facts import Host, Job, Measurements, Plan, files
from pipette_launch.facts.health import DeviceCondition, Verdict
from pipette_launch.facts.measurements import without_hosts
from pipette_launch.facts.messages import (
    Decision,
    Failure,
    Node,
    NodeRecord,
    RunScript,
    RunTraining,
    RunTrial,
    RunWarmup,
    Stop,
    TrialReport,
)
from pipette_launch.launch import cache
from pipette_launch.launch.cache import CLUSTER
from pipette_launch.launch.commands import links_options, probe_options
from pipette_launch.launch.hosts import (
    AS_TORCHRUN,
    Policy,
    Ruling,
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
        self._common = Decision(nodes=())
        """Nodes and reason of the decision in the making. After an error, the job trains on these nodes."""
        self._is_start = True
        """True until the first round of the job has a decision."""

    # -- a new round ----------------------------------------------------------------------------------------------

    def decide(
        self, records: Sequence[NodeRecord], held: Decision | None, lost: Mapping[str, str] | None = None
    ) -> Decision:
        """Decide the next phase of all nodes.

        `held` is the last round's decision; None at first. `lost` maps hosts that are gone or out of reach to reasons.
        """
        self._is_start = held is None or (isinstance(held, RunWarmup) and held.only_links)
        self._held_order = held.host_order if isinstance(held, RunTraining) else ()
        self._keep_batch(held)
        ordered = in_order(records)
        hosts = unique_names(ordered, held.names if held else None)
        self._common = Decision(
            nodes=tuple(
                Node(token=record.token, host=host, num_slots=record.num_slots)
                for record, host in zip(ordered, hosts, strict=True)
            ),
            restarts_left=held.restarts_left if held else min(record.max_restarts for record in records),
        ).leaving_out(lost or ())
        here = set(self._common.tokens)
        able = [record for record in ordered if record.token in here]
        decision = self._guarded(lambda: self._decide(able, held, lost))
        reached = max((record.iteration for record in records), default=0)
        return replace(decision, iteration=reached or (held.iteration if held else 0), shortage=self.planner.shortage)

    def _keep_batch(self, last: Decision | None) -> None:
        """Let later layouts keep the global batch size of a decision, or of the job that a warm-up measured."""
        given = self._options.script_arguments if isinstance(last, RunWarmup) else None
        if isinstance(last, RunScript):
            given = last.script_arguments
        self.planner.batch = megatron.global_batch_size(given) if given else None

    def _decide(self, records: Sequence[NodeRecord], held: Decision | None, lost: Mapping[str, str] | None) -> Decision:
        words, least, hosts = self._options.script_arguments, self._least_nodes, self._common.hosts
        step = replan.decide(records, hosts, held, written=words, lost=lost, least_nodes=least)
        self.planner.versions = records[0].versions
        self._script.capability = next((one.host.devices[0].compute_capability for one in records if one.host), None)
        if held is not None:
            self.planner.recall(held)
            self.planner.learn_shortage(held, records)
        self._measures_anew = isinstance(step, replan.Measure) and step.anew
        match step:
            case replan.Finish() | replan.GiveUp():
                return self._stop(step.reason, failed=isinstance(step, replan.GiveUp))
            case replan.Measure():
                return self._first(records, step.reason)
            case replan.UseFallback():
                return self._use_fallback(records, step)
            case replan.TryNext() | replan.Keep():
                assert isinstance(held, RunTraining)
                return self._go_on(records, held, step)

    def _go_on(self, records: Sequence[NodeRecord], held: RunTraining, step: replan.TryNext | replan.Keep) -> Decision:
        self._leave_out(set(self._common.hosts) - set(held.hosts))
        if isinstance(step, replan.TryNext):
            assert held.plan is not None
            self._note(step.reason)
            job = self.planner.read_job(self._common.num_ranks, held.plan.device_kind)
            failures = (*held.failures, *(one.failure for one in records if one.failure))
            return self._train(job, held.plan, attempt=step.attempt, failures=failures)
        return replace(
            held,
            nodes=self._common.nodes,
            standby=self._common.standby,
            proven=step.proven,
            restarts_left=step.restarts_left,
            reason=step.reason,
        )

    def _use_fallback(self, records: Sequence[NodeRecord], step: replan.UseFallback) -> Decision:
        """Train at once on the remaining hosts, with a fallback plan that was made before the loss."""
        everyone = self._common
        training = tuple(host for host in hosts_of(records, everyone.hosts) if host.name in step.plan.hosts)
        self._leave_out(set(everyone.hosts) - set(step.plan.hosts))
        try:
            job, plan = self.planner.fitted(step, training)
        except PipetteError as error:
            self._common, self.planner.job = everyone, None
            return self._first(records, joined(step.changes, f"the fallback plan cannot be used: {error}"))
        ran = replace(step, plan=plan, proven=step.proven and plan.chosen.layout == step.plan.chosen.layout)
        self._note(ran.reason)
        return self._train(job, plan, proven=ran.proven, is_refitted=True)

    # -- hosts without a plan -------------------------------------------------------------------------------------

    def _first(self, records: Sequence[NodeRecord], reason: str) -> Decision:
        """Find a plan for new hosts, without the hosts that the health policy excludes."""
        self._note(reason)
        hosts = hosts_of(records, self._common.hosts)
        self._conditions = {host.name: record.conditions for host, record in zip(hosts, records, strict=True)}
        self._driver_verdicts = verdicts = tuple(self._judge(hosts, [*self._conditions.values()]))
        ruling = self._rule(verdicts, hosts)
        self._told_before_warmup = ruling.reasons
        # The training may need the little memory that other processes hold on healthy devices.
        small = [one.words() for one in verdicts if one.kind == "busy" and not one.is_sick]
        self._note(*notes_of(records, self._common.hosts), *small, *ruling.reasons)
        if ruling.stops:
            return self._stop(failed=True)
        rest = self._apart(hosts, ruling)
        try:
            return self._find(rest)
        except PipetteError as error:
            return self._aside(rest, error)

    def _find(self, hosts: tuple[Host, ...]) -> Decision:
        """Take the first of: a plan in a file, a cached plan, a plan from earlier measurements, a warm-up."""
        planner, options = self.planner, self._options
        if options.plan is not None:
            return self._from_file(options.plan, hosts)
        if options.probe_to is not None:
            return self._measure(planner.read_keyed(hosts), hosts)
        job = planner.read_with_spares(hosts, options.spares)
        known = None if self._measures_anew else planner.cache.measurements()
        verdicts = known.verdicts if known else ()
        lasting = [one for one in verdicts if one.kind in MEASURED]
        ruling = self._rule(lasting, hosts, for_spares=verdicts if known else self._driver_verdicts)
        return (
            self._cached(job, hosts, known, ruling)
            or self._remembered(hosts, known, ruling)
            or self._surveyed(job, hosts)
            or self._measure(planner.read_with_spares(hosts, len(ruling.spares)), hosts, len(ruling.spares))
        )

    def _from_file(self, path: Path, hosts: tuple[Host, ...]) -> Decision:
        """Train with the plan file that the user named.

        Hosts that the file does not name become spares, unless --pipette-spares allows fewer spares.
        """
        options, planner = self._options, self.planner
        in_plan = files.read(path, Plan).hosts if options.spares and path.is_file() else self._common.hosts
        others = tuple(host.name for host in hosts if host.name not in in_plan)
        if 0 < len(others) <= min(options.spares, len(hosts) - self._least_nodes):
            hosts = self._apart(hosts, Ruling(spares=others))
        job = planner.read_keyed(hosts)
        return self._train(job, planner.from_file(path, job, hosts))

    def _cached(self, job: Job, hosts: tuple[Host, ...], known: Measurements | None, ruling: Ruling) -> Decision | None:
        """Train with an earlier job's plan for all hosts; None without a plan, or if some hosts must not train."""
        planner = self.planner
        if ruling.stops or ruling.on_standby or self._measures_anew:
            return None
        cached, trouble = planner.cache.load(hosts)
        self._note(trouble)
        if cached is None:
            return None
        planner.measurements = planner.surveyed = known
        self._note(*ruling.reasons)
        return self._train(job, replace(cached, other_hosts=()))

    def _remembered(self, hosts: tuple[Host, ...], known: Measurements | None, ruling: Ruling) -> Decision | None:
        """Train with an earlier job's plan that leaves out the hosts on standby; None if there is no such plan."""
        planner = self.planner
        if known is None or not ruling.on_standby:
            return None
        forget = f"to measure all nodes again, delete {planner.cache.path(CLUSTER)}" if ruling.leave_out else ""
        rest = tuple(host for host in hosts if host.name not in ruling.on_standby)
        job = planner.read_keyed(rest)
        cached, trouble = planner.cache.load(rest)
        if cached is None:
            return None
        self._apart(hosts, ruling)
        planner.measurements, planner.surveyed = planner.cache.measurements(), known
        self._note(*ruling.reasons, forget, trouble)
        return self._train(job, replace(cached, other_hosts=ruling.spares))

    def _surveyed(self, job: Job, hosts: tuple[Host, ...]) -> Decision | None:
        """Plan from this job's earlier measurements after a loss; None at the start, or without such measurements."""
        measured = None if self._measures_anew or self._is_start else self.planner.surveyed_of(self._common.hosts)
        if measured is None:
            return None
        self._note("nothing is measured again: the plan uses earlier measurements of these nodes")
        return self._plan(hosts, job, measured)

    def _measure(self, job: Job, hosts: tuple[Host, ...], num_spares: int = 0) -> Decision:
        # --pipette-probe measures everything anew and uses no earlier measurements.
        is_whole = self._measures_anew or self._options.probe_to is not None
        order = probe_options(
            job,
            hosts,
            options=self.planner.options,
            known=None if is_whole else self.planner.machine_measurements(hosts).path,
            num_training=len(hosts) - num_spares,
        )
        return RunWarmup.of(self._common, order=files.dumps(order))

    def _aside(self, hosts: tuple[Host, ...], error: PipetteError) -> Decision:
        """Train without a plan, on hosts in the order of their links; the first start may measure the links before."""
        if isinstance(error, UsageError) or not orders_hosts(self._options, len(hosts)):
            raise error
        self._note(str(error))
        known = None if self._measures_anew else self.planner.surveyed_of(self._common.hosts)
        if known is None and self._is_start and not self._measures_anew:
            known = self.planner.machine_measurements(hosts).load()
        if known is not None:
            return self._in_order(known)
        if not (self._is_start or self._measures_anew):
            # The first node may be lost together with its measurements, and recovery must not wait for new ones.
            return in_held_order(self._unplanned(), self._held_order)
        order = links_options(hosts, options=self._options)
        return RunWarmup.of(self._common, order=files.dumps(order), only_links=True)

    def _in_order(self, measured: Measurements) -> Decision:
        self.planner.surveyed = measured
        return in_order_of_links(self._unplanned(), measured, self._options)

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

    def after_warmup(self, decision: RunWarmup, failure: str) -> Decision:
        """Make a plan from the measurements. `failure` is the reason why the warm-up failed, or empty."""
        self._common = replace(Decision.of(decision), reason="")
        return self._guarded(lambda: self._after_warmup(decision, failure))

    def _after_warmup(self, decision: RunWarmup, failure: str) -> Decision:
        order = files.loads(WarmupOrder, decision.order, "the order of the warm-up")
        self.planner.job = order.job
        if failure:
            raise ProbeError(failure)
        measurements = files.read(self.measured_at(), Measurements)
        if order.job is not None:
            measurements = self._with_conditions(measurements)
        self.planner.machine_measurements(order.hosts).keep(measurements, self.planner.later)
        if order.job is None:
            return self._in_order(measurements)
        if self._options.probe_to is not None:
            self.planner.measurements = measurements
            files.write(self._options.probe_to, measurements, shared=True)
            return self._stop()
        return self._plan(order.hosts, order.job, measurements)

    def _with_conditions(self, found: Measurements) -> Measurements:
        """Add the drivers' reports and their verdicts. The workers of a warm-up do not need these long reports."""
        hosts = found.cluster.hosts
        conditions = [self._conditions.get(host.name, ()) for host in hosts]
        verdicts = faults_first([*judge(hosts, conditions), *found.verdicts])
        return replace(found, conditions=tuple(chain.from_iterable(conditions)), verdicts=verdicts)

    def _plan(self, hosts: tuple[Host, ...], job: Job, measurements: Measurements) -> Decision:
        """Plan for the measured hosts, without spares and without hosts that the warm-up found sick."""
        ruling = self._rule(measurements.verdicts, hosts, for_spares=measurements.verdicts)
        # Leave out reasons that were printed before the warm-up.
        self._note(*(reason for reason in ruling.reasons if reason not in self._told_before_warmup))
        if ruling.stops:
            return self._stop(failed=True)
        rest = self._apart(hosts, ruling)
        if ruling.on_standby:
            # Save the measurements of the sick hosts, because the next start would otherwise measure these hosts again.
            self._note(self.planner.cache.save(CLUSTER, measurements))
            self.planner.job = None
            job = self.planner.read_keyed(rest)
        left = without_hosts(measurements, ruling.on_standby)
        try:
            plan = self.planner.solve(job, left, surveyed=measurements, spares=ruling.spares)
        except PlanError as error:
            self.planner.surveyed = measurements
            return self._aside(rest, error)
        return self._train(job, plan)

    def after_trial(self, ended: RunTrial, report: TrialReport) -> Decision:
        """Return the decision to run the next trial, or to train with the plan that was fastest in the trials."""
        self._common = replace(Decision.of(ended), reason="")
        return self._guarded(lambda: self._after_trial(ended, report))

    def _after_trial(self, ended: RunTrial, report: TrialReport) -> Decision:
        following = self._trials.judge(ended, report)
        if isinstance(following, Decision):
            return following
        plan = self.planner.without_what_cannot_load(following.plan, following.job)
        if following.is_worth_keeping:
            self.planner.keep(plan, following.job)
        self._note(following.reason)
        return self._train(following.job, plan)

    # -- plans and errors as decisions ----------------------------------------------------------------------------

    def _note(self, *sentences: str) -> None:
        """Add sentences to the reason of the decision in the making."""
        self._common = replace(self._common, reason=joined(self._common.reason, *sentences))

    def _leave_out(self, hosts: Collection[str]) -> None:
        self._common = self._common.leaving_out(hosts)

    def _apart(self, hosts: tuple[Host, ...], ruling: Ruling) -> tuple[Host, ...]:
        """Put the ruling's hosts on standby, and return the hosts that remain for training."""
        self._leave_out(ruling.on_standby)
        return tuple(host for host in hosts if host.name not in ruling.on_standby)

    def _stop(self, reason: str = "", *, failed: bool = False) -> Stop:
        self._note(reason)
        return Stop.of(self._common, failed=failed)

    def _train(
        self,
        job: Job,
        plan: Plan,
        *,
        attempt: int = 0,
        proven: bool = False,
        is_refitted: bool = False,
        failures: tuple[Failure, ...] = (),
    ) -> Decision:
        """Return the decision to train with a plan's candidate, or to run trials before the training."""
        training = RunTraining.of(
            self._common, plan=plan, attempt=attempt, proven=proven, is_refitted=is_refitted, failures=failures
        )
        choice = training.choice
        layout = choice.layout if choice else job.own
        training = replace(
            training,
            script_arguments=self._script.words(job, layout),
            environment=self._script.environment(job, layout, plan.device_kind, is_own=choice is None),
            patches=self.planner.patches,
        )
        if attempt == 0 and not is_refitted:
            following = self._trials.open(training, job)
            if isinstance(following, RunTrial):
                return following
            training = following
        self._script.leave_record(plan, training.choice)
        return Stop.of(training, unrun=training) if self._options.dry_run else training

    def _guarded(self, decide: Callable[[], Decision]) -> Decision:
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
        self._note(reason)
        if is_misuse or options.on_error == "fail" or options.only_looks:
            return Stop.of(self._common, failed=True, is_misuse=is_misuse)
        self._common = replace(self._common, reason=f"{self._common.reason}; {AS_TORCHRUN}")
        return self._unplanned()

    def _unplanned(self) -> RunTraining:
        training, planner = RunTraining.of(self._common, plan=None, patches=self.planner.patches), self.planner
        if planner.job is None:
            return training
        # Write the model's sizes as in the checkpoint, because a model of other sizes could not load the checkpoint.
        # Other arguments stay as the user gave them.
        try:
            words = self._script.words(planner.job, planner.job.own)
        except PipetteError:
            return training
        needed = self._script.environment(planner.job, planner.job.own, planner.device_kind, is_own=True)
        return replace(training, script_arguments=words, environment=needed)
