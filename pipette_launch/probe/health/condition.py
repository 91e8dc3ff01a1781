"""Reads the condition of a host's devices from NVML and sysfs, before the job's workers exist. Imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from pipette_launch.errors import ClusterError
from pipette_launch.facts import Host
from pipette_launch.facts.health import NEARNESS, DeviceCondition, Holder, Nearness
from pipette_launch.probe.health import nvml as driver

SYSFS = Path("/sys")
SECOND_LOOK_S = 1.0
"""Longest sample period of a device's utilisation (manual of nvidia-smi)."""


def conditions(
    host: Host, *, sysfs: Path = SYSFS, sleep: Callable[[float], object] = time.sleep
) -> tuple[DeviceCondition, ...]:
    """Return the condition of every device of this machine, in the order of the local ranks.

    If a device looks busy, the utilisation of all is read again after a second. Without persistence mode the first
    question starts the driver, which scrubs the memory and reports high utilisation (nvmlDeviceGetUtilizationRates).

    Raises:
        ClusterError: the host has GPUs, and NVML no longer answers.

    """
    if host.devices[0].kind == "cpu":
        return tuple(DeviceCondition(uuid=device.uuid) for device in host.devices)
    with driver.session() as nvml:
        if nvml is None:
            raise ClusterError(f"{host.name}: NVML no longer answers; check the driver with nvidia-smi")
        found = tuple(_condition(nvml, device.uuid, sysfs) for device in host.devices)
        if any(one.utilisation for one in found):
            sleep(SECOND_LOOK_S)
            found = tuple(replace(one, utilisation=_utilisation(nvml, one.uuid)) for one in found)
        return found


def _utilisation(nvml: Any, uuid: str) -> float | None:
    rates = driver.query(nvml, "nvmlDeviceGetUtilizationRates", nvml.nvmlDeviceGetHandleByUUID(uuid))
    return None if rates is None else rates.gpu / 100


def _condition(nvml: Any, uuid: str, sysfs: Path) -> DeviceCondition:
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def ask(question: str, *arguments: Any) -> Any | None:
        return driver.query(nvml, f"nvmlDeviceGet{question}", handle, *arguments)

    rows = ask("RemappedRows") or (None,) * 4
    links = [ask("NvLinkState", link) for link in range(driver.MAX_NVLINKS)]
    links = [state for state in links if state is not None]
    pci = ask("PciInfo")
    # NVML's `00000000:3B:00.0` is sysfs' `0000:3b:00.0`.
    address = driver.text(pci.busId).lower()[-len("0000:3b:00.0") :] if pci else ""
    nic, nic_distance = nearest_nic(address, sysfs)
    return DeviceCondition(
        uuid=uuid,
        holders=tuple(
            _holder(process.pid, process.usedGpuMemory)
            for process in ask("ComputeRunningProcesses") or ()
            if process.pid != os.getpid()
        ),
        used_bytes=_held_bytes(nvml, handle),
        utilisation=_utilisation(nvml, uuid),
        sm_clock_hz=_hertz(ask("ClockInfo", driver.CLOCK_SM)),
        sm_clock_max_hz=_hertz(ask("MaxClockInfo", driver.CLOCK_SM)),
        clock_reasons=driver.clock_reasons(nvml, handle),
        ecc_volatile=ask("TotalEccErrors", driver.ERRORS_UNCORRECTED, driver.ECC_VOLATILE),
        ecc_aggregate=ask("TotalEccErrors", driver.ERRORS_UNCORRECTED, driver.ECC_AGGREGATE),
        rows_correctable=rows[0],
        rows_uncorrectable=rows[1],
        rows_pending=_flag(rows[2]),
        rows_failed=_flag(rows[3]),
        # A link that sleeps counts as up.
        nvlinks_up=sum(state != driver.NVLINK_DOWN for state in links) if links else None,
        nvlinks_total=len(links) or None,
        pcie_width=ask("CurrPcieLinkWidth"),
        pcie_width_max=ask("MaxPcieLinkWidth"),
        pcie_generation=ask("CurrPcieLinkGeneration"),
        pcie_generation_max=ask("MaxPcieLinkGeneration"),
        pci_address=address,
        numa_node=_numa_node(sysfs / "bus/pci/devices" / address) if address else None,
        nic=nic,
        nic_distance=nic_distance,
        persistence_mode=_flag(ask("PersistenceMode")),
        temperature_c=ask("Temperature", driver.TEMPERATURE_GPU),
    )


def nearest_nic(address: str, sysfs: Path) -> tuple[str, Nearness | None]:
    """Name the NIC nearest to a PCI device, and how near it is: an InfiniBand port that is up, else an interface.

    Returns:
        Name and distance; the distance is None where sysfs shows neither a common way nor NUMA nodes.

    """
    device = sysfs / "bus/pci/devices" / address
    if not address or not device.exists():
        return "", None
    places = dict(_nics(sysfs))
    near = {name: _nearness(device, place) for name, place in places.items()}
    known = sorted((NEARNESS.index(distance), name) for name, distance in near.items() if distance)
    if known:
        rank, name = known[0]
        return name, NEARNESS[rank]
    return min(places, default=""), None


def _nics(sysfs: Path) -> Iterator[tuple[str, Path]]:
    """NICs on the PCI bus that are up, with their devices; plain interfaces only where there is no InfiniBand."""
    found = [
        (port.parts[-3], port.parents[1] / "device")
        for port in sorted(sysfs.glob("class/infiniband/*/ports/*"))
        if "ACTIVE" in _read(port / "state")
    ]
    if not found:
        found = [
            (interface.name, interface / "device")
            for interface in sorted(sysfs.glob("class/net/*"))
            if _read(interface / "operstate") == "up"
        ]
    yield from ((name, place) for name, place in found if _bridges(place))


def _nearness(one: Path, other: Path) -> Nearness | None:
    """Compare the paths of two PCI devices to the processor.

    A root port has one link, so devices below the same root port share a switch.
    """
    pairs = zip(_bridges(one), _bridges(other), strict=False)
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if common:
        return "switch" if common > 1 else "root"
    nodes = _numa_node(one), _numa_node(other)
    if None in nodes:
        return None
    return "node" if nodes[0] == nodes[1] else "across"


def _bridges(device: Path) -> list[str]:
    """The host bridge, the root port and what lies below, down to the device; empty for what is not on a PCI bus."""
    parts = device.resolve().parts
    start = next((index for index, part in enumerate(parts) if part.startswith("pci") and ":" in part), len(parts))
    return [part for part in parts[start:] if ":" in part]


def _numa_node(device: Path) -> int | None:
    """Read a device's NUMA node; sysfs writes -1 where the firmware does not name it."""
    text = _read(device / "numa_node")
    return int(text) if text.isdecimal() else None


def _holder(pid: int, used_bytes: int | None) -> Holder:
    try:
        name = psutil.Process(pid).name()
    except psutil.Error:
        name = "name unknown"
    return Holder(pid=pid, name=name, used_bytes=used_bytes)


def _held_bytes(nvml: Any, handle: Any) -> int | None:
    try:
        return driver.memory(nvml, handle).held_bytes
    except nvml.NVMLError:
        return None


def _hertz(megahertz: int | None) -> int | None:
    return None if megahertz is None else megahertz * 1_000_000


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
