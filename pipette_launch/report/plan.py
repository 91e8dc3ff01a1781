"""The two screens of a plan: of one that the launcher is about to run, and of one that a file holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pipette_launch.facts import Choice, Measurements, Plan
from pipette_launch.facts.results.outcome import Outcome
from pipette_launch.printable import printable
from pipette_launch.report.draw import Section, bar, breakdown, bullet, plural, render, sheet, stages_shown, text
from pipette_launch.report.figures import limit_words, memory_bars, rate_words, without_gaps
from pipette_launch.report.flag_changes import flag_lines, paste_text
from pipette_launch.report.health import health
from pipette_launch.report.measured import what_the_plan_rests_on
from pipette_launch.report.templates import templates
from pipette_launch.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MOST_HOST_LINES = 12
MOST_REASONS = 5


def plan_screen(
    plan: Plan,
    measurements: Measurements | None,
    *,
    arguments: Sequence[str],
    new_arguments: Sequence[str] | None,
    saved_to: Path | None,
    drawn_to: Path | None = None,
    unsaved: str = "",
    width: int | None = None,
    colour: bool | None = None,
) -> str:
    """Show in one screen what was measured, what was chosen and why, and what changes for the script.

    Args:
        plan: the plan to show.
        measurements: what it rests on; None for a plan from the cache or a file.
        arguments: the script's arguments as the user gave them.
        new_arguments: the arguments that the script will get; None for the user's own.
        saved_to: where the plan file lies, if anywhere.
        drawn_to: where its report lies, an HTML file, if anywhere.
        unsaved: why there is none, and what to do; empty where none was wanted.
        width: columns; None for the terminal's, 80 without one.
        colour: None for yes on a terminal only.

    """
    sections: tuple[Section, ...] = (
        ("Measured", what_the_plan_rests_on(plan, measurements)),
        ("Health", [] if measurements is None else health(measurements.verdicts)),
        *_choice(plan),
        ("Flags", flag_lines(arguments, new_arguments)),
        ("Notes", map(bullet, _notes(plan, saved_to))),
        ("Plan file", list(_file(saved_to, drawn_to, unsaved))),
    )
    return render("pipette-launch", sheet(sections), width=width, colour=colour)


def plan_file_screen(
    plan: Plan,
    *,
    title: str,
    saved_to: Path | None,
    drawn_to: Path | None = None,
    width: int | None = None,
    colour: bool | None = None,
    stream: TextIO | None = None,
) -> str:
    """Show in one screen what a plan is for, what it chose, how sure that is, and what to paste.

    Args:
        plan: as `pipette plan` made it or a file holds it.
        title: the command that shows it.
        saved_to: where the plan file lies, if anywhere.
        drawn_to: where its report lies, an HTML file, if anywhere.
        width: columns; None for the terminal's, 80 without one.
        colour: None for yes on a terminal only.
        stream: where it will be shown; None for stdout.

    """
    setting = plan.setting
    sections: tuple[Section, ...] = (
        ("Job", _job(plan)),
        ("Machines", _machines(plan)),
        *_choice(plan),
        ("Flags", [] if setting is None else flag_lines(setting.arguments, setting.new_arguments)),
        ("Dropped", _dropped(plan)),
        ("Notes", map(bullet, _notes(plan, saved_to, counts_dropped=False))),
        ("Plan file", list(_file(saved_to, drawn_to))),
    )
    screen = render(title, sheet(sections), width=width, colour=colour, stream=stream or sys.stdout)
    if setting is None:
        return screen
    return screen + paste_text(setting.arguments, setting.new_arguments) + schedule_words(plan)


def schedule_words(plan: Plan) -> str:
    """Say that flags alone do not run a schedule which Megatron lacks."""
    order = None if plan.keeps_own else plan.chosen.order
    if order is None:
        return ""
    name = printable(order.name)
    return (
        f"Flags alone run {plan.chosen.layout.schedule_name}. pipette-launch runs {name}:\n"
        f"  --pipette-schedules {name}, or --pipette-plan with the plan file\n"
    )


def _choice(plan: Plan) -> tuple[Section, ...]:
    """The sections that both screens share: what was chosen and why."""
    return (
        ("Chosen", _chosen(plan)),
        ("Step time", _step_times(plan)),
        ("Trials", _trials(plan)),
        ("Why", map(bullet, plan.reasons)),
        ("Memory", _memory(plan.chosen)),
        ("On a loss", templates(plan)),
    )


def _file(saved_to: Path | None, drawn_to: Path | None, unsaved: str = "") -> Iterator[Text]:
    for path in filter(None, (saved_to, drawn_to)):
        yield text(str(path), overflow="fold")
    if saved_to is None and unsaved:
        yield text(f"not kept: {unsaved}", "yellow")


def outcome_line(outcome: Outcome, saved_to: Path | None) -> str:
    """Say in one line how the prediction compares with what was measured."""
    measured = outcome.measured_step
    shaky = f", spread {measured.spread:.0%}: unstable" if measured.is_unstable else ""
    where = f" ({saved_to})" if saved_to is not None else ""
    rate = f" ({rate_words(outcome.rate, outcome.layout.world_size)})" if outcome.rate else ""
    peak = outcome.fullest
    memory = ""
    if peak is not None:
        predicted = bytes_text(peak.predicted_bytes)
        memory = f"; rank {peak.rank} held at most {bytes_text(peak.measured_bytes)}, predicted {predicted}"
    off = f"{abs(outcome.error):.1%} too {'long' if outcome.error > 0 else 'short'}"
    return (
        f"{outcome.layout.words()}: measured {seconds_text(measured.median_s)} a step up to iteration "
        f"{outcome.last_iteration}{rate}{shaky}, predicted {seconds_text(outcome.predicted_step_s)}, {off}"
        f"{memory}{where}"
    )


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


def _chosen(plan: Plan) -> Iterator[RenderableType]:
    """The layout, the parts of its step, and where its ranks sit."""
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


def rank_ranges(ranks: Sequence[int]) -> str:
    """Ranks in their order, runs written short: `0-3 8 10`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(str(rank) for rank in run) for run in parts)


def _step_times(plan: Plan) -> Iterator[RenderableType]:
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


def _trials(plan: Plan) -> Iterator[RenderableType]:
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
    yield text(
        f"{plan.trials.iterations} iterations of each trial were timed; all trials took {plan.trials.took_s:.0f} s",
        "dim",
    )


def _memory(choice: Choice) -> Iterator[RenderableType]:
    """What each stage's device holds at its peak, against the limit."""
    shown = choice.memory_shown
    stages = stages_shown(shown.need_bytes)
    yield memory_bars([(stage, shown.need_bytes[stage]) for stage in stages], shown.limit_bytes)
    hidden = len(shown.need_bytes) - len(stages)
    if hidden:
        yield text(f"… {hidden} more stages, none of them fuller", "dim")
    yield text(limit_words(shown.limit_bytes, shown.free_bytes, shown.margin), "dim")


def _dropped(plan: Plan) -> Iterator[RenderableType]:
    """Why the others fell out, most first."""
    from rich.table import Table

    if not plan.dropped:
        return
    yield text(f"from {plan.num_layouts:,} legal layouts, and from combinations that Megatron refuses:")
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


def _notes(plan: Plan, saved_to: Path | None, *, counts_dropped: bool = True) -> Iterator[str]:
    """What was assumed, one sentence each; how many layouts were dropped, and how many effects are left out."""
    dropped = sum(plan.dropped.values())
    told: tuple[str, ...] = ()
    if dropped and counts_dropped:
        most = max(plan.dropped, key=lambda reason: plan.dropped[reason])
        told = (f"{plan.num_layouts} layouts looked at, {dropped} combinations dropped, most of them because {most}.",)
    listed = "the plan file lists them" if saved_to is not None else "see the documentation"
    return without_gaps((*plan.notes, *told), what="", listed=listed)
