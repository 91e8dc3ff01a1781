"""The results of one part of the check, written to disk after every record."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from benchmarks.validation.conditions import ROOT, conditions
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Device
from pipette_launch.facts.files import write_text
from pipette_launch.probe.health import inventory

SCHEMA_VERSION = 1
PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "numpy", "nvidia-ml-py")
WHOLE = "whole"
RUNNING = "still running"
Record = dict[str, Any]


@dataclass(kw_only=True)
class Notebook:
    """The records of one part, and the work that it left out."""

    path: Path
    part: str
    device: Device
    ends_at_s: float
    """On the clock of `time.time`: when the part has to be over."""
    records: list[Record] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    """Results that are wrong: with one of them the part fails."""
    ended: str = RUNNING
    """`whole`, `still running`, `failed: ...`, or why the part ended early."""

    def __post_init__(self) -> None:
        self._began_s = time.time()
        self._head = {
            "schema_version": SCHEMA_VERSION,
            "part": self.part,
            "device": {"kind": self.device.kind, "name": self.device.name, "bytes": self.device.memory_total_bytes},
            "conditions": circumstances(),
        }
        self.save()

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """Kind of device that the part uses."""
        return self.device.kind

    def left_s(self) -> float:
        """Seconds until the part has to be over."""
        return self.ends_at_s - time.time()

    def add(self, kind: str, **values: Any) -> None:
        """Keep a record."""
        self.records.append({"kind": kind, **values})
        self.save()

    def miss(self, what: str, why: str) -> None:
        """Keep what could not be done, and why."""
        self.missing.append({"what": what, "why": why})
        sys.stderr.write(f"{self.part}: not done: {what}: {why}\n")
        self.save()

    def fail(self, what: str, why: str) -> None:
        """Keep a result that is wrong; the part goes on, and fails at its end."""
        self.failed.append({"what": what, "why": why})
        sys.stderr.write(f"{self.part}: FAILED: {what}: {why}\n")
        self.save()

    def attempt(self, what: str, work: Callable[[], object], *, needs_s: float = 0.0) -> bool:
        """Do some work; where it fails, or too little time is left for it, keep the reason and go on.

        Args:
            what: a name for it.
            work: the work.
            needs_s: with less time left on a GPU it is not begun. On a CPU a time limit only ends what hangs.

        Returns:
            Whether it was done.

        """
        if self.kind == "cuda" and self.left_s() < needs_s:
            self.miss(what, f"it needs {needs_s:.0f} s and {max(self.left_s(), 0):.0f} s were left")
            return False
        sys.stderr.write(f"{self.part}: {what}\n")
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever one piece fails of, the others may still tell something
            if not isinstance(error, PipetteError):
                traceback.print_exc()
            self.miss(what, first_line(error))
            return False
        return True

    def save(self) -> None:
        """Write everything, atomically."""
        seconds = round(time.time() - self._began_s, 1)
        found = {**self._head, "ended": self.ended, "seconds": seconds}
        results = {"records": self.records, "missing": self.missing, "failed": self.failed}
        text = json.dumps({**found, **results}, indent=1)
        write_text(self.path, text + "\n")

    def close(self) -> None:
        """Say that the part did all that it had to do, or which of its results were wrong."""
        self.ended = f"failed: {'; '.join(one['what'] for one in self.failed)}" if self.failed else WHOLE
        self.save()


def first_line(error: BaseException) -> str:
    """An error in one line: its type and the first line of its text."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def device_here(kind: Literal["auto", "cuda", "cpu"]) -> Device:
    """Return the first device of this machine; raise ClusterError for `cuda` without a device."""
    return inventory.host(name="here", address="", num_devices=1, device=kind).devices[0]


def circumstances() -> dict[str, Any]:
    """Return the conditions of the figures."""
    driver = inventory.versions().get("driver")
    known = conditions(None)
    noted = ROOT / ".gpu-wheels" / "COMMIT"
    if known["commit"] == "unknown" and noted.exists():
        known["commit"] = f"unknown, {noted.read_text(encoding='ascii').strip()} when the wheels were fetched"
    return {
        **known,
        "packages": [*map(_version, PACKAGES), f"driver {driver}" if driver else "no NVIDIA driver"],
        "load": round(os.getloadavg()[0], 1),
    }


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    """The records of one kind."""
    return [record for record in records if record["kind"] == kind]
