"""`pipette report` shows a plan file as `pipette plan` showed it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from pipette_launch.tools.command import Command


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette report`."""
    parser.add_argument("plan", metavar="PLAN", type=Path, help="plan.json of `pipette plan --out` or of a warm-up")


def run(args: Namespace) -> int:
    """Print the screen; returns 0."""
    from pipette_launch.facts import Plan, files
    from pipette_launch.report import planned_screen

    plan = files.read(args.plan, Plan)
    sys.stdout.write(planned_screen(plan, title="pipette report", saved_to=args.plan))
    return 0


COMMAND = Command(summary="Show a plan file.", add_arguments=add_arguments, run=run)
"""For `main.COMMANDS`."""
