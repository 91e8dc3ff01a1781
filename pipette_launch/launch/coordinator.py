"""The judgement of a job: from a plan file, the cache or the warm-up to one decision for all nodes."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipette_launch import replan
from pipette_launch.errors import PipetteError, ProbeError, UsageError
from pipette_launch.facts import Measurements, files
from pipette_launch.facts.messages.round import Decision, NodeRecord
from pipette_launch.facts.some_hosts import without_hosts
from pipette_launch.launch.cache.measurements import MachineMeasurements
from pipette_launch.launch.cache.plan_files import adopt, named_plan
from pipette_launch.launch.cache.plans import CLUSTER, Cache, key_of
from pipette_launch.launch.health_policy import Ruling, apart, measured, rule, small_holders
from pipette_launch.launch.nodes import hosts_of, in_order, joined, restart_words, unique_names
from pipette_launch.launch.trials.run import TrialCoordinator
from pipette_launch.launch.user_script import Script
from pipette_launch.probe.health.verdicts import judge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipette_launch.facts import Host, Job, Plan
    from pipette_launch.facts.health.condition import DeviceCondition
    from pipette_launch.facts.health.verdict import Verdict
    from pipette_launch.facts.messages.round import TrialReport
    from pipette_launch.launch.options import Options
    from pipette_launch.probe.options import ProbeOptions

logger = logging.getLogger(__name__)

CPU_PATCHES = ("cpu_backend",)
"""What stock Megatron needs to train without a GPU."""

Judge: TypeAlias = "Callable[[Sequence[Host], Sequence[Sequence[DeviceCondition]]], Sequence[Verdict]]"


class Coordinator:
    """Decides for all nodes; every agent has one, and the first node's is asked."""

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
            options: what the user asked for.
            folder: a private one, where the warm-up leaves what it measured.
            interruption: what a signal raises; it is no failure of a plan.
            judge: finds what is amiss, from what drivers tell of each host's devices.
            least_nodes: how few may train, MIN of --nnodes.
            is_static: whether the rendezvous waits for all nodes whatever --nnodes says.

        """
        self._options = options
        self._folder = folder
        self._interruption = interruption
        self._judge = judge
        self._least_nodes = least_nodes
        self._is_static = is_static
        self._versions: dict[str, str] = {}
        self._conditions: dict[str, tuple[DeviceCondition, ...]] = {}
        self._patches: tuple[str, ...] = ()
        self._device_kind = ""
        self._job: Job | None = None
        self._is_start = True
        self._told_before_warmup: tuple[str, ...] = ()
        # The agent puts a plan's variables into its own environment; these are the user's.
        self._environ = dict(os.environ)
        self._script = Script(options, self._environ)
        self._trials = TrialCoordinator(options, self._script)
        self.cache = Cache(None, "")
        self.measurements: Measurements | None = None
        """What the plan in force rests on, where it is known."""

    def decide(self, records: Sequence[NodeRecord], held: Decision | None) -> Decision:
        """Decide for all nodes what a new round does."""
        self._is_start = held is None
        ordered = in_order(records)
        bare = Decision(
            phase="train",
            tokens=tuple(record.token for record in ordered),
            hosts=unique_names(ordered),
            num_slots=tuple(record.num_slots for record in ordered),
        )
        return self._guarded(bare, lambda: self._decide(bare, ordered, held))

    def _decide(self, bare: Decision, records: Sequence[NodeRecord], held: Decision | None) -> Decision:
        step = replan.decide(records, bare.hosts, held, written=self._options.script_arguments)
        self._versions = records[0].versions
        self._script.device_name = next((record.host.devices[0].name for record in records if record.host), "")
        if held is None or isinstance(step, replan.Measure):
            return self._first(bare, records, step.reason if isinstance(step, replan.Measure) else "")
        bare = bare.leaving_out(set(bare.hosts) - set(held.hosts))
        if isinstance(step, replan.GiveUp):
            return replace(bare, phase="stop", failed=True, reason=step.reason)
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
            reason=restart_words(records),
            free=False,
        )

    def _next(self, bare: Decision, held: Decision, step: replan.TryNext) -> Decision:
        """Go on to the next candidate of a plan."""
        assert held.plan is not None
        job = self._read_job(sum(bare.num_slots), held.plan.device_kind)
        return self._train(bare, job, held.plan, attempt=step.attempt, reason=step.reason)

    def _first(self, bare: Decision, records: Sequence[NodeRecord], reason: str) -> Decision:
        """Find a plan for hosts that have none, without those that had better not take part."""
        hosts = hosts_of(records, bare.hosts)
        self._conditions = {host.name: record.conditions for host, record in zip(hosts, records, strict=True)}
        verdicts = self._judge(hosts, [*self._conditions.values()])
        ruling = self._rule(verdicts, hosts)
        self._told_before_warmup = ruling.reasons
        bare = replace(bare, reason=joined(reason, *small_holders(verdicts), *ruling.reasons))
        if ruling.stops:
            return replace(bare, phase="stop", failed=True)
        smaller, rest = apart(bare, hosts, ruling)
        return self._guarded(smaller, lambda: self._find(smaller, rest))

    def _find(self, bare: Decision, hosts: tuple[Host, ...]) -> Decision:
        """Find a plan: from a file, from the cache, or by measuring."""
        job = self._read_keyed(hosts)
        if self._options.probe_to is not None:
            return self._measure(bare, job, hosts)
        if self._options.plan is not None:
            named = self._from_file(self._options.plan, job, hosts)
            return self._train(bare, job, named, attempt=0, reason=bare.reason)
        known = self.cache.measurements()
        ruling = self._rule(measured(known.verdicts) if known else (), hosts)
        if not (ruling.stops or ruling.leave_out):
            cached, trouble = self.cache.load(hosts)
            if cached is not None:
                self.measurements = known
                return self._train(bare, job, cached, attempt=0, reason=joined(bare.reason, *ruling.reasons))
            bare = replace(bare, reason=joined(bare.reason, trouble))
        elif ruling.leave_out and (remembered := self._remembered(bare, hosts, ruling)) is not None:
            return remembered
        return self._measure(bare, self._read_keyed(hosts), hosts)

    def _measure(self, bare: Decision, job: Job, hosts: tuple[Host, ...]) -> Decision:
        """Order a warm-up."""
        # What plans a warm-up is imported when there is one: a start from the cache does without it.
        from pipette_launch.launch.warmup_orders import probe_options

        told = [one for host in hosts for one in self._conditions.get(host.name, ())]
        # Whoever asks for a measurement gets one of everything.
        before = self._machine_measurements(hosts).path if self._options.probe_to is None else None
        orders = probe_options(job, hosts, options=self._options, folder=self._folder, known=before, conditions=told)
        return replace(bare, phase="warmup", probe_options=files.dumps(orders))

    def _machine_measurements(self, hosts: tuple[Host, ...]) -> MachineMeasurements:
        """What was measured of these hosts for whatever job."""
        return MachineMeasurements(self._options.cache, hosts, self._versions, environ=self._environ)

    def _remembered(self, bare: Decision, hosts: tuple[Host, ...], ruling: Ruling) -> Decision | None:
        """Return the plan that an earlier job made without the hosts that it had found to be sick; None without one."""
        forget = f"to measure all nodes again, delete {self.cache.path(CLUSTER)}"
        smaller, rest = apart(bare, hosts, ruling)
        job = self._read_keyed(rest)
        cached, _ = self.cache.load(rest)
        if cached is None:
            return None
        self.measurements = self.cache.measurements()
        reason = joined(bare.reason, *ruling.reasons, forget)
        return self._guarded(smaller, lambda: self._train(smaller, job, cached, attempt=0, reason=reason))

    def _rule(self, verdicts: Sequence[Verdict], hosts: tuple[Host, ...]) -> Ruling:
        """Apply --pipette-on-sick."""
        return rule(
            verdicts,
            [host.name for host in hosts],
            policy=self._options.on_sick,
            least_nodes=self._least_nodes,
            is_static=self._is_static,
            why_not=lambda names: self._why_not(tuple(host for host in hosts if host.name in names)),
        )

    def _why_not(self, hosts: tuple[Host, ...]) -> str:
        """Say why the job cannot run on these hosts; empty where it can."""
        try:
            if self._options.plan is not None:
                named_plan(self._options.plan, hosts)
            self._script.read(len(hosts) * len(hosts[0].devices), hosts[0].devices[0].kind)
        except PipetteError as error:
            return str(error)
        return ""

    def _from_file(self, path: Path, job: Job, hosts: Sequence[Host]) -> Plan:
        """Return the plan that the user named, as a plan of this job; the screen shows its notes."""
        adopted, note = adopt(named_plan(path, hosts), job, self.cache.key, str(path))
        self.measurements = None if note else self.cache.measurements()
        return adopted

    def _read_keyed(self, hosts: tuple[Host, ...]) -> Job:
        """Read the job for these hosts, and turn to the folder of its plan."""
        job = self._read_job(len(hosts) * len(hosts[0].devices), hosts[0].devices[0].kind)
        settings = self._options.plan_settings
        self.cache = Cache(self._options.cache, key_of(hosts, job, self._versions, settings, environ=self._environ))
        return job

    def _read_job(self, world_size: int, device_kind: str) -> Job:
        self._job = job = self._script.read(world_size, device_kind)
        self._device_kind = device_kind
        # Known to be Megatron's: without a GPU it needs the patches, whatever becomes of the plan.
        self._patches = CPU_PATCHES if device_kind == "cpu" and self._options.runs_python else ()
        return job

    def after_warmup(self, decision: Decision, failure: str) -> Decision:
        """Turn what the warm-up measured into a plan."""
        from pipette_launch.launch.warmup_orders import read

        bare = replace(decision, phase="train", probe_options="", reason="")
        return self._guarded(bare, lambda: self._weigh(bare, read(decision), failure))

    def _weigh(self, bare: Decision, orders: ProbeOptions, failure: str) -> Decision:
        """Plan for the hosts that were measured, without those that turned out to be sick."""
        self._job = orders.job
        if failure:
            raise ProbeError(failure)
        measurements = self._machine_measurements(orders.hosts).kept(files.read(self._folder / CLUSTER, Measurements))
        if self._options.probe_to is not None:
            self.measurements = measurements
            files.write(self._options.probe_to, measurements, shared=True)
            return replace(bare, phase="stop")
        ruling = self._rule(measurements.verdicts, orders.hosts)
        # The warm-up knows again what the drivers had told before it.
        news = (reason for reason in ruling.reasons if reason not in self._told_before_warmup)
        bare = replace(bare, reason=joined(*news))
        if ruling.stops:
            return replace(bare, phase="stop", failed=True)
        if not ruling.leave_out:
            return self._guarded(bare, lambda: self._solve(bare, orders.job, measurements))
        # For the next start, which would else measure the sick ones again.
        trouble = self.cache.save(CLUSTER, measurements)
        smaller, rest = apart(replace(bare, reason=joined(bare.reason, trouble)), orders.hosts, ruling)

        def solve() -> Decision:
            return self._solve(smaller, self._read_keyed(rest), without_hosts(measurements, ruling.leave_out))

        return self._guarded(smaller, solve)

    def _solve(self, bare: Decision, job: Job, measurements: Measurements) -> Decision:
        from pipette_launch.launch.planning import make_plan
        from pipette_launch.launch.setting import with_setting

        self._job = job
        plan = make_plan(
            job,
            measurements,
            self.cache.outcomes(measurements.cluster.hosts[0]),
            options=self._options,
            key=self.cache.key,
        )
        plan = with_setting(
            plan,
            job,
            measurements,
            script=self._options.script,
            arguments=self._options.script_arguments,
            machines=f"measured at {measurements.taken_at}",
        )
        self.cache.keep_plan(plan, measurements)
        self.measurements = measurements
        return self._train(bare, job, plan, attempt=0, reason=bare.reason)

    def after_trial(self, ended: Decision, report: TrialReport) -> Decision:
        """Order the next trial, or the training of whatever was measured best."""
        bare = replace(ended, phase="train", trial=0, iterations=0, script_arguments=None, environment={}, reason="")
        return self._guarded(replace(bare, plan=None), lambda: self._after_trial(bare, ended, report))

    def _after_trial(self, bare: Decision, ended: Decision, report: TrialReport) -> Decision:
        following = self._trials.judge(ended, report)
        if isinstance(following, Decision):
            return following
        if following.is_worth_keeping:
            self.cache.keep_plan(following.plan)
        return self._train(bare, following.job, following.plan, attempt=0, reason=following.reason)

    def _train(self, bare: Decision, job: Job, plan: Plan, *, attempt: int, reason: str) -> Decision:
        """Write the decision to run a plan's candidate, with the words that its script is given."""
        following = replace(
            bare, phase="train", plan=plan, attempt=attempt, proven=False, reason=reason, free=attempt > 0
        )
        choice = following.choice
        needed = self._script.environment(choice.layout if choice else job.own, plan.device_kind, is_own=choice is None)
        following = replace(
            following,
            script_arguments=self._script.words(job, choice.layout if choice else job.own),
            environment=needed,
            patches=self._patches,
        )
        if attempt == 0 and (following := self._trials.open(following, job)).phase == "trial":
            return following
        self._script.leave_record(plan, following.choice)
        if self._options.dry_run:
            return replace(following, phase="stop")
        return following

    def _guarded(self, bare: Decision, decide: Callable[[], Decision]) -> Decision:
        """Decide; when that fails, train with the user's own configuration, or stop if the user wants or erred."""
        self._job = None
        is_misuse = False
        try:
            return decide()
        except self._interruption:
            raise
        except PipetteError as error:
            reason = str(error)
            # Once a job runs, hosts may go: that their plan is for others is then nobody's error.
            is_misuse = isinstance(error, UsageError) and self._is_start and self._options.on_error != "train"
        except Exception as error:
            logger.exception("planning failed")
            reason = f"planning failed by an error of pipette-launch itself: {type(error).__name__}: {error}"
        reason = joined(bare.reason, reason)
        if is_misuse or self._options.on_error == "fail" or self._options.only_looks:
            return replace(bare, phase="stop", failed=True, is_misuse=is_misuse, reason=reason)
        reason = f"{reason}; training with your own configuration as torchrun would"
        following = replace(bare, patches=self._patches, reason=reason)
        return following if self._job is None else self._as_checkpoint_demands(following, self._job)

    def _as_checkpoint_demands(self, following: Decision, job: Job) -> Decision:
        """Put in the sizes that a checkpoint dictates, without which it cannot be loaded; other words stay."""
        try:
            words = self._script.words(job, job.own)
        except PipetteError:
            return following
        needed = self._script.environment(job.own, self._device_kind, is_own=True)
        return replace(following, script_arguments=words, environment=needed)
