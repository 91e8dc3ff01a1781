"""`pipette compare` sets plan files side by side, or the choices of several planners for one job."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.tools import question
from pipette_launch.tools.command import Command

if TYPE_CHECKING:
    # Parsing --help must not wait for numpy.
    from pipette_launch.facts import Plan
    from pipette_launch.facts.results.comparison import Comparison

RIVAL_BUDGET_S = 1.0


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette compare`."""
    parser.add_argument(
        "--planners",
        metavar="NAMES",
        help="ask these planners, the first is what the others are measured by: ours,yours,amp,varuna,pipette,"
        "megatron-rules,topology-sorted,torchrun-order,random ...",
    )
    parser.add_argument(
        "--rival-budget",
        metavar="SECONDS",
        type=question.seconds,
        default=RIVAL_BUDGET_S,
        help=f"for each candidate of a planner that anneals (default {RIVAL_BUDGET_S:g}; Pipette's own scripts: 10)",
    )
    question.add_machine_flags(parser)
    # Nothing is going to run: what another plan saves counts, however little.
    question.add_search_flags(parser, margin=0.0)
    parser.add_argument("--json", action="store_true", help="print a document of kind `comparison` instead of a screen")
    question.add_script(parser, what="PLAN|SCRIPT")


def run(args: Namespace) -> int:
    """Print the comparison; returns 0 even where a planner has no plan, which is an answer."""
    from pipette_launch.facts import files
    from pipette_launch.report import comparison_screen
    from pipette_launch.tools import comparing

    found = comparing.of_files(_paths(args)) if args.planners is None else _of_planners(args)
    sys.stdout.write(files.dumps(found) + "\n" if args.json else comparison_screen(found))
    return 0


def _paths(args: Namespace) -> list[Path]:
    from pipette_launch.errors import UsageError

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
    from pipette_launch.errors import PlanError
    from pipette_launch.tools import comparing

    names = comparing.checked_names(args.planners)
    asked = question.question_of(args)
    hosts = asked.measurements.cluster.hosts
    options = PlannerOptions(
        capacity_bytes=min(device.memory_total_bytes for host in hosts for device in host.devices),
        clock=time.process_time,
        budget_s=args.rival_budget,
        seed=args.seed,
        memory_margin=args.memory_margin,
        switches_H=asked.machines.switches_H,
    )
    plan: Plan | PlanError = PlanError("not asked")
    if comparing.OURS in names:
        try:
            plan = question.planned(asked, args)
        except PlanError as error:
            plan = error
    return comparing.of_planners(asked, names, plan, options)


COMMAND = Command(
    summary="Set plan files side by side, or the choices of several planners.",
    add_arguments=add_arguments,
    run=run,
)
"""For `main.COMMANDS`."""
