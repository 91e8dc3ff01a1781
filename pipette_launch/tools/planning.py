"""A job on machines as a planning problem, and its best plan: for `pipette plan`, `pipette compare` and Python."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipette_launch.defaults import MARGIN, MEMORY_MARGIN, SEARCH_BUDGET_S, SEED

if TYPE_CHECKING:
    # Parsing --help must not wait for numpy.
    from pathlib import Path

    from pipette_launch.facts import Job, Layout, Measurements, Plan
    from pipette_launch.facts.fabric import FabricSpec
    from pipette_launch.facts.known_devices import DeviceFile
    from pipette_launch.forecast import TargetMachines
    from pipette_launch.search.layouts.enumerate import Cuts

ONE_EXPERT_SIZE = "Layers with experts are timed at one ep for each tp, cp and micro-batch: the nearest to your own."
LAUNCHERS_FIX = "--pipette-fix"
"""What the launcher calls our --fix; sentences about it come from where both are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningRequest:
    """What is asked for: which job, on which machines, how hard to look, and what counts as better."""

    arguments: tuple[str, ...]
    """The words behind the script's name."""
    script: str = "pretrain_gpt.py"
    gpu: str | Path | DeviceFile | None = None
    cluster: Path | Measurements | None = None
    fabric: str | Path | FabricSpec | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    world_size: int | None = None
    megatron_version: str | None = None
    fix: tuple[str, ...] = ()
    """Parts of the layout that stay as they are."""
    schedules: str = "stock"
    margin: float = MARGIN
    memory_margin: float = MEMORY_MARGIN
    budget_s: float = SEARCH_BUDGET_S
    """Processor time of the search."""
    seed: int = SEED

    @classmethod
    def of(cls, args: Namespace) -> PlanningRequest:
        """Take it from the flags of a planning command."""
        return cls(
            arguments=tuple(args.arguments),
            script=args.script,
            gpu=args.gpu,
            cluster=args.cluster,
            fabric=args.fabric,
            nodes=args.nodes,
            gpus_per_node=args.gpus_per_node,
            world_size=args.world_size,
            megatron_version=args.megatron_version,
            fix=tuple(name for name in args.fix.split(",") if name.strip()),
            schedules=args.schedules,
            margin=args.margin,
            memory_margin=args.memory_margin,
            budget_s=args.budget,
            seed=args.seed,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningProblem:
    """A job on machines, with everything that a search prices it by."""

    machines: TargetMachines
    job: Job
    measurements: Measurements
    script: str
    arguments: tuple[str, ...]


def problem_of(request: PlanningRequest) -> PlanningProblem:
    """Find the machines, and read the job's flags; its environment is that of this process.

    Raises:
        PipetteError: the flags or sizes make no sense, a name is unknown, or the job cannot be planned.

    """
    from pipette_launch import megatron
    from pipette_launch.errors import UsageError
    from pipette_launch.forecast import machines_of

    if request.gpu is None and request.cluster is None:
        raise UsageError("on which machines? Name a device type with --gpu, or a measured cluster with --cluster")
    machines = machines_of(
        world_size=request.world_size,
        num_hosts=request.nodes,
        devices_per_host=request.gpus_per_node,
        gpu=request.gpu,
        cluster=request.cluster,
        fabric=request.fabric,
    )
    version, guess = megatron.version_or_newest(request.megatron_version, request.script, os.environ)
    try:
        megatron.fixed_fields(request.fix)
    except UsageError as error:
        raise UsageError(str(error).replace(LAUNCHERS_FIX, "--fix")) from error
    job = megatron.read_job(
        request.arguments,
        world_size=machines.world_size,
        megatron_version=version,
        device_kind=machines.kind,
        fix=request.fix,
        without_probes=machines.spec is not None,
        for_planning=True,
        environment=os.environ,
        device_name=machines.device_name,
        capability=machines.capability,
    )
    moe = (ONE_EXPERT_SIZE,) if machines.spec is not None and job.model.num_experts else ()
    notes = (note.replace(LAUNCHERS_FIX, "--fix") for note in job.notes)
    job = replace(job, notes=(*guess, *notes, *machines.notes, *moe))
    return PlanningProblem(
        machines=machines,
        job=job,
        measurements=_measurements(machines, job),
        script=request.script,
        arguments=request.arguments,
    )


def planned(problem: PlanningProblem, request: PlanningRequest) -> Plan:
    """Search for the best plan; raises PlanError where there is none, with what binds and what would help."""
    import time
    from datetime import datetime, timezone

    from pipette_launch.facts import Provenance
    from pipette_launch.facts.known_schedules import schedule_names
    from pipette_launch.launch.cache import key_of
    from pipette_launch.launch.setting import with_setting
    from pipette_launch.search.solve import SolveOptions, solve

    measured = problem.measurements
    schedules = schedule_names(request.schedules)
    settings: tuple[float | str, ...] = (request.margin, request.memory_margin, *schedules)
    key = key_of(measured.cluster.hosts, problem.job, measured.versions, settings, environ=os.environ)
    plan = solve(
        problem.job,
        measured,
        options=SolveOptions(
            margin=request.margin,
            memory_margin=request.memory_margin,
            budget_s=request.budget_s,
            seed=request.seed,
            schedules=schedules,
        ),
        # A machine that is busy with other work slows a search down, and must not cut it short.
        clock=time.process_time,
        provenance=Provenance(
            key=key,
            made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            versions=measured.versions,
            source="imagined" if problem.machines.measured is None else "file",
        ),
    )
    return with_setting(
        plan,
        problem.job,
        measured,
        script=problem.script,
        arguments=problem.arguments,
        machines=problem.machines.origin,
        network=problem.machines.network,
    )


def _measurements(machines: TargetMachines, job: Job) -> Measurements:
    """What was measured, or imagined times of every shape of computation and every group that a layout may have."""
    from pipette_launch.search.layouts.enumerate import cuts

    if machines.measured is not None:
        return machines.measured
    found = cuts(
        job, world_size=machines.world_size, devices_per_host=machines.devices_per_host, device_kind=machines.kind
    )
    own = () if found.own_fault else (job.own,)
    imagined = machines.measurements(job, (*own, *_shapes(found, job.own)))
    assert imagined is not None, "machines of a known type are always imagined"
    return imagined


def _shapes(found: Cuts, own: Layout) -> list[Layout]:
    """A layout for each shape of computation, and for each set of degrees: nothing else changes what is imagined."""
    import numpy as np

    columns = found.columns
    # The first of a shape is what its layers are timed with: of those with experts, the nearest to the user's own.
    apart_N = abs(np.log2(columns.ep / own.ep)) + abs(np.log2(columns.etp / own.etp))
    near = np.argsort(apart_N, kind="stable")
    nearest = columns.take(near).groups("tp", "cp", "micro_batch_size").first_U
    cases = near[nearest].tolist()
    degrees = columns.groups("tp", "pp", "dp", "cp", "ep", "etp").first_U.tolist()
    return [found.columns.layout(row) for row in dict.fromkeys((*cases, *degrees))]
