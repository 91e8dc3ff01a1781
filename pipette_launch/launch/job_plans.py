"""Plans of a job on the node that decides: from a file, the cache or a search, and refitted to the remaining hosts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from pipette_launch import megatron
from pipette_launch.errors import MegatronError, PipetteError, PlanError
from pipette_launch.facts import Host, Job, Measurements, Plan, files
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.measurements import without_hosts
from pipette_launch.facts.messages import Decision, NodeRecord, RunScript, RunTraining
from pipette_launch.facts.plan import Shortage, in_order_of, lower
from pipette_launch.launch import cache
from pipette_launch.launch.cache import CLUSTER, Cache, ShortageFile
from pipette_launch.launch.options import Options, Script
from pipette_launch.launch.plan_reports import PlanDocuments, page_of, page_path, trace_of, trace_path
from pipette_launch.planning.plan_key import plan_key
from pipette_launch.planning.replan import UseFallback
from pipette_launch.text import counted, joined

logger = logging.getLogger(__name__)
CPU_PATCHES = ("cpu_backend",)
"""Patches that stock Megatron needs to train without a GPU."""
MADE_AHEAD = "the plan that was made ahead"


class Planner:
    """The job and the measurements of its hosts, on the node that decides for all."""

    def __init__(
        self, options: Options, script: Script, environ: Mapping[str, str], *, least_nodes: int, later: cache.Later
    ) -> None:
        self._options = options
        self.later = later
        self._script = script
        self._environ = environ
        self._least_nodes = least_nodes
        self.batch: int | None = None
        """Global batch size of the training so far; None at the start. The user's own layout may be illegal with it."""
        self.versions: dict[str, str] = {}
        self.job: Job | None = None
        """Job as read for the present decision; None before the first successful reading."""
        self.patches: tuple[str, ...] = ()
        self.device_kind = ""
        self.cache = Cache(None, "")
        """Cache folder of the plan that the job runs now."""
        self.measurements: Measurements | None = None
        """Measurements behind the plan that the job runs now; None if unknown."""
        self.surveyed: Measurements | None = None
        """Measurements of all hosts of the warm-up, including spares."""
        self.shortage: Shortage | None = None
        """Memory shortage of a plan that failed in this or an earlier job; None if no plan ran out of memory."""
        self._shortage_path: Path | None = None

    # -- the job, for given hosts ---------------------------------------------------------------------------------

    def read_job(self, world_size: int, device_kind: str, *, batch: int | None = None) -> Job:
        """Read the job for `world_size` ranks as `megatron.read_job` does; a `batch` replaces `self.batch`."""
        self.job = job = self._script.read(world_size, device_kind, global_batch_size=batch or self.batch)
        self.device_kind = device_kind
        # The script uses Megatron, so without a GPU the script needs the CPU patch even if planning fails.
        self.patches = CPU_PATCHES if device_kind == "cpu" and self._options.runs_python else ()
        return job

    def read_keyed(self, hosts: Sequence[Host], *, batch: int | None = None) -> Job:
        """Read the job for these hosts as `read_job` does, and set `cache` to the folder of the job's plan.

        The key of the plan has the memory margin, so after a shortage no cached plan of a smaller margin runs.
        """
        job = self.read_job(len(hosts) * len(hosts[0].devices), hosts[0].devices[0].kind, batch=batch)
        file = ShortageFile(self._options.cache, hosts[0], job, self.versions)
        self._shortage_path, self.shortage = file.path, lower(self.shortage, file.load())
        options = self.options
        settings: list[float | str] = [options.margin, options.memory_margin, *options.schedules]
        num_fallbacks = min(options.tolerate, len(hosts) - self._least_nodes)
        if num_fallbacks > 0:
            settings += ["templates", num_fallbacks]
        self.cache = Cache(options.cache, plan_key(hosts, job, self.versions, settings, environ=self._environ))
        return job

    def read_with_spares(self, hosts: Sequence[Host], num_spares: int) -> Job:
        """Read the job for all hosts with spares, even if the user's own configuration is legal only without spares."""
        num_spares = min(num_spares, len(hosts) - self._least_nodes)
        try:
            return self.read_keyed(hosts)
        except MegatronError:
            if num_spares < 1 or self.batch is not None:
                raise
        training = self.read_job((len(hosts) - num_spares) * len(hosts[0].devices), hosts[0].devices[0].kind)
        return self.read_keyed(hosts, batch=training.batch.global_batch_size)

    def why_not(self, hosts: Sequence[Host]) -> str:
        """Return why the job cannot run on these hosts; empty if the job can."""
        try:
            if self._options.plan is not None:
                cache.named_plan(self._options.plan, hosts)
            self._script.read(len(hosts) * len(hosts[0].devices), hosts[0].devices[0].kind)
        except PipetteError as error:
            return str(error)
        return ""

    # -- the job's plan --------------------------------------------------------------------------------------------

    def machine_measurements(self, hosts: Sequence[Host]) -> cache.MachineMeasurements:
        """Return the file with the measurements of these hosts, which all jobs share."""
        return cache.MachineMeasurements(self._options.cache, hosts, self.versions, environ=self._environ)

    def from_file(self, path: Path, job: Job, hosts: Sequence[Host]) -> Plan:
        """Read the plan file that the user named, and turn it into a plan of this job."""
        adopted, note = cache.adopt(cache.named_plan(path, hosts), job, self.cache.key, str(path))
        self.measurements = None if note else self.cache.measurements()
        if self.shortage and self.shortage.rules_out(adopted.chosen):
            note = f"This plan runs because you named it, though it needs as much memory: {self.shortage.sentence}."
            adopted = replace(adopted, advice=(*adopted.advice, note))
        return adopted

    @property
    def options(self) -> Options:
        """The user's settings. After a plan ran out of memory, the memory margin is larger."""
        if self.shortage is None:
            return self._options
        return replace(self._options, memory_margin=self.shortage.margin(self._options.memory_margin))

    def solve(self, job: Job, measurements: Measurements, *, surveyed: Measurements, spares: Sequence[str]) -> Plan:
        """Search for a plan, and keep the plan in the cache; raises PlanError if there is no plan.

        `surveyed` are the measurements of all hosts of the warm-up, including the hosts that stand by (`spares`).
        """
        # Import the search only here, because a start with a cached plan does not search.
        from pipette_launch.planning.plan import make_plan, with_setting
        from pipette_launch.search.fallback_plans import FallbackNeeds

        self.job = job
        words, cluster, batch = self._options.script_arguments, measurements.cluster, job.batch.global_batch_size
        size, kind = cluster.devices_per_host, cluster.device_kind
        needs = FallbackNeeds(
            tolerate=self._options.tolerate,
            least_hosts=self._least_nodes,
            global_batch_size=batch,
            num_layers=job.model.num_layers,
            job_of=lambda num_hosts: self._script.read(num_hosts * size, kind, global_batch_size=batch),
            continuation_of=lambda layout: megatron.continuation(words, job, layout),
        )
        lean = ""
        if self.shortage is not None:
            forget = f" (to forget it, delete {self._shortage_path})" if self._shortage_path else ""
            lean = (
                f"{self.shortage.sentence}; so plans leave {self.options.memory_margin:.0%} of the memory free instead "
                f"of {self._options.memory_margin:.0%}{forget}"
            )
        outcomes = self.cache.outcomes(cluster.hosts[0])
        options = self.options.search_options()
        try:
            plan = make_plan(job, measurements, outcomes, options=options, key=self.cache.key, needs=needs)
        except PlanError as error:
            raise PlanError(joined(str(error), lean)) from error
        source = f"measured at {measurements.taken_at}"
        dialect = self._script.dialect(job.own.world_size)
        plan = with_setting(plan, job, measurements, script=self._options.script, dialect=dialect, machines=source)
        advice = (*plan.advice, f"{lean[0].upper()}{lean[1:]}.") if lean else plan.advice
        plan = replace(plan, other_hosts=tuple(spares), advice=advice)
        self.measurements, self.surveyed = measurements, surveyed
        self.keep(plan, job)
        return plan

    def keep(self, plan: Plan, job: Job) -> None:
        """Keep a plan in the cache. Measurements, report and trace of 1,000 hosts take seconds, so these follow later.

        The log reports errors of measurements, report and trace.
        """
        kept, measured = self.cache, self.measurements
        kept.keep_plan(plan)
        path = kept.plan_path
        if path is not None:
            self.later(lambda: self._add_files(path, kept, plan, job, measured))

    @staticmethod
    def _add_files(path: Path, kept: Cache, plan: Plan, job: Job, measured: Measurements | None) -> None:
        from pipette_launch.planning.picture import picture_of

        try:
            if measured is not None and (trouble := kept.save(CLUSTER, measured)):
                logger.warning("%s", trouble)
            picture = None if measured is None else picture_of(plan, job, measured)
            documents = PlanDocuments(plan=plan, measurements=measured, picture=picture)
            files.write_text(trace_path(path), trace_of(documents))
            files.write_text(page_path(path), page_of(documents))
        except (OSError, PipetteError) as error:
            logger.warning("report or trace is missing beside %s: %s", path, error)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError):
            # Catch no other exceptions: a signal to the launcher also raises an exception, which must end the job.
            logger.exception("report or trace is missing beside %s; the job goes on with its plan", path)

    # -- after a failure or the loss of a host --------------------------------------------------------------------

    def recall(self, held: Decision) -> None:
        """Load the measurements of the plan in use, and the shortage of memory that the last decision knew."""
        plan = held.plan if isinstance(held, RunScript) else None
        if self.surveyed is None and plan is not None:
            self.surveyed = Cache(self._options.cache, plan.provenance.key).measurements()
        self.shortage = lower(self.shortage, held.shortage)

    def learn_shortage(self, held: Decision, records: Sequence[NodeRecord]) -> None:
        """Record a shortage for this job and later jobs if the last attempt at training ran out of memory."""
        # Skip a plan file that the user named, because it may predict the memory of other machines.
        if not isinstance(held, RunTraining) or held.plan is None or self._options.plan is not None:
            return
        found = _shortage(held, held.plan, records)
        self.shortage = lower(self.shortage, found)
        host = next((record.host for record in records if record.host and record.token in held.tokens), None)
        if found is None or host is None or self.shortage is not found:
            return
        trouble = f"the shortage of memory ({found.sentence}) cannot be kept for later jobs"
        try:
            job = self.read_job(held.num_ranks, held.plan.device_kind)
        except PipetteError as error:
            logger.warning("%s: %s", trouble, error)
            return
        ShortageFile(self._options.cache, host, job, self.versions).write(found, trouble)

    def surveyed_of(self, hosts: Sequence[str]) -> Measurements | None:
        """Return the measurements of these hosts; None if a host was not measured."""
        if self.surveyed is None:
            return None
        known = [host.name for host in self.surveyed.cluster.hosts]
        return without_hosts(self.surveyed, set(known) - set(hosts)) if set(hosts) <= set(known) else None

    def fitted(self, step: UseFallback, hosts: Sequence[Host]) -> tuple[Job, Plan]:
        """Turn a fallback plan into the plan of the remaining hosts, with ranks placed for the links of these hosts.

        Raises PipetteError if the job cannot run with the fallback plan, or cannot load the checkpoint.
        """
        job = self.read_keyed(hosts)
        plan = cache.suited(step.plan, job, self.cache.key, MADE_AHEAD)
        if self.shortage is not None:
            leaner = self.shortage.leaner(plan)
            if leaner is None:
                raise PlanError("it needs as much memory as a plan that ran out of it")
            plan = leaner
        self.measurements = measurements = self.surveyed_of(plan.hosts)
        if measurements is None:
            return job, plan
        from pipette_launch.planning.plan import placed_for

        outcomes = self.cache.outcomes(hosts[0])
        try:
            plan = placed_for(plan, job, measurements, outcomes, options=self.options.search_options())
        except PipetteError as error:
            logger.warning("the ranks keep their places on the remaining nodes: %s", error)
            plan = in_order_of(plan, [host.name for host in measurements.cluster.hosts])
        return job, cache.kept_together(plan, job, Domains.of(measurements.cluster), MADE_AHEAD)

    def without_what_cannot_load(self, plan: Plan, job: Job) -> Plan:
        """Remove fallback plans that cannot load the chosen candidate's checkpoints, with a note about their number."""
        layout = plan.chosen.layout
        saved = megatron.continuation(self._options.script_arguments, job, layout)
        left = tuple(one for one in plan.templates if saved.can_load(layout, one.chosen.layout))
        if left == plan.templates:
            return plan
        gone = len(plan.templates) - len(left)
        plans = counted(gone, "plan")
        note = f"Left out: {plans} for fewer hosts, which cannot load the checkpoints of {layout.words()}."
        return replace(plan, templates=left, advice=(*plan.advice, note))


def _shortage(held: RunTraining, plan: Plan, records: Sequence[NodeRecord]) -> Shortage | None:
    # A plan for GPUs predicts GPU memory only, so a host that ran out of RAM proves nothing.
    kinds = ("out-of-memory",) if plan.device_kind == "cuda" else ("out-of-memory", "out-of-host-memory")
    ended = [record.failure for record in records if record.failure and record.attempt == held.attempt]
    short = next((failure for failure in ended if failure.kind in kinds), None)
    if short is None:
        return None
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Shortage.of(held.choice or plan.own, cause=short.sentence, noticed_at=now)
