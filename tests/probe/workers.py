"""Real warm-up workers for tests: one process per slot, and a store that the test hosts as the agent does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import warm
from facts_for_tests import tiny_cluster, tiny_job

from benchmarks.netlab import compare
from pipette_launch.facts import ComputeCase, files
from pipette_launch.facts.messages import Advice, MeasuringQuestion
from pipette_launch.probe.messages import WarmupOrder
from pipette_launch.probe.progress import open_question

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 200
LATE_S = 8.0
FORKED = Path(__file__).with_name("forked_workers.py")
REFERENCE = ComputeCase(tp=1, cp=1, micro_batch_size=1)
TINY_FLAGS = tuple(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 256 --transformer-impl local --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --train-iters 10 "
    "--micro-batch-size 1 --eval-iters 0".split()
)
"""Arguments with which the example trains the model of `tiny_job`, without the batch size of all ranks."""


def tiny_options(folder: Path, *, hosts: int, devices: int, **changes: object) -> WarmupOrder:
    """Return an order for a tiny model on CPU hosts, with small messages."""
    fields: dict[str, object] = {
        "job": tiny_job(world_size=hosts * devices),
        "hosts": tiny_cluster(hosts, devices).hosts,
        "cases": (REFERENCE,),
        "output": str(folder / "cluster.json"),
        "progress_dir": str(folder / "progress"),
        "message_sizes_bytes": (8, 4096, 65536),
        "script": (str(ROOT / "examples" / "pretrain_gpt.py"),),
        "script_arguments": (*TINY_FLAGS, "--global-batch-size", str(2 * hosts * devices)),
        "repeats": 3,
        "timeout_s": 30.0,
        "budget_s": 1000.0,
    }
    return WarmupOrder(**{**fields, **changes})  # type: ignore[arg-type]


class OneRankStore:
    """A store for a single rank: every awaited key exists."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        """Keep a value."""
        self.values[key] = value

    def get(self, key: str) -> bytes:
        """Give it back."""
        return self.values[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Give several back."""
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Count."""
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Time out at once, as torch's store does in the end."""
        if any(key not in self.values for key in keys):
            raise RuntimeError(f"wait timeout after {timeout}")


def answer_next(folder: Path, advise: Callable[[MeasuringQuestion], Advice]) -> None:
    """Answer the next question in a folder of progress messages, as a launcher does."""
    ends_s = time.monotonic() + LIMIT_S
    while (asked := open_question(folder)) is None and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert asked is not None
    question, answer = asked
    files.write(answer, advise(files.read(question, MeasuringQuestion)))


@dataclass(frozen=True)
class Outcome:
    """Exit codes and output of the workers, by rank."""

    codes: list[int]
    errors: list[str]


def run_workers(
    options: WarmupOrder, folder: Path, *, missing: tuple[int, ...] = (), late: tuple[int, ...] = ()
) -> Outcome:
    """Start one worker for each slot but the missing ones, and wait for all. The imports of late ones end 8 s later.

    A single one is started as the agent does it. Several are forked from one process, which is forked from a warm
    interpreter: on two cores imports are most of what they do.
    """
    order = folder / "options.json"
    files.write(order, options)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    ranks = [rank for rank in range(options.num_slots) if rank not in missing]
    if len(ranks) == 1:
        command = [sys.executable, "-m", "pipette_launch.probe.run", str(order)]
        done = _run(command, environment(ranks[0], options, store.port))
        return Outcome([done.returncode], [done.stderr])
    path = os.pathsep.join(str(ROOT / one) for one in (".", "patches", "tests"))
    named = [f"{rank}+{LATE_S}" if rank in late else str(rank) for rank in ranks]
    command = warm.command("pipette_patches.run", *warm.PATCHED[2:], str(FORKED), str(order), str(store.port), *named)
    done = _run(command, {**compare.environment(), "PYTHONPATH": path})
    assert 0 == done.returncode, done.stderr
    errors = [(folder / f"errors-{rank}").read_text() for rank in ranks]
    return Outcome(json.loads(done.stdout.splitlines()[-1]), errors)


def _run(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


def environment(rank: int, options: WarmupOrder, port: int) -> dict[str, str]:
    """Return the variables that torch's agent gives to a worker."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % options.devices_per_host),
        "WORLD_SIZE": str(options.num_slots),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'patches'}",
    }
