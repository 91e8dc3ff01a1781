"""Which folder may be a cache, and which paths below it are followed."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pipette_launch.errors import FileFormatError, LayoutError, PipetteError, PlanError, UsageError
from pipette_launch.facts import Choice, Host, Job, Measurements, Plan, files
from pipette_launch.facts.co_location import Domains, blocks_of
from pipette_launch.facts.fabric import made_up_names
from pipette_launch.facts.measurements import memory_digest
from pipette_launch.facts.outcome import Outcome
from pipette_launch.facts.plan import Shortage
from pipette_launch.megatron.performance import performance_options
from pipette_launch.planning.plan_key import lasting, steering

Kept = TypeVar("Kept", bound=files.Document)
logger = logging.getLogger(__name__)

NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
"""Keys are digests, and files have names of ours: no other folder can be meant."""


def distrust(root: Path) -> str:
    """Say why a folder is not believed, in one line; empty where it is, and where it is still to be made."""
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
    """Return a path below a cache; raises FileFormatError where a name or a symbolic link leads out of it."""
    path = root.joinpath(*names)
    try:
        is_inside = path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):
        is_inside = False
    if not is_inside or not all(map(NAME.fullmatch, names)):
        raise FileFormatError(f"{str(path)!r}: leads out of the cache {root}; delete it")
    return path


def read_kept(kind: type[Kept], root: Path | None, *names: str) -> Kept | None:
    """Return a document of a cache; None where none was kept, and where it cannot be used, which is said."""
    if root is None:
        return None
    try:
        return files.read(inside(root, *names), kind)
    except FileFormatError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            logger.warning("%s", error)
        return None


def named_plan(path: Path, hosts: Sequence[Host]) -> Plan:
    """Read the plan that the user named; raises UsageError where there is none, or it is not for these hosts."""
    try:
        plan = on_real_hosts(files.read(path, Plan), hosts)
        check_belongs(plan, hosts, str(path))
    except PipetteError as error:
        raise UsageError(f"--pipette-plan {error}") from error
    return plan


def on_real_hosts(plan: Plan, hosts: Sequence[Host]) -> Plan:
    """Put as many real hosts, in their own order, in the places of imagined ones that nobody has named."""
    if plan.provenance.source != "imagined" or plan.hosts != made_up_names(len(hosts)):
        return plan
    note = (
        f"The plan was made for {len(hosts)} imagined hosts; {hosts[0].name} to {hosts[-1].name} take their places in "
        f"torchrun's order, whatever the links between them are"
    )
    return replace(plan, hosts=tuple(host.name for host in hosts), notes=(*plan.notes, note))


def check_belongs(plan: Plan, hosts: Sequence[Host], source: str) -> None:
    """Raise PlanError unless a plan is for these hosts and devices."""
    here = sorted(host.name for host in hosts)
    if sorted(plan.hosts) != here:
        raise PlanError(
            f"{source}: the plan is for the hosts {', '.join(sorted(plan.hosts))}; this job runs on {', '.join(here)}"
        )
    devices = len(hosts[0].devices)
    if plan.devices_per_host != devices:
        raise PlanError(f"{source}: the plan is for {plan.devices_per_host} devices a host; this job has {devices}")
    kind = hosts[0].devices[0].kind
    if plan.device_kind != kind:
        raise PlanError(f"{source}: the plan is for {plan.device_kind} devices; this job has {kind}")


def adopt(plan: Plan, job: Job, key: str, source: str) -> tuple[Plan, str]:
    """Make a plan from a file the plan of this job; returns what the user should know about it, or nothing.

    Args:
        plan: as the file has it.
        job: what it is to run.
        key: of this job.
        source: the file.

    Raises:
        PlanError: the plan changes what this job pins.

    """
    adopted = suited(plan, job, key, source)
    adopted = replace(adopted, provenance=replace(adopted.provenance, source="file"))
    if plan.provenance.key == key:
        return adopted, ""
    note = (
        f"{source} was made for another job, other machines or other versions (its key is {plan.provenance.key}, this "
        f"job's is {key}): its predictions may not hold here"
    )
    return replace(adopted, notes=(*adopted.notes, note)), note


def suited(plan: Plan, job: Job, key: str, source: str) -> Plan:
    """Make a plan that was made before one of this job: with its own configuration, and without what it pins otherwise.

    Args:
        plan: for as many hosts as the job has.
        job: what is to run.
        key: of this job.
        source: where the plan is from, for the error.

    Raises:
        PlanError: the plan changes what this job pins, or splits what its flags demand inside one host.

    """
    # The record beside a checkpoint keeps its own configuration; in another job that is a configuration like any other.
    keeps_own = plan.keeps_own and plan.chosen.layout == job.own
    if not keeps_own:
        _check_pins(plan.chosen, job, source)
        plan = kept_together(plan, job, Domains(devices_per_host=plan.devices_per_host), source)
    own = plan.own
    if own.layout != job.own:
        own = replace(
            own,
            layout=job.own,
            placement=tuple(range(job.own.world_size)),
            features={},
            device_peak_bytes=(),
            memory=None,
        )
    alternatives = tuple(choice for choice in plan.alternatives if not _changed_pins(choice, job))
    # What was tried in another job, or beside other plans, settles nothing here.
    is_same = plan.provenance.key == key and alternatives == plan.alternatives
    return replace(
        plan,
        keeps_own=keeps_own,
        alternatives=alternatives,
        trials=plan.trials if is_same else None,
        num_in_line=plan.num_in_line if is_same else None,
        own=own,
        own_fault="",  # a job that runs was read with a layout that Megatron takes
        provenance=replace(plan.provenance, key=key),
    )


def kept_together(plan: Plan, job: Job, rooms: Domains, source: str) -> Plan:
    """Leave out the alternatives that split ranks which the job's flags demand inside one host or NVLink domain.

    Args:
        plan: with its hosts in the order of the rooms.
        job: what is to run.
        rooms: the plan's hosts.
        source: where the plan is from, for the error.

    Raises:
        PlanError: the plan itself splits such ranks.

    """
    if plan.device_kind != "cuda":
        return plan

    def fault(choice: Choice) -> str:
        try:
            blocks = blocks_of(job.model, performance_options(job), choice.layout, rooms)
        except LayoutError as error:
            return str(error)
        split = rooms.split(blocks, choice.placement)
        return f"it splits {split.words}, and {split.asked_by} needs each inside {split.inside}" if split else ""

    why = fault(plan.chosen)
    if why:
        raise PlanError(f"{source}: {plan.chosen.layout.words()} cannot run so on these hosts: {why}")
    return replace(plan, alternatives=tuple(choice for choice in plan.alternatives if not fault(choice)))


def _changed_pins(choice: Choice, job: Job) -> list[str]:
    return [name for name in job.pinned if getattr(choice.layout, name) != getattr(job.own, name)]


def _check_pins(choice: Choice, job: Job, source: str) -> None:
    changed = _changed_pins(choice, job)
    if changed:
        name = changed[0]
        raise PlanError(
            f"{source}: the plan has {name}={getattr(choice.layout, name)}, and this job pins "
            f"{name}={getattr(job.own, name)}; pinned are {', '.join(job.pinned)}, because: "
            f"{'; '.join(job.notes) or '--pipette-fix'}"
        )


PLAN = "plan.json"
CLUSTER = "cluster.json"
OUTCOME = "outcome.json"
OUTCOMES = "outcomes"
"""The folder of what all jobs came to, in a folder for each kind of machine."""
MOST_OUTCOMES = 200
"""So many of the newest are read."""


def default_root() -> Path | None:
    """Where plans and answers are kept unless the user says otherwise; None where there is no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipette-launch"
    except RuntimeError:
        return None


def machines_of(host: Host) -> str:
    """Digest what makes machines alike, whatever they are called: a batch system gives a job other ones each time.

    A processor's memory is no make, and how much of it a slot has depends on who shares it.
    """
    return files.digest(
        [(device.kind, device.name, device.kind == "cuda" and device.memory_total_bytes) for device in host.devices],
        host.cores,
    )


class Cache:
    """The folder of one key. What cannot be read or written is said once and is never fatal."""

    def __init__(self, root: Path | None, key: str) -> None:
        self.key = key
        self._root = root
        self.trouble = ""
        """Why the plan could not be kept and what to do; empty where it was, or where none is wanted."""

    def path(self, name: str) -> Path | None:
        """Where a file of this key lies; None when nothing is kept, FileFormatError where it leads out of the cache."""
        return inside(self._root, self.key, name) if self._root else None

    def load(self, hosts: Sequence[Host]) -> tuple[Plan | None, str]:
        """Return the plan of this key, or None and the reason when there is a file that cannot be used."""
        try:
            path = self.path(PLAN)
            if path is None:
                return None, ""
            plan = files.read(path, Plan)
            _check_key(plan, self.key, path)
            check_belongs(plan, hosts, str(path))
        except (FileFormatError, PlanError) as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None, ""
            return None, f"the cached plan cannot be used, so the machines are measured anew ({error})"
        return replace(plan, provenance=replace(plan.provenance, source="cached")), ""

    def measurements(self) -> Measurements | None:
        """Return what the plan of this key rests on, if it is still there."""
        return read_kept(Measurements, self._root, self.key, CLUSTER)

    def outcomes(self, host: Host) -> tuple[Outcome, ...]:
        """Return what earlier jobs on machines like this host came to, the newest last."""
        if self._root is None:
            return ()
        newest = _by_age(self._root / OUTCOMES / machines_of(host))[-MOST_OUTCOMES:]
        found = (_outcome(self._root, machines_of(host), path.name) for path in newest)
        return tuple(outcome for outcome in found if outcome is not None)

    def keep_outcome(self, outcome: Outcome, host: Host) -> str:
        """Keep an outcome beside its plan and among those of all jobs on such machines; returns why not, or nothing."""
        name = f"{outcome.key}-{files.digest(outcome.layout, list(outcome.placement))}.json"
        if outcome.features and self._root is not None:
            try:
                files.write(inside(self._root, OUTCOMES, machines_of(host), name), outcome)
            except (OSError, FileFormatError) as error:
                logger.warning("the outcome cannot be kept for later jobs: %s", error)
        return self.save(OUTCOME, outcome)

    def keep_plan(self, plan: Plan, measurements: Measurements | None = None) -> None:
        """Keep a plan, and what it rests on where that is not kept yet; where that fails, `trouble` says why."""
        self.trouble = (self.save(CLUSTER, measurements) if measurements else "") or self.save(PLAN, plan)

    @property
    def plan_path(self) -> Path | None:
        """Where the plan of this key lies; None where none was kept."""
        path = None if self.trouble else self.path(PLAN)
        return path if path is not None and path.exists() else None

    def save(self, name: str, document: files.Document) -> str:
        """Keep a document; returns why it could not be kept, or nothing."""
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


def _outcome(root: Path, machines: str, name: str) -> Outcome | None:
    try:
        return files.read(inside(root, OUTCOMES, machines, name), Outcome)
    except FileFormatError as error:
        logger.warning("%s", error)
        return None


def _by_age(folder: Path) -> list[Path]:
    """The documents of a folder, the oldest first; none where it cannot be read."""
    try:
        return sorted(folder.glob("*.json"), key=lambda path: (path.stat().st_mtime, path.name))
    except OSError:
        return []


def _check_key(plan: Plan, key: str, path: Path) -> None:
    if plan.provenance.key != key:
        raise PlanError(f"{path}: the plan has the key {plan.provenance.key}, its folder {key}; delete it")


CLUSTERS = "clusters"


class MachineMeasurements:
    """The file of one set of hosts, versions and variables. What cannot be read or written costs time, not the job."""

    def __init__(
        self, root: Path | None, hosts: Sequence[Host], versions: Mapping[str, str], *, environ: Mapping[str, str]
    ) -> None:
        key = files.digest(lasting(hosts), dict(versions), steering(environ))
        self._root, self._names = root, (CLUSTERS, key, CLUSTER)
        self.path = root.joinpath(*self._names) if root else None
        """None when nothing is kept."""

    def load(self) -> Measurements | None:
        """Return what was measured last on these hosts, in whatever order it names them."""
        return read_kept(Measurements, self._root, *self._names)

    def kept(self, measurements: Measurements) -> Measurements:
        """Put what was measured in the place of what was there; returns it with what of that still holds."""
        # A start from the cache keeps nothing, and does without this import.
        from pipette_launch.cost.compute.carried_over import with_cached_times

        if self._root is None:
            return measurements
        whole = with_cached_times(measurements, self.load())
        try:
            files.write(inside(self._root, *self._names), whole)
        except (OSError, FileFormatError) as error:
            logger.warning("links cannot be kept (%s): the next job will measure all of them", error)
        return whole


SHORTAGES = "shortages"
SHORTAGE = "shortage.json"


class ShortageFile:
    """The file of one kind of machine, what is trained, and versions. One that cannot be used is said once."""

    def __init__(self, root: Path | None, host: Host, job: Job, versions: Mapping[str, str]) -> None:
        key = files.digest(machines_of(host), memory_digest(job), job.megatron_version, dict(versions))
        self._root, self._names = root, (SHORTAGES, key, SHORTAGE)
        self.path = root.joinpath(*self._names) if root else None
        """None when nothing is kept."""

    def load(self) -> Shortage | None:
        """Return what is known; None where nothing is."""
        return read_kept(Shortage, self._root, *self._names)

    def keep(self, shortage: Shortage) -> None:
        """Put a shortage in the place of what was there."""
        if self._root is None:
            return
        try:
            files.write(inside(self._root, *self._names), shortage)
        except (OSError, FileFormatError) as error:
            logger.warning("that %s cannot be kept for later jobs: %s", shortage.sentence, error)
