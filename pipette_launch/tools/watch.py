"""`pipette watch` shows a job while it runs, from the files that its launcher writes."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.tools.flags import Subcommand

if TYPE_CHECKING:
    from pipette_launch.facts.outcome import LiveJob
    from pipette_launch.launch.watch import Watched

POLL_S = 1.0


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette watch`."""
    add = parser.add_argument
    add(
        "where",
        metavar="WHERE",
        nargs="?",
        type=Path,
        help="folder of a job in the cache, its plan.json, a cache, or a FILE.prom of --pipette-metrics-file; "
        "default: the newest job in the usual cache",
    )
    add("--json", action="store_true", help="print a document of kind `live-job` in a line at each change")
    add("--once", action="store_true", help="print what is known now, and exit")


def run(args: Namespace) -> int:
    """Watch until the job ends; returns 0 if it succeeded or the user has seen enough, 1 if it failed."""
    from pipette_launch.launch.watch import Watched

    watched = Watched(args.where)
    try:
        if args.once or args.json or not sys.stdout.isatty():
            return _lines(watched, is_once=args.once, as_json=args.json)
        return _screens(watched)
    except KeyboardInterrupt:
        return 0


def _screens(watched: Watched) -> int:
    """Show a screen that changes in its place."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from pipette_launch.report.live import live_screen

    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            job = watched.look(time.time())
            live.update(Text.from_ansi(live_screen(job, watched.steps_s)), refresh=True)
            if job.is_over:
                return _code(job)
            time.sleep(POLL_S)


def _lines(watched: Watched, *, is_once: bool, as_json: bool) -> int:
    """Print a line each time that something has changed, or one screen."""
    from pipette_launch.facts import files
    from pipette_launch.report.live import live_line, live_screen
    from pipette_launch.text import printable

    before = ""
    while True:
        job = watched.look(time.time())
        line = live_line(job)
        if as_json and line != before:
            sys.stdout.write(files.dumps(job, indent=None) + "\n")
        elif is_once:
            sys.stdout.write(live_screen(job, watched.steps_s))
        elif line != before:
            sys.stdout.write(f"{time.strftime('%H:%M:%S', time.localtime(job.read_s))} {printable(line)}\n")
        sys.stdout.flush()
        before = line
        if is_once or job.is_over:
            return _code(job)
        time.sleep(POLL_S)


def _code(job: LiveJob) -> int:
    return 1 if job.phase == "failed" else 0


COMMAND = Subcommand(
    summary="Show a job while it runs: phase, iteration, measured and predicted step.",
    add_arguments=add_arguments,
    run=run,
    examples=("pipette watch --once", "pipette watch /scratch/me/cache --json"),
    exit_codes="0 the job succeeded, or you have seen enough; 1 it failed; 2 what was typed makes no sense",
)
"""For `main.COMMANDS`."""
