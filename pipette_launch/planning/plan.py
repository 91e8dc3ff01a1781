"""Plan of a job: from a request on measured or imagined machines, or from the warm-up before the training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from pipette_launch.cost.compute.carried_over import with_extrapolated_times
from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.cost.learned import NOTHING_LEARNED, Corrections, corrections_from
from pipette_launch.defaults import MARGIN, MEMORY_MARGIN, SEARCH_BUDGET_S, SEED, TOP
from pipette_launch.errors import OptionError
from pipette_launch.facts import Job, Layout, Measurements, Plan, Provenance, Setting
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.devices import DeviceFile
from pipette_launch.facts.fabric import FabricSpec
from pipette_launch.facts.outcome import Outcome
from pipette_launch.facts.plan import in_order_of
from pipette_launch.facts.schedule import schedule_names
from pipette_launch.megatron import Dialect
from pipette_launch.planning.machines import TargetMachines, checked_words, machines_of
from pipette_launch.planning.plan_key import plan_key
from pipette_launch.search.candidates import SearchInputs
from pipette_launch.search.fallback_plans import FallbackNeeds, placed_anew, with_cases_of, with_fallback_plans
from pipette_launch.search.layouts import BaseLayouts, base_layouts
from pipette_launch.search.solve import SolveOptions, solve

ONE_EXPERT_SIZE = "Layers with experts are timed at one ep for each tp, cp and micro-batch: the nearest to your own."


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """A job, its machines, and options of the search."""

    arguments: tuple[str, ...]
    """Words of the job's command line after the script's name."""
    script: str = "pretrain_gpt.py"
    gpu: str | Path | DeviceFile | None = None
    cluster: str | Path | Measurements | None = None
    fabric: str | Path | FabricSpec | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    world_size: int | None = None
    megatron_version: str | None = None
    fix: tuple[str, ...] = ()
    schedules: str = "stock"
    margin: float = MARGIN
    memory_margin: float = MEMORY_MARGIN
    budget_s: float = SEARCH_BUDGET_S
    """Limit of the search in processor seconds."""
    seed: int = SEED
    top: int = TOP
    """Number of sets of degrees in the ranked list."""
    bridge_config: str | Path | None = None
    """Configuration that Megatron-Bridge saved, for a job whose arguments are overrides of a recipe."""
    environment: Mapping[str, str] | None = None
    """Variables of the job's workers. None = the variables of this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanProblem:
    """A request whose files and flags were read, and the measurements that price the plan."""

    request: PlanRequest
    machines: TargetMachines
    job: Job
    measurements: Measurements
    dialect: Dialect


def plan(
    arguments: Sequence[str],
    *,
    gpu: str | Path | DeviceFile | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    world_size: int | None = None,
    cluster: str | Path | Measurements | None = None,
    fabric: str | Path | FabricSpec | None = None,
    fix: Sequence[str] = (),
    budget_s: float = SEARCH_BUDGET_S,
    seed: int = SEED,
    top: int = TOP,
    megatron_version: str | None = None,
    bridge_config: str | Path | None = None,
) -> Plan:
    """Choose layout, schedule and placement for a Megatron command line, as `pipette plan` does, but write nothing.

    Args:
        arguments: words of the job's command line after the script's name.
        gpu: device of imagined hosts, by a name such as `h100-sxm` or a file of kind `device`, instead of `cluster`.
        nodes: hosts of the job.
        gpus_per_node: devices and ranks of each host. None = the usual number for `gpu`.
        world_size: ranks of the job. `world_size` can replace `nodes` or `gpus_per_node`.
        cluster: path or contents of a cluster.json of `pipette probe`.
        fabric: network between hosts of `gpu`: a file of kind `fabric`, or a name such as `fat-tree-2:1`.
        fix: parts of the layout that the plan must keep: `tp`, `pp`, `mbs`, `recompute` and others.
        budget_s: limit of the search in processor seconds.
        seed: seed of random numbers. Equal arguments give equal plans unless the budget ends the search.
        top: number of sets of degrees in the plan's ranked list. With 0, the plan has no list and no front.
        megatron_version: such as `0.16.1`. None = the version that a script here would import, else the newest known.
        bridge_config: configuration that Megatron-Bridge saved, for a job whose arguments are overrides of a recipe.

    Returns:
        The plan, with times in seconds and sizes in bytes. `chosen.placement` has the rank of each device slot.

    Raises:
        UsageError: `gpu` and `cluster` are both given or both missing, or a size, name or budget is wrong.
        PlanError: no layout is legal and fits in memory. The error names the limit and a remedy.
        PipetteError: wrong flags, a damaged file, or an unknown name.

    """
    request = PlanRequest(
        arguments=tuple(checked_words(arguments)),
        gpu=gpu,
        cluster=cluster,
        fabric=fabric,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        world_size=world_size,
        megatron_version=megatron_version,
        fix=tuple(fix.split(",") if isinstance(fix, str) else fix),
        budget_s=budget_s,
        seed=seed,
        top=top,
        bridge_config=bridge_config,
    )
    return search_plan(read_problem(request))


def read_problem(request: PlanRequest) -> PlanProblem:
    """Find the machines and read the job's flags."""
    if request.gpu is None and request.cluster is None:
        raise OptionError(("gpu", "cluster"), "are missing: name a device type or a measured cluster")
    machines = machines_of(
        world_size=request.world_size,
        nodes=request.nodes,
        gpus_per_node=request.gpus_per_node,
        gpu=request.gpu,
        cluster=request.cluster,
        fabric=request.fabric,
    )
    script, config = request.script, request.bridge_config
    dialect = machines.dialect(request.arguments, script=script, bridge_config=config)
    job = machines.job(
        dialect,
        script=request.script,
        megatron_version=request.megatron_version,
        environment=os.environ if request.environment is None else request.environment,
        fix=request.fix,
        without_probes=machines.spec is not None,
        for_planning=True,
    )
    moe = (ONE_EXPERT_SIZE,) if machines.spec is not None and job.model.num_experts else ()
    job = replace(job, notes=(*job.notes, *machines.notes, *moe))
    measured = _measurements(machines, job)
    return PlanProblem(request=request, machines=machines, job=job, measurements=measured, dialect=dialect)


def search_plan(problem: PlanProblem) -> Plan:
    """Search for the best plan. If no plan is possible, PlanError names the limit and a remedy."""
    request, measured, machines = problem.request, problem.measurements, problem.machines
    schedules = schedule_names(request.schedules)
    settings: tuple[float | str, ...] = (request.margin, request.memory_margin, *schedules)
    found = best_plan(
        problem.job,
        measured,
        options=SolveOptions(
            margin=request.margin,
            memory_margin=request.memory_margin,
            budget_s=request.budget_s,
            seed=request.seed,
            schedules=schedules,
            num_ranked=request.top,
        ),
        # The budget counts processor time, so that other work on this machine does not end the search sooner.
        clock=time.process_time,
        key=plan_key(measured.cluster.hosts, problem.job, measured.versions, settings, environ=os.environ),
        source="imagined" if machines.measured is None else "file",
    )
    return with_setting(
        found,
        problem.job,
        measured,
        script=request.script,
        dialect=problem.dialect,
        machines=machines.origin,
        network=machines.network,
    )


def best_plan(
    job: Job,
    measurements: Measurements,
    *,
    options: SolveOptions,
    clock: Callable[[], float],
    key: str,
    source: Literal["measured", "imagined", "file"],
    corrections: Corrections = NOTHING_LEARNED,
) -> Plan:
    """Search for the best plan. API, commands and launcher make every plan by this function.

    `clock` returns seconds and measures the budget. `key` is the plan's key in the cache, and is stored in the plan.
    `corrections` are factors on the step time, learned from outcomes of earlier jobs.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    provenance = Provenance(key=key, made_at=now, versions=measurements.versions, source=source)
    return solve(job, measurements, options=options, clock=clock, provenance=provenance, corrections=corrections)


def with_setting(
    plan: Plan, job: Job, measurements: Measurements, *, script: str, dialect: Dialect, machines: str, network: str = ""
) -> Plan:
    """Store job, machines and flags in the plan, so that the plan file can be shown and compared without other files.

    `machines` is the source of the machines' figures, and `network` the network between imagined hosts, in a few words.
    """
    cluster = measurements.cluster

    @cache
    def with_layout(layout: Layout) -> tuple[str, ...]:
        return dialect.written(job, layout)

    setting = Setting(
        script=script,
        arguments=dialect.words,
        new_arguments=with_layout(plan.chosen.layout),
        num_parameters=sum(part.count for part in stage_parameters(job, Layout())),
        global_batch_size=job.batch.global_batch_size,
        seq_length=job.model.seq_length,
        device_name=cluster.hosts[0].devices[0].name,
        device_memory_bytes=cluster.memory_bytes,
        machines=machines,
        network=network,
        megatron_flags=dialect.flags(job.megatron_version) if dialect.is_translated else (),
    )
    ranked, front = (
        tuple(replace(one, new_arguments=with_layout(one.layout)) for one in several)
        for several in (plan.ranked, plan.front)
    )
    alternatives = tuple(replace(one, new_arguments=with_layout(one.layout)) for one in plan.alternatives)
    return replace(plan, setting=setting, alternatives=alternatives, ranked=ranked, front=front)


def _measurements(machines: TargetMachines, job: Job) -> Measurements:
    """Return the measurements. Imagined machines get a time for every compute case and group that a layout may need."""
    if machines.measured is not None:
        return machines.measured
    domains = Domains(devices_per_host=machines.devices_per_host)
    found = base_layouts(job, world_size=machines.world_size, device_kind=machines.kind, domains=domains)
    own = () if found.own_fault else (job.own,)
    imagined = machines.measurements(job, (*own, *_needed_layouts(found, job.own)))
    assert imagined is not None, "machines of a known type are always imagined"
    return imagined


def _needed_layouts(found: BaseLayouts, own: Layout) -> list[Layout]:
    """Return one layout for each compute case (sizes of a layer's pass) and each set of parallel degrees."""
    columns = found.columns
    # Only the first layout of a compute case gets layer times, so the layout nearest to the user's own comes first.
    apart_N = abs(np.log2(columns.ep / own.ep)) + abs(np.log2(columns.etp / own.etp))
    near = np.argsort(apart_N, kind="stable")
    nearest = columns.take(near).groups("tp", "cp", "micro_batch_size").first_U
    cases = near[nearest].tolist()
    degrees = columns.groups("tp", "pp", "dp", "cp", "ep", "etp").first_U.tolist()
    return [found.columns.layout(row) for row in dict.fromkeys((*cases, *degrees))]


PLACING_S = 0.5
"""Time limit (s) of the search for a placement after the loss of a host. Every GPU waits during this search."""


def make_plan(
    job: Job,
    measurements: Measurements,
    outcomes: Sequence[Outcome],
    *,
    options: SolveOptions,
    key: str,
    needs: FallbackNeeds,
) -> Plan:
    """Search for a plan and its fallback plans; PlanError if no layout is legal, fits in memory and has a price."""
    corrections = corrections_from(outcomes)
    priced = with_extrapolated_times(job, measurements)
    clock = time.monotonic
    plan = best_plan(job, priced, options=options, clock=clock, key=key, source="measured", corrections=corrections)
    return with_fallback_plans(plan, measurements, needs, options=options, clock=clock, corrections=corrections)


def placed_for(
    plan: Plan, job: Job, measurements: Measurements, outcomes: Sequence[Outcome], *, options: SolveOptions
) -> Plan:
    """Place the ranks of a plan again on the remaining hosts, and predict the plan's step time there.

    The user's own configuration stays in torchrun's order.
    """
    plan = in_order_of(plan, [host.name for host in measurements.cluster.hosts])
    if plan.keeps_own:
        return plan
    ends_s = time.monotonic() + PLACING_S
    inputs = SearchInputs.of(
        job,
        with_extrapolated_times(job, with_cases_of(job, measurements)),
        memory_margin=options.memory_margin,
        corrections=corrections_from(outcomes),
    )
    chosen = placed_anew(inputs, plan.chosen, seed=options.seed, is_late=lambda: time.monotonic() >= ends_s)
    return replace(plan, chosen=chosen)
