"""NVIDIA's management library, which not every machine has and not every version of which knows every question."""

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
CLOCK_REASONS = {
    "GpuIdle": 0x1,
    "ApplicationsClocksSetting": 0x2,
    "SwPowerCap": 0x4,
    "HwSlowdown": 0x8,
    "SyncBoost": 0x10,
    "SwThermalSlowdown": 0x20,
    "HwThermalSlowdown": 0x40,
    "HwPowerBrakeSlowdown": 0x80,
    "DisplayClockSetting": 0x100,
}
"""Bits of why the clocks are where they are: `nvmlClocksEventReason...`, before 2023 `nvmlClocksThrottleReason...`."""


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


def told(nvml: Any, question: str, *arguments: Any) -> Any | None:
    """Ask NVML; None where the binding or the driver lacks the function, or the device does not support it."""
    function = getattr(nvml, question, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def text(value: str | bytes) -> str:
    """Old bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
