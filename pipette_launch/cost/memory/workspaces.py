"""Workspaces of matrix libraries: read from their sources, none is fitted.

PyTorch gives each pair of thread and stream that multiplies matrices a cuBLAS workspace and keeps it. A training rank
has two: the main thread runs forwards, autograd's own thread runs backwards (ATen, CublasHandlePool.cpp).
TransformerEngine keeps one of its own (`get_cublas_workspace_size_bytes`), and four more for grouped GEMMs, one a
stream (`get_multi_stream_cublas_workspace`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipette_launch.facts.job import Job
from pipette_launch.megatron.performance import performance_options

NUM_CUBLAS_THREADS = 2
"""The main thread and the backward's."""
NUM_GROUPED_GEMM_STREAMS = 4
NUM_OVERLAP_STREAMS = 3
"""Streams that share TransformerEngine's own workspace under `--tp-comm-overlap` (pytorch/module/base.py)."""
_KIB = 1 << 10
_HOPPER = 9
_LARGE_BYTES = 32 << 20
_SMALL_CUBLAS_BYTES = (2 * 4096 + 8 * 16) * _KIB
_SMALL_TE_BYTES = 4 << 20


def workspace_bytes(job: Job, *, compute_capability: int, environment: Mapping[str, str]) -> int:
    """Count the workspaces that a rank holds from its first step on.

    Checked on Megatron's golden values: A100 64 + 4 MiB, H100 64 + 32 MiB, both to 0.1 MiB at pp 1; the
    test with `--tp-comm-overlap` holds 64 MiB more.

    Args:
        job: its implementation and grouped GEMMs count.
        compute_capability: the major number: 8 for A100 and RTX 4090, 9 for H100, 10 for B200.
        environment: of the worker; CUBLAS_WORKSPACE_CONFIG counts, which deterministic runs must set.

    """
    total = NUM_CUBLAS_THREADS * cublas_workspace_bytes(compute_capability, environment)
    if job.model.transformer_impl == "transformer_engine":
        own = _LARGE_BYTES if compute_capability >= _HOPPER else _SMALL_TE_BYTES
        grouped = bool(job.model.num_experts) and performance_options(job).moe_grouped_gemm
        streams = NUM_OVERLAP_STREAMS if performance_options(job).tp_comm_overlap else 1
        total += own * (streams + (NUM_GROUPED_GEMM_STREAMS if grouped else 0))
    return total


def cublas_workspace_bytes(compute_capability: int, environment: Mapping[str, str]) -> int:
    """Return the size of a cuBLAS workspace of PyTorch: 8.1 MiB, 32 MiB from Hopper on, or as the environment sets it.

    A value that has no `:SIZE:COUNT` in it counts as none, as in PyTorch.
    """
    pools = re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pools:
        return sum(int(size) * int(count) * _KIB for size, count in pools)
    return _LARGE_BYTES if compute_capability >= _HOPPER else _SMALL_CUBLAS_BYTES
