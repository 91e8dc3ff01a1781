"""Screen that compares plans: step time and its parts, memory, gap to the lower bound, and ranks on other devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pipette_launch.facts.prediction import Comparison
from pipette_launch.report.screen import Line, Section, bullet, grid, note_lines, rate_words, screen, text
from pipette_launch.text import seconds_text

MOST_PARTS = 5
"""Number of parts of a step with a separate column, so that the table fits on a terminal."""


def comparison_screen(comparison: Comparison, *, width: int | None = None, colour: bool | None = None) -> str:
    """Draw several plans on one screen. Every later plan is compared with the first plan."""
    entries = list(enumerate(comparison.entries, 1))
    rates = [(number, one.choice.layout.world_size, one.choice.rate) for number, one in entries if one.choice]
    sections: tuple[Section, ...] = (
        ("Plans", _plans(comparison)),
        ("Rates", (f"{number}: {rate_words(rate, size)}" for number, size, rate in rates if rate)),
        ("Parts", _parts(comparison)),
        ("Places", _places(comparison)),
        ("Faults", (bullet(f"{number}: {fault}") for number, one in entries for fault in one.faults)),
        ("Remarks", (bullet(f"{number}: {remark}") for number, one in entries for remark in one.remarks)),
        ("Notes", note_lines(comparison.notes, what="the steps' time")),
    )
    return screen("pipette compare", sections, width=width, colour=colour)


def _plans(comparison: Comparison) -> Iterator[Line]:
    first = comparison.entries[0].choice
    rows: list[Sequence[Line]] = []
    for number, entry in enumerate(comparison.entries, 1):
        choice, style = entry.choice, "red" if entry.faults or entry.choice is None else "default"
        cells = ["no plan", "", "", "", ""]
        if choice is not None:
            memory = choice.memory_shown
            cells = [
                seconds_text(choice.step_time_s),
                f"{choice.step_time_s / first.step_time_s:.3f}" if first else "",
                f"{max(memory.need_bytes) / memory.limit_bytes:.0%}" if memory.limit_bytes > 0 else "over",
                "" if entry.gap is None else f"{entry.gap:.1%}",
                choice.layout.words(),
            ]
        rows.append((str(number), *(text(cell, style) for cell in (entry.name, *cells))))
    yield _table("rlrrrrw", ("", "", "step", "ratio", "memory", "gap", "layout"), rows)
    yield text(
        "memory: what a device of the fullest stage holds, in percent of the limit; gap: how far the step is above the "
        "lower bound of all plans",
        "dim",
    )


def _parts(comparison: Comparison) -> Iterator[Line]:
    shown = [(number, entry.choice) for number, entry in enumerate(comparison.entries, 1) if entry.choice is not None]
    # A plan that cannot run does not choose the columns, because its longest part may be missing in the other plans.
    weighed = [entry.choice for entry in comparison.entries if entry.runs and entry.choice] or [one for _, one in shown]
    longest_s: dict[str, float] = {}
    for choice in weighed:
        longest_s |= {name: max(longest_s.get(name, 0.0), part_s) for name, part_s in choice.breakdown_s.items()}
    names = sorted(longest_s, key=lambda name: (-longest_s[name], name))[:MOST_PARTS]
    if not names:
        return
    rows = []
    for number, choice in shown:
        parts_s = [choice.breakdown_s.get(name, 0.0) for name in names]
        other_s = sum(part_s for name, part_s in choice.breakdown_s.items() if name not in names)
        rows.append((str(number), *map(seconds_text, (*parts_s, other_s))))
    heads = ("", *(name.replace("_", " ") for name in names), "other")
    yield _table("l" + "r" * (len(heads) - 1), heads, rows)


def _places(comparison: Comparison) -> Iterator[Line]:
    """Return the number of ranks whose device differs from the first plan."""
    first, *others = comparison.entries
    counts = [(number, entry) for number, entry in enumerate(others, 2) if entry.choice and first.choice]
    moved = [f"plan {number}: {entry.num_moved}" for number, entry in counts if entry.num_moved]
    if moved and first.choice:
        yield f"ranks on another device than in plan 1, of {len(first.choice.placement)}: {', '.join(moved)}"
    elif any(entry.num_moved == 0 for _, entry in counts):
        yield "every rank is on the same device as in plan 1"
    strange = [str(number) for number, entry in counts if entry.num_moved is None]
    if strange:
        yield f"for other machines than plan 1: {', '.join(strange)}"


def _table(columns: str, heads: Sequence[str], rows: Iterable[Sequence[Line]]) -> Line:
    # A heading has one word per line, so that a column is only as wide as its numbers.
    return grid(columns, ([text(head.replace(" ", "\n"), "dim", keep="\n") for head in heads], *rows))
