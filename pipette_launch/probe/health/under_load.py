"""Reads a GPU that has worked for some seconds: its clock, its power, and what holds the clock down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipette_launch.probe.health import nvml as driver


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReading:
    """Figures of a GPU that has worked for some seconds, like all other slots; 0 if NVML does not report them."""

    sm_clock_hz: float
    sm_clock_max_hz: float
    power_w: float
    """Mean over the last second (nvml.h, nvmlDeviceGetPowerUsage)."""
    clock_reasons: tuple[str, ...]


def read_under_load(uuid: str, work: Callable[[], object]) -> LoadReading | None:
    """Return the reading of one device; None where NVML does not answer.

    Args:
        uuid: of the device.
        work: launches work that the device does while it is read. NVML starts before, as that may take longer.

    """
    with driver.session() as nvml:
        return None if nvml is None else _reading(nvml, uuid, work)


def _reading(nvml: Any, uuid: str, work: Callable[[], object]) -> LoadReading | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None
    work()
    clock, most = (
        driver.query(nvml, f"nvmlDeviceGet{name}", handle, driver.CLOCK_SM) for name in ("ClockInfo", "MaxClockInfo")
    )
    power = driver.query(nvml, "nvmlDeviceGetPowerUsage", handle)
    return LoadReading(
        # NVML reports megahertz and milliwatts.
        sm_clock_hz=1e6 * (clock or 0),
        sm_clock_max_hz=1e6 * (most or 0),
        power_w=1e-3 * (power or 0),
        clock_reasons=driver.clock_reasons(nvml, handle) or (),
    )
