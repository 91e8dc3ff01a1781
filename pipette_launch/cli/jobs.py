"""`pipette doctor` checks a machine, `pipette probe` measures the machines of a job, `pipette watch` shows a job."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.cli.flags import Subcommand, add_size_flags
from pipette_launch.errors import UsageError
from pipette_launch.installed import check_installed
from pipette_launch.text import printable

if TYPE_CHECKING:
    from pipette_launch.launch.metrics import Watched

DEFAULT_PORT, MOST_PORTS = 29500, 1 << 16
OUT = "--out"
DEFAULT_OUT = "cluster.json"
POLL_S = 1.0


def _add_doctor_arguments(parser: ArgumentParser) -> None:
    devices = ("auto", "cuda", "cpu")
    parser.add_argument("--device", choices=devices, default="auto", help="kind of device that trains (default auto)")
    gpus = "workers of this node (default: all GPUs, or one on CPU)"
    add_size_flags(parser, nodes="nodes of the job (default 1)", gpus=gpus)
    parser.set_defaults(nodes=1)
    text = f"port of --rdzv-endpoint (default {DEFAULT_PORT})"
    parser.add_argument("--port", metavar="N", type=int, default=DEFAULT_PORT, help=text)
    parser.add_argument("--json", action="store_true", help="print a document of kind `checkup` instead of a screen")


def _doctor(args: Namespace) -> int:
    """Print the findings; return 1 if a finding would stop a job."""
    # Allow a missing torch, because `pipette doctor` reports this problem as a finding.
    check_installed(but=frozenset({"torch"}))
    from pipette_launch.cli.machine_checks import examine
    from pipette_launch.facts import files
    from pipette_launch.report.measured import checkup_screen

    if not 0 < args.port < MOST_PORTS:
        raise UsageError(f"--port must be from 1 to {MOST_PORTS - 1}, got {args.port}")
    for flag, value in (("--gpus-per-node", args.gpus_per_node), ("--nodes", args.nodes)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be at least 1, got {value}")
    found = examine(args)
    sys.stdout.write(files.dumps(found, indent=1) + "\n" if args.json else checkup_screen(found))
    return 0 if found.is_fit else 1


DOCTOR = Subcommand(
    summary="Check this machine for problems that would stop or slow a job.",
    add_arguments=_add_doctor_arguments,
    run=_doctor,
    examples=("pipette doctor", "pipette doctor --device cpu --gpus-per-node 2 --json"),
    exit_codes="0 no problem stops a job; 1 a problem stops a job, or a check failed; 2 the flags are wrong",
)


def _add_probe_arguments(parser: ArgumentParser) -> None:
    """Add flags only for the text of `pipette probe --help`; `_become_launcher` gets the command line unparsed."""
    parser.usage = "pipette probe [--out FILE] [FLAGS OF pipette-launch] SCRIPT [ARGS ...]"
    text = f"file to write on the first node ({DEFAULT_OUT})"
    parser.add_argument(OUT, metavar="FILE", default=DEFAULT_OUT, help=text)
    text = "flags, script and arguments of the script, as for pipette-launch; run the command on every node of the job"
    parser.add_argument("words", nargs="*", metavar="SCRIPT", help=text)


def _refuse_probe(args: Namespace) -> int:
    raise UsageError(f"no script in {args.words}: pipette probe needs the flags and the script of pipette-launch")


def _become_launcher(words: Sequence[str]) -> None:
    """Replace this process by `pipette-launch --pipette-probe FILE`, because torch's launcher must receive signals."""
    out, rest = DEFAULT_OUT, list(words)
    if rest and rest[0].startswith(f"{OUT}="):
        out, rest = rest[0].partition("=")[2], rest[1:]
    elif rest and rest[0] == OUT:
        if len(rest) == 1:
            raise UsageError(f"{OUT} needs a file")
        out, rest = rest[1], rest[2:]
    launcher = [sys.executable, "-m", "pipette_launch", "--pipette-probe", out, *rest]
    os.execv(sys.executable, launcher)  # noqa: S606


PROBE = Subcommand(
    summary="Measure the machines of a job, write cluster.json, and train nothing.",
    add_arguments=_add_probe_arguments,
    run=_refuse_probe,
    examples=(
        "pipette probe --out one.cluster.json --nproc-per-node 8 pretrain_gpt.py $ARGS",
        "pipette probe --nnodes 2 --nproc-per-node 8 --rdzv-endpoint node0:29500 pretrain_gpt.py $ARGS   # on both",
    ),
    pass_on=_become_launcher,
)


def _add_watch_arguments(parser: ArgumentParser) -> None:
    text = (
        "folder of a job in the cache, its plan.json, a cache, or a FILE.prom of --pipette-metrics-file "
        "(default: the newest job in the usual cache)"
    )
    parser.add_argument("where", metavar="WHERE", nargs="?", type=Path, help=text)
    parser.add_argument("--json", action="store_true", help="print a document of kind `live-job` at each change")
    parser.add_argument("--once", action="store_true", help="print the present state and exit")


def _watch(args: Namespace) -> int:
    """Watch until the job ends. Return 1 if the job failed, 0 if the job succeeded or the user stopped watching."""
    from pipette_launch.launch.metrics import Watched

    watched = Watched(args.where)
    try:
        if args.once or args.json or not sys.stdout.isatty():
            return _print_changes(watched, is_once=args.once, as_json=args.json)
        return _show_screen(watched)
    except KeyboardInterrupt:
        return 0


def _show_screen(watched: Watched) -> int:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from pipette_launch.report.live import live_screen

    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            job = watched.look(time.time())
            live.update(Text.from_ansi(live_screen(job, watched.steps_s)), refresh=True)
            if job.is_over:
                return int(job.phase == "failed")
            time.sleep(POLL_S)


def _print_changes(watched: Watched, *, is_once: bool, as_json: bool) -> int:
    """Print a line at each change of the job until the job ends. With `is_once`, print one screen."""
    from pipette_launch.facts import files
    from pipette_launch.report.live import live_line, live_screen

    before = ""
    while True:
        job = watched.look(time.time())
        line = live_line(job)
        if as_json and line != before:
            sys.stdout.write(files.dumps(job) + "\n")
        elif is_once:
            sys.stdout.write(live_screen(job, watched.steps_s))
        elif line != before:
            sys.stdout.write(f"{time.strftime('%H:%M:%S', time.localtime(job.read_s))} {printable(line)}\n")
        sys.stdout.flush()
        before = line
        if is_once or job.is_over:
            return int(job.phase == "failed")
        time.sleep(POLL_S)


WATCH = Subcommand(
    summary="Show a job while it runs: phase, iteration, measured and predicted step.",
    add_arguments=_add_watch_arguments,
    run=_watch,
    examples=("pipette watch --once", "pipette watch /scratch/me/cache --json"),
    exit_codes="0 the job succeeded, or you stopped watching; 1 the job failed; 2 the command line is wrong",
)
