"""Memory count by abstract execution: a worker process runs megatron-core as one rank, without a GPU.

Requests to the worker and its answers are lines of JSON, so this module does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipette_launch.cost.layers.parameters import sharding_of
from pipette_launch.errors import FileFormatError, PlanError
from pipette_launch.facts.files import digest, from_plain, parse, read_bytes, to_plain, write_text
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.messages import ExecutedMemory, ExecutionAnswer, ExecutionRequest

WORKER = ("-u", "-m", "pipette_patches.abstract")
REVISION = 8
"""Revision number of the worker's counting. Raise this revision number with every change of the counting, because
cached answers of other revisions are not read."""
LIMIT_S = 300.0
"""Seconds in which the worker must answer a request. Most answers of the worker take seconds, but megatron-core's
recompute of `mlp` never ends if the MLP has biases (0.16.1)."""
_ERROR_LINES = 3


def execute(
    job: Job,
    layout: Layout,
    pp_ranks: Sequence[int],
    *,
    cache: Path | None = None,
    python: str = sys.executable,
    limit_s: float = LIMIT_S,
) -> tuple[ExecutedMemory, ...]:
    """Count the bytes of one rank of each named pipeline rank, by executing megatron-core abstractly.

    Args:
        job: the training job.
        layout: any layout of the job.
        pp_ranks: pipeline ranks.
        cache: folder for answers; None = no cache.
        python: interpreter that has torch, megatron-core and this package.
        limit_s: time limit of an answer, in seconds.

    Raises:
        PlanError: megatron-core refuses the layout or does not end, or a part of it is not modelled; the message gives
            the reason.

    """
    with Executor(cache=cache, python=python, limit_s=limit_s) as executor:
        return executor.execute(job, layout, pp_ranks)


class Executor(contextlib.AbstractContextManager["Executor"]):
    """Worker process that answers many requests, because importing megatron-core takes longer than an answer.

    The process starts with the first request that the cache cannot answer.
    """

    def __init__(self, *, cache: Path | None = None, python: str = sys.executable, limit_s: float = LIMIT_S) -> None:
        self._cache = cache
        self._python = python
        self._limit_s = limit_s
        self._worker: subprocess.Popen[str] | None = None
        self._resources = contextlib.ExitStack()

    def __exit__(self, *_: object) -> None:
        """End the worker."""
        self.close()

    def close(self) -> None:
        """End the worker process. The next request starts a new worker process."""
        self._worker = None
        with contextlib.suppress(BrokenPipeError):
            self._resources.close()

    def execute(self, job: Job, layout: Layout, pp_ranks: Sequence[int]) -> tuple[ExecutedMemory, ...]:
        """Count the bytes of one rank of each pipeline rank in `pp_ranks`, from the cache or by the worker."""
        if sharding_of(job):
            # Abstract execution cannot run Megatron-FSDP, which needs a process group with all ranks and frees storage
            # of tensors.
            raise PlanError("abstract execution runs no FSDP; count by formula with --method closed")
        if job.model.hybrid:
            raise PlanError("abstract execution builds no hybrid models; count by formula with --method closed")
        for rank in pp_ranks:
            if not 0 <= rank < layout.pp:
                raise PlanError(f"there is no pipeline rank {rank} of {layout.pp}")
        kept = {rank: self._cached(job, layout, rank) for rank in pp_ranks}
        missing = tuple(rank for rank, memory in kept.items() if memory is None)
        if missing:
            for fresh in self._answer(ExecutionRequest(job=job, layout=layout, pp_ranks=missing)):
                kept[fresh.pp_rank] = fresh
                if self._cache is not None:
                    name = _name(job, layout, fresh.pp_rank)
                    write_text(self._cache / name, json.dumps(to_plain(fresh)) + "\n")
        return tuple(memory for rank in pp_ranks if (memory := kept[rank]) is not None)

    def _answer(self, request: ExecutionRequest) -> tuple[ExecutedMemory, ...]:
        line, is_late = self._exchange(json.dumps(to_plain(request)))
        if is_late:
            self.close()
            raise PlanError(
                f"abstract execution of {request.layout.words()} gave no answer within {self._limit_s:g} s; "
                f"use the closed form"
            )
        if not line:
            raise PlanError(f"abstract execution ended without an answer: {self._last_errors()}")
        try:
            answer: ExecutionAnswer = _read(ExecutionAnswer, line)
        except FileFormatError as error:
            raise PlanError(str(error)) from error
        if answer.error is not None:
            raise PlanError(f"abstract execution of {request.layout.words()}: {answer.error}")
        if tuple(memory.pp_rank for memory in answer.ranks) != request.pp_ranks:
            raise PlanError("abstract execution answered for other pipeline ranks than it was asked for")
        return answer.ranks

    def _exchange(self, line: str) -> tuple[str, bool]:
        """Send a line; return the worker's answer (empty if it ended), and True if the time limit passed."""
        worker = self._worker = self._worker or self._started()
        assert worker.stdin
        assert worker.stdout
        late = threading.Event()

        def stop() -> None:
            late.set()
            worker.kill()

        clock = threading.Timer(self._limit_s, stop)
        clock.daemon = True
        clock.start()
        try:
            worker.stdin.write(f"{line}\n")
            worker.stdin.flush()
            return worker.stdout.readline(), late.is_set()
        except BrokenPipeError:
            return "", late.is_set()
        finally:
            clock.cancel()

    def _started(self) -> subprocess.Popen[str]:
        """Start a worker process, which `close` ends, and keep its stderr for error messages."""
        self._errors = self._resources.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))  # noqa: SIM115
        try:
            worker = subprocess.Popen(
                [self._python, *WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
                env=_environment(self._python),
            )
        except OSError as error:
            raise PlanError(f"cannot start {self._python} for abstract execution: {error.strerror}") from error
        self._resources.enter_context(worker)
        self._resources.callback(worker.kill)
        return worker

    def _last_errors(self) -> str:
        """Wait until the worker process has ended, and return the last lines of its stderr."""
        assert self._worker
        code = self._worker.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()[-_ERROR_LINES:]
        self.close()
        return " / ".join(lines) or f"exit code {code}"

    def _cached(self, job: Job, layout: Layout, pp_rank: int) -> ExecutedMemory | None:
        if self._cache is None:
            return None
        try:
            memory: ExecutedMemory = _read(ExecutedMemory, read_bytes(self._cache / _name(job, layout, pp_rank)))
        except FileFormatError:
            # If a cache file cannot be read, its answer is computed again and the file is overwritten.
            return None
        return memory


def _name(job: Job, layout: Layout, pp_rank: int) -> str:
    """Return the name of the cache file: a digest of exactly the facts that can change the answer."""
    facts = (
        job.model,
        layout.num_microbatches(job.batch.global_batch_size),
        job.grad_reduce_in_bf16,
        job.optimizer,
        job.performance_flags,
        layout,
        pp_rank,
    )
    return f"executed-{digest(*facts, REVISION, _version('torch'), _version('megatron-core'))}.json"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _environment(python: str) -> dict[str, str]:
    """Return the worker's environment: one thread, no compilation, no GPU, and our import path if `python` is ours."""
    own = {"PYTHONPATH": os.pathsep.join(entry or "." for entry in sys.path)} if python == sys.executable else {}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}


def _read(kind: Any, text: str | bytes) -> Any:
    return from_plain(kind, parse(text, "abstract execution"), "abstract execution")
