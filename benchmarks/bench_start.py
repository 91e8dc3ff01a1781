"""Delay of a script's start under pipette-launch with a cached plan, against torchrun.

`python -m benchmarks.bench_start [--pairs 10] [--nproc 2]` runs both alternately and prints both medians. Timed is what
passes from the start of the launcher until the slowest worker has imported torch and reached its own first line.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

SCRIPT = Path(__file__).parent / "first_line.py"
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 1 --vocab-size 256 --tokenizer-type NullTokenizer "
    "--transformer-impl local --lr 1e-3"
).split()


def started_after_s(launcher: list[str], nproc: int) -> float:
    """Run a launcher once; seconds until its last worker was at its first line."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "BENCH_OUT": folder, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        began = time.time()
        subprocess.run(
            [*launcher, f"--nproc-per-node={nproc}", str(SCRIPT), *MODEL],
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return max(float(path.read_text()) for path in Path(folder).iterdir()) - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--nproc", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        stock = [sys.executable, "-m", "torch.distributed.run"]
        ours = [sys.executable, "-m", "pipette_launch", f"--pipette-cache={cache}"]
        cold_s = started_after_s(ours, args.nproc)
        if not list(Path(cache).glob("*/plan.json")):
            sys.exit("the first run left no plan in the cache")
        pairs = [(started_after_s(stock, args.nproc), started_after_s(ours, args.nproc)) for _ in range(args.pairs)]
    stock_s, ours_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    differences = [ours - stock for stock, ours in pairs]
    print(f"python {platform.python_version()}, torch {version('torch')}, {os.cpu_count()} cores, {args.nproc} workers")
    print(f"{args.pairs} alternating pairs; seconds until the script's first line after `import torch`")
    print(f"torchrun                     median {stock_s:.2f} s")
    print(f"pipette-launch, cached plan  median {ours_s:.2f} s")
    print(
        f"difference                   median {statistics.median(differences):+.2f} s, worst {max(differences):+.2f} s"
    )
    print(f"pipette-launch, cold         {cold_s:.1f} s (warm-up and planning; one run)")


if __name__ == "__main__":
    main()
