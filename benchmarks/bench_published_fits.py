"""Predicted memory of layouts that NVIDIA published: each of them ran, so each should be predicted to fit.

`python -m benchmarks.bench_published_fits [--record]` predicts the fullest pipeline rank of every distinct layout of
benchmarks/data/nvidia_perf_dev.csv, and of NVIDIA's flat recipes in nvidia_recipes.csv beside it. A recipe counts as
published if a performance summary lists its layout. Nothing is run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.telling import shown
from benchmarks.validation.nvidia import SHAPES, refusal, run_of
from benchmarks.validation.nvidia_rows import RECIPES, read_rows, read_shapes
from benchmarks.validation.options import DEFAULT_FILES
from benchmarks.validation.tables import Row
from pipette_launch.cost.memory.overhead import overhead_of
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job
from pipette_launch.text import GIB

RESULT = Path(__file__).parent / "results" / "published_fits.md"
GROUPS = ("published rows", "published recipes", "other recipes")


class Found(NamedTuple):
    """Prediction for one layout, or the sentence that refuses it."""

    group: str
    name: str
    words: str = ""
    peak_bytes: int = 0
    device_bytes: int = 0
    refused: str = ""

    @property
    def fits(self) -> bool:
        """True if the fullest rank needs at most the device's memory."""
        return self.peak_bytes <= self.device_bytes


def predictions() -> Iterator[Found]:
    """Predict each distinct layout once."""
    shapes, seen = read_shapes(SHAPES), set()
    for path in (DEFAULT_FILES["nvidia"], RECIPES):
        for row in read_rows(path).rows:
            found, key = _predicted(row, shapes[row["model"]], refusal(row, shapes, needs_time=False))
            if found.refused or key not in seen:
                seen.add(key)
                yield found


def _predicted(row: Row, shape: Row, refused: str) -> tuple[Found, object]:
    stated = row.values.get("published")
    group = GROUPS[0] if stated is None else GROUPS[1] if stated else GROUPS[2]
    name = f"{row['model']}, {row['gpus']} {row['system']}, {row['precision']}, {row['release']}"
    try:
        if refused:
            return Found(group, name, refused=refused), None
        job, peak, capacity = priced(row, shape)
    except PipetteError as error:
        return Found(group, name, refused=str(error).splitlines()[0]), None
    return Found(group, name, job.own.words(), peak, capacity), (job, capacity)


def priced(row: Row, shape: Row | None) -> tuple[Job, int, int]:
    """Return the job of a row, the bytes of its fullest rank, and those of its device; raises PipetteError."""
    job, machines = run_of(row, shape)
    device = machines.device
    overhead = overhead_of(job, job.own, device_kind="cuda", device_name=device.name)
    peak = max(overhead.device_peak_bytes(stage.total) for stage in peak_memory_bytes(job, job.own))
    return job, peak, device.memory_bytes


def report() -> Iterator[str]:
    """Count layouts that fit, name those that do not, and the sentences of those that are not predicted."""
    found = list(predictions())
    yield "Predicted, not run. A layout fits if its fullest pipeline rank needs at most the memory of its device."
    yield ""
    yield "| layouts | predicted | fit | share |"
    yield "|---|--:|--:|--:|"
    for group in (*GROUPS, "all"):
        priced = [one for one in found if group in (one.group, "all") and not one.refused]
        fit = sum(one.fits for one in priced)
        yield f"| {group} | {len(priced)} | {fit} | {fit / len(priced):.1%} |"
    yield ""
    yield "| too large | layout | predicted | device |"
    yield "|---|---|--:|--:|"
    for one in found:
        if not one.refused and not one.fits:
            sizes = f"{one.peak_bytes / GIB:.1f} GiB | {one.device_bytes / GIB:.1f} GiB"
            yield f"| {one.name} ({one.group}) | {one.words} | {sizes} |"
    yield ""
    yield "Not predicted:"
    yield ""
    for refused, count in Counter(one.refused for one in found if one.refused).most_common():
        yield f"- {count}: {refused}"


def main() -> None:
    """Print the report, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write benchmarks/results/{RESULT.name}")
    text = shown(report())
    if parser.parse_args().record:
        RESULT.write_text(f"# Published layouts that are predicted to fit\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
