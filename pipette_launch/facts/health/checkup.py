"""What `pipette doctor` finds on one machine that would stop or slow a job."""

# schema_version history of the document
# 1  2026-11-21  first version

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

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
