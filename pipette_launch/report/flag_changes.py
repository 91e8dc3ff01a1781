"""Shows how a plan changes the script's flags: as a list of changes, and as words to paste into a command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipette_launch.report.draw import text
from pipette_launch.text import plural, printable

if TYPE_CHECKING:
    from rich.text import Text


BETWEEN = "   "
"""What stands between two changes on a line."""


def flag_lines(arguments: Sequence[str], new_arguments: Sequence[str] | None) -> Iterator[Text]:
    """What changes for the script."""
    changes = [] if new_arguments is None else arguments_diff(arguments, new_arguments)
    if not changes:
        yield text("your own, unchanged")
    styles = {"+": "green", "-": "red", "~": "yellow"}
    for sign, what in changes:
        line = text(f"{sign} ", styles[sign])
        line.append(what, "default")
        yield line


def packed_flag_lines(
    arguments: Sequence[str], new_arguments: Sequence[str] | None, *, width: int, most: int
) -> Iterator[Text]:
    """What changes for the script, as many changes on a line as fit.

    Args:
        arguments: as the user gave them.
        new_arguments: as the script will get them; None for the user's own.
        width: columns of a line.
        most: how many lines.

    """
    from rich.text import Text

    changes = [*flag_lines(arguments, new_arguments)]
    lines: list[list[Text]] = []
    used = 0
    for change in changes:
        if not lines or used + len(BETWEEN) + len(change) > width:
            lines.append([])
            used = -len(BETWEEN)
        lines[-1].append(change)
        used += len(BETWEEN) + len(change)
    for line in lines[:most]:
        yield Text(BETWEEN).join(line)
    rest = sum(map(len, lines[most:]))
    if rest:
        yield text(f"… and {rest} more {plural('change', rest)}, in the plan file", "dim")


def arguments_diff(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    """What changes in a command line: (`~`, flag old → new), (`+`, flag) and (`-`, flag), in the order of flags."""
    before, after = _values_of_flags(old), _values_of_flags(new)
    lines = []
    for flag, values in before.items():
        if flag not in after:
            lines.append(("-", _joined(flag, values)))
        elif after[flag] != values:
            lines.append(("~", f"{_joined(flag, values)} → {' '.join(after[flag]) or 'given'}"))
    return lines + [("+", _joined(flag, values)) for flag, values in after.items() if flag not in before]


def paste_text(old: Sequence[str], new: Sequence[str], *, width: int = 0) -> str:
    """Flags to append to the job's own, so that a shell takes them: no flag is wrapped, whatever the width.

    Args:
        old: as the user gave them.
        new: as the plan wants them.
        width: as many flags on a line as fit into so many columns; 0 sets one on each.

    """
    added, deleted = paste_words(old, new)
    flags: list[list[str]] = []
    for word in added:
        if word.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(word)
    lines: list[str] = []
    for one in map(shlex.join, flags):
        if lines and len(f"  {lines[-1]} {one} \\") <= width:
            lines[-1] += f" {one}"
        else:
            lines.append(one)
    told = " \\\n".join(f"  {printable(line)}" for line in lines)
    append = f"Append to the script's flags:\n{told}\n" if lines else ""
    return append + (f"And delete these: {printable(' '.join(deleted))}\n" if deleted else "")


def paste_words(old: Sequence[str], new: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words to append to a command line so that it means the new one, and flags to delete from it first."""
    before, after = _values_of_flags(old), _values_of_flags(new)
    added = [name for name, values in after.items() if before.get(name) != values]
    return [word for name in added for word in (name, *after[name]) if word], [
        name for name in before if name not in after
    ]


def _values_of_flags(arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flags with their values; the last of several counts, as in Megatron."""
    groups: dict[str, list[str]] = {}
    flag = ""
    for word in arguments:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            groups[flag] = [value] if equals else []
        else:
            groups.setdefault(flag, []).append(word)
    return {name: tuple(values) for name, values in groups.items()}


def _joined(flag: str, values: Sequence[str]) -> str:
    return " ".join((flag, *values)) if flag else " ".join(values)
