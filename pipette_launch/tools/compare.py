"""`pipette compare` prints plan files side by side."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from pipette_launch.tools.flags import Subcommand


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette compare`."""
    parser.add_argument("--json", action="store_true", help="print a document of kind `comparison` instead of a screen")
    parser.add_argument("plans", metavar="PLAN", nargs="*", type=Path, help="two plan files or more")


def run(args: Namespace) -> int:
    """Print the comparison; returns 0."""
    from pipette_launch.facts import files
    from pipette_launch.planning.compare import compare
    from pipette_launch.report import comparison_screen

    found = compare(args.plans)
    sys.stdout.write(files.dumps(found) + "\n" if args.json else comparison_screen(found))
    return 0


COMMAND = Subcommand(
    summary="Print plan files side by side.",
    add_arguments=add_arguments,
    run=run,
    examples=("pipette compare a.plan.json b.plan.json", "pipette compare --json a.plan.json b.plan.json"),
)
"""For `main.COMMANDS`."""
