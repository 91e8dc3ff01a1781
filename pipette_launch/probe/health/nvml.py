"""Access to NVML, NVIDIA's management library, which some machines and some of whose functions old drivers lack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CLOCK_SM = 1
TEMPERATURE_GPU = 0
ERRORS_UNCORRECTED = 1
ECC_VOLATILE = 0
ECC_AGGREGATE = 1
MAX_NVLINKS = 36
NVLINK_DOWN = 0
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
"""Why a clock has its frequency, bit 0 first: `nvmlClocksEventReason...`, before 2023 `nvmlClocksThrottleReason...`."""


@contextmanager
def session() -> Iterator[Any]:
    """NVML's module, started; None where this machine has no NVIDIA driver."""
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
    """Call a function of NVML; None where the binding, the driver or the device does not support it."""
    function = getattr(nvml, function_name, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def text(value: str | bytes) -> str:
    """Old bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
