"""Abstract execution in a worker process that answers many requests: the import of megatron-core takes seconds."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from oracle.memory import RankMemory

from pipette_launch.facts import Job, Layout

ROOT = Path(__file__).parents[2]


class RefusedError(Exception):
    """megatron-core refuses the job, or abstract execution does not model a feature of the job."""


class Executor(contextlib.AbstractContextManager["Executor"]):
    """Counts the bytes of ranks without a GPU; the worker process starts with the first request."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()

    def execute(self, job: Job, layout: Layout, pp_ranks: Sequence[int]) -> list[RankMemory]:
        """Count the bytes of the first rank of each pipeline stage in `pp_ranks`; raises RefusedError."""
        if self._worker is None:
            self._worker = _start()
        assert self._worker.stdin
        assert self._worker.stdout
        pickle.dump((job, layout, list(pp_ranks)), self._worker.stdin)
        self._worker.stdin.flush()
        answer: list[RankMemory] | str = pickle.load(self._worker.stdout)  # noqa: S301
        if isinstance(answer, str):
            raise RefusedError(answer)
        return answer


def _start() -> subprocess.Popen[bytes]:
    """Start a worker with one thread, without compilation and without a GPU."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "patches", "tests"))
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "oracle.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **variables},
    )
