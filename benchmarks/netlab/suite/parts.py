"""Common types of the suite's parts: their inputs, their results, and the report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.netlab.lab import Lab
from benchmarks.netlab.warm import WarmPython
from benchmarks.validation.conditions import conditions

TITLES = {
    "speedup": "Speed-up",
    "regret": "Regret",
    "nvidia": "NVIDIA's script",
    "schedules": "Pipeline schedules",
    "prediction": "Prediction",
    "overhead": "Overhead",
    "trials": "Trials mode",
}
"""Every part's heading, in the order of the report; a part's module bears its name."""
HEAD = (
    "# pipette-launch against torchrun on unevenly joined hosts",
    "",
    "Hosts are network namespaces on one machine, joined by wires of limited rate (docs/netlab.md);",
    "raw figures are in `netlab.json`.",
)

QUICK_BUDGET_S = 10.0

Say = Callable[[str], None]
"""Receives lines about the progress, for the terminal."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of a run of the suite."""

    quick: bool = False
    """A few runs that show that all works; their figures mean little."""
    known: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`PartResult.raw` of earlier parts, by the part's name."""

    def budget_s(self, usual_s: float) -> float:
        """Return the seconds for a warm-up: the usual number, or enough for any plan."""
        return min(usual_s, QUICK_BUDGET_S) if self.quick else usual_s

    def python(self, lab: Lab, *, megatron_lm: Path | None = None) -> AbstractContextManager[str]:
        """Give the interpreter of all launchers and workers on the hosts of a lab while the block runs."""
        return WarmPython(lab, megatron_lm=megatron_lm)


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """Result of a part."""

    name: str
    lines: tuple[str, ...]
    """Markdown."""
    raw: Mapping[str, Any]
    """For JSON: every figure that the lines rest on."""
    headline: str = ""
    """One sentence for the table at the top."""


Entry = Mapping[str, Any]
"""A part's place in netlab.json: `circumstances`, `took_s`, `headline`, `lines`, `raw`."""


def circumstances(name: str, *, quick: bool) -> dict[str, str]:
    """Conditions of a part's figures."""
    known = conditions(None)
    return {
        "command": f"python -m benchmarks.netlab.suite --part {name}{' --quick' if quick else ''}",
        "date": known["date"],
        "commit": known["commit"],
        "versions": f"{known['versions']}, torch {version('torch')}, megatron-core {version('megatron-core')}",
        "machine": known["machine"],
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def entry(result: PartResult, found: Mapping[str, str], *, took_s: float) -> Entry:
    """Put a part's result into words for JSON."""
    return {
        "circumstances": dict(found),
        "took_s": round(took_s, 1),
        "headline": result.headline,
        "lines": list(result.lines),
        "raw": result.raw,
    }


def report(entries: Mapping[str, Entry]) -> str:
    """Write netlab.md: what came out on top, then a section of each part that has been run."""
    there = {name: entries[name] for name in TITLES if name in entries}
    lines = [*HEAD, "", "| part | what came out | measured |", "|---|---|---|"]
    for name, one in there.items():
        found = one["circumstances"]
        lines.append(f"| {TITLES[name]} | {one['headline'] or '-'} | {found['date']}, {found['commit']} |")
    for name, one in there.items():
        lines += ["", f"## {TITLES[name]}", "", *_first_lines(one), "", *one["lines"]]
    return "\n".join(lines) + "\n"


def _first_lines(one: Entry) -> Iterator[str]:
    found = one["circumstances"]
    yield f"`{found['command']}`, {found['date']}, commit {found['commit']}; took {one['took_s']:.0f} s;"
    yield f"{found['versions']};"
    yield (
        f"{found['machine']}; load {found['load']} at the start, which others caused; other machines of the same host "
        f"took {found['stolen']} of the processor time; one computation, again and again before and "
        f"after: {found['pace']}."
    )
