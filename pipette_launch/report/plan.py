"""Screens of a plan that the launcher will run, and of a plan in a file. Each screen can be short or whole.

A short screen has at most `MOST_LINES` lines. The listings are cut, and only notes on which the user can act are shown.
A short screen counts the omitted notes and names the file or page with all notes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rich.columns import Columns
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipette_launch.facts import Choice, Measurements, Plan
from pipette_launch.facts.outcome import Outcome
from pipette_launch.report.measured import MOST_VERDICTS, health, what_the_plan_rests_on
from pipette_launch.report.screen import (
    INDENT,
    Section,
    advice,
    bar,
    breakdown,
    bullet,
    columns,
    flag_lines,
    limit_words,
    memory_bars,
    packed_flag_lines,
    paste_text,
    rate_words,
    render,
    sheet,
    short_limit_words,
    stages_shown,
    step_words,
    text,
)
from pipette_launch.text import bytes_text, count_text, plural, printable, seconds_text

MOST_HOST_LINES = 12
SHORT_HOST_LINES = 3
HOST_GAP = 3
LEAST_ROWS = 2
"""Least number of rows of a listing: the chosen configuration and the user's own configuration."""


def chosen(plan: Plan, width: int, most: int | None) -> Iterator[RenderableType]:
    """Return the chosen layout, the parts of its step, and its ranks by host, in `width` columns."""
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
    """Return lines with hosts and their ranks, several hosts on a line."""
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
    """Return a text of ranks in their order, with shortened runs: `0-3 8 10`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(str(rank) for rank in run) for run in parts)


def step_times(plan: Plan, most: int | None) -> Iterator[RenderableType]:
    """Return bars of the step times of the chosen configuration, the runners-up and the user's own configuration."""
    if most is not None and plan.trials is not None:
        # The section on trials shows the same configurations, with measured and predicted step times.
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
    """Return lines with measured trials of plans and of the user's own configuration."""
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
    """Return bars of the peak memory of each stage's device, as shares of the limit."""
    shown = choice.memory_shown
    # A remark "1 more stage" would take a line, which can show the stage itself.
    stages = stages_shown(shown.need_bytes) if most is None else stages_shown(shown.need_bytes, most + 1)
    if most is not None and len(stages) > most + 1:
        stages = [list(shown.need_bytes).index(max(shown.need_bytes))]
    yield memory_bars([(stage, shown.need_bytes[stage]) for stage in stages], shown.limit_bytes)
    hidden = len(shown.need_bytes) - len(stages)
    if hidden:
        yield text(f"… {hidden} more {plural('stage', hidden)}, none of them fuller", "dim")
    words = limit_words if most is None else short_limit_words
    yield text(words(shown.limit_bytes, shown.free_bytes, shown.margin), "dim")


def templates(plan: Plan, most: int | None = None) -> Iterator[RenderableType]:
    """Return a line for the plan and for each fallback plan: nodes, step time, slowdown, layout, checkpoint.

    Args:
        most: largest number of lines; None for all fallback plans.

    """
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
    """Return whether a checkpoint of the layout `before` must be resharded for the layout `after`, in words."""
    is_same = (before.layout.tp, before.layout.pp) == (after.layout.tp, after.layout.pp)
    return "keeps TP and PP" if is_same else "reshards the checkpoint"


MOST_LINES = 40
"""Largest number of lines of a short screen at 100 columns."""
LISTINGS = ((6, True), (5, True), (4, True), (4, False), (3, False), (2, False), (1, False))
"""Variants of a short screen: (most lines of a listing, whether there are empty lines).

The first that fits is drawn.
"""
MOST_REASONS = 5
OUTCOME_WIDTH = 84
"""Number of columns of an outcome line: 100 without the prefix of the log."""


def plan_screen(
    plan: Plan,
    measurements: Measurements | None,
    *,
    arguments: Sequence[str],
    new_arguments: Sequence[str] | None,
    saved_to: Path | None,
    drawn_to: Path | None = None,
    unsaved: str = "",
    is_whole: bool = False,
    width: int | None = None,
    colour: bool | None = None,
) -> str:
    """Draw the launcher's screen of a plan: measurements, choice, reasons, and changes of the script's flags.

    Args:
        measurements: measurements behind the plan; None for a plan from the cache or a file.
        new_arguments: arguments of the script under the plan; None for the user's own arguments.
        saved_to: path of the plan file; None if the plan has no file.
        drawn_to: path of the plan's HTML report; None if there is no report.
        unsaved: reason why no file was written, with a remedy; empty if no file was requested.
        is_whole: true for all notes and listings, at any length.

    """
    wide = columns(width, sys.stderr)
    where = _where(saved_to, drawn_to, otherwise="--pipette-verbose shows them")

    def draw(most: int | None, has_gaps: bool) -> str:
        verdicts = () if measurements is None else measurements.verdicts
        rests_on = list(what_the_plan_rests_on(plan, measurements))
        sections: tuple[Section, ...] = (
            ("Measured", rests_on if most is None else rests_on[: max(most, 2)]),
            ("Health", health(verdicts, most=MOST_VERDICTS if most is None else most) if verdicts else []),
            *_choice(plan, wide, most),
            ("Flags", _flags(arguments, new_arguments, wide, most)),
            ("Notes", _notes(plan, where, most)),
            ("Plan file", list(_file(saved_to, drawn_to, unsaved))),
        )
        return render("pipette-launch", sheet(sections, has_gaps=has_gaps), width=wide, colour=colour)

    return _fitted(draw, is_whole=is_whole)


def plan_file_screen(
    plan: Plan,
    *,
    title: str,
    saved_to: Path | None,
    drawn_to: Path | None = None,
    is_whole: bool = True,
    width: int | None = None,
    colour: bool | None = None,
    stream: TextIO | None = None,
) -> str:
    """Draw the screen of a plan file: job, machines, choice, reasons, and flags to paste.

    Args:
        title: command that shows the screen.
        saved_to: path of the plan file; None if the plan has no file.
        drawn_to: path of the plan's HTML report; None if there is no report.
        is_whole: true for all notes and listings, at any length.

    """
    setting, target = plan.setting, stream or sys.stdout
    wide = columns(width, target)
    where = _where(saved_to, drawn_to, otherwise="-v shows them, --out FILE keeps them")

    def draw(most: int | None, has_gaps: bool) -> str:
        # The flags to paste repeat the changes of flags.
        changes = [] if setting is None or most is not None else flag_lines(setting.arguments, setting.new_arguments)
        sections: tuple[Section, ...] = (
            ("Job", _job(plan)),
            ("Machines", _machines(plan)),
            *_choice(plan, wide, most),
            ("Flags", changes),
            ("Dropped", _dropped(plan) if most is None else []),
            ("Notes", _notes(plan, where, most, counts_dropped=most is not None)),
            ("Plan file", list(_file(saved_to, drawn_to))),
        )
        screen = render(title, sheet(sections, has_gaps=has_gaps), width=wide, colour=colour, stream=target)
        if setting is None:
            return screen
        pasted = paste_text(setting.arguments, setting.new_arguments, width=0 if most is None else wide)
        return screen + pasted + schedule_words(plan)

    return _fitted(draw, is_whole=is_whole)


def chosen_line(plan: Plan) -> str:
    """Return one line with the chosen configuration and the step time that the choice saves."""
    choice, own = plan.chosen, plan.own
    words = f"{choice.layout.words()}, {choice.schedule}, {seconds_text(choice.step_time_s)} a step predicted"
    if plan.keeps_own:
        return f"your own configuration: {words}"
    if plan.own_fault or not own.fits:
        return f"{words}; your own configuration {'cannot run' if plan.own_fault else 'does not fit'}"
    return f"{words}, {1 - choice.step_time_s / own.step_time_s:.1%} less than your own configuration"


def _fitted(draw: Callable[[int | None, bool], str], *, is_whole: bool) -> str:
    """Draw the whole screen, or the fullest short screen of at most MOST_LINES lines."""
    if is_whole:
        return draw(None, True)
    screens = (draw(most, has_gaps) for most, has_gaps in LISTINGS)
    return next((screen for screen in screens if screen.count("\n") <= MOST_LINES), draw(*LISTINGS[-1]))


def schedule_words(plan: Plan) -> str:
    """Return a remark that flags alone do not run a schedule that Megatron lacks; empty for Megatron's schedules."""
    order = None if plan.keeps_own else plan.chosen.order
    if order is None:
        return ""
    name = printable(order.name)
    return (
        f"Flags alone run {plan.chosen.layout.schedule_name}. pipette-launch runs {name}:\n"
        f"  --pipette-schedules {name}, or --pipette-plan with the plan file\n"
    )


def _choice(plan: Plan, width: int, most: int | None) -> tuple[Section, ...]:
    """Return the sections on choice and reasons, which the launcher's screen and the screen of a plan file share."""
    reasons = plan.reasons
    # Other listings are cut before the reasons, because reasons matter most to a reader.
    if most is not None and len(reasons) > most + 1:
        # The last reason states the gap between the plan and the lower bound.
        reasons = (*reasons[:most], *(reasons[-1:] if most > 1 else ()))
    return (
        ("Chosen", chosen(plan, width - INDENT, most)),
        ("Step time", step_times(plan, most)),
        ("Trials", trials(plan, most)),
        ("Why", map(bullet, reasons)),
        ("Memory", memory(plan.chosen, most)),
        ("On a loss", templates(plan, most)),
    )


def _flags(
    arguments: Sequence[str], new_arguments: Sequence[str] | None, width: int, most: int | None
) -> Iterator[Text]:
    if most is None:
        return flag_lines(arguments, new_arguments)
    return packed_flag_lines(arguments, new_arguments, width=width - INDENT, most=most)


def _where(saved_to: Path | None, drawn_to: Path | None, *, otherwise: str) -> str:
    """Return a clause that names the file or page with the notes that a short screen omits."""
    if drawn_to is not None:
        return "the report lists them"
    return "pipette report shows them" if saved_to is not None else otherwise


def _file(saved_to: Path | None, drawn_to: Path | None, unsaved: str = "") -> Iterator[Text]:
    for path in filter(None, (saved_to, drawn_to)):
        yield text(str(path), overflow="fold")
    if saved_to is None and unsaved:
        yield text(f"not kept: {unsaved}", "yellow")


def outcome_line(outcome: Outcome, width: int = OUTCOME_WIDTH) -> str:
    """Compare prediction and measurement in one line. Tokens per second are left out if the line is too long."""
    measured = outcome.measured_step
    words = f"step {step_words(measured.median_s, outcome.predicted_step_s)}"
    if measured.is_unstable:
        words += f", unstable (spread {measured.spread:.0%})"
    peak = outcome.fullest
    if peak is not None:
        words += f"; memory {bytes_text(peak.measured_bytes)}, predicted {bytes_text(peak.predicted_bytes)}"
    rate = outcome.rate
    more = "" if rate is None else f"; {count_text(rate.tokens_per_s)} tokens/s"
    if rate is not None and rate.mfu is not None:
        more += f", MFU {rate.mfu:.1%}"
    return words + more if len(words + more) <= width else words


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
    memory_text = bytes_text(plan.setting.device_memory_bytes)
    yield text(f"{ranks} {plan.setting.device_name} with {memory_text}, {plan.setting.machines}")
    if plan.setting.network:
        yield text(f"between hosts: {plan.setting.network}")


def _dropped(plan: Plan) -> Iterator[RenderableType]:
    """Return the number of dropped layouts for each reason."""
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


def _notes(plan: Plan, where: str, most: int | None, *, counts_dropped: bool = True) -> Iterator[RenderableType]:
    """Return the plan's notes and the number of dropped layouts. A short screen shows only some notes."""
    dropped = sum(plan.dropped.values())
    told: tuple[str, ...] = ()
    if dropped and counts_dropped:
        reason = max(plan.dropped, key=lambda reason: plan.dropped[reason])
        told = (
            f"{plan.num_layouts} layouts looked at, {dropped} combinations dropped, most of them because {reason}.",
        )
    if most is None:
        yield from map(bullet, (*plan.notes, *told))
        return
    shown = advice(plan.notes)[:most]
    yield from map(bullet, shown)
    rest = len(plan.notes) + len(told) - len(shown)
    if rest:
        yield text(f"{rest} {'more ' if shown else ''}{plural('note', rest)} on what was assumed; {where}", "dim")
