"""What the driver reports of one device before the job starts. A figure that it does not report is None, never 0."""

# schema_version history of the document
# 1  2026-11-21  first version

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

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


VerdictKind = Literal[
    "busy",
    "throttled",
    "ecc",
    "remapped-rows",
    "nvlink",
    "pcie",
    "nic",
    "slow-device",
    "slow-host",
    "slow-link",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One problem: a figure that differs from that of the peers, or from what it should be."""

    kind: VerdictKind
    host: str
    """The node with the problem; of a link, the sender."""
    figure: str
    """What was seen, with its unit: `2 of 18 NVLinks are up`."""
    device: str = ""
    """UUID; empty where the whole host has the problem."""
    other_host: str = ""
    """Of a link, the receiver; else empty."""
    peers: str = ""
    """The figure of its peers, `18`; empty where no comparison is needed."""
    advice: str = ""
    """What to do, `exclude it with --exclude=node17`."""
    is_sick: bool = True
    """Whether the launcher may leave the host out because of it; else it is only shown."""

    def words(self) -> str:
        """Say it in one sentence."""
        where = f"{self.host} -> {self.other_host}" if self.other_host else self.host
        compared = f", its peers {self.peers}" if self.peers else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{where}{' ' + self.device if self.device else ''}: {self.figure}{compared}{advice}"


Severity = Literal["stops", "slows", "fine"]
SEVERITIES: tuple[Severity, ...] = ("stops", "slows", "fine")
"""Worst first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check."""

    severity: Severity
    what: str
    """`open files`."""
    value: str
    """What was found, with its unit: `1024 for this process`."""
    advice: str = ""
    """What to do; empty where nothing is to be done."""

    def words(self) -> str:
        """Say it in one sentence."""
        return f"{self.what}: {self.value}" + (f"; {self.advice}" if self.advice else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    """The results of all checks on one machine."""

    KIND: ClassVar[str] = "checkup"
    SCHEMA_VERSION: ClassVar[int] = 1

    host: str
    taken_at: str
    """UTC, ISO 8601."""
    findings: tuple[Finding, ...]

    @property
    def is_fit(self) -> bool:
        """Whether nothing would stop a job."""
        return all(finding.severity != "stops" for finding in self.findings)
