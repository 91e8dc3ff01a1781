"""The table, for the terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.validation.lines import Line, Section

HEADER = ("data", "group", "method", "quantity", "scored", "skipped", "mean", "median", "max", "signed", "Spearman", "")
SIGNED_NOTE = "signed = median of predicted / measured - 1; errors are relative to the measured value."


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All results of one run, and its conditions."""

    conditions: dict[str, str]
    sections: tuple[Section, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """All lines of all sections."""
        return tuple(line for section in self.sections for line in section.lines)


def cells(line: Line) -> tuple[str, ...]:
    """One line as text."""
    found = line.errors
    percents: tuple[str, ...] = ("", "", "", "")
    rank = ""
    if found is not None:
        values = (found.mean, found.median, found.largest)
        percents = (*(f"{value:.2%}" for value in values), f"{found.signed_median:+.2%}")
        rank = "" if found.spearman is None else f"{found.spearman:.3f}"
    others = ", ".join(f"{name} {value:.4g}" for name, value in line.figures.items())
    return (
        line.data,
        line.group,
        line.method,
        line.quantity,
        str(line.scored),
        str(line.skipped),
        *percents,
        rank,
        others,
    )


def print_report(report: Report, *, verbose: bool) -> None:
    """Print to the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 200)
    for name, value in report.conditions.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    for section in report.sections:
        console.print(f"\n{section.data}: {section.source}", markup=False, highlight=False, style="bold")
        if section.lines:
            table = Table(*HEADER[1:], box=None, pad_edge=False)
            for line in section.lines:
                table.add_row(*cells(line)[1:])
            console.print(table)
        for text in _after(section, verbose=verbose):
            console.print(text, highlight=False, markup=False)
    console.print(f"\n{SIGNED_NOTE}", highlight=False, markup=False)


def _after(section: Section, *, verbose: bool) -> Iterator[str]:
    for note in section.notes:
        yield f"  note: {note}"
    for reason, count in section.reasons.most_common():
        yield f"  not scored: {count} x {reason}"
    if verbose:
        for reason, row in section.skipped:
            yield f"    {row}: {reason}"
        yield from (f"    {detail}" for detail in section.details)


def markdown(report: Report, *, title: str) -> str:
    """Return the report as Markdown, with the left-out rows below each table."""
    parts = [f"# {title}", "", *(f"- {name}: {value}" for name, value in report.conditions.items()), f"- {SIGNED_NOTE}"]
    for section in report.sections:
        parts += ["", f"## {section.data}", "", f"Data: {section.source}", ""]
        if section.lines:
            parts += [_markdown_row(HEADER[1:]), _markdown_row(["---"] * (len(HEADER) - 1))]
            parts += [_markdown_row(cells(line)[1:]) for line in section.lines]
            parts.append("")
        parts += [f"- {note}" for note in section.notes]
        parts += [f"- not scored: {count} x {reason}" for reason, count in section.reasons.most_common()]
    return "\n".join(parts) + "\n"


def _markdown_row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def as_json(report: Report) -> str:
    """Return the report as JSON, one line of the table to a line of text."""
    lines = ",\n  ".join(json.dumps(line_record(line)) for line in report.lines)
    head = json.dumps({"conditions": report.conditions}, indent=1)[:-2]
    rest = {
        section.data: {"source": section.source, "notes": section.notes, "not scored": dict(section.reasons)}
        for section in report.sections
    }
    return f'{head},\n "lines": [\n  {lines}\n ],\n "sections": {json.dumps(rest, indent=1)}\n}}\n'


def line_record(line: Line) -> dict[str, Any]:
    """Return one line as plain values."""
    record = asdict(line)
    figures = record.pop("errors") or {}
    record |= {name: value for name, value in figures.items() if name != "count"}
    return record
