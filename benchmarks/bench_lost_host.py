"""Seconds without training after one of four hosts is lost: pipette-launch and torchrun, side by side.

`python -m benchmarks.bench_lost_host [--rounds 2] [--host n1] [--how killed silent] [--launchers pipette_launch
torch.distributed.run]` trains the example's GPT on four laboratory hosts with `--nnodes 3:4 --max-restarts 3` and a
checkpoint every five steps. In the middle of it one host is lost: its processes are killed, and its kernel says so,
or it falls silent as when its power fails. Timed is what passes until three hosts print their first new iteration.
Beside it three hosts train under the plan that is found for them from scratch: the step after a loss is to be as long.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.faults.job import Job, await_so, median_step_s, small_disk
from benchmarks.netlab import Lab, topology

TRAINS_S, GIVES_UP_S = 180.0, 240.0
STEPS_BEFORE, STEPS_AFTER = 12, 40


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Cost of one loss."""

    stood_still_s: float | None
    """From the loss to the first iteration afterwards; None if the time ran out."""
    last: int
    """The last iteration before the loss."""
    first: int
    """The first one afterwards, 0 without one."""
    told_s: float | None
    """From the loss to the launcher's words about it."""
    step_s: float
    """The median step time of the first steps afterwards."""


def lose(launcher: str, host: str, how: str, *, extra: list[str], keep: Path | None = None) -> Loss:
    """Train on four hosts, lose one, and see when the others go on."""
    with Lab(topology.uniform(4, rate_mbit=400)) as lab, small_disk() as disk:
        job = Job(lab, disk)
        flags = ["--nnodes=3:4", "--max-restarts=3", *(extra if launcher == "pipette_launch" else [])]
        # Without it torchrun's agents lose the store with the first worker that ends.
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if launcher != "pipette_launch" else {}
        job.start(launcher, flags, ["--train-iters", 4000], env)
        await_so(lambda: any(iteration >= STEPS_BEFORE for _, iteration in job.iterations()), TRAINS_S)
        last = job.iterations()[-1][1]
        if how == "silent":
            lab.kill(host)
        else:
            lab.end(host)
        lost_s = time.monotonic()
        # Lines under way when the host was lost are not new iterations.
        settled_s = lost_s + 0.5
        await_so(lambda: len(job.iterations(settled_s)) > STEPS_AFTER, GIVES_UP_S)
        after = job.iterations(settled_s)
        if keep is not None:
            job.write(keep, lost_s)
    told = job.matches("is lost", lost_s)
    return Loss(
        stood_still_s=after[0][0] - lost_s if after else None,
        last=last,
        first=after[0][1] if after else 0,
        told_s=told[0][0].at_s - lost_s if told else None,
        step_s=median_step_s(after),
    )


def from_scratch(extra: list[str]) -> float:
    """Train on three hosts without any knowledge, and return the median step time."""
    with Lab(topology.uniform(3, rate_mbit=400)) as lab, small_disk() as disk:
        job = Job(lab, disk)
        job.start("pipette_launch", ["--pipette-cache=off", *extra], ["--train-iters", 4000])
        await_so(lambda: len(job.iterations()) > STEPS_BEFORE + STEPS_AFTER, TRAINS_S)
        return median_step_s(job.iterations()[STEPS_BEFORE:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--host", default="n1")
    parser.add_argument("--how", nargs="+", default=["killed", "silent"])
    parser.add_argument("--launchers", nargs="+", default=["pipette_launch", "torch.distributed.run"])
    parser.add_argument("--log", type=Path, help="write all lines of the last run there, with seconds since the loss")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of pipette-launch")
    args = parser.parse_args()
    print(f"python {platform.python_version()}, torch {version('torch')}, {os.cpu_count()} cores, gloo")
    print(f"4 hosts, 400 Mbit/s; one of --nnodes 3:4 is lost: {args.host}; a checkpoint every 5 steps")
    for _ in range(args.rounds):
        if "pipette_launch" in args.launchers:
            print(f"three hosts from scratch: {1e3 * from_scratch(args.flag):.0f} ms a step", flush=True)
        for how in args.how:
            for launcher in args.launchers:
                loss = lose(launcher, args.host, how, extra=args.flag, keep=args.log)
                if loss.stood_still_s is None:
                    print(f"{how:7} {launcher:22} never trained on ({GIVES_UP_S:.0f} s)", flush=True)
                    continue
                told = f", told after {loss.told_s:.1f} s" if loss.told_s is not None else ""
                print(
                    f"{how:7} {launcher:22} stood still for {loss.stood_still_s:5.1f} s{told}; iteration {loss.last} "
                    f"was the last, {loss.first} the next; {1e3 * loss.step_s:.0f} ms a step then",
                    flush=True,
                )


if __name__ == "__main__":
    main()
