"""The key of a plan in the cache: a digest of everything that the plan depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipette_launch.facts import Host, Job, files
from pipette_launch.megatron.performance import VARIABLES as ALLOCATOR_VARIABLES

STEERING = (
    # torch and its compiler; the allocator decides how much memory is lost to fragments.
    *(*ALLOCATOR_VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_ALLOW_TF32_", "TORCH_BLAS_PREFER_", "TORCH_COMPILE_", "TORCH_NCCL_"),
    # CUDA and its libraries.
    *("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_MPS_", "NVIDIA_TF32_OVERRIDE", "NVTE_"),
    # Networks: libfabric and its plugin for NCCL (EFA), SHARP, UCX, NVSHMEM (DeepEP).
    *("FI_", "GLOO_", "NCCL_", "NVSHMEM_", "OFI_NCCL_", "SHARP_", "UCX_"),
    # CPUs.
    *("ATEN_CPU_CAPABILITY", "KMP_", "MKL_", "OMP_", "ONEDNN_"),
)
"""Prefixes of environment variables that change speed or memory. CUDA_VISIBLE_DEVICES is missing: UUIDs replace it."""
LOGGING = ("DEBUG", "FILE", "LOG", "DUMP", "TRACE", "VERBOSE")
"""Variables whose name contains one of these words only steer logs and do not count."""
FOLDERS = ("_DIR", "_DIRECTORY", "_PATH")
"""Variables whose name ends like this are folders and do not count. `_DIRECT_` is no such end."""


def plan_key(
    hosts: Sequence[Host],
    job: Job,
    versions: dict[str, str],
    settings: Sequence[float | str],
    environ: Mapping[str, str],
) -> str:
    """Digest everything that a plan depends on.

    Free memory is left out because it changes every minute. The budget is left out because a short warm-up also gives
    a plan, and the order of hosts because a plan names them.
    """
    # Notes are prose, and the number of iterations does not change a step.
    work = replace(job, notes=(), train_iters=None, log_interval=1)
    return files.digest(lasting(hosts), work, versions, list(settings), steering(environ))


def lasting(hosts: Sequence[Host]) -> list[object]:
    """Return the facts that tell one set of hosts from another, without free memory, which changes every minute."""
    return [
        (
            host.name,
            host.cores,
            [(device.kind, device.uuid, device.name, device.memory_total_bytes) for device in host.devices],
        )
        for host in sorted(hosts, key=lambda host: host.name)
    ]


def steering(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that change speed or memory."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(STEERING) and not name.endswith(FOLDERS) and not any(word in name for word in LOGGING)
    }
