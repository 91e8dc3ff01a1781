"""Cache of plans, measurements, outcomes and memory shortages for later jobs, and the user's plan files."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from pipette_launch.errors import FileFormatError, LayoutError, PipetteError, PlanError, UsageError
from pipette_launch.facts import Choice, Host, Job, Measurements, Plan, files
from pipette_launch.facts.co_location import Domains, blocks_of
from pipette_launch.facts.fabric import made_up_names
from pipette_launch.facts.measurements import memory_digest
from pipette_launch.facts.outcome import Outcome
from pipette_launch.facts.plan import Shortage
from pipette_launch.planning.plan_key import lasting, steering

Kept = TypeVar("Kept", bound=files.Document)
Later: TypeAlias = "Callable[[Callable[[], None]], None]"
"""Calls a function after the next decision has reached the other nodes."""
logger = logging.getLogger(__name__)

NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
"""Pattern of valid names in a cache: digests (the keys) and this module's own file names."""
PLAN = "plan.json"
CLUSTER = "cluster.json"
OUTCOME = "outcome.json"
OUTCOMES = "outcomes"
"""Name of the folder with all jobs' outcomes, which has a subfolder for each kind of machine."""
MOST_OUTCOMES = 200
"""Largest number of earlier outcomes that a job reads. The job ignores older outcomes."""
CLUSTERS = "clusters"
SHORTAGES = "shortages"
SHORTAGE = "shortage.json"


# -- which folders and names are trusted --------------------------------------------------------------------------


def default_root() -> Path | None:
    """Return the default folder of the cache; None if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipette-launch"
    except RuntimeError:
        return None


def distrust(root: Path) -> str:
    """Return in one line why a folder is not trusted; empty if the folder is trusted or does not exist yet."""
    try:
        state = root.stat()
    except OSError:
        return ""
    if state.st_uid not in (os.geteuid(), 0):
        why = f"belongs to user {state.st_uid} and not to you"
    elif state.st_mode & 0o002:
        why = "may be written by everybody"
    else:
        return ""
    return f"the cache {root} {why}, so it is not used; name another folder, or change its owner or mode"


def inside(root: Path, *names: str) -> Path:
    """Return a path below a cache; raises FileFormatError if a name or a symbolic link leads out of the cache."""
    path = root.joinpath(*names)
    try:
        is_inside = path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):
        is_inside = False
    if not is_inside or not all(map(NAME.fullmatch, names)):
        raise FileFormatError(f"{str(path)!r}: leads out of the cache {root}; delete it")
    return path


class KeptFile(Generic[Kept]):
    """Reads and writes one document of a cache. The log reports an unusable file, and the file counts as missing."""

    def __init__(self, kind: type[Kept], root: Path | None, *names: str) -> None:
        self._kind, self._root, self._names = kind, root, names
        self.path = root.joinpath(*names) if root else None
        """Path of the document; None if the job has no cache."""

    def load(self) -> Kept | None:
        """Return the document; None if the file is missing or cannot be used."""
        if self._root is None:
            return None
        try:
            return files.read(inside(self._root, *self._names), self._kind)
        except FileFormatError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                logger.warning("%s", error)
            return None

    def write(self, document: Kept, trouble: str) -> None:
        """Replace the document; `trouble` begins the log line about an error."""
        if self._root is None:
            return
        try:
            files.write(inside(self._root, *self._names), document)
        except (OSError, FileFormatError) as error:
            logger.warning("%s: %s", trouble, error)


# -- the files of one job, by its key -----------------------------------------------------------------------------


class Cache:
    """Cache folder of one plan key. Errors are logged or returned as texts, and never stop the job."""

    def __init__(self, root: Path | None, key: str) -> None:
        self.key = key
        self._root = root
        self.trouble = ""
        """Reason why the plan was not kept, with a remedy; empty if the plan was kept, or if the job keeps no files."""

    def path(self, name: str) -> Path | None:
        """Return the path of a file; None if the job keeps no files; raises FileFormatError for a path outside."""
        return inside(self._root, self.key, name) if self._root else None

    def load(self, hosts: Sequence[Host]) -> tuple[Plan | None, str]:
        """Return the cached plan and an empty text. If the cached plan cannot be used, return None and the reason."""
        try:
            path = self.path(PLAN)
            if path is None:
                return None, ""
            plan = files.read(path, Plan)
            check_belongs(plan, hosts, str(path), key=self.key)
        except (FileFormatError, PlanError) as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None, ""
            return None, f"the cached plan cannot be used, so the machines are measured again ({error})"
        return replace(plan, provenance=replace(plan.provenance, source="cached")), ""

    def measurements(self) -> Measurements | None:
        """Return the measurements behind the plan; None if their file is missing."""
        return KeptFile(Measurements, self._root, self.key, CLUSTER).load()

    def outcomes(self, host: Host) -> tuple[Outcome, ...]:
        """Return the outcomes of earlier jobs on machines like this host, newest last."""
        if self._root is None:
            return ()
        folder = self._root / OUTCOMES / machines_of(host)
        try:
            paths = sorted(folder.glob("*.json"), key=lambda path: (path.stat().st_mtime, path.name))[-MOST_OUTCOMES:]
        except OSError:
            return ()
        kept = (KeptFile(Outcome, self._root, OUTCOMES, folder.name, path.name).load() for path in paths)
        return tuple(filter(None, kept))

    def keep_outcome(self, outcome: Outcome, host: Host) -> str:
        """Write an outcome beside its plan, and for all jobs on such machines; return an error or an empty text."""
        name = f"{outcome.key}-{files.digest(outcome.layout, list(outcome.placement))}.json"
        if outcome.configuration_digest:
            trouble = "the outcome cannot be kept for later jobs"
            KeptFile(Outcome, self._root, OUTCOMES, machines_of(host), name).write(outcome, trouble)
        return self.save(OUTCOME, outcome)

    def keep_plan(self, plan: Plan) -> None:
        """Write a plan into the cache; an error goes into `trouble`."""
        self.trouble = self.save(PLAN, plan)

    @property
    def plan_path(self) -> Path | None:
        """Path of the plan; None if no plan was kept."""
        path = None if self.trouble else self.path(PLAN)
        return path if path is not None and path.exists() else None

    def save(self, name: str, document: files.Document) -> str:
        """Write a document into the cache; return the error, or an empty text."""
        try:
            path = self.path(name)
            if path is None:
                return ""
            files.write(path, document)
        except FileFormatError as error:
            return str(error)
        except OSError as error:
            return (
                f"{path} cannot be written ({error.strerror or error}): the next start will measure again; "
                f"name a writable folder with --pipette-cache, or switch the cache off with --pipette-cache off"
            )
        return ""


# -- files that several jobs share --------------------------------------------------------------------------------


def machines_of(host: Host) -> str:
    """Return a digest of a machine's hardware without its name, because each job gets other machines of a cluster.

    The digest leaves out the memory of CPU slots, which depends on the number of slots that share a host.
    """
    return files.digest(
        [(device.kind, device.name, device.kind == "cuda" and device.memory_total_bytes) for device in host.devices],
        host.cores,
    )


class MachineMeasurements(KeptFile[Measurements]):
    """Last measurements of a set of hosts with given software versions and variables, which all models share."""

    def __init__(
        self, root: Path | None, hosts: Sequence[Host], versions: Mapping[str, str], *, environ: Mapping[str, str]
    ) -> None:
        key = files.digest(lasting(hosts), dict(versions), steering(environ))
        super().__init__(Measurements, root, CLUSTERS, key, CLUSTER)

    def keep(self, measurements: Measurements, later: Later) -> None:
        """Write new measurements `later`."""
        if self.path is not None:
            later(lambda: self.write(measurements, "links cannot be kept, so the next job will measure all of them"))


class ShortageFile(KeptFile[Shortage]):
    """File of the memory shortage of one job on one kind of machine with given software versions."""

    def __init__(self, root: Path | None, host: Host, job: Job, versions: Mapping[str, str]) -> None:
        key = files.digest(machines_of(host), memory_digest(job), job.megatron_version, dict(versions))
        super().__init__(Shortage, root, SHORTAGES, key, SHORTAGE)


# -- an earlier plan for this job ---------------------------------------------------------------------------------


def named_plan(path: Path, hosts: Sequence[Host]) -> Plan:
    """Read the user's plan file, and name real hosts for imagined hosts; raises UsageError if the plan cannot run."""
    try:
        plan = files.read(path, Plan)
        if plan.provenance.source == "imagined" and plan.hosts == made_up_names(len(hosts)):
            note = (
                f"The plan was made for {len(hosts)} imagined hosts; {hosts[0].name} to {hosts[-1].name} replace them "
                f"in torchrun's order, without regard to the links between them"
            )
            plan = replace(plan, hosts=tuple(host.name for host in hosts), advice=(*plan.advice, note))
        check_belongs(plan, hosts, str(path))
    except PipetteError as error:
        raise UsageError(f"--pipette-plan {error}") from error
    return plan


def check_belongs(plan: Plan, hosts: Sequence[Host], source: str, *, key: str = "") -> None:
    """Raise PlanError unless a plan is for these hosts and devices, and has `key` if `key` is not empty."""
    if key and plan.provenance.key != key:
        raise PlanError(f"{source}: the plan has the key {plan.provenance.key}, its folder {key}; delete it")
    here = sorted(host.name for host in hosts)
    if sorted(plan.hosts) != here:
        raise PlanError(
            f"{source}: the plan is for the hosts {', '.join(sorted(plan.hosts))}; this job runs on {', '.join(here)}"
        )
    devices, kind = len(hosts[0].devices), hosts[0].devices[0].kind
    if plan.devices_per_host != devices:
        raise PlanError(f"{source}: the plan is for {plan.devices_per_host} devices a host; this job has {devices}")
    if plan.device_kind != kind:
        raise PlanError(f"{source}: the plan is for {plan.device_kind} devices; this job has {kind}")


def adopt(plan: Plan, job: Job, key: str, source: str) -> tuple[Plan, str]:
    """Turn a plan from a file into a plan of this job as `suited` does; also return a note for the user, or ""."""
    adopted = suited(plan, job, key, source)
    adopted = replace(adopted, provenance=replace(adopted.provenance, source="file"))
    if plan.provenance.key == key:
        return adopted, ""
    note = (
        f"{source} was made for another job, or for other machines, versions or margins (its key is "
        f"{plan.provenance.key}, this job's is {key}): its predictions may not hold here"
    )
    return replace(adopted, advice=(*adopted.advice, note)), note


def suited(plan: Plan, job: Job, key: str, source: str) -> Plan:
    """Turn an earlier plan into a plan of this job: use the job's own configuration, drop candidates the job excludes.

    Raises PlanError if the plan changes an option that this job pins, or splits ranks that need to share a host.
    """

    def changed_pins(choice: Choice) -> list[str]:
        return [name for name in job.pinned if getattr(choice.layout, name) != getattr(job.own, name)]

    # The plan beside a checkpoint may keep the own configuration of the job that wrote the checkpoint. In another job's
    # plan, this configuration is an ordinary candidate.
    keeps_own = plan.keeps_own and plan.chosen.layout == job.own
    if not keeps_own:
        if name := next(iter(changed_pins(plan.chosen)), None):
            raise PlanError(
                f"{source}: the plan has {name}={getattr(plan.chosen.layout, name)}, and this job pins "
                f"{name}={getattr(job.own, name)}; pinned are {', '.join(job.pinned)}, because: "
                f"{'; '.join(job.notes) or '--pipette-fix'}"
            )
        plan = kept_together(plan, job, Domains(devices_per_host=plan.devices_per_host), source)
    own = plan.own
    if own.layout != job.own:
        order = tuple(range(job.own.world_size))
        own = replace(own, layout=job.own, placement=order, configuration_digest="")
    alternatives = tuple(choice for choice in plan.alternatives if not changed_pins(choice))
    # Trials of another job or of other plans do not prove this plan.
    is_same = plan.provenance.key == key and alternatives == plan.alternatives
    return replace(
        plan,
        keeps_own=keeps_own,
        alternatives=alternatives,
        trials=plan.trials if is_same else None,
        num_in_line=plan.num_in_line if is_same else None,
        own=own,
        own_fault="",  # The user's own layout is legal in a job that runs.
        provenance=replace(plan.provenance, key=key),
    )


def kept_together(plan: Plan, job: Job, domains: Domains, source: str) -> Plan:
    """Remove alternatives that split ranks which the job's flags demand inside one host or NVLink domain.

    `domains` has the NVLink domains of the hosts in the plan's order. Raises PlanError if the chosen candidate splits
    such ranks.
    """
    if plan.device_kind != "cuda":
        return plan

    def fault(choice: Choice) -> str:
        try:
            blocks = blocks_of(job.model, job.options, choice.layout, domains)
        except LayoutError as error:
            return str(error)
        split = domains.split(blocks, choice.placement)
        return f"it splits {split.words}, and {split.asked_by} needs each inside {split.inside}" if split else ""

    why = fault(plan.chosen)
    if why:
        raise PlanError(f"{source}: {plan.chosen.layout.words()} cannot run on these hosts in this order: {why}")
    return replace(plan, alternatives=tuple(choice for choice in plan.alternatives if not fault(choice)))
