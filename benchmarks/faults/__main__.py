"""Injects faults into trainings on four laboratory hosts, one fault for each training.

`python -m benchmarks.faults soak RECORD [--runs 200] [--lanes 2] [--phases ..] [--faults ..] [--hosts n0 n2]` deals
the cases at random, each one once before any comes again, and the moment within the phase with each; so many lanes
train at a time, each being load for the others. Every training is one line of JSON in RECORD; what is there already
is not run again. `python -m benchmarks.faults table RECORD.. [--into FILE]` writes a table of what became of them.
The exit code is 1 where a job hung, lost what a checkpoint held, left a process, took a healthy host for lost, or
ended without a word.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.faults.cases import FAULTS, PHASES, Case, cases
from benchmarks.faults.job import ROOT
from benchmarks.faults.run import Result, run
from benchmarks.faults.table import table


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    soak = commands.add_parser("soak")
    soak.add_argument("record", type=Path)
    soak.add_argument("--runs", type=int, default=200)
    soak.add_argument("--lanes", type=int, default=2)
    soak.add_argument("--seed", type=int, default=0)
    soak.add_argument("--hosts", nargs="+", default=["n0", "n2"])
    soak.add_argument("--phases", nargs="+", default=[*PHASES], choices=PHASES)
    soak.add_argument("--faults", nargs="+", default=[*FAULTS], choices=FAULTS)
    soak.add_argument("--logs", type=Path, help="a folder for all lines of each job")
    soak.set_defaults(do=_soak)
    show = commands.add_parser("table")
    show.add_argument("records", type=Path, nargs="+")
    show.add_argument("--into", type=Path, help="put the table between the marks <!-- faults --> of this file")
    show.set_defaults(do=_table)
    args = parser.parse_args()
    return int(args.do(args))


def _soak(args: argparse.Namespace) -> int:
    draw = random.Random(args.seed)
    dealt = [(number, *one) for number, one in zip(range(args.runs), _deal(args, draw), strict=False)]
    done = {line["number"] for line in _read(args.record)} if args.record.exists() else set()
    told = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(told, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    conditions = (
        f"commit {commit}, Python {platform.python_version()}, torch {version('torch')}, gloo, {os.cpu_count()} cores, "
        f"{args.lanes} jobs at a time"
    )
    are_well = []
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache, args.record.open("a") as record:
        # All others start from the plan of this one.
        run(Case("exit", "worker killed", "n0"), cache=Path(cache))
        with ProcessPoolExecutor(args.lanes, mp_context=get_context("spawn")) as pool:
            running = {
                pool.submit(run, case, cache=Path(cache), share=share, keep=_log(args.logs, number, case)): number
                for number, case, share in dealt
                if number not in done
            }
            try:
                for future in as_completed(running):
                    result, number = future.result(), running[future]
                    record.write(json.dumps({"number": number, "conditions": conditions, **asdict(result)}) + "\n")
                    record.flush()
                    print(number, _told(result), flush=True)
                    are_well.append(result.is_well)
            except BaseException:
                # Else the pool runs all others first, which nobody records.
                pool.shutdown(cancel_futures=True)
                raise
    print(f"{sum(are_well)} of {len(are_well)} survived or ended with the right words")
    return 0 if all(are_well) else 1


def _deal(args: argparse.Namespace, draw: random.Random) -> Iterator[tuple[Case, float]]:
    while True:
        deck = cases(args.phases, args.faults, args.hosts)
        draw.shuffle(deck)
        for case in deck:
            yield case, draw.random()


def _log(folder: Path | None, number: int, case: Case) -> Path | None:
    return folder / f"{number:03}-{'-'.join(case)}.log".replace(" ", "_") if folder else None


def _told(result: Result) -> str:
    seconds = "" if result.recovered_s is None else f" after {result.recovered_s:.1f} s"
    bad = "" if result.is_well else f"  <-- BAD {result.lost_checkpoint} {result.false_alarms} {result.left}"
    return f"{', '.join(result.case)}: {result.ended}{seconds}: {result.words[:120]}{bad}"


def _table(args: argparse.Namespace) -> int:
    lines = [line for record in args.records for line in _read(record)]
    results = [
        Result(
            case=Case(*line["case"]),
            **{name: value for name, value in line.items() if name not in ("number", "conditions", "case")},
        )
        for line in lines
    ]
    text = "\n".join(table(results, sorted({line["conditions"] for line in lines})))
    if args.into is None:
        print(text)
    else:
        before, _, rest = args.into.read_text().partition("<!-- faults -->\n")
        after = rest.partition("<!-- /faults -->")[2]
        args.into.write_text(f"{before}<!-- faults -->\n{text}\n<!-- /faults -->{after}")
    return 0 if all(result.is_well for result in results) else 1


def _read(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
