"""`pipette report` shows a plan file as `pipette plan` showed it, and what a warm-up measured."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from pipette_launch.tools.flags import Subcommand


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette report`."""
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="plan.json of `pipette plan --out` or of a warm-up, or its cluster.json"
    )


def run(args: Namespace) -> int:
    """Print the screen; returns 0."""
    from pipette_launch.facts import Measurements, Plan, files
    from pipette_launch.report import measured_screen, plan_file_screen

    if files.kind_of(args.file) == Measurements.KIND:
        found = files.read(args.file, Measurements)
        sys.stdout.write(measured_screen(found, title="pipette report", saved_to=args.file))
    else:
        plan = files.read(args.file, Plan)
        sys.stdout.write(plan_file_screen(plan, title="pipette report", saved_to=args.file))
    return 0


COMMAND = Subcommand(summary="Show a plan file, or what a warm-up measured.", add_arguments=add_arguments, run=run)
"""For `main.COMMANDS`."""
