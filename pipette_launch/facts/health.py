"""Health of machines: reports of the driver, problems of hosts and devices, and the results of pipette doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process of another job that holds memory of the device."""

    pid: int
    name: str
    used_bytes: int | None
    """Memory of the process in bytes. The number is `None` if the driver hides it, as in a container."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCondition:
    """One device before the job, as NVML reports it.

    A field is `None` if the driver does not report it. On CPU only the UUID is known.
    """

    uuid: str
    holders: tuple[Holder, ...] = ()
    used_bytes: int | None = None
    """Memory held by processes before the job's workers start, without the driver's own reserve."""
    utilisation: float | None = None
    """Share of the driver's last sample period in which a kernel ran, 0 to 1."""
    sm_clock_hz: int | None = None
    """Present clock of the multiprocessors. An idle device lowers its clock, so a low value alone is not a problem."""
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
    """True if a memory row will be replaced at the next reset of the device."""
    rows_failed: bool | None = None
    """True if a memory row could not be replaced because no spare row is left."""
    nvlinks_up: int | None = None
    nvlinks_total: int | None = None
    """Number of NVLinks that NVML reports, both active and inactive."""
    pcie_width: int | None = None
    """Number of PCIe lanes in use. An idle device does not reduce this number."""
    pcie_width_max: int | None = None
    """Largest number of PCIe lanes that the device and its PCIe slot allow."""
    pcie_generation: int | None = None
    """Present PCIe generation. An idle device falls back to PCIe generation 1, so a low value is not a problem."""
    pcie_generation_max: int | None = None
    persistence_mode: bool | None = None
    temperature_c: int | None = None


VerdictKind = Literal[
    "busy", "throttled", "ecc", "remapped-rows", "nvlink", "pcie", "slow-device", "slow-host", "slow-link"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One problem of a host, device or link, with a figure that differs from its peers or from the expected figure."""

    kind: VerdictKind
    host: str
    """Name of the host with the problem: the sending host of a slow link."""
    figure: str
    """The measured figure with a unit, such as `2 of 18 NVLinks are up`."""
    device: str = ""
    """UUID of the device with the problem. The UUID is empty if the whole host has the problem."""
    other_host: str = ""
    """Name of the receiving host of a slow link. The name is empty if the problem is not a slow link."""
    peers: str = ""
    """Figure of similar hosts or devices, such as `18`. Empty = the problem needs no comparison."""
    advice: str = ""
    """Advice that solves the problem, such as `exclude it with --exclude=node17`."""
    is_sick: bool = True
    """True if the launcher may exclude the host because of this problem. Other problems are only printed."""

    def words(self) -> str:
        """Return the problem as a sentence."""
        where = f"{self.host} -> {self.other_host}" if self.other_host else self.host
        compared = f", its peers {self.peers}" if self.peers else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{where}{' ' + self.device if self.device else ''}: {self.figure}{compared}{advice}"


Severity = Literal["stops", "slows", "fine"]
SEVERITIES: tuple[Severity, ...] = ("stops", "slows", "fine")
"""Severities of the findings of pipette doctor, beginning with the worst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of one check that pipette doctor made."""

    severity: Severity
    what: str
    """Name of the check: `open files`."""
    value: str
    """Result of the check with a unit, such as `1024 for this process`."""
    advice: str = ""
    """Advice that solves the problem. The advice is empty if no problem was found."""

    def words(self) -> str:
        """Return the result of the check as a sentence."""
        return f"{self.what}: {self.value}" + (f"; {self.advice}" if self.advice else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    """Results of all checks on one machine."""

    KIND: ClassVar[str] = "checkup"

    host: str
    taken_at: str
    """Time of the checks, UTC, ISO 8601."""
    findings: tuple[Finding, ...]

    @property
    def is_fit(self) -> bool:
        """True if no finding prevents a job on this machine."""
        return all(finding.severity != "stops" for finding in self.findings)
