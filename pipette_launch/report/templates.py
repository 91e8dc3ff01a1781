"""The table of plans for fewer nodes: what the job goes on with when some are lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipette_launch.facts import Choice, Plan
from pipette_launch.report.draw import text
from pipette_launch.text import plural, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def templates(plan: Plan, most: int | None = None) -> Iterator[RenderableType]:
    """One line for the plan and for each template: nodes, step time, what that is of the plan's, layout, checkpoint.

    Args:
        plan: with its templates.
        most: how many lines; None for all of them.

    """
    from rich.table import Table

    if not plan.templates:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_column()
    listed = (plan, *plan.templates)
    kept = listed if most is None else listed[: max(most, 2)]
    for one in kept:
        runs, before = one.chosen, plan.chosen
        nodes = f"{len(one.hosts)} {plural('node', len(one.hosts))}"
        is_same = one is plan
        slower = "" if is_same else f"{runs.step_time_s / before.step_time_s - 1:+.0%}"
        words = runs.layout.words() if is_same else f"{runs.layout.words()}  {checkpoint_words(before, runs)}"
        style = "green" if is_same else "default"
        table.add_row(text(nodes, style), text(seconds_text(runs.step_time_s), style), text(slower), text(words, style))
    yield table
    if len(kept) < len(listed):
        yield text(f"… and {len(listed) - len(kept)} more for fewer nodes, in the plan file", "dim")


def checkpoint_words(before: Choice, after: Choice) -> str:
    """Say what becomes of a checkpoint that one layout wrote and the other loads."""
    is_same = (before.layout.tp, before.layout.pp) == (after.layout.tp, after.layout.pp)
    return "keeps TP and PP" if is_same else "reshards the checkpoint"
