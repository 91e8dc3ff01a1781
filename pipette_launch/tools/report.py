"""`pipette report` shows a plan file, as `pipette plan` showed it or as a page, and what a warm-up measured."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from pipette_launch.errors import UsageError
from pipette_launch.tools.flags import Subcommand


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette report`."""
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="plan.json of `pipette plan --out` or of a warm-up, or its cluster.json"
    )
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write the plan's report as one HTML file, and print nothing"
    )
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write the plan's steps as a trace for Perfetto, and print nothing"
    )
    parser.add_argument(
        "--profile",
        metavar="DIR",
        type=Path,
        help="draw into --trace what the job's --profile --use-pytorch-profiler left in its --tensorboard-dir",
    )
    parser.add_argument(
        "--cluster", metavar="FILE", type=Path, help="what the plan rests on; default: cluster.json beside it"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="of a plan one line: what was chosen, what it saves")
    parser.add_argument("--json", action="store_true", help="print the file's document, checked, instead of a screen")


def run(args: Namespace) -> int:
    """Print the screen, or write the page; returns 0."""
    from pipette_launch.facts import Measurements, Plan, files
    from pipette_launch.launch.plan_reports import existing_page
    from pipette_launch.report import chosen_line, measured_screen, plan_file_screen

    if args.profile is not None and args.trace is None:
        raise UsageError("--profile says what --trace draws; name its file with --trace")
    if args.html is not None or args.trace is not None:
        _write(args)
        return 0
    if args.cluster is not None:
        raise UsageError("--cluster is read for the page and the trace alone; add --html FILE or --trace FILE")
    if args.json:
        kind = Measurements if files.kind_of(args.file) == Measurements.KIND else Plan
        sys.stdout.write(files.dumps(files.read(args.file, kind)) + "\n")
    elif files.kind_of(args.file) == Measurements.KIND:
        found = files.read(args.file, Measurements)
        sys.stdout.write(measured_screen(found, title="pipette report", saved_to=args.file))
    else:
        plan, page = files.read(args.file, Plan), existing_page(args.file)
        whole = plan_file_screen(plan, title="pipette report", saved_to=args.file, drawn_to=page)
        sys.stdout.write(f"{chosen_line(plan)}\n" if args.quiet else whole)
    return 0


def _write(args: Namespace) -> None:
    """Write the page, the trace, or both."""
    from pipette_launch.facts import files
    from pipette_launch.launch.plan_reports import found_files, page_of, trace_of
    from pipette_launch.text import printable

    found = found_files(args.file, args.cluster)
    if found.missing:
        sys.stderr.write(f"{printable(found.missing)}\n")
    wanted = (("--html", args.html, page_of), ("--trace", args.trace, lambda found: trace_of(found, args.profile)))
    for flag, path, text_of in wanted:
        if path is None:
            continue
        text = text_of(found)
        try:
            files.write_text(path, text, shared=True)
        except OSError as error:
            raise UsageError(f"{flag} {path}: cannot be written ({error.strerror})") from error


COMMAND = Subcommand(
    summary="Show a plan file, or what a warm-up measured.",
    add_arguments=add_arguments,
    run=run,
    examples=("pipette report a.plan.json", "pipette report --json cluster.json"),
)
"""For `main.COMMANDS`."""
