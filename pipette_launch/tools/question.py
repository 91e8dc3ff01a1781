"""What a planning command is asked: its shared flags, and the job, machines and prices that they mean."""

from __future__ import annotations

import math
import os
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Parsing --help must not wait for numpy.
    from pipette_launch.facts import Job, Layout, Measurements, Plan
    from pipette_launch.forecast import Machines
    from pipette_launch.search.layouts.enumerate import Cuts

MARGIN = 0.02
MEMORY_MARGIN = 0.08
ONE_EXPERT_SIZE = "Layers with experts are timed at one ep for each tp, cp and micro-batch: the nearest to your own."
LAUNCHERS_FIX = "--pipette-fix"
"""What the launcher calls our --fix; sentences about it come from where both are read."""


def seconds(text: str) -> float:
    """Read a budget for argparse, which names the flag of one that is none."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"needs seconds, at least 0 and finite, got {text}")
    return value


def fraction(text: str) -> float:
    """Read a part of a whole for argparse, which names the flag of one that is none."""
    value = _number(text)
    if not 0 <= value < 1:
        raise ArgumentTypeError(f"must be at least 0 and below 1 (0.08 is 8 %), got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"needs a number, got {text!r}") from None


def add_machine_flags(parser: ArgumentParser) -> None:
    """Add the flags that say on which machines."""
    add = parser.add_argument
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument("--cluster", metavar="FILE", type=Path, help="cluster.json that a warm-up measured")
    machines.add_argument("--gpu", metavar="NAME", help="imagine hosts with this device, e.g. h100-sxm or gb200-nvl72")
    add("--nodes", "--nnodes", "--hosts", metavar="N", type=int, help="hosts of the job")
    add(
        "--nproc-per-node", "--nproc_per_node", metavar="N", type=int, help="ranks on each (default: as usual for NAME)"
    )
    add("--world-size", metavar="N", type=int, help="ranks of the job, in place of one of the two")
    add(
        "--fabric", metavar="FILE|NAME", help="network between the hosts of --gpu: a file, uniform, or fat-tree-2:1 ..."
    )


def add_search_flags(parser: ArgumentParser, *, margin: float = MARGIN) -> None:
    """Add the flags that say how to look and what counts as better; `margin` is the default of --margin."""
    add = parser.add_argument
    add(
        "--budget", metavar="SECONDS", type=seconds, default=10.0, help="most processor time of the search (default 10)"
    )
    add("--seed", metavar="N", type=int, default=0, help="of the search's chance (default 0)")
    add(
        "--margin",
        metavar="FRACTION",
        type=fraction,
        default=margin,
        help=f"part of the step that another plan than your own must save (default {margin:g})",
    )
    add(
        "--memory-margin",
        metavar="FRACTION",
        type=fraction,
        default=MEMORY_MARGIN,
        help=f"part of the device memory that must stay free (default {MEMORY_MARGIN})",
    )
    add(
        "--fix", metavar="NAMES", default="", help="parts of the layout that stay: tp,pp,dp,cp,ep,vpp,mbs,recompute,..."
    )
    add("--megatron-version", metavar="V", help="whose flags are read, e.g. 0.16.1 (default: what SCRIPT would import)")


def add_script(parser: ArgumentParser, *, what: str = "SCRIPT") -> None:
    """Add the script and its own flags."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for torchrun")
    parser.add_argument("script", metavar=what, help="as in the job's own command; it need not be here")
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=REMAINDER, help="the script's own flags, exactly as in the job"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A job on machines, with everything that a search prices it by."""

    machines: Machines
    job: Job
    measurements: Measurements
    script: str
    arguments: tuple[str, ...]


def question_of(args: Namespace) -> Question:
    """Find out what is asked.

    Raises:
        PipetteError: the flags or sizes make no sense, a name is unknown, or the job cannot be planned.

    """
    from pipette_launch import megatron
    from pipette_launch.cost.layers.activations import computes_in_fp8
    from pipette_launch.errors import UsageError
    from pipette_launch.forecast import FP8_AS_16_BIT, machines_of, megatron_version_of

    if args.gpu is None and args.cluster is None:
        raise UsageError("on which machines? Name a device type with --gpu, or a measured cluster with --cluster")
    machines = machines_of(
        world_size=args.world_size,
        num_hosts=args.nodes,
        devices_per_host=args.nproc_per_node,
        gpu=args.gpu,
        cluster=args.cluster,
        fabric=args.fabric,
    )
    version, guess = megatron_version_of(args.megatron_version, args.script, os.environ)
    fix = tuple(name for name in args.fix.split(",") if name.strip())
    try:
        megatron.fixed_fields(fix)
    except UsageError as error:
        raise UsageError(str(error).replace(LAUNCHERS_FIX, "--fix")) from error
    job = megatron.read_job(
        args.arguments,
        world_size=machines.world_size,
        megatron_version=version,
        device_kind=machines.kind,
        fix=fix,
        without_probes=machines.spec is not None,
        for_planning=True,
        environment=os.environ,
        device_name=machines.device_name,
    )
    moe = (ONE_EXPERT_SIZE,) if machines.spec is not None and job.model.num_experts else ()
    eight_bit = (FP8_AS_16_BIT,) if machines.spec is not None and computes_in_fp8(job) else ()
    notes = (note.replace(LAUNCHERS_FIX, "--fix") for note in job.notes)
    job = replace(job, notes=(*guess, *machines.notes, *notes, *moe, *eight_bit))
    return Question(
        machines=machines,
        job=job,
        measurements=_measurements(machines, job),
        script=args.script,
        arguments=tuple(args.arguments),
    )


def planned(question: Question, args: Namespace) -> Plan:
    """Search for the best plan; raises PlanError where there is none, with what binds and what would help."""
    import time
    from datetime import datetime, timezone

    from pipette_launch.facts import Provenance
    from pipette_launch.launch.cache.plans import key_of
    from pipette_launch.launch.setting import with_setting
    from pipette_launch.search.solve import SolveOptions, solve

    measured = question.measurements
    key = key_of(
        measured.cluster.hosts, question.job, measured.versions, (args.margin, args.memory_margin), environ=os.environ
    )
    plan = solve(
        question.job,
        measured,
        options=SolveOptions(
            margin=args.margin, memory_margin=args.memory_margin, budget_s=args.budget, seed=args.seed
        ),
        # A machine that is busy with other work slows a search down, and must not cut it short.
        clock=time.process_time,
        provenance=Provenance(
            key=key,
            made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            versions=measured.versions,
            source="imagined" if question.machines.measured is None else "file",
        ),
    )
    return with_setting(
        plan,
        question.job,
        measured,
        script=question.script,
        arguments=question.arguments,
        machines=question.machines.origin,
        network=question.machines.network,
    )


def _measurements(machines: Machines, job: Job) -> Measurements:
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
