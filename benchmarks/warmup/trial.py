"""Runs the product's warm-up on every virtual host, as a user would, and reads its measurements."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pipette_launch
from benchmarks.netlab import Lab
from benchmarks.netlab import topology as topologies
from benchmarks.netlab.topology import Topology
from pipette_launch.facts import Measurements, files

ROOT = Path(pipette_launch.__file__).parent.parent
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --train-iters 4 --vocab-size 256 --transformer-impl local --lr 1e-3 "
    "--attention-dropout 0 --hidden-dropout 0"
).split()
LEAST_BATCH = 16
TIMEOUT_S = 300.0
HEALTHY_KINDS = ("uniform", "two islands", "nearly uniform")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One warm-up."""

    measurements: Measurements | None
    """None if the launcher wrote no file."""
    wall_s: float
    """From the start of the launchers to the end of the last one: imports, rendezvous, warm-up, search, screen."""
    cpu_s: float
    """Processor time of all processes of all hosts; divided by the number of cores, a lower bound of `wall_s`."""
    code: int
    """The worst exit code."""
    screen: str
    """Output of the first host."""

    @property
    def failure(self) -> str:
        """Return the last line of the first host if the warm-up failed; else empty."""
        if self.measurements is not None and self.code == 0:
            return ""
        return f"failed, exit code {self.code}: {(self.screen.splitlines() or ['no output'])[-1][:200]}"

    def need(self) -> Measurements:
        """Return the measurements.

        Raises:
            RuntimeError: the warm-up failed; the text has the output of the first host.

        """
        if self.measurements is None or self.code != 0:
            raise RuntimeError(f"the warm-up failed with exit code {self.code}:\n{self.screen}")
        return self.measurements


def warm_up(lab: Lab, name: str, *, budget_s: float = 60.0) -> Trial:
    """Measure and plan on all hosts of a lab, with a new cache; `name` of the run must be new within the lab."""
    folder = lab.folder / name
    folder.mkdir()
    words = [sys.executable, "-m", "pipette_launch", "--pipette-dry-run", f"--pipette-budget={budget_s:g}"]
    words += [f"--pipette-cache={folder / 'cache'}", str(SCRIPT), *MODEL, f"--global-batch-size={_batch(lab)}"]
    env = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'patches'}",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
        "COLUMNS": "120",
    }
    began_s, before_s = time.monotonic(), _children_s()
    with (folder / "screen").open("w") as screen:
        jobs = [
            lab.run(host, words, env, stdout=screen if index == 0 else subprocess.DEVNULL, stderr=screen)
            for index, host in enumerate(lab.hosts)
        ]
        code = max(abs(_ended(job, began_s + TIMEOUT_S)) for job in jobs)
    wall_s = time.monotonic() - began_s
    found = next(iter((folder / "cache").glob("*/cluster.json")), None)
    return Trial(
        measurements=files.read(found, Measurements) if found else None,
        wall_s=wall_s,
        cpu_s=_children_s() - before_s,
        code=code,
        screen=(folder / "screen").read_text(),
    )


def _batch(lab: Lab) -> int:
    """Return a batch size that plain data parallelism divides evenly."""
    slots = sum(host.slots for host in lab.topology.hosts)
    return slots * -(-LEAST_BATCH // slots)


def _children_s() -> float:
    """Return the processor time of all ended descendants of this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ended(job: subprocess.Popen[str], deadline_s: float) -> int:
    try:
        return job.wait(timeout=max(1.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, 9)
        return job.wait()


def steps(least: float, most: float, factor: float) -> list[float]:
    """Return whole rates from the least to at most the most, each larger by the factor."""
    rates = [least]
    while rates[-1] * factor <= most:
        rates.append(rates[-1] * factor)
    return [float(round(rate)) for rate in rates]


def healthy(kind: str, num_hosts: int, *, rate_mbit: float = 400.0, seed: int = 0) -> Topology:
    """Return a network without faults: equal links, two islands, or links that differ by up to 3 %."""
    if kind == "two islands":
        half = num_hosts // 2
        names = [f"n{index}" for index in range(num_hosts)]
        islands = [{"hosts": part, "rate_mbit": 2 * rate_mbit} for part in (names[:half], names[half:])]
        return topologies.parse({"hosts": num_hosts, "rate_mbit": rate_mbit / 2, "island": islands})
    if kind == "nearly uniform":
        rates = [rate_mbit * (0.97 + 0.01 * step) for step in range(7)]
        return topologies.uneven(num_hosts, rates, seed=seed)
    return topologies.uniform(num_hosts, rate_mbit=rate_mbit)
