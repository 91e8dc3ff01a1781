"""How long a training stands still when one of four hosts is lost: pipette-launch and torchrun, side by side.

`python -m benchmarks.bench_lost_host [--rounds 2] [--host n1] [--how killed silent] [--launchers pipette_launch
torch.distributed.run]` trains the example's GPT on four laboratory hosts with `--nnodes 3:4 --max-restarts 3` and a
checkpoint every five steps. In the middle of it one host is lost: its processes are killed, and its kernel says so,
or it falls silent as when its power fails. Timed is what passes until three hosts print their first new iteration.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO

from benchmarks.netlab import Lab, topology

ROOT = Path(__file__).parent.parent
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 12 --vocab-size 256 --transformer-impl local --lr 1e-3 "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 --train-iters 4000 --save-interval 5"
).split()
ITERATION = re.compile(r"iteration\s+(\d+)/")
TRAINS_S, GIVES_UP_S = 180.0, 240.0
STEPS_BEFORE = 12


@dataclass
class Seen:
    """Lines of all hosts, each with when it came, on the clock of this process."""

    lines: list[tuple[float, str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def follow(self, host: str, stream: IO[str]) -> None:
        """Read one stream to its end."""
        for line in stream:
            with self.lock:
                self.lines.append((time.monotonic(), host, line.rstrip()))

    def iterations(self, since_s: float = 0.0) -> list[tuple[float, int]]:
        """When which iteration was printed."""
        with self.lock:
            found = [(at_s, ITERATION.search(line)) for at_s, _, line in self.lines if at_s > since_s]
        return [(at_s, int(match.group(1))) for at_s, match in found if match]

    def words(self, since_s: float) -> list[tuple[float, str, str]]:
        """What the launchers said of a loss."""
        with self.lock:
            return [(at_s - since_s, host, line) for at_s, host, line in self.lines if "is lost" in line]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What one loss cost."""

    stood_still_s: float | None
    """From the loss to the first iteration afterwards; None where there was none in time."""
    last: int
    """The last iteration before the loss."""
    first: int
    """The first one afterwards, 0 without one."""
    told_s: float | None
    """From the loss to the launcher's words about it."""
    step_s: float
    """The median step time of the first ten steps afterwards."""


def lose(launcher: str, host: str, how: str, *, extra: list[str], keep: Path | None = None) -> Loss:
    """Train on four hosts, lose one, and see when the others go on."""
    with Lab(topology.uniform(4, rate_mbit=400)) as lab, tempfile.TemporaryDirectory() as name:
        saved = str(Path(name) / "checkpoints")
        flags = ["--nnodes=3:4", "--max-restarts=3", *(extra if launcher == "pipette_launch" else [])]
        command = [sys.executable, "-m", launcher, *flags, str(ROOT / "examples" / "pretrain_gpt.py"), *MODEL]
        seen = Seen()
        for one in lab.hosts:
            env = {
                "PYTHONPATH": f"{ROOT}:{ROOT / 'patches'}",
                "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "PYTHONWARNINGS": "ignore",
            }
            process = lab.run(one, [*command, "--save", saved, "--load", saved], env, stdout=-1, stderr=-1)
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                threading.Thread(target=seen.follow, args=(one, stream), daemon=True).start()
        _await(lambda: bool(seen.iterations()) and seen.iterations()[-1][1] >= STEPS_BEFORE, TRAINS_S)
        last = seen.iterations()[-1][1]
        if how == "silent":
            lab.kill(host)
        else:
            lab.end(host)
        lost_s = time.monotonic()
        # What was on its way when the host was lost is no new iteration.
        settled_s = lost_s + 0.5
        _await(lambda: len(seen.iterations(settled_s)) > 10, GIVES_UP_S)
        after = seen.iterations(settled_s)
        if keep is not None:
            keep.write_text("\n".join(f"{at_s - lost_s:8.2f} {one} {line}" for at_s, one, line in seen.lines))
    told = seen.words(lost_s)
    steps = sorted(later - sooner for (sooner, _), (later, _) in itertools.pairwise(after))
    return Loss(
        stood_still_s=after[0][0] - lost_s if after else None,
        last=last,
        first=after[0][1] if after else 0,
        told_s=told[0][0] if told else None,
        step_s=steps[len(steps) // 2] if steps else 0.0,
    )


def _await(is_so: object, patience_s: float) -> bool:
    assert callable(is_so)
    ends_s = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.05)
    return True


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
