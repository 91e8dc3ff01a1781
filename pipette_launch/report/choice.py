"""The sections on a choice: layout, ranks, step times, trials and memory.

`most` is how many lines a listing may have on a screen that is to be short; None lists all that a report lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipette_launch.facts import Choice, Plan
from pipette_launch.report.draw import bar, breakdown, stages_shown, text
from pipette_launch.report.figures import limit_words, memory_bars, rate_words, short_limit_words
from pipette_launch.text import plural, printable, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_HOST_LINES = 12
SHORT_HOST_LINES = 3
HOST_GAP = 3
LEAST_ROWS = 2
"""The chosen configuration and the user's own are always listed."""


def chosen(plan: Plan, width: int, most: int | None) -> Iterator[RenderableType]:
    """The layout, the parts of its step, and where its ranks sit, in so many columns."""
    choice = plan.chosen
    whose = "your own configuration, " if plan.keeps_own else ""
    line = text(f"{choice.layout.words()}", "bold green")
    words = f"  {whose}{choice.schedule}, {seconds_text(choice.step_time_s)} a step predicted"
    line.append(printable(words), "default")
    yield line
    if choice.rate:
        yield text(rate_words(choice.rate, choice.layout.world_size))
    yield breakdown(choice.breakdown_s, choice.step_time_s)
    if choice.is_host_order:
        yield text("ranks in torchrun's own order")
        return
    yield from _rank_map(plan, width, MOST_HOST_LINES if most is None else min(SHORT_HOST_LINES, most))


def _rank_map(plan: Plan, width: int, most: int) -> Iterator[RenderableType]:
    """Host → ranks, as many hosts on a line as fit."""
    from rich.columns import Columns

    size = plan.devices_per_host
    names = max(len(name) for name in plan.hosts)
    cells = []
    for index, name in enumerate(plan.hosts):
        ranks = plan.chosen.placement[index * size : (index + 1) * size]
        cell = text(f"{name:<{names}} ", "dim")
        cell.append(rank_ranges(ranks), "default")
        cells.append(cell)
    per_line = max((width + HOST_GAP) // (max(len(cell) for cell in cells) + HOST_GAP), 1)
    kept = min(len(cells), per_line * most)
    yield text("ranks on each host, in the order of its devices:")
    yield Columns(cells[:kept], padding=(0, HOST_GAP), column_first=True)
    if len(cells) > kept:
        yield text(f"… and {len(cells) - kept} more hosts, in the plan file", "dim")


def rank_ranges(ranks: Sequence[int]) -> str:
    """Ranks in their order, runs written short: `0-3 8 10`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(str(rank) for rank in run) for run in parts)


def step_times(plan: Plan, most: int | None) -> Iterator[RenderableType]:
    """The chosen one, the runners-up and the user's own, as bars."""
    from rich.table import Table

    if most is not None and plan.trials is not None:
        # The trials show the same configurations, measured and predicted.
        return
    others = plan.alternatives if most is None else plan.alternatives[: max(most - LEAST_ROWS, 0)]
    rows = [(plan.chosen, "chosen, yours" if plan.keeps_own else "chosen")]
    rows += [(choice, "") for choice in others]
    if not (plan.keeps_own or plan.own_fault):
        rows.append((plan.own, "yours" if plan.own.fits else "yours, too large"))
    longest_s = max(choice.step_time_s for choice, _ in rows)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for choice, remark in rows:
        style = "green" if choice is plan.chosen else "default"
        part = choice.step_time_s / longest_s if longest_s > 0 else 0.0
        table.add_row(
            text(seconds_text(choice.step_time_s), style),
            bar(part, style),
            text(remark, style),
            text(choice.layout.words(), style),
        )
    yield table


def trials(plan: Plan, most: int | None) -> Iterator[RenderableType]:
    """What was measured of the plans and of the user's own configuration before the training."""
    from rich.table import Table

    if plan.trials is None:
        return
    runs = plan.trials.runs
    ranked = sorted(runs, key=lambda run: (not run.is_own, run.median_s))
    kept = runs if most is None else tuple(run for run in runs if run in ranked[: max(most, LEAST_ROWS)])
    longest_s = max((run.step.median_s for run in runs if run.step), default=0.0)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for run in kept:
        won = (run.layout, run.placement) == (plan.chosen.layout, plan.chosen.placement)
        style = "green" if won else "default"
        whose = f", {'in place of ' if plan.own_fault else ''}yours" if run.is_own else ""
        if run.step is None:
            table.add_row(text("-"), bar(0.0, "red"), text(f"{run.layout.words()}{whose}: {run.failure}", "red"))
            continue
        part = run.step.median_s / longest_s if longest_s > 0 else 0.0
        figures = f"spread {run.step.spread:.0%}, predicted {seconds_text(run.predicted_step_s)}"
        words = f"{run.layout.words()}{whose}  {figures}"
        table.add_row(text(seconds_text(run.step.median_s), style), bar(part, style), text(words, style))
    yield table
    left_out = f"{len(runs) - len(kept)} slower ones are in the plan file; " if len(kept) < len(runs) else ""
    yield text(
        f"{left_out}{plan.trials.iterations} iterations of each trial were timed; all trials took "
        f"{plan.trials.took_s:.0f} s",
        "dim",
    )


def memory(choice: Choice, most: int | None) -> Iterator[RenderableType]:
    """What each stage's device holds at its peak, against the limit."""
    shown = choice.memory_shown
    # A line that counts one stage would take the place of that stage.
    stages = stages_shown(shown.need_bytes) if most is None else stages_shown(shown.need_bytes, most + 1)
    if most is not None and len(stages) > most + 1:
        stages = [list(shown.need_bytes).index(max(shown.need_bytes))]
    yield memory_bars([(stage, shown.need_bytes[stage]) for stage in stages], shown.limit_bytes)
    hidden = len(shown.need_bytes) - len(stages)
    if hidden:
        yield text(f"… {hidden} more {plural('stage', hidden)}, none of them fuller", "dim")
    words = limit_words if most is None else short_limit_words
    yield text(words(shown.limit_bytes, shown.free_bytes, shown.margin), "dim")
