"""Access to NVML, NVIDIA's management library. Some machines lack NVML, and old drivers lack some of its functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

CLOCK_SM, TEMPERATURE_GPU = 1, 0
ERRORS_UNCORRECTED, ECC_VOLATILE, ECC_AGGREGATE = 1, 0, 1
MAX_NVLINKS, NVLINK_DOWN = 36, 0
CLOCK_REASONS = (
    "GpuIdle",
    "ApplicationsClocksSetting",
    "SwPowerCap",
    "HwSlowdown",
    "SyncBoost",
    "SwThermalSlowdown",
    "HwThermalSlowdown",
    "HwPowerBrakeSlowdown",
    "DisplayClockSetting",
)
"""Reasons for a clock's frequency, bit 0 first: `nvmlClocksEventReason...` (before 2023 `...ThrottleReason...`)."""
UNKNOWN_RESERVE_BYTES = 1 << 30
"""Assumed memory that a driver reserves: 0.3 to 0.8 GiB on idle A100, H100 and H200, up to 1 GiB on B200 and B300."""
HIDDEN = ("NVMLError_NoPermission", "NVMLError_OperatingSystem")
"""NVML's error codes for the handle of a device that a control group (cgroup) hides (nvml.h, nvmlReturn_t 4 and 17)."""


class Memory(NamedTuple):
    """Memory of one device, in bytes."""

    total_bytes: int
    free_bytes: int
    held_bytes: int
    """Bytes that processes have allocated on the device, without the driver's own reserve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReading:
    """Figures of a GPU after some seconds of work on all slots; 0 = a figure that NVML does not report."""

    sm_clock_hz: float
    sm_clock_max_hz: float
    power_w: float
    """Mean power of the GPU over the last second (nvml.h, nvmlDeviceGetPowerUsage)."""
    clock_reasons: tuple[str, ...]


@contextmanager
def session() -> Iterator[Any]:
    """Start NVML and yield its module; None if this machine has no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def query(nvml: Any, function_name: str, *arguments: Any) -> Any | None:
    """Call a function of NVML; returns None if the binding, the driver or the device lacks this function."""
    function = getattr(nvml, function_name, None)
    try:
        return function(*arguments) if function else None
    except nvml.NVMLError:
        return None


def clock_reasons(nvml: Any, handle: Any) -> tuple[str, ...] | None:
    """Return the reasons for a device's clock frequency, as names in `CLOCK_REASONS`; None if not reported."""
    bits = query(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:
        bits = query(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if bits is None else tuple(name for bit, name in enumerate(CLOCK_REASONS) if bits >> bit & 1)


def memory(nvml: Any, handle: Any) -> Memory:
    """Read the memory of a device; every reader of device memory calls this function.

    Version 1 of the call counts the driver's reserve as used (nvml.h, nvmlMemory_t). Version 2 reports the reserve. The
    manual of driver 525 includes the reserve in `used` of version 2, but later manuals do not. The formula total - free
    - reserved gives the used bytes under both manuals. Drivers before 510 and bindings before 11.510 lack version 2, so
    the largest known reserve is subtracted.
    """
    all_used = nvml.nvmlDeviceGetMemoryInfo(handle)
    version = getattr(nvml, "nvmlMemory_v2", None)
    split = query(nvml, "nvmlDeviceGetMemoryInfo", handle, version) if version else None
    held = all_used.used - UNKNOWN_RESERVE_BYTES if split is None else split.total - split.free - split.reserved
    return Memory(int(all_used.total), int(all_used.free), max(int(held), 0))


def gpus(nvml: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Return handles of the GPUs in PCI bus order, without CUDA_VISIBLE_DEVICES, and a sentence for each broken GPU.

    NVML counts GPUs that a control group hides, and refuses their handles (nvml.h, nvmlDeviceGetHandleByIndex_v2). CUDA
    does not count GPUs that a control group hides.
    """
    count = nvml.nvmlDeviceGetCount()
    handles, lost = [], []
    for index in range(count):
        try:
            handle = _gpu(nvml, index)
        except nvml.NVMLError as error:
            lost.append(f"GPU {index} of {count} cannot be used (NVML: {error}); reset it or reboot the node")
            continue
        handles += [] if handle is None else [handle]
    return handles, tuple(lost)


def _gpu(nvml: Any, index: int) -> Any | None:
    """Return the handle of a GPU whose memory can be read; None if a control group hides it."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except tuple(getattr(nvml, name) for name in HIDDEN):
        return None
    mode = query(nvml, "nvmlDeviceGetMigMode", handle)
    if mode and mode[0]:
        # CUDA enumerates a single MIG device (MIG User Guide, CUDA Device Enumeration), and reading the memory of the
        # whole GPU needs privileges (nvml.h, nvmlDeviceGetMemoryInfo).
        slices = range(query(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
        devices = (query(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, one) for one in slices)
        handle = next((device for device in devices if device is not None), handle)
    memory(nvml, handle)
    return handle


def is_same_device(nvml_uuid: str, cuda_uuid: object) -> bool:
    """Compare `GPU-5a3b...` of NVML with `5a3b...` of torch; true if the two UUIDs cannot be compared.

    CUDA may report the UUID of the whole GPU for a MIG device, and an old torch reports no UUID.
    """
    return cuda_uuid is None or nvml_uuid.startswith("MIG-") or nvml_uuid == f"GPU-{cuda_uuid}"


def text(value: str | bytes) -> str:
    """Return an answer of NVML as text; old bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def read_under_load(uuid: str, work: Callable[[], object]) -> LoadReading | None:
    """Read clock, power and clock reasons of a GPU at work; None if NVML does not answer.

    `work` launches work on the GPU. NVML is started first, because starting NVML may take longer than the work.
    """
    with session() as nvml:
        if nvml is None:
            return None
        handle = query(nvml, "nvmlDeviceGetHandleByUUID", uuid)
        if handle is None:
            return None
        work()
        clock, most = (query(nvml, f"nvmlDeviceGet{name}", handle, CLOCK_SM) for name in ("ClockInfo", "MaxClockInfo"))
        power = query(nvml, "nvmlDeviceGetPowerUsage", handle)
        return LoadReading(
            # NVML reports megahertz and milliwatts.
            sm_clock_hz=1e6 * (clock or 0),
            sm_clock_max_hz=1e6 * (most or 0),
            power_w=1e-3 * (power or 0),
            clock_reasons=clock_reasons(nvml, handle) or (),
        )
