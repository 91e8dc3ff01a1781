"""A recorded part of the validation that runs in seconds. CI compares later figures with it.

`python -m benchmarks.validation --record` records anew. A figure may get better in silence; where one has to get worse
for a reason, record it together with the change that makes it so, and say why in the commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.validation import golden, korthikanti, latency, logs, nvidia, readme, vtrain
from benchmarks.validation.lines import Line
from benchmarks.validation.options import DEFAULT_FILES, FOLDER, GOLDEN_ARGS, GOLDEN_ROWS
from benchmarks.validation.tables import DataError
from pipette_launch.facts.devices import device_named

RECORD = FOLDER / "results" / "validation.json"
VTRAIN_EVERY = 10
"""Every n-th row of vTrain is fitted and scored, as a fit to all rows takes a minute."""
LOWER_IS_BETTER = ("mean", "median", "largest", "regret", "measured but", "no result but")
HIGHER_IS_BETTER = ("scored", "spearman", "Spearman", "AUC", "R2")
"""Beginnings of names of figures; what begins with neither is not held."""
RELATIVE, ABSOLUTE = 0.01, 1e-4
"""A figure may get worse by this share and this much, so that no rounding or library version fails a build."""


def lines() -> tuple[Line, ...]:
    """Errors of the memory formula and of the latency model."""
    files = golden.Files(rows=GOLDEN_ROWS, args=GOLDEN_ARGS)
    found = golden.run(golden.read(files, files), "closed form", golden.closed_form)
    a100 = device_named(vtrain.DEVICE)
    sections = (
        logs.section(DEFAULT_FILES["logs"], {"closed form": logs.closed_form}, latency.pipette),
        korthikanti.section(DEFAULT_FILES["korthikanti"], a100, latency.pipette),
        readme.section(DEFAULT_FILES["readme"], device_named(readme.DEVICE), latency.pipette),
        nvidia.section(DEFAULT_FILES["nvidia"], latency.pipette),
        vtrain.section(DEFAULT_FILES["vtrain"], a100, fraction=0.1, seed=0, every=VTRAIN_EVERY),
    )
    return (*found.lines, *(line for section in sections for line in section.lines))


def figures_of(line: Line) -> dict[str, float]:
    """The figures of a line that are held."""
    found: dict[str, float] = {"scored": float(line.scored), **line.figures}
    if line.errors is not None:
        names = ("mean", "median", "largest", "spearman")
        found |= {name: value for name in names if (value := getattr(line.errors, name)) is not None}
    return {name: value for name, value in found.items() if name.startswith((*LOWER_IS_BETTER, *HIGHER_IS_BETTER))}


def as_record(lines: Iterable[Line]) -> dict[str, dict[str, float]]:
    """Figures by line, rounded to the tolerance."""
    return {
        line.key: {name: round(value, 6) for name, value in figures_of(line).items()}
        for line in lines
        if "uncorrected" not in line.method and line.method != "measured"
    }


def write(path: Path, lines: Iterable[Line], conditions: Mapping[str, str]) -> int:
    """Record figures; returns how many lines."""
    record = as_record(lines)
    rows = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(figures)}" for key, figures in record.items())
    head = json.dumps({"conditions": dict(conditions)}, indent=1)[:-2]
    path.write_text(f'{head},\n "lines": {{\n  {rows}\n }}\n}}\n', encoding="utf-8")
    return len(record)


def read(path: Path) -> dict[str, dict[str, float]]:
    """Read recorded figures. Raises DataError if another program wrote the file."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        return {key: dict(figures) for key, figures in content["lines"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{path}: no recorded figures: {error!r}; python -m benchmarks.validation --record") from error


def worse(recorded: Mapping[str, Mapping[str, float]], lines: Iterable[Line]) -> list[str]:
    """Say which recorded figures got worse, or are gone.

    Args:
        recorded: figures by line.
        lines: figures of this run.

    """
    found = as_record(lines)
    complaints = []
    for key, figures in recorded.items():
        if key not in found:
            complaints.append(f"{key}: no longer scored")
            continue
        for name, before in figures.items():
            now = found[key].get(name)
            if now is None or _is_worse(name, before, now):
                complaints.append(f"{key}: {name} was {before:.6g} and is {'gone' if now is None else f'{now:.6g}'}")
    return complaints


def _is_worse(name: str, before: float, now: float) -> bool:
    slack = RELATIVE * abs(before) + ABSOLUTE
    if name == "scored":
        return now < before
    return now > before + slack if name.startswith(LOWER_IS_BETTER) else now < before - slack
