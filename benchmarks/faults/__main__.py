"""Injects faults into trainings on four laboratory hosts, one fault for each training.

`python -m benchmarks.faults table [--hosts n0 n2] [--phases ..] [--faults ..] [--into FILE]` runs every fault in every
phase and writes a table; `python -m benchmarks.faults soak [--runs 200] [--seed 0]` draws phase, fault and host.
The exit code is 1 where a job hung, lost what a checkpoint held, left a process, or ended without a word.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks.faults.cases import FAULTS, PHASES
from benchmarks.faults.run import Result, run


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "soak"))
    parser.add_argument("--hosts", nargs="+", default=["n0", "n2"])
    parser.add_argument("--phases", nargs="+", default=[*PHASES], choices=PHASES)
    parser.add_argument("--faults", nargs="+", default=[*FAULTS], choices=FAULTS)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--into", type=Path, help="put the table between the marks <!-- faults --> of this file")
    parser.add_argument("--logs", type=Path, help="a folder for all lines of each job")
    args = parser.parse_args()
    if args.what == "table":
        wanted = [(phase, fault, host) for phase in args.phases for fault in args.faults for host in args.hosts]
    else:
        draw = random.Random(args.seed)
        wanted = [
            (draw.choice(args.phases), draw.choice(args.faults), draw.choice(args.hosts)) for _ in range(args.runs)
        ]
    results = list(_run_all(wanted, args.logs))
    if args.into is not None:
        before, _, rest = args.into.read_text().partition("<!-- faults -->\n")
        after = rest.partition("<!-- /faults -->")[2]
        table = "\n".join([_conditions(), "", *_table(results), ""])
        args.into.write_text(f"{before}<!-- faults -->\n{table}<!-- /faults -->{after}")
    bad = [one for one in results if not one.is_well]
    print(f"{len(results) - len(bad)} of {len(results)} survived or ended with the right words")
    return 1 if bad else 0


def _run_all(wanted: Iterable[tuple[str, str, str]], logs: Path | None) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as cache:
        for number, (phase, fault, host) in enumerate(wanted):
            keep = logs / f"{number:03}-{phase}-{fault}-{host}.log".replace(" ", "_") if logs else None
            result = run(phase, fault, host, cache=Path(cache), keep=keep)
            print(_row(result), "" if result.is_well else "<-- BAD", result.lost_checkpoint, *result.left, flush=True)
            yield result


def _conditions() -> str:
    return (
        f"Four laboratory hosts of one slot, 400 Mbit/s, `--nnodes 3:4 --max-restarts 3`, a checkpoint every 5 "
        f"iterations; Python {platform.python_version()}, torch {version('torch')}, gloo, {os.cpu_count()} cores."
    )


def _table(results: list[Result]) -> list[str]:
    return [
        "| phase | fault | host | what happened | seconds | words |",
        "|---|---|---|---|---|---|",
        *map(_row, results),
    ]


def _row(result: Result) -> str:
    seconds = "" if result.recovered_s is None else f"{result.recovered_s:.1f}"
    left = f", {len(result.left)} processes left" if result.left else ""
    words = result.words.replace("|", "/")[:160]
    return f"| {result.phase} | {result.fault} | {result.host} | {result.ended}{left} | {seconds} | {words} |"


if __name__ == "__main__":
    sys.exit(main())
