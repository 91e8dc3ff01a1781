"""What the driver reports of one device before the job starts. A figure that it does not report is None, never 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Nearness = Literal["switch", "root", "node", "across"]
"""How a device reaches its nearest NIC: by the PCIe switch above both, by one root port's tree, within one NUMA node,
or across the sockets."""
NEARNESS: tuple[Nearness, ...] = ("switch", "root", "node", "across")
"""Nearest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process of others that holds memory of the device."""

    pid: int
    name: str
    used_bytes: int | None
    """None where the driver hides it, as it does inside a container."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCondition:
    """One device, as NVML and sysfs describe it. On CPU only the UUID is known."""

    uuid: str
    holders: tuple[Holder, ...] = ()
    """Processes other than our own, however little memory they hold."""
    used_bytes: int | None = None
    """Memory held by processes before the job's workers exist, without the driver's own reserve."""
    utilisation: float | None = None
    """Share of the driver's last sample period in which some kernel ran, 0 to 1."""
    sm_clock_hz: int | None = None
    """An idle device clocks down, so a low value alone means nothing."""
    sm_clock_max_hz: int | None = None
    clock_reasons: tuple[str, ...] | None = None
    """Why the clocks are where they are, in NVML's words without its prefix: `GpuIdle`, `HwThermalSlowdown`."""
    ecc_volatile: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    ecc_aggregate: int | None = None
    """Uncorrected memory errors in the device's life."""
    rows_correctable: int | None = None
    """Rows of memory that were replaced by spare ones because of correctable errors."""
    rows_uncorrectable: int | None = None
    rows_pending: bool | None = None
    """A row waits to be replaced, which happens when the device is reset."""
    rows_failed: bool | None = None
    """A row could not be replaced: there was no spare one."""
    nvlinks_up: int | None = None
    nvlinks_total: int | None = None
    """Links that NVML knows of, up or down."""
    pcie_width: int | None = None
    """Lanes in use; unlike the generation it stays when the device idles."""
    pcie_width_max: int | None = None
    """Lanes that device and slot allow."""
    pcie_generation: int | None = None
    """An idle device falls back to generation 1, so a low value alone means nothing."""
    pcie_generation_max: int | None = None
    pci_address: str = ""
    """As sysfs writes it, `0000:3b:00.0`; empty = not reported."""
    numa_node: int | None = None
    nic: str = ""
    """The nearest NIC, an InfiniBand one where there is any; empty = none seen."""
    nic_distance: Nearness | None = None
    persistence_mode: bool | None = None
    temperature_c: int | None = None
