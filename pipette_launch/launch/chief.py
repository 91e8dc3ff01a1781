"""The judgement of a job: from a plan file, the cache or the warm-up to one decision for all nodes."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch import megatron, replan
from pipette_launch.errors import ClusterError, PipetteError, ProbeError
from pipette_launch.facts import Measurements, Plan, files
from pipette_launch.facts.round import Decision, NodeRecord
from pipette_launch.launch.cache import CLUSTER, PLAN, Cache, key_of
from pipette_launch.launch.reuse import adopt, check_belongs, on_real_hosts
from pipette_launch.probe.options import ProbeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipette_launch.agent.conductor import Invite
    from pipette_launch.facts import Host, Job, Layout
    from pipette_launch.launch.options import Options

logger = logging.getLogger(__name__)

CPU_PATCHES = ("cpu_backend",)
"""What stock Megatron needs to train without a GPU."""


class Chief:
    """Decides for all nodes; every agent has one, and the first node's is asked."""

    def __init__(self, options: Options, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._device_name = ""
        self._patches: tuple[str, ...] = ()
        self._device_kind = ""
        self._job: Job | None = None
        # The agent puts a plan's variables into its own environment; these are the user's.
        self._environ = dict(os.environ)
        self.interruption: type[Exception] = InterruptedError
        """What a signal to the agent raises."""
        self.cache = Cache(None, "")
        self.measurements: Measurements | None = None
        """What the plan in force rests on, where it is known."""

    def decide(self, records: Sequence[NodeRecord], held: Decision | None) -> Decision:
        """Decide for all nodes what a new round does."""
        ordered = (
            sorted(records, key=lambda record: record.node_rank)
            if min(record.node_rank for record in records) >= 0
            else records
        )
        names = replan.unique_names(ordered)
        bare = Decision(
            phase="train",
            tokens=tuple(record.token for record in ordered),
            hosts=names,
            num_slots=tuple(record.num_slots for record in ordered),
        )
        return self._guarded(bare, lambda: self._decide(bare, ordered, held))

    def _decide(self, bare: Decision, records: Sequence[NodeRecord], held: Decision | None) -> Decision:
        step = replan.decide(records, bare.hosts, held)
        self._device_name = next((record.host.devices[0].name for record in records if record.host), "")
        if held is not None and isinstance(step, replan.Keep):
            return replace(
                held,
                tokens=bare.tokens,
                hosts=bare.hosts,
                num_slots=bare.num_slots,
                proven=step.proven,
                reason=_restart_words(records),
                free=False,
            )
        if held is not None and held.plan is not None and isinstance(step, replan.TryNext):
            job = self._read_job(sum(bare.num_slots), held.plan.device_kind)
            # Words that the user wrote are refused under every plan alike.
            own_fault = megatron.refused_flags(step.reason) & set(self._options.script_arguments)
            attempt = len(held.plan.candidates()) if own_fault else step.attempt
            return self._train(bare, job, held.plan, attempt=attempt, reason=step.reason)
        return self._first(bare, records, step.reason if isinstance(step, replan.Measure) else "")

    def _first(self, bare: Decision, records: Sequence[NodeRecord], reason: str) -> Decision:
        """Find a plan for hosts that have none: from a file, from the cache, or by measuring."""
        hosts = _hosts(records, bare.hosts)
        reasons = [text for text in (reason, *_warnings(records)) if text]
        job = self._read_job(sum(bare.num_slots), hosts[0].devices[0].kind)
        settings = (self._options.margin, self._options.memory_margin)
        self.cache = Cache(
            self._options.cache, key_of(hosts, job, records[0].versions, settings, environ=self._environ)
        )
        if self._options.plan is not None:
            plan = self._from_file(self._options.plan, job, hosts)
            return self._train(bare, job, plan, attempt=0, reason="; ".join(reasons))
        cached, trouble = self.cache.load(hosts)
        if cached is not None:
            self.measurements = self.cache.measurements()
            return self._train(bare, job, cached, attempt=0, reason="; ".join(reasons))
        reasons += [trouble] if trouble else []
        # What plans a warm-up is imported when there is one: a start from the cache does without it.
        from pipette_launch.launch.orders import probe_options

        orders = files.dumps(probe_options(job, hosts, options=self._options, folder=self._folder))
        return replace(bare, phase="warmup", reason="; ".join(reasons), probe_options=orders)

    def _from_file(self, path: Path, job: Job, hosts: Sequence[Host]) -> Plan:
        """Return the plan that the user named, as a plan of this job; the screen shows its notes."""
        plan = on_real_hosts(files.read(path, Plan), hosts)
        check_belongs(plan, hosts, str(path))
        adopted, note = adopt(plan, job, self.cache.key, str(path))
        self.measurements = None if note else self.cache.measurements()
        return adopted

    def _read_job(self, world_size: int, device_kind: str) -> Job:
        version = megatron.script_version(self._options.script, self._environ)
        self._job = job = megatron.read_job(
            self._options.script_arguments,
            world_size=world_size,
            megatron_version=version,
            device_kind=device_kind,
            fix=self._options.fix,
            environment=self._environ,
            device_name=self._device_name,
        )
        self._device_kind = device_kind
        # Known to be Megatron's: without a GPU it needs the patches, whatever becomes of the plan.
        self._patches = CPU_PATCHES if device_kind == "cpu" and self._options.runs_python else ()
        return job

    def after_warmup(self, decision: Decision, failure: str, invite: Invite) -> Decision:
        """Turn what the warm-up measured into a plan, with the help of the nodes that can be invited."""
        bare = replace(decision, phase="train", probe_options="", reason="")
        orders = files.loads(ProbeOptions, decision.probe_options, "the warm-up's orders")
        return self._guarded(bare, lambda: self._solve(bare, orders, failure, invite))

    def _solve(self, bare: Decision, orders: ProbeOptions, failure: str, invite: Invite) -> Decision:
        from pipette_launch.launch.planning import make_plan
        from pipette_launch.launch.setting import with_setting

        self._job = orders.job
        if failure:
            raise ProbeError(failure)
        measurements = files.read(Path(orders.output), Measurements)
        plan, words = make_plan(
            orders.job,
            measurements,
            self.cache.outcomes(orders.hosts[0]),
            options=self._options,
            key=self.cache.key,
            folder=self._folder,
            invite=invite,
        )
        plan = with_setting(
            plan,
            orders.job,
            measurements,
            script=self._options.script,
            arguments=self._options.script_arguments,
            machines=f"measured at {measurements.taken_at}",
        )
        trouble = self.cache.save(CLUSTER, measurements) or self.cache.save(PLAN, plan)
        self.measurements = measurements
        reason = "; ".join(text for text in (*words, trouble) if text)
        return self._train(bare, orders.job, plan, attempt=0, reason=reason)

    def _train(self, bare: Decision, job: Job, plan: Plan, *, attempt: int, reason: str) -> Decision:
        """Write the decision to run a plan's candidate, with the words that its script is given."""
        following = replace(
            bare, phase="train", plan=plan, attempt=attempt, proven=False, reason=reason, free=attempt > 0
        )
        choice = following.choice
        needed = self._environment(choice.layout if choice else job.own, plan.device_kind, is_own=choice is None)
        following = replace(
            following,
            script_arguments=megatron.write_arguments(
                self._options.script_arguments, job=job, layout=choice.layout if choice else job.own
            ),
            environment=needed,
            patches=self._patches,
        )
        self._leave_record(following, plan)
        if self._options.dry_run:
            return replace(following, phase="stop")
        return following

    def _environment(self, layout: Layout, device_kind: str, *, is_own: bool) -> dict[str, str]:
        needed = megatron.environment(layout, device_kind=device_kind, device_name=self._device_name)
        # torchrun would have left the user's own variables alone.
        return {name: value for name, value in needed.items() if not is_own or name not in self._environ}

    def _guarded(self, bare: Decision, decide: Callable[[], Decision]) -> Decision:
        """Decide; when that fails, train with the user's own configuration, or stop if the user wants that."""
        self._job = None
        try:
            return decide()
        except self.interruption:
            raise
        except PipetteError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("planning failed")
            reason = f"planning failed by an error of pipette-launch itself: {type(error).__name__}: {error}"
        if self._options.on_error == "fail" or self._options.dry_run:
            return replace(bare, phase="stop", failed=True, reason=reason)
        reason = f"{reason}; training with your own configuration as torchrun would"
        following = replace(bare, patches=self._patches, reason=reason)
        return following if self._job is None else self._as_checkpoint_demands(following, self._job)

    def _as_checkpoint_demands(self, following: Decision, job: Job) -> Decision:
        """Put in the sizes that a checkpoint dictates, without which it cannot be loaded; other words stay."""
        try:
            words = megatron.write_arguments(self._options.script_arguments, job=job, layout=job.own)
        except PipetteError:
            return following
        needed = self._environment(job.own, self._device_kind, is_own=True)
        return replace(following, script_arguments=words, environment=needed)

    def _leave_record(self, decision: Decision, plan: Plan) -> None:
        """Leave the plan beside the checkpoints that it will write, for the job that loads them."""
        path = megatron.record_path(self._options.script_arguments)
        if path is None or self._options.dry_run:
            return
        runs = decision.choice or plan.own
        try:
            files.write(path, replace(plan, chosen=runs, keeps_own=decision.choice is None))
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): a job that loads the checkpoint will not know its plan", path, error
            )


def _hosts(records: Sequence[NodeRecord], names: Sequence[str]) -> tuple[Host, ...]:
    """Return the job's hosts under unique names; raises ClusterError for a set of nodes that no plan can use."""
    for record, name in zip(records, names, strict=True):
        if record.trouble:
            raise ClusterError(f"{name}: {record.trouble}")
    counts = {name: record.num_slots for record, name in zip(records, names, strict=True)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ClusterError(
            f"the nodes lend unequal numbers of slots ({listed}); give every node the same --nproc-per-node, "
            f"at most {min(counts.values())}"
        )
    for what, values in (
        ("script and arguments", [record.script_digest for record in records]),
        ("versions", [str(sorted(record.versions.items())) for record in records]),
    ):
        others = [name for name, value in zip(names, values, strict=True) if value != values[0]]
        if others:
            raise ClusterError(
                f"{what} differ between {names[0]} and {', '.join(others)}; start the same on every node"
            )
    ranks = [record.node_rank for record in records]
    if len(set(ranks)) < len(ranks) and min(ranks) >= 0:
        raise ClusterError(f"two nodes have the same --node-rank: {sorted(ranks)}")
    return tuple(replace(record.host, name=name) for record, name in zip(records, names, strict=True) if record.host)


def _restart_words(records: Sequence[NodeRecord]) -> str:
    """Say why workers start again under what they ran before; empty when only the nodes changed."""
    failures = sorted({record.failure for record in records if record.failure})
    return f"{failures[0]}; starting again under the same plan" if failures else ""


def _warnings(records: Sequence[NodeRecord]) -> list[str]:
    return [warning for record in records for warning in record.warnings]
