"""Predicted and measured step of the README's first run: `scripts/smoke` from an empty cache, several times.

`python -m benchmarks.bench_first_run [--starts 5] [--train-iters 200]` starts the command of `scripts/smoke` with a
fresh cache folder each time and prints predicted and measured steps (`outcome.json`).
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks import pace
from benchmarks.stolen import processor_time
from pipette_launch.facts import files
from pipette_launch.facts.outcome import Outcome

ROOT = Path(__file__).parent.parent
SMOKE = ROOT / "scripts" / "smoke"
TIMEOUT_S = 180
MEDIAN, WORST = 0.15, 0.25
"""Targets of the error."""


def words(text: str) -> list[str]:
    """Return the words behind `pipette-launch` in a script like `scripts/smoke`, with four processes."""
    line = text.replace("\\\n", " ").strip().splitlines()[-1]
    return [word.replace("${NPROC:-4}", "4") for word in shlex.split(line)[1:] if word != "$@"]


def first_run(command: list[str], folder: Path) -> Outcome:
    """Start the command with an empty cache in a folder; returns what became of its plan.

    Raises:
        CalledProcessError: the training failed; the error holds its output.

    """
    paths = (str(ROOT), str(ROOT / "patches"), os.environ.get("PYTHONPATH", ""))
    subprocess.run(
        [sys.executable, "-m", "pipette_launch", *command],
        check=True,
        cwd=ROOT,
        capture_output=True,
        timeout=TIMEOUT_S,
        env={
            **os.environ,
            "XDG_CACHE_HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONWARNINGS": "ignore",
        },
    )
    (path,) = folder.glob("pipette-launch/*/outcome.json")
    return files.read(path, Outcome)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--train-iters", type=int, default=200)
    args = parser.parse_args()
    command = words(SMOKE.read_text(encoding="utf-8"))
    command[command.index("--train-iters") + 1] = str(args.train_iters)
    print(
        f"python {platform.python_version()}, torch {version('torch')}, megatron-core {version('megatron-core')}, "
        f"{os.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}"
    )
    print(f"one and the same computation takes {pace.words(pace.looks(pace.QUICK_LOOKS))}")
    before, errors = processor_time(), []
    for start in range(1, args.starts + 1):
        with tempfile.TemporaryDirectory() as name:
            outcome = first_run(command, Path(name))
        errors.append(outcome.error)
        print(
            f"{start}: {outcome.layout.words()}: predicted {1e3 * outcome.predicted_step_s:.1f} ms, measured "
            f"{1e3 * outcome.measured_step.median_s:.1f} ms, {outcome.error:+.1%}",
            flush=True,
        )
    sizes = sorted(map(abs, errors))
    print(f"one and the same computation takes {pace.words(pace.looks(pace.QUICK_LOOKS))}")
    print(
        f"off by {statistics.median(sizes):.1%} in the median (wanted {MEDIAN:.0%}), {sizes[-1]:.1%} at worst (wanted "
        f"{WORST:.0%}); {processor_time().stolen_since(before):.2%} of the processor time was stolen"
    )


if __name__ == "__main__":
    main()
