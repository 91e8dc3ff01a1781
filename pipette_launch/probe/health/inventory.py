"""What a host has for the job: devices, memory, cores, versions. Imports no torch.

NVML sees every GPU of the machine, CUDA only those in CUDA_VISIBLE_DEVICES, so this file applies the variable itself.
NVML counts in PCI bus order; CUDA does so only with CUDA_DEVICE_ORDER=PCI_BUS_ID, which matters where a host has
unlike GPUs. Devices are therefore named by UUID everywhere else, and each warm-up worker compares the UUIDs of both.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import psutil

import pipette_launch
from pipette_launch.errors import ClusterError, UsageError
from pipette_launch.facts import Device, Host
from pipette_launch.probe.health import nvml as driver

PACKAGES = ("torch", "megatron-core", "transformer-engine")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CPU_INFO = Path("/proc/cpuinfo")


def host(*, name: str, address: str, num_devices: int, device: Literal["auto", "cuda", "cpu"] = "auto") -> Host:
    """Describe this machine and the devices that the job uses, in the order of the local ranks.

    Args:
        name: the name of this node in the job.
        address: the address at which its peers reach it.
        num_devices: the number of workers on this node.
        device: `auto` is `cuda` where NVML shows a GPU to this process, else `cpu`.

    Raises:
        ClusterError: there are fewer GPUs than workers, or every GPU is broken.
        UsageError: there are none although `cuda` was asked for.

    """
    gpus, lost = ([], ()) if device == "cpu" else _gpus()
    broken = "".join(f"; {sentence}" for sentence in lost)
    if lost and not gpus:
        raise ClusterError(f"{name}: no GPU can be used{broken}")
    if device == "cuda" and not gpus:
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
        said = "is not set" if wanted is None else f"is {wanted!r}"
        raise UsageError(
            f"{name}: NVML shows no GPU to this process (CUDA_VISIBLE_DEVICES {said}); install the driver, or use "
            f"--pipette-device=cpu"
        )
    if gpus and len(gpus) < num_devices:
        raise ClusterError(
            f"{name}: {num_devices} workers for {len(gpus)} visible GPUs; lower --nproc-per-node, widen "
            f"CUDA_VISIBLE_DEVICES, or use --pipette-device=cpu{broken}"
        )
    devices = tuple(gpus[:num_devices]) if gpus else _cpu_shares(num_devices)
    return Host(
        name=name,
        address=address,
        cores=len(os.sched_getaffinity(0)),
        devices=devices,
        place=switches(os.environ, socket.gethostname()),
    )


def switches(environ: Mapping[str, str], hostname: str) -> tuple[str, ...]:
    """Switches above this node as Slurm names them in SLURM_TOPOLOGY_ADDR, `spine.leaf3.node17`, outermost first.

    Empty where the address is not this host's: a user who starts the nodes by ssh may give all the same environment.
    """
    levels = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    # The pattern tells how many names there are, as a node's own may have dots in it.
    *above, node = address.split(".", len(levels) - 1) if len(levels) > 1 else address.split(".")
    return tuple(above) if node.partition(".")[0] == hostname.partition(".")[0] else ()


def num_gpus() -> int:
    """Number of GPUs that this process may use."""
    return len(_gpus()[0])


def lost_gpus() -> tuple[str, ...]:
    """Return one sentence for each GPU of this machine that is there but cannot be used."""
    return _gpus()[1]


def versions() -> dict[str, str]:
    """Versions of the packages and the driver that influence a measurement; those not installed are left out."""
    found = {"pipette-launch": pipette_launch.__version__}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    with driver.session() as nvml:
        if nvml is not None:
            found["driver"] = nvml.nvmlSystemGetDriverVersion()
    return found


def device_used_bytes(uuid: str) -> int:
    """Memory of a GPU that is not free, in bytes: all processes and the driver's reserve. Compare only differences."""
    with driver.session() as nvml:
        if nvml is None:
            raise ClusterError(f"NVML no longer answers for {uuid}; check the driver with nvidia-smi")
        memory = driver.memory(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        return memory.total_bytes - memory.free_bytes


def _gpus() -> tuple[list[Device], tuple[str, ...]]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: in its order, by index or UUID prefix, up to the first bad entry."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    with driver.session() as nvml:
        if nvml is None:
            return [], ()
        handles, lost = driver.gpus(nvml)
        if wanted is not None:
            chosen = (_handle(nvml, handles, entry.strip()) for entry in wanted.split(","))
            handles = list(takewhile(lambda handle: handle is not None, chosen))
        return [_device(nvml, handle) for handle in handles], lost


def _handle(nvml: Any, every: list[Any], entry: str) -> Any | None:
    if entry.isdecimal():
        return every[int(entry)] if int(entry) < len(every) else None
    if entry.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(entry)
        except nvml.NVMLError:
            return None
    matches = [handle for handle in every if entry and driver.text(nvml.nvmlDeviceGetUUID(handle)).startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _device(nvml: Any, handle: Any) -> Device:
    memory = driver.memory(nvml, handle)
    return Device(
        kind="cuda",
        uuid=driver.text(nvml.nvmlDeviceGetUUID(handle)),
        name=driver.text(nvml.nvmlDeviceGetName(handle)),
        memory_total_bytes=memory.total_bytes,
        memory_free_bytes=memory.free_bytes,
    )


def _cpu_shares(num_devices: int) -> tuple[Device, ...]:
    """One device per worker, each with an equal share of the memory that this process may use."""
    memory = psutil.virtual_memory()
    limit = ""
    with suppress(OSError):
        limit = CGROUP_LIMIT.read_text(encoding="ascii").strip()
    # `max`, or an absent file, means that the container has no limit.
    total = min(memory.total, int(limit) if limit.isdecimal() else memory.total) // num_devices
    free = min(memory.available // num_devices, total)
    # The processor's model as Linux prints it; Arm prints none.
    with CPU_INFO.open(encoding="utf-8", errors="replace") as lines:
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")
    return tuple(
        Device(kind="cpu", uuid=f"cpu-{index}", name=name, memory_total_bytes=total, memory_free_bytes=free)
        for index in range(num_devices)
    )
