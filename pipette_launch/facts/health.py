"""Health of machines: reports of the driver, problems of hosts and devices, and the results of pipette doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Nearness = Literal["switch", "root", "node", "across"]
"""Path from a device to its nearest network card: through a common PCIe switch, the tree of one root port, one NUMA
node, or across the sockets."""
NEARNESS: tuple[Nearness, ...] = ("switch", "root", "node", "across")
"""Kinds of nearness, from near to far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A foreign process that holds memory of the device."""

    pid: int
    name: str
    used_bytes: int | None
    """Memory of the process; None if the driver hides it, as in a container."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCondition:
    """One device before the job, as NVML and sysfs report it. Missing values are None, never 0.

    On CPU only the UUID is known.
    """

    uuid: str
    holders: tuple[Holder, ...] = ()
    """Foreign processes that hold memory of the device."""
    used_bytes: int | None = None
    """Memory held by processes before the job's workers start, without the driver's own reserve."""
    utilisation: float | None = None
    """Share of the driver's last sample period in which a kernel ran, 0 to 1."""
    sm_clock_hz: int | None = None
    """An idle device lowers its clock, so a low value alone is not a problem."""
    sm_clock_max_hz: int | None = None
    clock_reasons: tuple[str, ...] | None = None
    """NVML's reasons for the present clocks, without prefix: `GpuIdle`, `HwThermalSlowdown`."""
    ecc_volatile: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    ecc_aggregate: int | None = None
    """Uncorrected memory errors in the life of the device."""
    rows_correctable: int | None = None
    """Memory rows replaced by spare rows after correctable errors."""
    rows_uncorrectable: int | None = None
    rows_pending: bool | None = None
    """A row will be replaced at the next reset of the device."""
    rows_failed: bool | None = None
    """A row could not be replaced because no spare row is left."""
    nvlinks_up: int | None = None
    nvlinks_total: int | None = None
    """Number of NVLinks that NVML knows, up or down."""
    pcie_width: int | None = None
    """PCIe lanes in use. An idle device does not reduce them."""
    pcie_width_max: int | None = None
    """PCIe lanes that device and slot allow."""
    pcie_generation: int | None = None
    """An idle device falls back to generation 1, so a low value alone is not a problem."""
    pcie_generation_max: int | None = None
    pci_address: str = ""
    """As in sysfs, `0000:3b:00.0`; empty = not reported."""
    numa_node: int | None = None
    nic: str = ""
    """The nearest network card, InfiniBand if there is one; empty = none found."""
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
    """One problem: a figure that differs from the figures of its peers, or from the expected figure."""

    kind: VerdictKind
    host: str
    """Host with the problem; for a link, the sender."""
    figure: str
    """The measured figure with its unit: `2 of 18 NVLinks are up`."""
    device: str = ""
    """UUID of the device; empty = the whole host has the problem."""
    other_host: str = ""
    """Receiver of a slow link; empty for other problems."""
    peers: str = ""
    """Figure of its peers, `18`; empty = no comparison needed."""
    advice: str = ""
    """Remedy: `exclude it with --exclude=node17`."""
    is_sick: bool = True
    """True if the launcher may exclude the host because of it; False if it is only shown."""

    def words(self) -> str:
        """Return the problem as a sentence."""
        where = f"{self.host} -> {self.other_host}" if self.other_host else self.host
        compared = f", its peers {self.peers}" if self.peers else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{where}{' ' + self.device if self.device else ''}: {self.figure}{compared}{advice}"


Severity = Literal["stops", "slows", "fine"]
SEVERITIES: tuple[Severity, ...] = ("stops", "slows", "fine")
"""Severities of findings, worst first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of one check of pipette doctor."""

    severity: Severity
    what: str
    """Name of the check: `open files`."""
    value: str
    """Result of the check with its unit: `1024 for this process`."""
    advice: str = ""
    """Remedy; empty = no remedy needed."""

    def words(self) -> str:
        """Return the result as a sentence."""
        return f"{self.what}: {self.value}" + (f"; {self.advice}" if self.advice else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    """Results of all checks on one machine."""

    KIND: ClassVar[str] = "checkup"
    SCHEMA_VERSION: ClassVar[int] = 1

    host: str
    taken_at: str
    """Time of the checks, UTC, ISO 8601."""
    findings: tuple[Finding, ...]

    @property
    def is_fit(self) -> bool:
        """True if a job can run."""
        return all(finding.severity != "stops" for finding in self.findings)
