"""A worker of abstract execution that answers many requests: importing megatron-core takes longer than an answer."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipette_launch.cost.memory.abstract_execution import WORKER, environment, execute
from pipette_launch.facts import Job, Layout
from pipette_launch.facts.messages import ExecutedMemory


class Executor(contextlib.AbstractContextManager["Executor"]):
    """Starts its worker with the first request that the cache cannot answer."""

    def __init__(self, *, cache: Path | None = None, python: str = sys.executable) -> None:
        """Take a folder for answers, and an interpreter that has torch, megatron-core and this package."""
        self._cache, self._python = cache, python
        self._worker: subprocess.Popen[str] | None = None

    def __exit__(self, *_: object) -> None:
        """End the worker."""
        self.close()

    def close(self) -> None:
        """End the worker. The next request starts another worker."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def execute(self, job: Job, layout: Layout, pp_ranks: Sequence[int]) -> tuple[ExecutedMemory, ...]:
        """Count the bytes of one rank of each pipeline rank in `pp_ranks`."""
        return execute(job, layout, pp_ranks, cache=self._cache, ask=self._ask)

    def _ask(self, request: str) -> str:
        if self._worker is None:
            variables = environment()
            if self._python != sys.executable:
                variables.pop("PYTHONPATH")
            self._worker = subprocess.Popen(
                [self._python, *WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env=variables,
            )
        assert self._worker.stdin
        assert self._worker.stdout
        self._worker.stdin.write(f"{request}\n")
        self._worker.stdin.flush()
        return self._worker.stdout.readline()
