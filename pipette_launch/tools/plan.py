"""`pipette plan` chooses layout and placement for machines that were measured before, or for imagined ones."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.errors import PipetteError, UsageError
from pipette_launch.text import printable
from pipette_launch.tools import flags
from pipette_launch.tools.flags import Subcommand

if TYPE_CHECKING:
    from pipette_launch.facts import Plan
    from pipette_launch.planning.plan import PlanProblem, PlanRequest


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette plan`; what stands behind the script belongs to the script."""
    flags.add_machine_flags(parser)
    flags.add_search_flags(parser)
    flags.add_reading_flags(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the plan to this file, for --pipette-plan and `pipette compare`, and its report beside it",
    )
    parser.add_argument("--json", action="store_true", help="print the plan's document instead of a screen")
    flags.add_detail_flags(parser)
    flags.add_script(parser)


def run(args: Namespace) -> int:
    """Print the plan and write its file; returns 0 for every plan, the user's own configuration included."""
    # Parsing --help must not wait for numpy.
    from pipette_launch.facts import files
    from pipette_launch.launch.terminal import ProgressLine, Ticker
    from pipette_launch.planning.plan import read_problem, search_plan
    from pipette_launch.report import chosen_line, plan_file_screen

    problem = read_problem(request_of(args))
    if args.out is not None:
        # Before the search, whose plan would be lost.
        with _naming(args.out):
            files.check_writable(args.out)
    ticker = Ticker(ProgressLine(sys.stderr, head="pipette plan: "), "searching, {:.0f} s".format)
    try:
        plan = search_plan(problem)
    finally:
        ticker.stop()
    page = None if args.out is None else _kept(args.out, plan, problem)
    if args.json:
        sys.stdout.write(f"{files.dumps(plan)}\n")
    elif args.quiet:
        sys.stdout.write(f"{chosen_line(plan)}\n")
    else:
        screen = plan_file_screen(plan, title="pipette plan", saved_to=args.out, drawn_to=page, is_whole=args.verbose)
        sys.stdout.write(screen)
    return 0


def request_of(args: Namespace) -> PlanRequest:
    """Return the request that the flags describe."""
    from pipette_launch.planning.plan import PlanRequest

    return PlanRequest(
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


def _kept(out: Path, plan: Plan, problem: PlanProblem) -> Path | None:
    """Write the plan's file, trace and report; returns where the report lies, if it could be made."""
    from pipette_launch.facts import files
    from pipette_launch.launch.plan_reports import page_path, trace_path, write_page, write_trace
    from pipette_launch.planning.picture import picture_of

    with _naming(out):
        files.write(out, plan, shared=True)
        picture = picture_of(plan, problem.job, problem.measurements)
        write_trace(trace_path(out), plan, problem.measurements, picture, shared=True)
    page = page_path(out)
    try:
        write_page(page, plan, problem.measurements, picture, shared=True)
    except (OSError, PipetteError) as error:
        sys.stderr.write(f"no report beside {printable(str(out))}: {printable(str(error))}\n")
        return None
    return page


@contextmanager
def _naming(out: Path) -> Iterator[None]:
    """Turn an OSError into a complaint about --out."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written ({error.strerror})") from error


COMMAND = Subcommand(
    summary="Choose the fastest layout and order of ranks on these machines, and say how sure that is.",
    add_arguments=add_arguments,
    run=run,
    examples=(
        "pipette plan --gpu H100 --nodes 2 --out a.plan.json pretrain_gpt.py $ARGS",
        "pipette plan --gpu H100 --nodes 2 --fabric fat-tree-4:1 --fix tp,cp pretrain_gpt.py $ARGS",
        "pipette plan --cluster cluster.json pretrain_gpt.py $ARGS   # what pipette probe measured",
    ),
)
"""For `main.COMMANDS`."""
