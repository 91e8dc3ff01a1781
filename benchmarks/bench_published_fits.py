"""Predicted memory of layouts that NVIDIA published: each of them ran, so none should be too large.

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
from pipette_launch.facts.measurements import MemoryNeed
from pipette_launch.text import GIB

RESULT = Path(__file__).parent / "results" / "published_fits.md"
GROUPS = ("published rows", "published recipes", "other recipes")


class Found(NamedTuple):
    """Prediction for one layout, or the sentence that refuses it."""

    group: str
    name: str
    words: str = ""
    memory: MemoryNeed | None = None
    refused: str = ""

    @property
    def verdict(self) -> str:
        """Verdict of the memory check, without a margin; empty for refused layouts."""
        return self.memory.verdict if self.memory else ""


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
        job, memory = priced(row, shape)
    except PipetteError as error:
        return Found(group, name, refused=str(error).splitlines()[0]), None
    return Found(group, name, job.own.words(), memory), (job, memory.free_bytes)


def priced(row: Row, shape: Row | None) -> tuple[Job, MemoryNeed]:
    """Return the job of a row, and the memory that it needs without a margin; raises PipetteError."""
    job, machines = run_of(row, shape)
    device = machines.device
    overhead = overhead_of(job, job.own, device_kind="cuda", device_name=device.name)
    peaks = [stage.total for stage in peak_memory_bytes(job, job.own)]
    return job, overhead.need(peaks, device.memory_bytes, memory_margin=0.0)


def report() -> Iterator[str]:
    """Count layouts by verdict, name those that do not fit, and the sentences of those that are not predicted."""
    found = list(predictions())
    yield "Predicted, not run. A layout fits if its fullest rank needs at most the memory of its device, with the cache"
    yield "of torch's allocator. It is tight if it needs more only with the cache, and otherwise too large."
    yield ""
    yield "| layouts | predicted | fit | tight | too large | fit or tight |"
    yield "|---|--:|--:|--:|--:|--:|"
    for group in (*GROUPS, "all"):
        verdicts = [one.verdict for one in found if group in (one.group, "all") and not one.refused]
        fit, tight, large = (verdicts.count(verdict) for verdict in ("fits", "tight", "too large"))
        yield f"| {group} | {len(verdicts)} | {fit} | {tight} | {large} | {(fit + tight) / len(verdicts):.1%} |"
    yield ""
    yield "| tight or too large | layout | verdict | predicted | without the cache | device |"
    yield "|---|---|---|--:|--:|--:|"
    for one in found:
        if one.memory and not one.memory.fits:
            sizes = (max(one.memory.need_bytes), max(one.memory.least_bytes), one.memory.free_bytes)
            cells = " | ".join(f"{size / GIB:.1f} GiB" for size in sizes)
            yield f"| {one.name} ({one.group}) | {one.words} | {one.verdict} | {cells} |"
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
