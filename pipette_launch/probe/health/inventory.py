"""Inventory of this host: devices and their condition, memory, cores, versions. Imports no torch.

NVML shows every GPU of the machine, CUDA only those in CUDA_VISIBLE_DEVICES, so this file applies the variable itself.
NVML numbers GPUs in PCI bus order. CUDA uses PCI bus order only with CUDA_DEVICE_ORDER=PCI_BUS_ID, which matters if a
host has different GPUs. So all modules name devices by UUID, and each warm-up worker compares NVML's UUID with CUDA's
UUID.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import psutil

import pipette_launch
from pipette_launch.defaults import MEMORY_FREE_S
from pipette_launch.errors import ClusterError, UsageError
from pipette_launch.facts import Device, Host
from pipette_launch.facts.health import DeviceCondition, Holder
from pipette_launch.probe.health import nvml as driver
from pipette_launch.probe.health.verdicts import BUSY_TOLERANCE_BYTES
from pipette_launch.text import bytes_text

PACKAGES = ("torch", "megatron-core", "transformer-engine")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CPU_INFO = Path("/proc/cpuinfo")
SECOND_LOOK_S = 1.0  # Longest sample period of a device's utilisation (manual of nvidia-smi)
POLL_S = 0.5


def host(*, name: str, address: str, num_devices: int, device: Literal["auto", "cuda", "cpu"] = "auto") -> Host:
    """Describe this machine and the devices that the job uses, in the order of the local ranks.

    `device`: `auto` = `cuda` if NVML shows a GPU to this process, else `cpu`. Raises ClusterError if there are fewer
    GPUs than workers or every GPU is broken, and UsageError for `cuda` without any GPU.
    """
    gpus, lost = ([], ()) if device == "cpu" else _gpus()
    broken = "".join(f"; {sentence}" for sentence in lost)
    if lost and not gpus:
        raise ClusterError(f"{name}: no GPU can be used{broken}")
    if device == "cuda" and not gpus:
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
        value = "is not set" if wanted is None else f"is {wanted!r}"
        raise UsageError(
            f"{name}: NVML shows no GPU to this process (CUDA_VISIBLE_DEVICES {value}); install the driver, or use "
            f"--pipette-device=cpu"
        )
    if gpus and len(gpus) < num_devices:
        raise ClusterError(
            f"{name}: {num_devices} workers for {len(gpus)} visible GPUs; lower --nproc-per-node, widen "
            f"CUDA_VISIBLE_DEVICES, or use --pipette-device=cpu{broken}"
        )
    devices = tuple(gpus[:num_devices]) if gpus else _cpu_shares(num_devices)
    place = switches(os.environ, socket.gethostname())
    return Host(name=name, address=address, cores=len(os.sched_getaffinity(0)), devices=devices, place=place)


def switches(environ: Mapping[str, str], hostname: str) -> tuple[str, ...]:
    """Return the switches above this node, outermost first, from SLURM_TOPOLOGY_ADDR (`spine.leaf3.node17`).

    The result is empty if the address is not this host's: nodes that ssh starts may all have the same environment.
    """
    levels = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    # SLURM_TOPOLOGY_ADDR_PATTERN gives the number of names, because a node's own name may contain dots.
    *above, node = address.split(".", len(levels) - 1) if len(levels) > 1 else address.split(".")
    return tuple(above) if node.partition(".")[0] == hostname.partition(".")[0] else ()


def num_gpus() -> int:
    """Return the number of GPUs that this process may use."""
    return len(_gpus()[0])


def lost_gpus() -> tuple[str, ...]:
    """Return one sentence for each GPU of this machine that is present but cannot be used."""
    return _gpus()[1]


def versions() -> dict[str, str]:
    """Return the versions of installed packages and of the driver that influence a measurement."""
    found = {"pipette-launch": pipette_launch.__version__}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    with driver.session() as nvml:
        if nvml is not None:
            found["driver"] = nvml.nvmlSystemGetDriverVersion()
    return found


def device_used_bytes(uuid: str) -> int:
    """Return a GPU's used memory, including the driver's reserve. Callers use only differences between two results."""
    with driver.session() as nvml:
        if nvml is None:
            raise ClusterError(f"NVML no longer answers for {uuid}; check the driver with nvidia-smi")
        memory = driver.memory(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        return memory.total_bytes - memory.free_bytes


def _gpus() -> tuple[list[Device], tuple[str, ...]]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: in listed order, by index or UUID prefix, up to a bad entry."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    with driver.session() as nvml:
        if nvml is None:
            return [], ()
        handles, lost = driver.gpus(nvml)
        if wanted is not None:
            chosen = (_handle(nvml, handles, entry.strip()) for entry in wanted.split(","))
            handles = list(takewhile(lambda handle: handle is not None, chosen))
        devices = []
        for handle in handles:
            memory = driver.memory(nvml, handle)
            capability = driver.query(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
            devices.append(
                Device(
                    kind="cuda",
                    uuid=driver.text(nvml.nvmlDeviceGetUUID(handle)),
                    name=driver.text(nvml.nvmlDeviceGetName(handle)),
                    memory_total_bytes=memory.total_bytes,
                    memory_free_bytes=memory.free_bytes,
                    compute_capability=capability and float("{}.{}".format(*capability)),
                )
            )
        return devices, lost


def _handle(nvml: Any, every: list[Any], entry: str) -> Any | None:
    if entry.isdecimal():
        return every[int(entry)] if int(entry) < len(every) else None
    if entry.startswith("MIG-"):
        return driver.query(nvml, "nvmlDeviceGetHandleByUUID", entry)
    matches = [handle for handle in every if entry and driver.text(nvml.nvmlDeviceGetUUID(handle)).startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _cpu_shares(num_devices: int) -> tuple[Device, ...]:
    """Return one device for each worker, with an equal share of the memory that this process may use."""
    memory = psutil.virtual_memory()
    # If the container has no limit, the file contains `max` or does not exist.
    limit = _read(CGROUP_LIMIT)
    total = min(memory.total, int(limit) if limit.isdecimal() else memory.total) // num_devices
    free = min(memory.available // num_devices, total)
    # Read the processor's model as Linux prints it; on Arm Linux prints no model.
    with CPU_INFO.open(encoding="utf-8", errors="replace") as lines:
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")
    return tuple(
        Device(kind="cpu", uuid=f"cpu-{index}", name=name, memory_total_bytes=total, memory_free_bytes=free)
        for index in range(num_devices)
    )


def conditions(host: Host, *, sleep: Callable[[float], object] = time.sleep) -> tuple[DeviceCondition, ...]:
    """Return the condition of every device of this machine, in the order of the local ranks, from NVML.

    If a device looks busy, the utilisation of all devices is read again after a second. Without persistence mode the
    first query starts the driver, which scrubs the memory and reports high utilisation (nvmlDeviceGetUtilizationRates).
    Raises ClusterError if the host has GPUs and NVML no longer answers.
    """
    if host.devices[0].kind == "cpu":
        return tuple(DeviceCondition(uuid=device.uuid) for device in host.devices)
    with driver.session() as nvml:
        if nvml is None:
            raise ClusterError(f"{host.name}: NVML no longer answers; check the driver with nvidia-smi")
        found = tuple(_condition(nvml, device.uuid) for device in host.devices)
        if any(one.utilisation for one in found):
            sleep(SECOND_LOOK_S)
            found = tuple(replace(one, utilisation=_utilisation(nvml, one.uuid)) for one in found)
        return found


def _utilisation(nvml: Any, uuid: str) -> float | None:
    rates = driver.query(nvml, "nvmlDeviceGetUtilizationRates", nvml.nvmlDeviceGetHandleByUUID(uuid))
    return None if rates is None else rates.gpu / 100


def _condition(nvml: Any, uuid: str) -> DeviceCondition:
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def ask(question: str, *arguments: Any) -> Any | None:
        return driver.query(nvml, f"nvmlDeviceGet{question}", handle, *arguments)

    rows = ask("RemappedRows") or (None,) * 4
    states = (ask("NvLinkState", link) for link in range(driver.MAX_NVLINKS))
    links = [state for state in states if state is not None]
    clocks_mhz = ask("ClockInfo", driver.CLOCK_SM), ask("MaxClockInfo", driver.CLOCK_SM)
    clocks_hz = [None if mhz is None else mhz * 1_000_000 for mhz in clocks_mhz]
    processes = ask("ComputeRunningProcesses") or ()
    used_bytes = None
    with suppress(nvml.NVMLError):
        used_bytes = driver.memory(nvml, handle).held_bytes
    return DeviceCondition(
        uuid=uuid,
        holders=tuple(_holder(one.pid, one.usedGpuMemory) for one in processes if one.pid != os.getpid()),
        used_bytes=used_bytes,
        utilisation=_utilisation(nvml, uuid),
        sm_clock_hz=clocks_hz[0],
        sm_clock_max_hz=clocks_hz[1],
        clock_reasons=driver.clock_reasons(nvml, handle),
        ecc_volatile=ask("TotalEccErrors", driver.ERRORS_UNCORRECTED, driver.ECC_VOLATILE),
        ecc_aggregate=ask("TotalEccErrors", driver.ERRORS_UNCORRECTED, driver.ECC_AGGREGATE),
        rows_correctable=rows[0],
        rows_uncorrectable=rows[1],
        rows_pending=_flag(rows[2]),
        rows_failed=_flag(rows[3]),
        # An NVLink in sleep state counts as up.
        nvlinks_up=sum(state != driver.NVLINK_DOWN for state in links) if links else None,
        nvlinks_total=len(links) or None,
        pcie_width=ask("CurrPcieLinkWidth"),
        pcie_width_max=ask("MaxPcieLinkWidth"),
        pcie_generation=ask("CurrPcieLinkGeneration"),
        pcie_generation_max=ask("MaxPcieLinkGeneration"),
        persistence_mode=_flag(ask("PersistenceMode")),
        temperature_c=ask("Temperature", driver.TEMPERATURE_GPU),
    )


def _holder(pid: int, used_bytes: int | None) -> Holder:
    try:
        name = psutil.Process(pid).name()
    except psutil.Error:
        name = "name unknown"
    return Holder(pid=pid, name=name, used_bytes=used_bytes)


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def await_memory(
    host: Host,
    *,
    deadline_s: float = MEMORY_FREE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[str, ...]:
    """Wait until no GPU of a host holds noticeably more memory than before the warm-up, which `host` describes.

    A driver frees the memory of a process some time after the process has ended. A child process that a worker left
    behind may hold memory for ever. Returns a sentence for each device that stayed full, and for each process that
    holds memory of that device. The result is empty on a CPU, whose memory the kernel takes back before a process ends.
    """
    ends_s = clock() + deadline_s
    full = [device for device in host.devices if device.kind == "cuda"]
    try:
        while True:
            # Bytes that each device holds in excess of its used memory before the warm-up.
            before = {device: device.memory_total_bytes - device.memory_free_bytes for device in full}
            excess = {device: device_used_bytes(device.uuid) - held for device, held in before.items()}
            full = [device for device in full if excess[device] > BUSY_TOLERANCE_BYTES]
            if not full or clock() >= ends_s:
                break
            sleep(POLL_S)
        found = conditions(replace(host, devices=tuple(full))) if full else ()
    except ClusterError as error:
        # Give up if the driver no longer answers, because the training will report the driver's error.
        return (str(error),)
    after = f"more than before the warm-up, {deadline_s:.0f} s after it"
    troubles = [
        f"{host.name}: {device.name} {device.uuid} still holds {bytes_text(excess[device])} {after}" for device in full
    ]
    for condition in found:
        for one in condition.holders:
            size = "memory" if one.used_bytes is None else bytes_text(one.used_bytes)
            troubles.append(f"{host.name}: process {one.pid} ({one.name}) holds {size} of {condition.uuid}")
    return tuple(troubles)
