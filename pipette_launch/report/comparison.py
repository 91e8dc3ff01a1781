"""Shows plans side by side: step, parts of the step, memory, proof, and how many ranks sit elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from pipette_launch.facts.comparison import Comparison, Entry
from pipette_launch.report.draw import Section, bullet, render, sheet, text
from pipette_launch.report.parts import NOT_MODELLED
from pipette_launch.units import GIB, MIB, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MOST_COLUMNS = 8
"""Entries whose parts stand in a table; with more it would be wider than a terminal."""
LEAST_PART = 0.005
"""Parts of every step that are shorter than this share of it are left out."""


def comparison_screen(
    comparison: Comparison, *, width: int | None = None, colour: bool | None = None, stream: TextIO | None = None
) -> str:
    """Show several plans in one screen.

    Args:
        comparison: at least one entry; the first is what the others are measured by.
        width: columns; None for the terminal's, 80 without one.
        colour: None for yes on a terminal only.
        stream: where it will be shown; None for stdout.

    """
    sections: tuple[Section, ...] = (
        ("Plans", _plans(comparison)),
        ("Parts", _parts(comparison)),
        ("Places", map(bullet, _places(comparison))),
        ("Faults", map(bullet, _sentences(comparison, faults=True))),
        ("Remarks", map(bullet, _sentences(comparison, faults=False))),
        ("Notes", map(bullet, _notes(comparison))),
    )
    return render("pipette compare", sheet(sections), width=width, colour=colour, stream=stream or sys.stdout)


def _plans(comparison: Comparison) -> Iterator[RenderableType]:
    table = _table(("", "", "step", "times", "memory", "gap", "layout"), right=(0, 2, 3, 4, 5))
    first = comparison.entries[0].choice
    for number, entry in enumerate(comparison.entries, 1):
        choice = entry.choice
        if choice is None:
            table.add_row(str(number), text(entry.name, "red"), text("no plan", "red"), "", "", "", "")
            continue
        ratio = f"{choice.step_time_s / first.step_time_s:.3f}" if first and first.step_time_s > 0 else ""
        gap = "" if entry.gap is None else f"{entry.gap:.1%}"
        cells = (seconds_text(choice.step_time_s), ratio, _memory(entry), gap, choice.layout.words())
        style = "red" if entry.faults else "default"
        table.add_row(str(number), text(entry.name, style), *(text(cell, style) for cell in cells))
    yield table


def _memory(entry: Entry) -> str:
    """The fullest stage beside the limit, in one unit."""
    choice = entry.choice
    assert choice is not None, "called for entries with a choice"
    peak, limit = max(choice.peak_memory_bytes), choice.memory_limit_bytes
    unit, size = ("GiB", GIB) if limit >= GIB else ("MiB", MIB)
    return f"{peak / size:.1f}/{limit / size:.1f} {unit}"


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    """What each step consists of, longest of the first one first."""
    shown = [(number, entry.choice) for number, entry in enumerate(comparison.entries, 1) if entry.choice is not None]
    shown = shown[:MOST_COLUMNS]
    if not shown:
        return
    weight = {
        name: max(choice.breakdown_s.get(name, 0.0) / choice.step_time_s for _, choice in shown if choice.step_time_s)
        for _, one in shown
        for name in one.breakdown_s
    }
    lead = shown[0][1].breakdown_s
    table = _table(("", *(str(number) for number, _ in shown)), right=range(1, len(shown) + 1))
    for name in sorted(weight, key=lambda name: (-lead.get(name, 0.0), name)):
        if weight[name] >= LEAST_PART:
            parts = (seconds_text(choice.breakdown_s.get(name, 0.0)) for _, choice in shown)
            table.add_row(text(name.replace("_", " ")), *(text(part) for part in parts))
    yield table


def _places(comparison: Comparison) -> Iterator[str]:
    first, *others = comparison.entries
    for number, entry in enumerate(others, 2):
        if entry.choice is None or first.choice is None:
            continue
        size = len(entry.choice.placement)
        if entry.num_moved is None:
            yield f"{number}: on other machines than 1."
        elif entry.num_moved:
            yield f"{number}: {entry.num_moved} of {size} ranks sit elsewhere than under 1."
        else:
            yield f"{number}: all {size} ranks sit where they do under 1."


def _sentences(comparison: Comparison, *, faults: bool) -> Iterator[str]:
    for number, entry in enumerate(comparison.entries, 1):
        for sentence in entry.faults if faults else entry.remarks:
            yield f"{number}: {sentence}"


def _notes(comparison: Comparison) -> Iterator[str]:
    left_out = sum(note.startswith(NOT_MODELLED) for note in comparison.notes)
    yield from (note for note in comparison.notes if not note.startswith(NOT_MODELLED))
    if left_out:
        yield f"{left_out} effects on the steps' time are not modelled; --json lists them."


def _table(heads: tuple[str, ...], *, right: tuple[int, ...] | range) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    last = len(heads) - 1
    for index in range(len(heads)):
        table.add_column(justify="right" if index in right else "left", no_wrap=index not in (1, last))
    table.add_row(*(text(head, "dim") for head in heads))
    return table
