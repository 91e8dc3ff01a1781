"""Step times of a training in which one of four hosts slows down, under each --pipette-watch.

`python -m benchmarks.bench_slow_host [--watch off warn restart] [--host n2] [--share 0.25]` trains the example's GPT on
four laboratory hosts with `--nnodes 3:4 --pipette-on-sick exclude`. Later one host keeps only a share of
its processor time. The benchmark prints the median step before, while the host is slow, and at the end, and the lines
of the launcher.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.faults.job import Job, await_so, median_step_s, small_disk
from benchmarks.netlab import Lab, topology

STEPS_BEFORE, STEPS_SLOW, STEPS_AFTER = 60, 30, 30
TRAINS_S = 240.0
WORDS = r"pipette-launch: .*(?:steps take|stands? by|left out|runs no workers|training goes on|slow)"


def slowed(watch: str, host: str, share: float, *, keep: Path | None = None) -> None:
    """Train, slow a host down, and print what becomes of it."""
    with Lab(topology.uniform(4, rate_mbit=400)) as lab, small_disk() as disk:
        job = Job(lab, disk)
        flags = ["--nnodes=3:4", "--pipette-on-sick=exclude", "--pipette-cache=off", f"--pipette-watch={watch}"]
        job.start("pipette_launch", flags, ["--train-iters", 4000])
        await_so(lambda: len(job.iterations()) > STEPS_BEFORE, TRAINS_S)
        lab.slow(host, share)
        at_s = time.monotonic()
        before = 1e3 * median_step_s(job.iterations()[-STEPS_BEFORE // 2 :])
        await_so(lambda: len(job.iterations(at_s)) > STEPS_SLOW, TRAINS_S)
        during = 1e3 * median_step_s(job.iterations(at_s)[:STEPS_SLOW])
        if watch == "restart":
            await_so(lambda: bool(job.matches("training goes on with", at_s)), TRAINS_S)
        again_s = time.monotonic()
        await_so(lambda: len(job.iterations(again_s)) > STEPS_AFTER, TRAINS_S)
        after = 1e3 * median_step_s(job.iterations(again_s))
        if keep is not None:
            job.write(keep, at_s)
    print(f"{watch}: {before:.0f} ms a step, {during:.0f} with {host} slow, {after:.0f} at the end", flush=True)
    told = {line.text: line.at_s - at_s for line, _ in reversed(job.matches(WORDS, at_s))}
    for text, told_s in sorted(told.items(), key=lambda one: one[1]):
        print(f"  after {told_s:5.1f} s: {text}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--watch", nargs="+", default=["off", "warn", "restart"])
    parser.add_argument("--host", default="n2")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--log", type=Path, help="write all lines of the last run there")
    args = parser.parse_args()
    print(f"python {platform.python_version()}, torch {version('torch')}, {os.cpu_count()} cores, gloo")
    print(f"4 hosts, 400 Mbit/s, a checkpoint every 5 steps; {args.host} gets {args.share:.0%} of its processor time")
    for watch in args.watch:
        slowed(watch, args.host, args.share, keep=args.log)


if __name__ == "__main__":
    main()
