"""Shows a plan that nobody runs yet: for which job and machines, what was chosen and why, and the flags to paste."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pipette_launch.facts import Plan
from pipette_launch.report import parts
from pipette_launch.report.draw import Section, bullet, plural, render, sheet, text
from pipette_launch.units import bytes_text, count_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MOST_REASONS = 5


def planned_screen(
    plan: Plan,
    *,
    title: str,
    saved_to: Path | None,
    width: int | None = None,
    colour: bool | None = None,
    stream: TextIO | None = None,
) -> str:
    """Show in one screen what a plan is for, what it chose, how sure that is, and what to paste.

    Args:
        plan: as `pipette plan` made it or a file holds it.
        title: the command that shows it.
        saved_to: where the plan file lies, if anywhere.
        width: columns; None for the terminal's, 80 without one.
        colour: None for yes on a terminal only.
        stream: where it will be shown; None for stdout.

    """
    sections: tuple[Section, ...] = (
        ("Job", _job(plan)),
        ("Machines", _machines(plan)),
        ("Chosen", parts.chosen(plan)),
        ("Step time", parts.step_times(plan)),
        ("Trials", parts.trials(plan)),
        ("Why", map(bullet, plan.reasons)),
        ("Memory", parts.memory(plan.chosen)),
        ("Flags", _flags(plan)),
        ("Dropped", _dropped(plan)),
        ("Notes", map(bullet, parts.notes(plan, saved_to, counts_dropped=False))),
        ("Plan file", [] if saved_to is None else [text(str(saved_to), overflow="fold")]),
    )
    screen = render(title, sheet(sections), width=width, colour=colour, stream=stream or sys.stdout)
    return f"{screen}{_paste(plan)}"


def _job(plan: Plan) -> Iterator[Text]:
    setting = plan.setting
    if setting is None:
        yield text(f"not in this plan file, which is of {plan.provenance.made_at}")
        return
    yield text(
        f"{setting.script}: {count_text(setting.num_parameters)} parameters, {setting.global_batch_size} sequences = "
        f"{count_text(setting.tokens_per_step)} tokens a step"
    )


def _machines(plan: Plan) -> Iterator[Text]:
    hosts, devices = len(plan.hosts), plan.devices_per_host
    ranks = f"{hosts * devices} {plural('rank', hosts * devices)} on {hosts} {plural('host', hosts)} x {devices}"
    if plan.setting is None:
        yield text(f"{ranks} {plan.device_kind}")
        return
    memory = bytes_text(plan.setting.device_memory_bytes)
    yield text(f"{ranks} {plan.setting.device_name} with {memory}, {plan.setting.machines}")
    if plan.setting.network:
        yield text(f"between hosts: {plan.setting.network}")


def _flags(plan: Plan) -> Iterator[Text]:
    if plan.setting is not None:
        yield from parts.flags(plan.setting.arguments, plan.setting.new_arguments)


def _paste(plan: Plan) -> str:
    """Flags to append to the job's own, a flag a line; not wrapped, whatever the width, so that a shell takes them."""
    if plan.setting is None:
        return ""
    added, deleted = parts.paste_words(plan.setting.arguments, plan.setting.new_arguments)
    lines: list[list[str]] = []
    for word in added:
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(word)
    told = " \\\n".join(f"  {shlex.join(line)}" for line in lines)
    append = f"Append to the script's flags:\n{told}\n" if lines else ""
    return append + (f"And delete: {' '.join(deleted)}\n" if deleted else "")


def _dropped(plan: Plan) -> Iterator[RenderableType]:
    """Why the others fell out, most first."""
    from rich.table import Table

    if not plan.dropped:
        return
    yield text(f"of {plan.num_layouts:,} legal layouts, and of combinations that Megatron refuses:")
    most = sorted(plan.dropped.items(), key=lambda item: -item[1])
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    for reason, count in most[:MOST_REASONS]:
        table.add_row(text(str(count)), text(reason))
    rest = sum(count for _, count in most[MOST_REASONS:])
    if rest:
        more = len(most) - MOST_REASONS
        table.add_row(text(str(rest)), text(f"for {more} more {plural('reason', more)}, in the plan file"))
    yield table
