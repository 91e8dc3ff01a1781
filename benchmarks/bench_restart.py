"""Trainings that survive the death of a worker: pipette-launch and torchrun, each with `--max-restarts 2`.

`python -m benchmarks.bench_restart [--tries 10] [--stock-tries 4]` kills one worker of a two-process gloo training with
SIGKILL after its third iteration, in every try another one, and counts the trainings that end with exit code 0. Under
pipette-launch the plan is a pipeline of two stages placed backwards, and each restart must keep it.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from pipette_launch.facts import Layout
from tests.end_to_end import jobs

ITERATIONS = 60
TIMEOUT_S = 180
FLAGS = ["--nproc-per-node=2", "--max-restarts=2"]


def survives(launcher: str, folder: Path, words: list[object], victim: int) -> tuple[bool, float]:
    """Run one training and kill a worker; whether it ended well, and seconds from the kill to the end."""
    process = jobs.start(folder, words, launcher=launcher)
    assert process.stdout is not None
    while "iteration        3/" not in (line := process.stdout.readline()):
        if not line:
            return False, 0.0
    os.kill(jobs.workers(process.pid)[victim], signal.SIGKILL)
    killed = time.monotonic()
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate()
        return False, TIMEOUT_S
    ended = f"iteration       {ITERATIONS}/" in out
    return process.returncode == 0 and ended and "cannot start" not in err, time.monotonic() - killed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--stock-tries", type=int, default=4)
    args = parser.parse_args()
    script = [jobs.TRAINER, *jobs.MODEL, "--train-iters", str(ITERATIONS)]
    print(f"python {platform.python_version()}, torch {version('torch')}, {os.cpu_count()} cores, gloo, 2 processes")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = jobs.plan_file(folder, jobs.plan(Layout(pp=2), [1, 0]))
        for launcher, tries, extra in (
            ("pipette_launch", args.tries, [f"--pipette-plan={plan}"]),
            ("torch.distributed.run", args.stock_tries, []),
        ):
            results = [survives(launcher, folder, [*FLAGS, *extra, *script], one % 2) for one in range(tries)]
            seconds = sorted(took_s for well, took_s in results if well)
            middle = f", {seconds[len(seconds) // 2]:.1f} s from the kill to the end (median)" if seconds else ""
            print(f"{launcher}: {sum(well for well, _ in results)} of {tries} trainings survived{middle}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
