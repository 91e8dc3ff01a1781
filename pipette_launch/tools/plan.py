"""`pipette plan` chooses layout and placement for machines that were measured before, or for imagined ones."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipette_launch.errors import PipetteError, UsageError
from pipette_launch.tools import flags, planning
from pipette_launch.tools.flags import Subcommand


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
    flags.add_script(parser)


def run(args: Namespace) -> int:
    """Print the plan and write its file; returns 0 for every plan, the user's own configuration included."""
    # Parsing --help must not wait for numpy.
    from pipette_launch.facts import files
    from pipette_launch.launch.page import page_path, write_page
    from pipette_launch.printable import printable
    from pipette_launch.report import plan_file_screen

    problem = planning.problem_of(args)
    if args.out is not None:
        # Before the search, whose plan would be lost.
        with _naming(args.out):
            files.check_writable(args.out)
    plan, page = planning.planned(problem, args), None
    if args.out is not None:
        with _naming(args.out):
            files.write(args.out, plan, shared=True)
        page = page_path(args.out)
        try:
            write_page(page, plan, problem.job, problem.measurements, shared=True)
        except (OSError, PipetteError) as error:
            page = None
            sys.stderr.write(f"no report beside {printable(str(args.out))}: {printable(str(error))}\n")
    if args.json:
        sys.stdout.write(files.dumps(plan) + "\n")
    else:
        sys.stdout.write(plan_file_screen(plan, title="pipette plan", saved_to=args.out, drawn_to=page))
    return 0


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
)
"""For `main.COMMANDS`."""
