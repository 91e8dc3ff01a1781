"""Parts of the screens that show a plan: what was chosen, its step beside others', memory, flags, notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.facts import Choice, Plan
from pipette_launch.facts.results.rate import Rate
from pipette_launch.report.draw import bar, breakdown, stages_shown, text
from pipette_launch.units import bytes_text, count_text, flops_text, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

MOST_HOST_LINES = 12
NOT_MODELLED = "Not modelled: "
"""How the planner begins a note on what it leaves out; the screen counts these, the plan file has them."""


def rate_words(rate: Rate, world_size: int) -> str:
    """Tokens of all ranks and of each, model FLOPs of each, and their part of the peak, if known."""
    mfu = "" if rate.mfu is None else f", MFU {rate.mfu:.1%}"
    tokens = f"{count_text(rate.tokens_per_s)} tokens/s, {rate.tokens_per_s / world_size:,.0f} on each rank"
    return f"{tokens}; {flops_text(rate.flops_per_s)} on each{mfu}"


def chosen(plan: Plan) -> Iterator[RenderableType]:
    """The layout, the parts of its step, and where its ranks sit."""
    choice = plan.chosen
    whose = "your own configuration, " if plan.keeps_own else ""
    line = text(f"{choice.layout.words()}", "bold green")
    line.append(f"  {whose}{choice.schedule}, {seconds_text(choice.step_time_s)} a step predicted", "default")
    yield line
    if choice.rate:
        yield text(rate_words(choice.rate, choice.layout.world_size))
    yield breakdown(choice.breakdown_s, choice.step_time_s)
    if choice.is_host_order:
        yield text("ranks in torchrun's own order")
        return
    yield from _rank_map(plan)


def _rank_map(plan: Plan) -> Iterator[RenderableType]:
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
    yield text("ranks on each host, in the order of its devices:")
    yield Columns(cells[: 4 * MOST_HOST_LINES], padding=(0, 3), column_first=True)
    if len(cells) > 4 * MOST_HOST_LINES:
        yield text(f"… and {len(cells) - 4 * MOST_HOST_LINES} more hosts, in the plan file")


def step_times(plan: Plan) -> Iterator[RenderableType]:
    """The chosen one, the runners-up and the user's own, as bars."""
    from rich.table import Table

    rows = [(plan.chosen, "chosen, yours" if plan.keeps_own else "chosen")]
    rows += [(choice, "") for choice in plan.alternatives]
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


def trials(plan: Plan) -> Iterator[RenderableType]:
    """What was measured of the plans and of the user's own configuration before the training."""
    from rich.table import Table

    if plan.trials is None:
        return
    runs = plan.trials.runs
    longest_s = max((run.step.median_s for run in runs if run.step), default=0.0)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for run in runs:
        won = (run.layout, run.placement) == (plan.chosen.layout, plan.chosen.placement)
        style = "green" if won else "default"
        whose = ", yours" if run.is_own else ""
        if run.step is None:
            table.add_row(text("-"), bar(0.0, "red"), text(f"{run.layout.words()}{whose}: {run.failure}", "red"))
            continue
        part = run.step.median_s / longest_s if longest_s > 0 else 0.0
        figures = f"spread {run.step.spread:.0%}, predicted {seconds_text(run.predicted_step_s)}"
        words = f"{run.layout.words()}{whose}  {figures}"
        table.add_row(text(seconds_text(run.step.median_s), style), bar(part, style), text(words, style))
    yield table
    yield text(f"{plan.trials.iterations} iterations of each count; {plan.trials.took_s:.0f} s in all", "dim")


def memory(choice: Choice) -> Iterator[RenderableType]:
    """What each stage's device holds at its peak, against the limit."""
    shown = choice.memory_shown
    stages = stages_shown(shown.need_bytes)
    yield memory_bars([(stage, shown.need_bytes[stage]) for stage in stages], shown.limit_bytes)
    hidden = len(shown.need_bytes) - len(stages)
    if hidden:
        yield text(f"… {hidden} more stages, none fuller", "dim")
    yield text(limit_words(shown.limit_bytes, shown.free_bytes, shown.margin), "dim")


def memory_bars(stages: Sequence[tuple[int, int]], limit_bytes: int | None) -> Table:
    """A bar for each (stage, bytes); without a limit beside the fullest."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    whole = max(need for _, need in stages) if limit_bytes is None else limit_bytes
    limit = "" if limit_bytes is None else f" of {bytes_text(limit_bytes)}"
    for stage, need in stages:
        over = need > whole
        table.add_row(
            text(f"stage {stage}"),
            bar(min(need / whole, 1.0) if whole else 1.0, "red" if over else "default"),
            text(f"{bytes_text(need)}{limit}{', too much' if over else ''}"),
        )
    return table


def limit_words(limit_bytes: int, free_bytes: int, margin: float) -> str:
    """Say what the figures hold and what the limit is; the same words on every screen."""
    if not free_bytes:
        return "the model's tensors alone, as this file of an earlier release has them"
    return (
        f"of a whole device, overhead included; the limit of {bytes_text(limit_bytes)} is the {bytes_text(free_bytes)} "
        f"that are free on the fullest device, less the margin of {margin:.0%}"
    )


def flags(arguments: Sequence[str], new_arguments: Sequence[str] | None) -> Iterator[Text]:
    """What changes for the script."""
    changes = [] if new_arguments is None else arguments_diff(arguments, new_arguments)
    if not changes:
        yield text("your own, untouched")
    styles = {"+": "green", "-": "red", "~": "yellow"}
    for sign, what in changes:
        line = text(f"{sign} ", styles[sign])
        line.append(what, "default")
        yield line


def notes(plan: Plan, saved_to: Path | None, *, counts_dropped: bool = True) -> Iterator[str]:
    """What was assumed, one sentence each; how many layouts were dropped, and how many effects are left out."""
    left_out = sum(note.startswith(NOT_MODELLED) for note in plan.notes)
    yield from (note for note in plan.notes if not note.startswith(NOT_MODELLED))
    dropped = sum(plan.dropped.values())
    if dropped and counts_dropped:
        most = max(plan.dropped, key=lambda reason: plan.dropped[reason])
        yield f"{plan.num_layouts} layouts looked at, {dropped} combinations dropped, most of them because {most}."
    if left_out:
        listed = "the plan file lists them" if saved_to is not None else "see the documentation"
        yield f"{left_out} effects are not modelled; {listed}."


def arguments_diff(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    """What changes in a command line: (`~`, flag old → new), (`+`, flag) and (`-`, flag), in the order of flags."""
    before, after = _groups(old), _groups(new)
    lines = []
    for flag, values in before.items():
        if flag not in after:
            lines.append(("-", _joined(flag, values)))
        elif after[flag] != values:
            lines.append(("~", f"{_joined(flag, values)} → {' '.join(after[flag]) or 'given'}"))
    return lines + [("+", _joined(flag, values)) for flag, values in after.items() if flag not in before]


def rank_ranges(ranks: Sequence[int]) -> str:
    """Ranks in their order, runs written short: `0-3 8 10`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(str(rank) for rank in run) for run in parts)


def paste_words(old: Sequence[str], new: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words to append to a command line so that it means the new one, and flags to delete from it first."""
    before, after = _groups(old), _groups(new)
    added = [name for name, values in after.items() if before.get(name) != values]
    return [word for name in added for word in (name, *after[name]) if word], [
        name for name in before if name not in after
    ]


def _groups(arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
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
