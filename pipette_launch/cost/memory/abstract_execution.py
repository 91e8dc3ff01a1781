"""Memory count by abstract execution: a worker process runs megatron-core as one rank, without a GPU.

Requests to the worker and its answers are lines of JSON, so this module does not import torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipette_launch.cost.layers.parameters import sharding_of
from pipette_launch.defaults import ABSTRACT_S
from pipette_launch.errors import FileFormatError, PlanError
from pipette_launch.facts.files import digest, from_plain, parse, read_bytes, to_plain, write_text
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.messages import ExecutedMemory, ExecutionAnswer, ExecutionRequest

WORKER = ("-m", "pipette_patches.abstract")
REVISION = 8
"""Revision number of the worker's counting. Raise this revision number with every change of the counting, because
cached answers of other revisions are not read."""
_ERROR_LINES = 3


def ask_worker(request: str) -> str:
    """Start a worker process with one request, and return the worker's answer."""
    try:
        worker = subprocess.run(
            [sys.executable, *WORKER],
            input=f"{request}\n",
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=environment(),
            timeout=ABSTRACT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PlanError(f"abstract execution gave no answer within {ABSTRACT_S:g} s; use the closed form") from error
    except OSError as error:
        raise PlanError(f"cannot start {sys.executable} for abstract execution: {error.strerror}") from error
    if not worker.stdout:
        lines = worker.stderr.strip().splitlines()[-_ERROR_LINES:]
        reason = " / ".join(lines) or f"exit code {worker.returncode}"
        raise PlanError(f"abstract execution ended without an answer: {reason}")
    return worker.stdout


def environment() -> dict[str, str]:
    """Return the worker's environment: this process's import path, one thread, no compilation and no GPU."""
    paths = os.pathsep.join(entry or "." for entry in sys.path)
    ours = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **ours}


def execute(
    job: Job,
    layout: Layout,
    pp_ranks: Sequence[int],
    *,
    cache: Path | None = None,
    ask: Callable[[str], str] = ask_worker,
) -> tuple[ExecutedMemory, ...]:
    """Count the bytes of one rank of each named pipeline rank, by executing megatron-core abstractly.

    `cache` is a folder for answers; None = no cache. `ask` sends a request to a worker and returns the worker's answer.
    If megatron-core refuses the layout or does not end, or a part of it is not modelled, the PlanError has the reason.
    """
    if sharding_of(job):
        # Megatron-FSDP needs a process group with all ranks, and frees storage of tensors.
        raise PlanError("abstract execution runs no FSDP; count by formula with --method closed")
    if job.model.needs_script:
        reason = "abstract execution builds only attention, MLPs and experts of a GPT"
        raise PlanError(f"{reason}; count by formula with --method closed")
    for rank in pp_ranks:
        if not 0 <= rank < layout.pp:
            raise PlanError(f"there is no pipeline rank {rank} of {layout.pp}")
    kept = {rank: _cached(cache, job, layout, rank) for rank in pp_ranks}
    missing = tuple(rank for rank, memory in kept.items() if memory is None)
    if missing:
        request = ExecutionRequest(job=job, layout=layout, pp_ranks=missing)
        for fresh in _read_answer(request, ask(json.dumps(to_plain(request)))):
            kept[fresh.pp_rank] = fresh
            if cache is not None:
                write_text(cache / _name(job, layout, fresh.pp_rank), json.dumps(to_plain(fresh)) + "\n")
    return tuple(memory for rank in pp_ranks if (memory := kept[rank]) is not None)


def _read_answer(request: ExecutionRequest, line: str) -> tuple[ExecutedMemory, ...]:
    try:
        answer: ExecutionAnswer = _read(ExecutionAnswer, line)
    except FileFormatError as error:
        raise PlanError(str(error)) from error
    if answer.error is not None:
        raise PlanError(f"abstract execution of {request.layout.words()}: {answer.error}")
    if tuple(memory.pp_rank for memory in answer.ranks) != request.pp_ranks:
        raise PlanError("abstract execution answered for other pipeline ranks than it was asked for")
    return answer.ranks


def _cached(cache: Path | None, job: Job, layout: Layout, pp_rank: int) -> ExecutedMemory | None:
    if cache is None:
        return None
    try:
        memory: ExecutedMemory = _read(ExecutedMemory, read_bytes(cache / _name(job, layout, pp_rank)))
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


def _read(kind: Any, text: str | bytes) -> Any:
    return from_plain(kind, parse(text, "abstract execution"), "abstract execution")
