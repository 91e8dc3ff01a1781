"""Elements of all screens on a terminal: texts, bars, bullets, tables of memory and flags, and the frame.

Each function imports rich itself, so that a command without a screen does not wait for this import.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from pipette_launch.facts.plan import Rate
from pipette_launch.text import bytes_text, count_text, flops_text, plural, printable, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

LEAST_WIDTH, MOST_WIDTH = 60, 120
BAR_CELLS = 20
MOST_STAGES = 8
HEADING, GAP = 9, 2
INDENT = HEADING + GAP
"""Number of columns to the left of a section's lines."""
ASCII = str.maketrans("─█░→·•…▁▂▃▄▅▆▇│└≥", "-#.>|*~_.:-=+%|+>")

Line: TypeAlias = "RenderableType"
"""A line or a table of a screen. The functions `grid` and `screen` escape plain strings."""
Section: TypeAlias = "tuple[str, Iterable[Line]]"
"""Heading of a section, and the section's lines. A section without lines is not drawn."""


def text(words: str, style: str = "default", *, keep: str = "", **options: Any) -> Text:
    """Return a text in one style. Characters that cannot be printed are escaped, except characters in `keep`."""
    from rich.text import Text

    return Text(printable(words, keep=keep), style=style, **options)


def grid(columns: str, rows: Iterable[Sequence[Line]], *, gap: int = 2) -> Table:
    """Return a table without borders, with `gap` spaces after each column.

    `columns` has a letter for each column: `r` = aligned right, `l` = aligned left, `w` = aligned left and wrapped.
    """
    from rich.table import Table

    table = Table.grid(padding=(0, gap, 0, 0))
    for letter in columns:
        table.add_column(justify="right" if letter == "r" else "left", no_wrap=letter != "w")
    for row in rows:
        table.add_row(*(text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def bar(part: float, style: str) -> Text:
    """Draw a bar for a share from 0 to 1."""
    full = max(1, round(part * BAR_CELLS)) if part > 0 else 0
    return text("█" * full, style).append("░" * (BAR_CELLS - full), "dim")


def bullet(sentence: str, mark: str = "•", style: str = "dim") -> Line:
    """Return a sentence with a mark before it."""
    return grid("ww", [(text(mark, style), sentence)], gap=1)


def breakdown(parts_s: Mapping[str, float], total_s: float) -> Text:
    """Return the parts of a step in words, the longest first, without parts below 0.5 % of the step."""
    parts = sorted(parts_s.items(), key=lambda part: -part[1])
    shown = [f"{name.replace('_', ' ')} {seconds_text(part_s)}" for name, part_s in parts if part_s >= 0.005 * total_s]
    return text(" · ".join(shown), "dim")


def stages_shown(peaks: Sequence[int], most: int = MOST_STAGES) -> list[int]:
    """Return all stages of a short pipeline, and the first, fullest and last stages of a long pipeline."""
    last = len(peaks) - 1
    return list(range(len(peaks))) if last < most else sorted({0, list(peaks).index(max(peaks)), last})


def columns(target: TextIO) -> int:
    """Return the width of a screen: the terminal's width within limits, or 80 without a terminal."""
    found = shutil.get_terminal_size((80, 24)).columns if target.isatty() else 80
    return min(max(found, LEAST_WIDTH), MOST_WIDTH)


def screen(title: str, sections: Iterable[Section], *, has_gaps: bool = True, stream: TextIO | None = None) -> str:
    """Draw sections in a frame, with their headings on the left, and return the text.

    `has_gaps` separates sections by empty lines, and `stream` will show the screen (None for stdout).
    """
    from rich.console import Console
    from rich.rule import Rule
    from rich.table import Table

    rows = Table.grid(padding=(0, GAP, 0, 0), expand=True)
    rows.add_column(width=HEADING, no_wrap=True)
    rows.add_column(ratio=1)
    for heading, lines in sections:
        for index, line in enumerate(lines):
            if has_gaps and index == 0 and rows.row_count:
                rows.add_row("", "")
            rows.add_row(text("" if index else heading, "bold"), text(line) if isinstance(line, str) else line)
    target, buffer = stream or sys.stdout, io.StringIO()
    console = Console(
        file=buffer,
        width=columns(target),
        force_terminal=target.isatty(),
        color_system="standard" if target.isatty() else None,
        highlight=False,
        legacy_windows=False,
    )
    console.print(Rule(text(title, "bold"), style="dim", align="left"))
    console.print(rows)
    console.print(Rule(style="dim"))
    drawn = "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())
    return drawn if (target.encoding or "ascii").lower().startswith("utf") else drawn.translate(ASCII)


LEFT_OUT = "Predictions leave out small effects: docs/prediction.md, What is not predicted."


def rate_words(rate: Rate, world_size: int) -> str:
    """Return total tokens per second, tokens per second and model FLOP/s of a rank, and MFU if the peak is known."""
    mfu = "" if rate.mfu is None else f", MFU {mfu_text(rate)}"
    tokens = f"{count_text(rate.tokens_per_s)} tokens/s, {rate.tokens_per_s / world_size:,.0f} on each rank"
    return f"{tokens}; {flops_text(rate.flops_per_s)} on each{mfu}"


def mfu_text(rate: Rate) -> str:
    """Return the MFU, with the format of the peak if it is FP8 or FP4; empty if the peak is unknown."""
    narrow = f" of the {rate.peak_dtype.upper()} peak" if rate.peak_dtype in {"fp8", "fp4"} else ""
    return "" if rate.mfu is None else f"{rate.mfu:.1%}{narrow}"


def step_words(measured_s: float, predicted_s: float) -> str:
    """Compare a measured step time with the predicted one. The error is a share of the measured step time."""
    words = f"{seconds_text(measured_s)}, predicted {seconds_text(predicted_s)}"
    error = round(predicted_s / measured_s - 1, 3) if measured_s > 0 else 0.0
    if not error:
        return words
    return f"{words}: {abs(error):.{1 if abs(error) < 0.1 else 0}%} too {'long' if error > 0 else 'short'}"


def memory_bars(stages: Sequence[tuple[int, int]], limit_bytes: int | None) -> Table:
    """Draw a bar for each (stage, bytes) as a share of the limit. Without a limit, the fullest stage has a full bar."""
    whole = max(need for _, need in stages) if limit_bytes is None else limit_bytes
    limit = "" if limit_bytes is None else f" of {bytes_text(limit_bytes)}"

    def row(stage: int, need: int) -> tuple[Line, ...]:
        is_over = need > whole
        drawn = bar(min(need / whole, 1.0) if whole else 1.0, "red" if is_over else "default")
        return f"stage {stage}", drawn, f"{bytes_text(need)}{limit}{', over' if is_over else ''}"

    return grid("www", [row(stage, need) for stage, need in stages])


def limit_words(limit_bytes: int, free_bytes: int, margin: float, *, is_short: bool = False) -> str:
    """Explain the memory figures and the memory limit, in the words that all screens use."""
    if is_short:
        return f"with overhead; limit: {bytes_text(free_bytes)} free on the fullest device, less {margin:.0%}"
    return (
        f"what one device holds, overhead included; the limit of {bytes_text(limit_bytes)} is what is free on the "
        f"fullest device ({bytes_text(free_bytes)}), less the margin of {margin:.0%}"
    )


BETWEEN = "   "
"""Separator of two changes on a line."""


def flag_lines(
    arguments: Sequence[str], new_arguments: Sequence[str] | None, *, width: int = 0, most: int | None = None
) -> Iterator[Text]:
    """Return the changes of the script's flags from `arguments` to `new_arguments` (None for no changes).

    At most `most` lines of `width` columns have several changes each; None puts one change on each line.
    """
    styles = {"+": "green", "-": "red", "~": "yellow"}
    found = [] if new_arguments is None else arguments_diff(arguments, new_arguments)
    changes = [text(f"{sign} ", styles[sign]).append(what, "default") for sign, what in found]
    if most is None or not changes:
        yield from changes or [text("your own, unchanged")]
        return
    lines: list[Text] = []
    for number, change in enumerate(changes):
        if lines and len(lines[-1]) + len(BETWEEN) + len(change) <= width:
            lines[-1] = text(BETWEEN).join([lines[-1], change])
        elif len(lines) < most:
            lines.append(change)
        else:
            rest = len(changes) - number
            lines.append(text(f"… and {rest} more {plural('change', rest)}, in the plan file", "dim"))
            break
    yield from lines


def arguments_diff(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    """Return changes of a command line: (`~`, flag old → new), (`+`, flag) and (`-`, flag), in the order of flags."""
    before, after = _values_of_flags(old), _values_of_flags(new)
    lines = []
    for flag, values in before.items():
        if flag not in after:
            lines.append(("-", _joined(flag, values)))
        elif after[flag] != values:
            lines.append(("~", f"{_joined(flag, values)} → {' '.join(after[flag]) or 'given'}"))
    return lines + [("+", _joined(flag, values)) for flag, values in after.items() if flag not in before]


def paste_text(old: Sequence[str], new: Sequence[str], *, width: int = 0) -> str:
    """Return flags to append to the job's command line, in shell syntax. A flag is never wrapped.

    `width` has the columns of a line; 0 puts one flag on each line.
    """
    added, deleted = changed_flags(old, new)
    lines: list[str] = []
    for flag in map(shlex.join, added):
        if lines and len(f"  {lines[-1]} {flag} \\") <= width:
            lines[-1] += f" {flag}"
        else:
            lines.append(flag)
    shown = " \\\n".join(f"  {printable(line)}" for line in lines)
    append = f"Append to the script's flags:\n{shown}\n" if lines else ""
    return append + (f"And delete these: {printable(' '.join(deleted))}\n" if deleted else "")


def changed_flags(old: Sequence[str], new: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Return flags, with values, to append to the old command line for the new one, and the flags to delete first."""
    before, after = _values_of_flags(old), _values_of_flags(new)
    changed = ((flag, values) for flag, values in after.items() if before.get(flag) != values)
    added = [
        [_joined(flag, values)] if flag[-1:] == "=" else [*filter(None, (flag,)), *values] for flag, values in changed
    ]
    return added, [flag for flag in before if flag not in after]


def _values_of_flags(arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return flags with their values. A repeated flag has the last values, as in Megatron.

    An override of Megatron-Bridge, such as `model.seq_length=4096`, is a flag whose name ends with `=`.
    """
    groups: dict[str, list[str]] = {}
    flag = ""
    for word in arguments:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            groups[flag] = [value] if equals else []
        elif override := re.match(r"[+~]*\w+(\.\w+)+=", word):
            groups[override[0]] = [word[override.end() :]]
        else:
            groups.setdefault(flag, []).append(word)
    return {name: tuple(values) for name, values in groups.items()}


def _joined(flag: str, values: Sequence[str]) -> str:
    if flag.endswith("="):
        return flag + " ".join(values)
    return " ".join(filter(None, (flag, *values)))
