"""Whether a plan that was made before may run a job, and what it becomes there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipette_launch.errors import LayoutError, PipetteError, PlanError, UsageError
from pipette_launch.facts import Plan, files
from pipette_launch.facts.co_location import Rooms, blocks_of
from pipette_launch.facts.fabric import made_up_names
from pipette_launch.megatron.performance import performance_options

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipette_launch.facts import Choice, Host, Job


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
        plan = kept_together(plan, job, Rooms(devices_per_host=plan.devices_per_host), source)
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


def kept_together(plan: Plan, job: Job, rooms: Rooms, source: str) -> Plan:
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
