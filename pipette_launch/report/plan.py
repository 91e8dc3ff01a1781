"""Screens of a plan that the launcher will run, and of a plan in a file. Each screen of a plan can be short or whole.

A short screen shows `SHORT_ROWS` rows of each listing, and of the notes only those on which the user can act. It counts
the omitted notes and names the file or page with all notes.
"""

from __future__ import annotations

import csv
import io
import itertools
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from pipette_launch.facts import Choice, Layout, Measurements, Plan
from pipette_launch.facts.outcome import Outcome
from pipette_launch.facts.plan import Ranked
from pipette_launch.report.measured import MOST_VERDICTS, health, what_the_plan_rests_on
from pipette_launch.report.screen import (
    INDENT,
    LEFT_OUT,
    MOST_STAGES,
    Line,
    Section,
    bar,
    breakdown,
    bullet,
    changed_flags,
    columns,
    flag_lines,
    grid,
    limit_words,
    memory_bars,
    mfu_text,
    paste_text,
    rate_words,
    screen,
    stages_shown,
    step_words,
    text,
)
from pipette_launch.text import bytes_text, count_text, counted, plural, printable, seconds_text

SHORT_ROWS = 3
"""Number of rows of each listing on a short screen."""
MOST_HOST_LINES = 12
HOST_GAP = 3
RANKED_ROWS = 10
WIDE = 85
"""Least width in columns of a table with the longer step and whole names of the parts."""
SHORT_PARTS = {
    "tensor parallel": "tp",
    "context parallel": "cp",
    "expert parallel": "ep",
    "pipeline transfer": "pp",
    "data parallel": "dp",
    "embedding gradients": "embedding",
    "parameter gather": "gather",
}
"""Names of a step's parts in narrow tables."""
DEGREES = ("tp", "pp", "dp", "cp", "ep")
MOST_REASONS = 5
OUTCOME_WIDTH = 84
"""Number of columns of an outcome line: 100 minus the 16 columns of the log's prefix."""


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
) -> str:
    """Draw the launcher's screen of a plan: measurements, choice, reasons, and changes of the script's flags.

    `measurements` priced the plan; None for a plan from the cache or a file. `new_arguments` follow the plan; None for
    the user's own arguments. `saved_to` is the plan file and `drawn_to` the HTML report; None for no file. `unsaved` is
    the reason why no file was written, with a remedy; empty if no file was requested.
    """
    wide = columns(sys.stderr)
    where = _where(saved_to, drawn_to, otherwise="--pipette-verbose shows them")
    verdicts = () if measurements is None else measurements.verdicts

    most = None if is_whole else SHORT_ROWS
    flags = flag_lines(arguments, new_arguments, width=wide - INDENT, most=most)
    sections: tuple[Section, ...] = (
        ("Measured", what_the_plan_rests_on(plan, measurements)),
        ("Health", health(verdicts, most=most or MOST_VERDICTS)),
        *_choice(plan, wide - INDENT, most),
        ("Flags", flags),
        ("Notes", _notes(plan, where, most)),
        ("Plan file", _files(saved_to, drawn_to, unsaved)),
    )
    return screen("pipette-launch", sections, stream=sys.stderr)


def plan_file_screen(
    plan: Plan,
    *,
    title: str,
    saved_to: Path | None,
    drawn_to: Path | None = None,
    is_whole: bool = True,
    top: int | None = None,
) -> str:
    """Draw the screen of a plan file, with job and machines; `saved_to` and `drawn_to` are as in `plan_screen`.

    `top` has the rows of the ranked list; None for `SHORT_ROWS` on a short screen and `RANKED_ROWS` on a whole one.
    """
    setting, wide = plan.setting, columns(sys.stdout)
    where = _where(saved_to, drawn_to, otherwise="-v shows them, --out FILE keeps them")

    most = None if is_whole else SHORT_ROWS
    # A short screen omits the changes of flags, because the flags to paste below the frame show the same changes.
    flags = flag_lines(setting.arguments, setting.new_arguments) if setting is not None and is_whole else ()
    sections: tuple[Section, ...] = (
        ("Job", _job(plan)),
        ("Machines", _machines(plan)),
        *_choice(plan, wide - INDENT, most, top=top or most or RANKED_ROWS),
        ("Flags", flags),
        ("Dropped", _dropped(plan) if is_whole else ()),
        ("Notes", _notes(plan, where, most, counts_dropped=not is_whole)),
        ("Plan file", _files(saved_to, drawn_to)),
    )
    drawn = screen(title, sections)
    if setting is None:
        return drawn
    pasted = paste_text(setting.arguments, setting.new_arguments, width=0 if is_whole else wide)
    return drawn + pasted + schedule_words(plan)


FIT_WORDS = {"fits": "fits in memory", "tight": "is tight in memory", "too large": "does not fit in memory"}


def chosen_line(plan: Plan) -> str:
    """Return one line with the chosen configuration and the step time that the choice saves."""
    choice, own = plan.chosen, plan.own
    words = f"{choice.layout.words()}, {choice.schedule}, {seconds_text(choice.step_time_s)} a step predicted"
    if plan.keeps_own:
        return f"your own configuration: {words}"
    if plan.own_fault or not own.fits:
        return f"{words}; your own configuration {'cannot run' if plan.own_fault else FIT_WORDS[own.verdict]}"
    return f"{words}, {1 - choice.step_time_s / own.step_time_s:.1%} less than your own configuration"


def outcome_line(outcome: Outcome, width: int = OUTCOME_WIDTH) -> str:
    """Compare predicted and measured values in one line. Tokens per second are left out if the line is too long."""
    measured, peak, rate = outcome.measured_step, outcome.fullest, outcome.rate
    words = f"step {step_words(measured.median_s, outcome.predicted_step_s)}"
    if measured.is_unstable:
        words += f", unstable (spread {measured.spread:.0%})"
    if peak is not None:
        words += f"; memory {bytes_text(peak.measured_bytes)}, predicted {bytes_text(peak.predicted_bytes)}"
    more = "" if rate is None else f"; {count_text(rate.tokens_per_s)} tokens/s"
    if rate is not None and rate.mfu is not None:
        more += f", MFU {mfu_text(rate)}"
    return words + more if len(words + more) <= width else words


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


def checkpoint_words(before: Choice, after: Choice) -> str:
    """Return whether a checkpoint of the layout `before` must be resharded for the layout `after`, in words."""
    is_same = (before.layout.tp, before.layout.pp) == (after.layout.tp, after.layout.pp)
    return "keeps TP and PP" if is_same else "reshards the checkpoint"


def fit_remark(choice: Choice) -> str:
    """Return the verdict on a choice that does not fit, as an appendix to its name; empty for choices that fit."""
    return "" if choice.fits else f", {choice.verdict}"


def listed(plan: Plan, most: int | None = None) -> list[tuple[str, Choice]]:
    """Return the plan's configurations with at most `most` alternatives, each with a role: chosen, yours, or empty."""
    found = [("chosen, yours" if plan.keeps_own else "chosen", plan.chosen)]
    found += [("", choice) for choice in plan.alternatives[:most]]
    if not (plan.keeps_own or plan.own_fault):
        found.append((f"yours{fit_remark(plan.own)}", plan.own))
    return found


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return a text of ranks in their order, with shortened runs: `0-3 8 10`."""
    # In a run of successive ranks, rank minus index is constant.
    groups = itertools.groupby(enumerate(ranks), key=lambda place: place[1] - place[0])
    runs = [[rank for _, rank in run] for _, run in groups]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def _choice(plan: Plan, width: int, most: int | None, *, top: int = 0) -> tuple[Section, ...]:
    """Return the sections on choice and reasons, which the launcher's screen and the screen of a plan file share.

    Each listing shows `most` rows, or all rows with None. With `top`, a plan with a ranked list shows `top` rows of the
    list instead of step times.
    """
    reasons = plan.reasons
    if most is not None and len(reasons) > most:
        # The last reason states the gap between the plan and the lower bound.
        reasons = (*reasons[: most - 1], reasons[-1])
    is_ranked = bool(top and plan.ranked) and plan.trials is None
    return (
        ("Chosen", _chosen(plan, width, most)),
        ("Ranked", ranked_table(plan, width, top)) if is_ranked else ("Step time", _step_times(plan, most)),
        ("Trials", _trials(plan, most)),
        ("Why", map(bullet, reasons)),
        ("Memory", _memory(plan.chosen, most)),
        ("On a loss", _fallback_plans(plan, most)),
    )


def _chosen(plan: Plan, width: int, most: int | None) -> Iterator[Line]:
    choice = plan.chosen
    words = f"  {'your own configuration, ' if plan.keeps_own else ''}{choice.schedule}, "
    words += f"{seconds_text(choice.step_time_s)} a step predicted"
    yield text(choice.layout.words(), "bold green").append(printable(words), "default")
    if choice.rate:
        yield rate_words(choice.rate, choice.layout.world_size)
    yield breakdown(choice.breakdown_s, choice.step_time_s)
    if choice.is_host_order:
        yield "ranks in torchrun's own order"
    else:
        yield from _rank_map(plan, width, most or MOST_HOST_LINES)


def _rank_map(plan: Plan, width: int, most: int) -> Iterator[Line]:
    from rich.columns import Columns

    size, name_width = plan.devices_per_host, max(map(len, plan.hosts))
    cells = [
        text(f"{name:<{name_width}} ", "dim").append(
            rank_ranges(plan.chosen.placement[index * size : (index + 1) * size]), "default"
        )
        for index, name in enumerate(plan.hosts)
    ]
    per_line = max((width + HOST_GAP) // (max(map(len, cells)) + HOST_GAP), 1)
    kept = cells[: per_line * most]
    yield "ranks on each host, in the order of its devices:"
    yield Columns(kept, padding=(0, HOST_GAP), column_first=True)
    if len(cells) > len(kept):
        yield text(f"… and {counted(len(cells) - len(kept), 'more host')}, in the plan file", "dim")


def _step_times(plan: Plan, most: int | None) -> Iterator[Line]:
    if most is not None and plan.trials is not None:
        # The section on trials shows the same configurations, with measured and predicted step times.
        return
    # The chosen and the user's own configuration take two rows.
    shown = listed(plan, None if most is None else most - 2)
    longest_s = max(choice.step_time_s for _, choice in shown)
    rows = []
    for remark, choice in shown:
        style = "green" if choice is plan.chosen else "default"
        drawn = bar(choice.step_time_s / longest_s, style)
        words = seconds_text(choice.step_time_s), remark, choice.layout.words()
        duration, *about = (text(one, style) for one in words)
        rows.append((duration, drawn, *about))
    yield grid("rllw", rows)


def _trials(plan: Plan, most: int | None) -> Iterator[Line]:
    if plan.trials is None:
        return
    runs = plan.trials.runs
    ranked = sorted(runs, key=lambda run: (not run.is_own, run.median_s))[:most]
    kept = [run for run in runs if run in ranked]
    longest_s = max((run.step.median_s for run in runs if run.step), default=0.0)
    rows: list[tuple[Line, ...]] = []
    for run in kept:
        won = (run.layout, run.placement) == (plan.chosen.layout, plan.chosen.placement)
        style = "green" if won else "default"
        words = run.layout.words()
        if run.is_own:
            words += f", {'in place of ' if plan.own_fault else ''}yours"
        if run.step is None:
            rows.append(("-", bar(0.0, "red"), text(f"{words}: {run.failure}", "red")))
            continue
        drawn = bar(run.step.median_s / longest_s if longest_s > 0 else 0.0, style)
        words += f"  spread {run.step.spread:.0%}, predicted {seconds_text(run.predicted_step_s)}"
        rows.append((text(seconds_text(run.step.median_s), style), drawn, text(words, style)))
    yield grid("rlw", rows)
    left_out = f"the plan file has {counted(len(runs) - len(kept), 'slower one')}; " if len(kept) < len(runs) else ""
    timed = f"timed: {counted(plan.trials.iterations, 'iteration')} of each trial"
    yield text(f"{left_out}{timed}; all trials took {plan.trials.took_s:.0f} s", "dim")


def _memory(choice: Choice, most: int | None) -> Iterator[Line]:
    shown = choice.memory
    stages = stages_shown(shown.need_bytes, most or MOST_STAGES)
    yield memory_bars([(stage, shown.need_bytes[stage]) for stage in stages], shown.limit_bytes)
    hidden = len(shown.need_bytes) - len(stages)
    if hidden:
        yield text(f"… {counted(hidden, 'more stage')}, not fuller", "dim")
    yield text(limit_words(shown.limit_bytes, shown.free_bytes, shown.margin, is_short=most is not None), "dim")


def _fallback_plans(plan: Plan, most: int | None) -> Iterator[Line]:
    if not plan.templates:
        return
    listed = (plan, *plan.templates)
    kept, before = listed[:most], plan.chosen

    def row(one: Plan) -> tuple[Line, ...]:
        runs, style = one.chosen, "green" if one is plan else "default"
        slower, words = "", runs.layout.words()
        if one is not plan:
            slower = f"{runs.step_time_s / before.step_time_s - 1:+.0%}"
            words += f"  {checkpoint_words(before, runs)}"
        nodes = f"{len(one.hosts)} {plural('node', len(one.hosts))}"
        return text(nodes, style), text(seconds_text(runs.step_time_s), style), slower, text(words, style)

    yield grid("rrrw", map(row, kept))
    if len(kept) < len(listed):
        yield text(f"… and {len(listed) - len(kept)} more for fewer nodes, in the plan file", "dim")


def _where(saved_to: Path | None, drawn_to: Path | None, *, otherwise: str) -> str:
    """Return a clause that names the file or page with the notes that a short screen omits."""
    if drawn_to is not None:
        return "the report lists them"
    return "pipette report shows them" if saved_to is not None else otherwise


def _files(saved_to: Path | None, drawn_to: Path | None, unsaved: str = "") -> Iterator[Line]:
    yield from (text(str(path), overflow="fold") for path in (saved_to, drawn_to) if path)
    if saved_to is None and unsaved:
        yield text(f"not kept: {unsaved}", "yellow")


def _job(plan: Plan) -> Iterator[Line]:
    setting = plan.setting
    if setting is None:
        yield f"not in this plan file, which is of {plan.provenance.made_at}"
        return
    yield (
        f"{setting.script}: {count_text(setting.num_parameters)} parameters, {setting.global_batch_size} sequences = "
        f"{count_text(setting.tokens_per_step)} tokens a step"
    )


def _machines(plan: Plan) -> Iterator[Line]:
    hosts, devices, setting = len(plan.hosts), plan.devices_per_host, plan.setting
    ranks = f"{hosts * devices} {plural('rank', hosts * devices)} on {hosts} {plural('host', hosts)} x {devices}"
    if setting is None:
        yield f"{ranks} {plan.device_kind}"
        return
    yield f"{ranks} {setting.device_name} with {bytes_text(setting.device_memory_bytes)}, {setting.machines}"
    if setting.network:
        yield f"between hosts: {setting.network}"


def _dropped(plan: Plan) -> Iterator[Line]:
    if not plan.dropped:
        return
    legal = f"{plan.num_layouts:,} {plural('legal layout', plan.num_layouts)}"
    yield f"from {legal}, and from combinations that Megatron refuses:"
    most = sorted(plan.dropped.items(), key=lambda item: -item[1])
    rows = [(str(count), reason) for reason, count in most[:MOST_REASONS]]
    rest = sum(count for _, count in most[MOST_REASONS:])
    if rest:
        more = len(most) - MOST_REASONS
        rows.append((str(rest), f"for {more} more {plural('reason', more)}, in the plan file"))
    yield grid("rw", rows)


def _notes(plan: Plan, where: str, most: int | None, *, counts_dropped: bool = True) -> Iterator[Line]:
    """Return the plan's notes and the number of dropped layouts. A short screen shows only some notes."""
    notes, dropped = (*plan.advice, *plan.notes, LEFT_OUT), sum(plan.dropped.values())
    if dropped and counts_dropped:
        reason = max(plan.dropped, key=lambda reason: plan.dropped[reason])
        looked_at = f"{counted(plan.num_layouts, 'layout')} looked at"
        notes = (*notes, f"{looked_at}, {counted(dropped, 'combination')} dropped, most of them because {reason}.")
    shown = notes if most is None else plan.advice[:most]
    yield from map(bullet, shown)
    rest = len(notes) - len(shown)
    if rest:
        yield text(f"{rest} {'more ' if shown else ''}{plural('note', rest)} on what was assumed; {where}", "dim")


def difference(layout: Layout, first: Layout) -> str:
    """Return the degrees of a layout, and the words in which the layout differs from the first one."""
    if layout == first:
        return layout.words()
    before, mine = first.named_words(), layout.named_words()
    words = [word for name, word in mine.items() if before.get(name) != word or name in DEGREES]
    gone = [name for name in before if name not in mine and name not in DEGREES]
    return " ".join([*words, *(f"no {name}" for name in gone)])


def ranked_table(plan: Plan, width: int, most: int) -> Iterator[Line]:
    """Return a table with the first `most` layouts of the ranked list, and the user's own configuration."""
    first, is_wide = plan.ranked[0], width >= WIDE
    heads = ["step", "longer", "memory", "MFU", "lost to", ""] if is_wide else ["step", "memory", "MFU", "lost to", ""]
    rows: list[tuple[Line, ...]] = [tuple(text(head, "dim") for head in ("", *heads))]
    shown = [(str(place), one, difference(one.layout, first.layout)) for place, one in enumerate(plan.ranked[:most], 1)]
    # The line above the table has all words of the chosen layout.
    shown[0] = ("1", first, " ".join(word for name, word in first.layout.named_words().items() if name in DEGREES))
    if not plan.own_fault and plan.own.layout not in {one.layout for _, one, _ in shown}:
        shown.append(("", Ranked.of(plan.own), plan.own.layout.words() + fit_remark(plan.own)))
    for place, one, words in shown:
        cells = [place, *figures(one, is_short=not is_wide), f"{_role(plan, one)}{words}"]
        if is_wide:
            share = round(one.step_time_s / first.step_time_s - 1, 3)
            cells.insert(2, f"{share:+.1%}" if share else "")
        style = "green" if one.layout == plan.chosen.layout else "default"
        rows.append(tuple(text(cell, style) for cell in cells))
    yield grid("rrrrrlw" if is_wide else "rrrrlw", rows)
    if len(plan.ranked) > most:
        yield text(f"{len(plan.ranked) - most} more; pipette plan --top N shows N", "dim")


def _role(plan: Plan, one: Ranked) -> str:
    if one.layout == plan.own.layout and not plan.own_fault:
        return "yours: "
    return "chosen: " if one is plan.ranked[0] else ""


def figures(one: Ranked, *, is_short: bool = False) -> tuple[str, str, str, str]:
    """Return step time, memory, MFU and the longest part beside compute, in words."""
    mfu = "" if one.rate is None or one.rate.mfu is None else f"{one.rate.mfu:.0%}"
    lost = ""
    if one.lost_to is not None:
        name, share = one.lost_to
        lost = f"{SHORT_PARTS.get(name, name) if is_short else name} {share:.0%}"
    return seconds_text(one.step_time_s), bytes_text(one.need_bytes), mfu, lost


def ranked_csv(plan: Plan) -> str:
    """Return the ranked list, then the rest of the front, as CSV with one row for each layout and flags to append."""
    listed, front = [one.layout for one in plan.ranked], {one.layout for one in plan.front}
    shown = [*plan.ranked, *(one for one in plan.front if one.layout not in listed)]
    rows = [_csv_row(plan, one, place if place <= len(listed) else None, front) for place, one in enumerate(shown, 1)]
    out = io.StringIO()
    table = csv.DictWriter(out, rows[0] if rows else (), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return out.getvalue()


def _csv_row(plan: Plan, one: Ranked, place: int | None, front: Collection[Layout]) -> dict[str, object]:
    part, share = one.lost_to or ("", None)
    append, delete = paste_words(plan, one.new_arguments)
    return {
        "place": place,
        **{name: getattr(one.layout, name) for name in (*DEGREES, "etp", "vpp", "micro_batch_size")},
        "step_time_s": one.step_time_s,
        "memory_bytes": one.need_bytes,
        "mfu": one.rate and one.rate.mfu,
        "tokens_per_s": one.rate and one.rate.tokens_per_s,
        "lost_to": part,
        "lost_to_share": share,
        "on_front": one.layout in front,
        "layout": one.layout.words(),
        "append": append,
        "delete": delete,
    }


def paste_words(plan: Plan, new_arguments: Sequence[str]) -> tuple[str, str]:
    """Return flags to append to the job's command line, and flags to delete first, each as one line of shell words."""
    if plan.setting is None:
        return "", ""
    added, deleted = changed_flags(plan.setting.arguments, new_arguments)
    return shlex.join(word for flag in added for word in flag), " ".join(deleted)
