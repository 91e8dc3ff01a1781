"""How everything of ours looks on a terminal: words, bars, bullets, and the frame around them."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from pipette_launch.text import printable, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

LEAST_WIDTH = 60
MOST_WIDTH = 120
BAR_CELLS = 20
MOST_STAGES = 8
HEADING = 9
GAP = 2
INDENT = HEADING + GAP
"""Columns that stand before the lines of a section."""
ASCII = str.maketrans(
    {
        "─": "-",
        "█": "#",
        "░": ".",
        "→": ">",
        "·": "|",
        "•": "*",
        "…": "~",
        **dict(zip("▁▂▃▄▅▆▇", "_.:-=+%", strict=True)),
    }
)


Section = tuple[str, "Iterable[RenderableType]"]
"""A heading and the lines beside it; without lines it is left out."""


def bar(part: float, style: str) -> Text:
    """Draw a part of a whole, from 0 to 1."""
    full = max(1, round(part * BAR_CELLS)) if part > 0 else 0
    drawn = text("█" * full, style)
    drawn.append("░" * (BAR_CELLS - full), "dim")
    return drawn


def bullet(sentence: str) -> RenderableType:
    """One of several sentences."""
    from rich.table import Table

    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_row(text("•", "dim"), text(sentence))
    return row


def text(words: str, style: str = "default", *, keep: str = "", **options: str) -> Text:
    """Plain words in one style; what is not printed stands as its escape, but for the characters in `keep`."""
    from rich.text import Text

    return Text(printable(words, keep=keep), style=style, **options)  # type: ignore[arg-type]


def breakdown(parts_s: Mapping[str, float], total_s: float) -> Text:
    """The parts of a step, the longest first, without those that are too short to matter."""
    parts = sorted(parts_s.items(), key=lambda part: -part[1])
    shown = [f"{name.replace('_', ' ')} {seconds_text(part_s)}" for name, part_s in parts if part_s >= 0.005 * total_s]
    return text(" · ".join(shown), "dim")


def stages_shown(peaks: Sequence[int], most: int = MOST_STAGES) -> list[int]:
    """All stages of a short pipeline; of a long one the first, the fullest and the last."""
    if len(peaks) <= most:
        return list(range(len(peaks)))
    return sorted({0, list(peaks).index(max(peaks)), len(peaks) - 1})


def sheet(sections: Iterable[Section], *, has_gaps: bool = True) -> RenderableType:
    """Set sections below each other, their headings on the left; an empty line between them or none."""
    from rich.table import Table

    rows = Table.grid(padding=(0, GAP, 0, 0), expand=True)
    rows.add_column(width=HEADING, no_wrap=True)
    rows.add_column(ratio=1)
    for heading, lines in sections:
        for index, line in enumerate(lines):
            if has_gaps and index == 0 and rows.row_count:
                rows.add_row("", "")
            rows.add_row(text(heading if index == 0 else "", "bold"), line)
    return rows


def columns(width: int | None, target: TextIO) -> int:
    """How wide to draw: as said, else as the terminal, and 80 without one."""
    if width is not None:
        return width
    found = shutil.get_terminal_size((80, 24)).columns if target.isatty() else 80
    return min(max(found, LEAST_WIDTH), MOST_WIDTH)


def render(
    title: str, body: RenderableType, *, width: int | None, colour: bool | None, stream: TextIO | None = None
) -> str:
    """Frame a screen.

    Args:
        title: of the frame.
        body: what it holds.
        width: columns; None for the terminal's, 80 without one.
        colour: None for yes on a terminal only.
        stream: where the screen will be shown; None for stderr.

    """
    from rich.console import Console
    from rich.rule import Rule

    target = stream or sys.stderr
    is_terminal = target.isatty()
    buffer = io.StringIO()
    coloured = is_terminal if colour is None else colour
    console = Console(
        file=buffer,
        width=columns(width, target),
        force_terminal=coloured,
        color_system="standard" if coloured else None,
        highlight=False,
        legacy_windows=False,
    )
    console.print(Rule(text(title, "bold"), style="dim", align="left"))
    console.print(body)
    console.print(Rule(style="dim"))
    drawn = "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())
    encoding = (target.encoding or "ascii").lower()
    return drawn if encoding.startswith("utf") else drawn.translate(ASCII)
