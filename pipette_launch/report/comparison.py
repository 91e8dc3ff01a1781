"""Screen that compares plans: step time, parts of the step, memory, proof, and number of ranks on another device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipette_launch.facts import Choice
from pipette_launch.facts.prediction import Comparison
from pipette_launch.report.screen import Section, bullet, rate_words, render, sheet, text, without_gaps
from pipette_launch.text import seconds_text

MOST_PARTS = 5
"""Number of parts of a step with a separate column, so that the table fits on a terminal."""


def comparison_screen(
    comparison: Comparison, *, width: int | None = None, colour: bool | None = None, stream: TextIO | None = None
) -> str:
    """Draw several plans on one screen.

    Every later plan is compared with the first plan.
    """
    sections: tuple[Section, ...] = (
        ("Plans", _plans(comparison)),
        ("Rates", _rates(comparison)),
        ("Parts", _parts(comparison)),
        ("Places", _places(comparison)),
        ("Faults", map(bullet, _sentences(comparison, faults=True))),
        ("Remarks", map(bullet, _sentences(comparison, faults=False))),
        ("Notes", map(bullet, without_gaps(comparison.notes, what=" on the steps' time", listed="--json lists them"))),
    )
    return render("pipette compare", sheet(sections), width=width, colour=colour, stream=stream or sys.stdout)


def _plans(comparison: Comparison) -> Iterator[RenderableType]:
    table = _table(("", "", "step", "ratio", "memory", "gap", "layout"), right=(0, 2, 3, 4, 5), folds=True)
    first = comparison.entries[0].choice
    for number, entry in enumerate(comparison.entries, 1):
        choice = entry.choice
        if choice is None:
            table.add_row(str(number), text(entry.name, "red"), text("no plan", "red"), "", "", "", "")
            continue
        ratio = f"{choice.step_time_s / first.step_time_s:.3f}" if first and first.step_time_s > 0 else ""
        gap = "" if entry.gap is None else f"{entry.gap:.1%}"
        cells = (seconds_text(choice.step_time_s), ratio, _memory(choice), gap, choice.layout.words())
        style = "red" if entry.faults else "default"
        table.add_row(str(number), text(entry.name, style), *(text(cell, style) for cell in cells))
    yield table
    yield text(
        "memory: what a device of the fullest stage holds, in percent of the limit; gap: how far the step is above the "
        "lower bound of all plans",
        "dim",
    )


def _rates(comparison: Comparison) -> Iterator[Text]:
    for number, entry in enumerate(comparison.entries, 1):
        if entry.choice and entry.choice.rate:
            yield text(f"{number}: {rate_words(entry.choice.rate, entry.choice.layout.world_size)}")


def _memory(choice: Choice) -> str:
    """Return the peak memory of the fullest stage as a share of the device's limit."""
    shown = choice.memory_shown
    return f"{max(shown.need_bytes) / shown.limit_bytes:.0%}" if shown.limit_bytes > 0 else "over"


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    """Return the table of step parts, with a column for each of the longest parts and a column for the rest."""
    shown = [(number, entry.choice) for number, entry in enumerate(comparison.entries, 1) if entry.choice is not None]
    # Plans that cannot run do not choose the columns, because other plans may lack the longest part of such a plan.
    weighed = [entry.choice for entry in comparison.entries if entry.runs and entry.choice] or [one for _, one in shown]
    longest_s = {
        name: max(choice.breakdown_s.get(name, 0.0) for choice in weighed)
        for one in weighed
        for name in one.breakdown_s
    }
    names = sorted(longest_s, key=lambda name: (-longest_s[name], name))[:MOST_PARTS]
    if not names:
        return
    table = _table(("", *(name.replace("_", " ") for name in names), "other"), right=range(1, len(names) + 2))
    for number, choice in shown:
        parts_s = [choice.breakdown_s.get(name, 0.0) for name in names]
        other_s = sum(part_s for name, part_s in choice.breakdown_s.items() if name not in names)
        table.add_row(str(number), *(text(seconds_text(part_s)) for part_s in (*parts_s, other_s)))
    yield table


def _places(comparison: Comparison) -> Iterator[RenderableType]:
    """Return the number of ranks whose device differs from the first plan."""
    first, *others = comparison.entries
    counts = [(number, entry) for number, entry in enumerate(others, 2) if entry.choice and first.choice]
    moved = [f"plan {number}: {entry.num_moved}" for number, entry in counts if entry.num_moved]
    if moved and first.choice:
        yield text(f"ranks on another device than in plan 1, of {len(first.choice.placement)}: {', '.join(moved)}")
    elif any(entry.num_moved == 0 for _, entry in counts):
        yield text("every rank is on the same device as in plan 1")
    strange = [str(number) for number, entry in counts if entry.num_moved is None]
    if strange:
        yield text(f"for other machines than plan 1: {', '.join(strange)}")


def _sentences(comparison: Comparison, *, faults: bool) -> Iterator[str]:
    for number, entry in enumerate(comparison.entries, 1):
        for sentence in entry.faults if faults else entry.remarks:
            yield f"{number}: {sentence}"


def _table(heads: tuple[str, ...], *, right: tuple[int, ...] | range, folds: bool = False) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    last = len(heads) - 1
    for index in range(len(heads)):
        table.add_column(justify="right" if index in right else "left", no_wrap=not folds or index != last)
    # A heading has one word per line, so that a column is as narrow as its figures.
    table.add_row(*(text(head.replace(" ", "\n"), "dim", keep="\n") for head in heads))
    return table
