"""Key of a plan in the cache: a digest of all facts and settings that the plan depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipette_launch.facts import Host, Job, files
from pipette_launch.facts.job import ALLOCATOR_VARIABLES

STEERING = (
    # Variables of torch, of its compiler, and of its allocator, on which the memory lost to fragments depends.
    *(*ALLOCATOR_VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_ALLOW_TF32_", "TORCH_BLAS_PREFER_", "TORCH_COMPILE_", "TORCH_NCCL_"),
    # Variables of CUDA and of the CUDA libraries.
    *("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_MPS_", "NVIDIA_TF32_OVERRIDE", "NVTE_"),
    # Variables of network libraries: libfabric and its plugin for NCCL (EFA), SHARP, UCX, NVSHMEM (DeepEP).
    *("FI_", "GLOO_", "NCCL_", "NVSHMEM_", "OFI_NCCL_", "SHARP_", "UCX_"),
    # CPUs.
    *("ATEN_CPU_CAPABILITY", "KMP_", "MKL_", "OMP_", "ONEDNN_"),
)
"""Prefixes of environment variables that change speed or memory. Device UUIDs replace CUDA_VISIBLE_DEVICES."""
LOGGING = ("DEBUG", "FILE", "LOG", "DUMP", "TRACE", "VERBOSE")
"""A variable whose name contains one of these words only steers logs. The key leaves out these variables."""
FOLDERS = ("_DIR", "_DIRECTORY", "_PATH")
"""A variable whose name ends in one of these texts holds a folder. The key leaves out these variables."""


def plan_key(
    hosts: Sequence[Host],
    job: Job,
    versions: dict[str, str],
    settings: Sequence[float | str],
    environ: Mapping[str, str],
) -> str:
    """Digest all facts and settings that a plan depends on.

    The digest leaves out free memory, which changes every minute. The digest also leaves out the budget, because a plan
    is valid after a short warm-up or search too. The digest leaves out the order of hosts, because a plan names the
    hosts.
    """
    # Notes, the number of iterations and the log interval do not change a step.
    work = replace(job, notes=(), train_iters=None, log_interval=1)
    return files.digest(lasting(hosts), work, versions, list(settings), steering(environ))


def lasting(hosts: Sequence[Host]) -> list[object]:
    """Return the facts that distinguish sets of hosts. Free memory changes every minute and is left out."""
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
