"""`pipette compare` sets plan files side by side, or the choices of several planners for one job."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.defaults import RIVAL_BUDGET_S
from pipette_launch.errors import PlanError, UsageError
from pipette_launch.tools import flags
from pipette_launch.tools.flags import Subcommand

if TYPE_CHECKING:
    # Parsing --help must not wait for numpy.
    from pipette_launch.facts import Plan
    from pipette_launch.facts.results.comparison import Comparison


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette compare`."""
    parser.add_argument(
        "--planners",
        metavar="NAMES",
        help="planners to compare, the others with the first: ours,yours,amp,varuna,pipette,"
        "megatron-rules,topology-sorted,torchrun-order,random ...",
    )
    parser.add_argument(
        "--rival-budget",
        metavar="SECONDS",
        type=flags.seconds,
        default=RIVAL_BUDGET_S,
        help=f"time for each candidate of a planner that anneals (default {RIVAL_BUDGET_S:g}; Pipette's scripts: 10)",
    )
    flags.add_machine_flags(parser)
    # Nothing is going to run: what another plan saves counts, however little.
    flags.add_search_flags(parser, margin=0.0)
    flags.add_reading_flags(parser)
    parser.add_argument("--json", action="store_true", help="print a document of kind `comparison` instead of a screen")
    flags.add_script(parser, what="PLAN|SCRIPT", about="plan files; or with --planners the script of the job")


def run(args: Namespace) -> int:
    """Print the comparison; returns 0 even where a planner has no plan, which is an answer."""
    from pipette_launch.facts import files
    from pipette_launch.report import comparison_screen

    found = of_files(_paths(args)) if args.planners is None else _of_planners(args)
    sys.stdout.write(files.dumps(found) + "\n" if args.json else comparison_screen(found))
    return 0


def _paths(args: Namespace) -> list[Path]:
    words = [args.script, *args.arguments]
    late = [word for word in words if word.startswith("-")]
    if late:
        raise UsageError(
            f"{late[0]} stands behind a file's name; flags of ours stand before, and a job is compared with --planners"
        )
    for flag, value in (("--gpu", args.gpu), ("--cluster", args.cluster), ("--fabric", args.fabric)):
        if value is not None:
            raise UsageError(f"{flag} is for --planners; plan files say themselves what they are for")
    return [Path(word) for word in words]


def _of_planners(args: Namespace) -> Comparison:
    import time

    from pipette_launch.baselines.pick import PlannerOptions
    from pipette_launch.tools import planning, rivals

    names = rivals.checked_names(args.planners)
    request = planning.PlanningRequest.of(args)
    problem = planning.problem_of(request)
    hosts = problem.measurements.cluster.hosts
    options = PlannerOptions(
        capacity_bytes=min(device.memory_total_bytes for host in hosts for device in host.devices),
        clock=time.process_time,
        budget_s=args.rival_budget,
        seed=args.seed,
        memory_margin=args.memory_margin,
        switches_H=problem.machines.switches_H,
    )
    plan: Plan | PlanError = PlanError("not asked")
    if rivals.OURS in names:
        try:
            plan = planning.planned(problem, request)
        except PlanError as error:
            plan = error
    return rivals.of_planners(problem, names, plan, options)


def of_files(paths: Sequence[Path]) -> Comparison:
    """Set plan files side by side; raises FileFormatError for one that is none, UsageError for fewer than two."""
    from pipette_launch.facts import Plan, files
    from pipette_launch.facts.results.comparison import Comparison, Entry
    from pipette_launch.tools.rivals import memory_fault

    if len(paths) < 2:
        raise UsageError(
            f"what is {paths[0] if paths else 'it'} compared with? Name two plan files or more, or planners with "
            f"--planners"
        )
    plans = [files.read(path, Plan) for path in paths]
    entries = [
        Entry(
            name=name,
            choice=plan.chosen,
            gap=plan.gap,
            num_moved=num_moved(plans[0], plan),
            faults=tuple(memory_fault(plan.chosen)),
            remarks=("It is the user's own configuration.",) if plan.keeps_own else (),
        )
        for name, plan in zip(_short(paths), plans, strict=True)
    ]
    return Comparison(entries=tuple(entries), notes=tuple(_unlike(plans)))


def _short(paths: Sequence[Path]) -> list[str]:
    """The names of the files, with their folders where two are alike."""
    names = [path.name.removesuffix(".json").removesuffix(".plan") for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def num_moved(one: Plan, other: Plan) -> int | None:
    """Count the ranks that sit on another device; None where hosts or devices are others."""
    if sorted(one.hosts) != sorted(other.hosts) or one.devices_per_host != other.devices_per_host:
        return None
    size = one.devices_per_host
    moved = 0
    for index, name in enumerate(one.hosts):
        there = other.hosts.index(name)
        mine = one.chosen.placement[index * size : (index + 1) * size]
        others = other.chosen.placement[there * size : (there + 1) * size]
        moved += sum(a != b for a, b in zip(mine, others, strict=True))
    return moved


def _unlike(plans: Sequence[Plan]) -> Iterator[str]:
    """Say where plans are for other jobs or machines than the first, so that their steps mean something else."""
    first = plans[0]
    for number, plan in enumerate(plans[1:], 2):
        if first.setting is None or plan.setting is None:
            yield f"{number}: whether it is for the same job as 1 cannot be told; a file does not say what it is for."
            continue
        for what, name in (
            ("parameters", "num_parameters"),
            ("sequences a step", "global_batch_size"),
            ("tokens a sequence", "seq_length"),
            ("devices", "device_name"),
            ("network", "network"),
        ):
            mine, others = getattr(plan.setting, name), getattr(first.setting, name)
            if mine != others:
                yield f"{number}: other {what} than 1: {mine or 'measured'}, not {others or 'measured'}."
        if len(plan.hosts) != len(first.hosts):
            yield f"{number}: {len(plan.hosts)} hosts, not {len(first.hosts)}."


COMMAND = Subcommand(
    summary="Set plan files side by side, or the choices of several planners.",
    add_arguments=add_arguments,
    run=run,
    examples=(
        "pipette compare a.plan.json b.plan.json",
        "pipette compare --planners ours,yours,amp --gpu H100 --nodes 2 pretrain_gpt.py $ARGS",
    ),
)
"""For `main.COMMANDS`."""
