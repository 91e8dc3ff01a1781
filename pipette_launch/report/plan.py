"""Shows a plan and why it won, as text for a terminal; measures, prices and decides nothing."""

# S = slots, H = hosts.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.facts import Choice, Links, Measurements, Plan
from pipette_launch.facts.outcome import Outcome
from pipette_launch.report.draw import Section, bar, breakdown, bullet, plural, render, sheet, stages_shown, text
from pipette_launch.units import bytes_text, rate_text, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MOST_HOST_LINES = 12
NOT_MODELLED = "Not modelled: "
"""How the planner begins a note on what it leaves out; the screen counts these, the plan file has them."""


def plan_screen(
    plan: Plan,
    measurements: Measurements | None,
    *,
    arguments: Sequence[str],
    new_arguments: Sequence[str] | None,
    saved_to: Path | None,
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
        width: columns; None for the terminal's, 80 without one.
        colour: None for yes on a terminal only.

    """
    sections: tuple[Section, ...] = (
        ("Measured", _measured(plan, measurements)),
        ("Chosen", _chosen(plan)),
        ("Step time", _step_times(plan)),
        ("Why", map(bullet, plan.reasons)),
        ("Memory", _memory(plan.chosen)),
        ("Flags", _flags(arguments, new_arguments)),
        ("Notes", map(bullet, _notes(plan, saved_to))),
        ("Plan file", [] if saved_to is None else [text(str(saved_to), overflow="fold")]),
    )
    return render("pipette-launch", sheet(sections), width=width, colour=colour)


def outcome_line(outcome: Outcome, saved_to: Path | None) -> str:
    """Say in one line how the prediction compares with what was measured."""
    measured = outcome.measured_step
    shaky = f", spread {measured.spread:.0%}: unstable" if measured.is_unstable else ""
    where = f" ({saved_to})" if saved_to is not None else ""
    peak = outcome.fullest
    memory = ""
    if peak is not None:
        predicted = bytes_text(peak.predicted_bytes)
        memory = f"; rank {peak.rank} held at most {bytes_text(peak.measured_bytes)}, predicted {predicted}"
    off = f"{abs(outcome.error):.1%} too {'long' if outcome.error > 0 else 'short'}"
    return (
        f"{outcome.layout.words()}: measured {seconds_text(measured.median_s)} a step up to iteration "
        f"{outcome.last_iteration}{shaky}, predicted {seconds_text(outcome.predicted_step_s)}, {off}{memory}{where}"
    )


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


def _measured(plan: Plan, measurements: Measurements | None) -> Iterator[Text]:
    if measurements is None:
        origin = {"cached": "kept from an earlier start", "file": "given by file", "measured": "measured before"}
        yield text(f"nothing now: the plan was {origin[plan.provenance.source]}, made at {plan.provenance.made_at}")
        return
    cluster = measurements.cluster
    names = sorted({device.name for host in cluster.hosts for device in host.devices})
    hosts, devices = len(cluster.hosts), cluster.devices_per_host
    took_s = sum(measurements.phase_s.values())
    yield text(
        f"{hosts} {plural('host', hosts)} x {devices} {cluster.device_kind} ({', '.join(names)}, "
        f"{bytes_text(cluster.memory_bytes)} free)"
        + (f" in {seconds_text(took_s)}" if took_s else "")
        + ("" if plan.provenance.source == "measured" else f"; kept from {plan.provenance.made_at}, not measured now")
    )
    yield from _links("between hosts", [cluster.between_hosts], lambda _, index: cluster.hosts[index].name)
    yield from _links(
        "in a host",
        cluster.within_host,
        lambda host, device: cluster.slot_name(host * devices + device),
    )
    yield from _compute(plan, measurements)


def _links(where: str, matrices: Sequence[Links], name: Callable[[int, int], str]) -> Iterator[Text]:
    """The slowest and the fastest link, each named."""
    found = [
        (links.bandwidth_bytes_per_s[a][b], f"{name(index, a)} → {name(index, b)}")
        for index, links in enumerate(matrices)
        for a in range(links.size)
        for b in range(links.size)
        if a != b
    ]
    if found:
        slowest, fastest = min(found), max(found)
        if slowest[0] == fastest[0]:
            yield text(f"{where}: {rate_text(slowest[0])} on every link")
            return
        yield text(f"{where}: {rate_text(slowest[0])} ({slowest[1]}) to {rate_text(fastest[0])} ({fastest[1]})")


def _compute(plan: Plan, measurements: Measurements) -> Iterator[Text]:
    layout = plan.chosen.layout
    wanted = (layout.tp, layout.cp, layout.micro_batch_size)
    layers = [time for time in measurements.compute if time.part in ("layer", "moe_layer")]
    for time in layers:
        if (time.case.tp, time.case.cp, time.case.micro_batch_size) == wanted:
            backward_s = time.input_grad.median_s + time.weight_grad.median_s
            yield text(
                f"one layer: {seconds_text(time.forward.median_s)} forward, {seconds_text(backward_s)} backward "
                f"(tp{time.case.tp} mbs{time.case.micro_batch_size})"
            )
            break
    speeds = measurements.cluster.slot_speed
    slowest = min(speeds)
    if slowest < 1:
        slot = speeds.index(slowest)
        yield text(f"slowest slot: {measurements.cluster.slot_name(slot)} at {slowest:.2f} x the median")


def _chosen(plan: Plan) -> Iterator[RenderableType]:
    chosen = plan.chosen
    whose = "your own configuration, " if plan.keeps_own else ""
    line = text(f"{chosen.layout.words()}", "bold green")
    line.append(f"  {whose}{chosen.schedule}, {seconds_text(chosen.step_time_s)} a step predicted", "default")
    yield line
    yield breakdown(chosen.breakdown_s, chosen.step_time_s)
    if chosen.is_host_order:
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


def _step_times(plan: Plan) -> Iterator[RenderableType]:
    """The chosen one, the runners-up and the user's own, as bars."""
    from rich.table import Table

    rows = [(plan.chosen, "chosen, yours" if plan.keeps_own else "chosen")]
    rows += [(choice, "") for choice in plan.alternatives]
    rows += [] if plan.keeps_own else [(plan.own, "yours" if plan.own.fits else "yours, too large")]
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


def _memory(choice: Choice) -> Iterator[RenderableType]:
    """Each stage's peak against the limit."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    limit = bytes_text(choice.memory_limit_bytes)
    for stage in stages_shown(choice.peak_memory_bytes):
        peak = choice.peak_memory_bytes[stage]
        part = peak / choice.memory_limit_bytes if choice.memory_limit_bytes else 1.0
        over = peak > choice.memory_limit_bytes
        table.add_row(
            text(f"stage {stage}"),
            bar(min(part, 1.0), "red" if over else "default"),
            text(f"{bytes_text(peak)} of {limit}{', over the limit' if over else ''}"),
        )
    yield table
    hidden = len(choice.peak_memory_bytes) - len(stages_shown(choice.peak_memory_bytes))
    if hidden:
        yield text(f"… {hidden} more stages, none fuller", "dim")


def _flags(arguments: Sequence[str], new_arguments: Sequence[str] | None) -> Iterator[Text]:
    changes = [] if new_arguments is None else arguments_diff(arguments, new_arguments)
    if not changes:
        yield text("your own, untouched")
    styles = {"+": "green", "-": "red", "~": "yellow"}
    for sign, what in changes:
        line = text(f"{sign} ", styles[sign])
        line.append(what, "default")
        yield line


def _notes(plan: Plan, saved_to: Path | None) -> Iterator[str]:
    left_out = sum(note.startswith(NOT_MODELLED) for note in plan.notes)
    yield from (note for note in plan.notes if not note.startswith(NOT_MODELLED))
    dropped = sum(plan.dropped.values())
    if dropped:
        most = max(plan.dropped, key=lambda reason: plan.dropped[reason])
        yield f"{plan.num_layouts} layouts looked at, {dropped} combinations dropped, most of them because {most}."
    if left_out:
        listed = "the plan file lists them" if saved_to is not None else "see the documentation"
        yield f"{left_out} effects are not modelled; {listed}."


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
