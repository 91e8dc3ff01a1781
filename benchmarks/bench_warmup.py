"""Runs the real warm-up on virtual hosts (network namespaces) with known links and faults.

`python -m benchmarks.bench_warmup --part accuracy|faults|healthy|time|rounds [--runs K] [--out FILE]` runs
`pipette-launch --pipette-dry-run` on every host, reads the cluster.json that it writes, and prints Markdown. `--out`
puts the part into its section of a report. Needs root and iproute2 (docs/netlab.md).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks import netlab
from benchmarks.validation.conditions import conditions
from benchmarks.warmup import parts

PARTS: dict[str, tuple[str, Callable[..., Iterator[str]], int]] = {
    "accuracy": ("Links set to unequal rates", parts.accuracy, len(parts.ACCURACY)),
    "faults": ("Throttled links and slowed devices", parts.faults, len(parts.FAULTS)),
    "healthy": ("Healthy runs", parts.alarms, 20),
    "time": ("How long it takes", parts.duration, 3),
    "rounds": ("Rounds", parts.rounds, 8),
}
"""(title, function that yields the lines, default number of runs)"""
TITLE = "# The warm-up on namespaced hosts\n"


def circumstances(part: str, runs: int) -> Iterator[str]:
    """Yield the conditions of the measurement."""
    known = conditions(None)
    yield f"`python -m benchmarks.bench_warmup --part {part} --runs {runs}`, {known['date']}, commit {known['commit']};"
    yield f"{known['versions']}, torch {version('torch')}, megatron-core {version('megatron-core')};"
    yield f"{known['machine']}; load {os.getloadavg()[0]:.1f} at the start, caused by other processes."


def put_section(report: str, title: str, text: str) -> str:
    """Put a part into a report: in its section if there is one, else at the end."""
    head = f"## {title}\n"
    before, found, rest = (report or TITLE).partition(f"\n{head}")
    after = rest[rest.find("\n## ") :] if found and "\n## " in rest else ""
    return f"{before.rstrip()}\n\n{head}\n{text.strip()}\n{after}"


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(PARTS), required=True)
    parser.add_argument("--runs", type=int, help="fewer than the part's own number of warm-ups")
    parser.add_argument("--out", type=Path, help="the report, such as benchmarks/results/warmup.md")
    args = parser.parse_args()
    reason = netlab.missing()
    if reason:
        sys.exit(f"bench_warmup: {reason}")
    title, measure, usual = PARTS[args.part]
    runs = args.runs or usual
    began_s = time.monotonic()
    lines = [*circumstances(args.part, runs), ""]
    print("\n".join(lines), flush=True)
    for line in measure(runs=runs):
        print(line, flush=True)
        lines.append(line)
    lines += ["", f"Took {time.monotonic() - began_s:.0f} s."]
    print(lines[-1])
    if args.out:
        before = args.out.read_text() if args.out.exists() else ""
        args.out.write_text(put_section(before, title, "\n".join(lines)))


if __name__ == "__main__":
    main()
