"""Writes the views of a plan into one HTML file, which includes the styles and the script."""

# A = actions of all pipeline ranks; R = pipeline ranks.
# H = hosts (or the devices of a single host), B = blocks of hosts that are drawn as one.

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.facts import Choice, Measurements, Plan
from pipette_launch.facts.layout import FLAG_WORDS, Floats
from pipette_launch.facts.outcome import Outcome
from pipette_launch.facts.plan import Ranked
from pipette_launch.planning.picture import DrawnStep, Picture
from pipette_launch.report.measured import layer_times, pass_times_s
from pipette_launch.report.page.tables_and_bars import (
    Axis,
    Segment,
    Table,
    bar,
    legend,
    limit_in_view,
    memory_view,
    outcome_table,
    spaced,
    trials_table,
)
from pipette_launch.report.plan import (
    FIT_WORDS,
    checkpoint_words,
    difference,
    figures,
    listed,
    paste_words,
    rank_ranges,
    schedule_words,
)
from pipette_launch.report.screen import LEFT_OUT, arguments_diff, mfu_text, paste_text
from pipette_launch.search.slots import tiers_of
from pipette_launch.text import (
    GIB,
    MIB,
    bytes_text,
    count_text,
    counted,
    flops_text,
    printable,
    rate_text,
    seconds_text,
)

if TYPE_CHECKING:
    from jinja2 import Environment

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Content security policy, which stops the page from loading anything from a network."""
PARTS = (
    "compute",
    "recompute",
    "tensor parallel",
    "context parallel",
    "expert parallel",
    "pipeline transfer",
    "bubble",
    "data parallel",
    "embedding gradients",
    "optimizer",
    "parameter gather",
    "launching kernels",
)
"""Names of a step's parts, in the order of the drawing and of the colours."""
MOST_DRAWN = 2.0
"""The plot leaves out configurations that need more than this multiple of the memory limit."""
RARE = ("context parallel (cp)", "expert parallel (ep)", "virtual stages (vpp)", "expert tensor parallel (etp)")
"""Rows that the table of changes leaves out if the chosen and the user's own configuration have the value 1."""
MOST_ACTIONS = 20_000
"""Largest number of passes in a drawn step (12 bytes each). Longer steps show some ranks and their first passes."""
RESOLUTION = 100_000
"""Number of time units in the longer of the two drawn steps. Drawn times are rounded to whole units."""
ROLES = {"ranked": "best of its degrees", "front": "less memory"}
"""Names of the roles that differ from their CSS classes."""
LEGEND = (
    ("F", "forward", "forward"),
    ("B", "backward", "backward"),
    ("I", "input", "gradient of the input"),
    ("W", "weight", "gradient of the weights"),
)
HEAD = ("pipeline rank", "passes", "in passes", "of it exposed communication", "waiting (bubble)", "share")


def tiles(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Return the id, name, value and remark of each key figure."""
    chosen, own, memory = plan.chosen, plan.own, plan.chosen.memory
    step = "" if plan.keeps_own or plan.own_fault else f"yours: {seconds_text(own.step_time_s)}"
    found = [("step", "Step, predicted", seconds_text(chosen.step_time_s), step)]
    if plan.keeps_own:
        found.append(("saved", "Your own layout", "stays", "nothing else is better by the margin"))
    elif plan.own_fault:
        found.append(("saved", "Your own layout", "cannot run", "the reason stands below"))
    else:
        saved_s = own.step_time_s - chosen.step_time_s
        remark = f"{seconds_text(saved_s)} of each step" if saved_s > 0 else "see why below"
        remark = remark if own.fits else f"but yours {FIT_WORDS[own.verdict]}"
        found.append(("saved", "Saved", f"{saved_s / own.step_time_s:.1%}", remark))
    need = max(memory.need_bytes)
    spare, side = memory.limit_bytes - need, "below" if chosen.fits else "above"
    fit = f"{chosen.verdict}: {bytes_text(abs(spare))} {side} the limit"
    found.append(("memory-need", "Memory, fullest device", bytes_text(need), fit))
    if chosen.rate:
        mfu = "" if chosen.rate.mfu is None else f", MFU {mfu_text(chosen.rate)}"
        each = f"{flops_text(chosen.rate.flops_per_s)} on each device{mfu}"
        found.append(("rate", "Tokens a second", count_text(chosen.rate.tokens_per_s), each))
    if plan.gap is not None:
        found.append(("gap", "Above the lower bound", f"{plan.gap:.1%}", "no legal layout can save more"))
    return found


def what_changes(plan: Plan) -> Table:
    """Compare the chosen configuration with the user's own, row by row."""
    has_both = not (plan.keeps_own or plan.own_fault)
    columns = [_configuration(choice, plan) for choice in ([plan.own, plan.chosen] if has_both else [plan.chosen])]
    rows = [
        (name, *cells)
        for name, *cells in zip(columns[0], *(column.values() for column in columns), strict=True)
        if not set(cells) <= {"", "no", "none"} and not (name in RARE and set(cells) == {1})
    ]
    if has_both:
        return Table("Yours and the chosen configuration", ("", "yours", "chosen"), rows)
    return Table("The configuration", ("", "yours" if plan.keeps_own else "chosen"), rows)


def _configuration(choice: Choice, plan: Plan) -> dict[str, object]:
    layout, recompute, setting = choice.layout, choice.layout.recompute, plan.setting
    layers = [_chunks(layout.layers_per_chunk[rank :: layout.pp]) for rank in range(layout.pp)]
    away = [f"{recompute.offload_share:.0%} of", *recompute.offload_modules] if recompute.offload_modules else ["none"]
    again = " ".join(filter(None, (recompute.granularity, str(recompute.num_layers or ""), *recompute.modules)))
    return {
        "tensor parallel (tp)": layout.tp,
        "pipeline parallel (pp)": layout.pp,
        "data parallel (dp)": layout.dp,
        "context parallel (cp)": layout.cp,
        "expert parallel (ep)": layout.ep,
        "expert tensor parallel (etp)": layout.etp if layout.ep > 1 else 1,
        "virtual stages (vpp)": layout.vpp,
        "schedule": choice.schedule,
        "micro-batch (mbs)": layout.micro_batch_size,
        "micro-batches a step": layout.num_microbatches(setting.global_batch_size) if setting else "",
        **{words: "yes" if getattr(layout, name) else "no" for name, words in FLAG_WORDS.items()},
        "recompute": again,
        "offloaded to the host": " ".join(away),
        "layers on each stage": " ".join(layers) if any(layers) else "",
        "step, predicted": seconds_text(choice.step_time_s),
        "fullest device": bytes_text(max(choice.memory.need_bytes)),
    }


def _chunks(layers: Sequence[int]) -> str:
    """Return the layers of a pipeline rank's model chunks, such as `2+19x1`; empty if all chunks have equally many."""
    runs = [(size, len([*run])) for size, run in itertools.groupby(layers)]
    return "+".join(f"{count}x{size}" if count > 2 else "+".join([str(size)] * count) for size, count in runs)


def alternatives(plan: Plan) -> dict[str, Any]:
    """Return a chart of all configurations by step time and by memory of the fullest pipeline rank."""
    shown, limit = _points(plan), plan.chosen.memory.limit_bytes
    far_off = [role for role, one in shown if one.need_bytes > MOST_DRAWN * limit]
    drawn = [(role, one) for role, one in shown if role not in far_off]
    across = Axis.around([one.step_time_s for _, one in drawn])
    sizes = [one.need_bytes for _, one in drawn]
    shows_limit = limit_in_view(limit, max(sizes))
    unit, unit_name = (GIB, "GiB") if max(sizes) >= GIB else (MIB, "MiB")
    up = Axis.around([size / unit for size in (*sizes, *([limit] if shows_limit else []))], from_zero=True)
    best = [drawn[index] for index in front([(one.step_time_s, one.need_bytes) for _, one in drawn])]
    points, rows = [], []
    for role, one in shown:
        words, is_best = one.layout.words(), (role, one) in best
        step, memory, mfu, lost_to = figures(one)
        append, delete = paste_words(plan, one.new_arguments)
        flags = f"{append}\n{f'Delete first: {delete}' if delete else ''}".strip()
        rows.append((words, ROLES.get(role, role), step, memory, mfu, lost_to, "yes" if is_best else "", flags))
        if (role, one) in drawn:
            points.append(
                {
                    "mark": role.partition(",")[0],
                    "tip": f"{ROLES.get(role, role)}: {words}\n{step} a step, {memory} on the fullest device",
                    "flags": flags.replace(" --", " \\\n--") or "your own flags, unchanged",
                    "step_s": one.step_time_s,
                    "bytes": one.need_bytes,
                    "x": across.percent(one.step_time_s),
                    "y": up.percent(one.need_bytes / unit),
                    "is_best": is_best,
                }
            )
    head = ("layout", "which", "step", "memory", "MFU", "lost to", "on the front", "flags to append")
    return {
        "points": points,
        "marks": [(mark, ROLES.get(mark, mark)) for mark in dict.fromkeys(role.partition(",")[0] for role, _ in drawn)],
        "front": sorted({(point["x"], point["y"]) for point in points if point["is_best"]}),
        "x_ticks": [tick for tick in across.second_ticks(5) if 2 < tick[0] < 98],
        "y_ticks": [(up.percent(tick), f"{tick:g} {unit_name}") for tick in up.ticks()],
        "limit": up.percent(limit / unit) if shows_limit else None,
        "limit_words": bytes_text(limit),
        "far_off": [f"{role}, {bytes_text(one.need_bytes)}: above this plot" for role, one in shown if role in far_off],
        "ranked": _ranked_table(plan),
        "table": Table("Configurations", head, rows),
    }


def _points(plan: Plan) -> list[tuple[str, Ranked]]:
    """Return the configurations of the plan with their roles: choices, then other layouts of the list and the front."""
    setting = plan.setting
    found = [(role or "alternative", Ranked.of(one)) for role, one in listed(plan)]
    if setting is not None:
        words = {"chosen": setting.new_arguments, "yours": setting.arguments}
        found = [
            (role, replace(one, new_arguments=words.get(role.partition(",")[0], one.new_arguments)))
            for role, one in found
        ]
    for role, several in (("ranked", plan.ranked), ("front", plan.front)):
        known = {one.layout for _, one in found}
        found += [(role, one) for one in several if one.layout not in known]
    return found


def _ranked_table(plan: Plan) -> Table:
    rows = [
        (place, difference(one.layout, plan.ranked[0].layout), *figures(one))
        for place, one in enumerate(plan.ranked, 1)
    ]
    head = ("", "layout, and its differences to the first", "step", "memory", "MFU", "lost to")
    return Table("The best layout of each set of degrees", head, rows)


def front(points: list[tuple[float, int]]) -> set[int]:
    """Return the indices of the Pareto front: no other configuration is better in time and memory."""
    return {
        index
        for index, one in enumerate(points)
        if not any(other[0] <= one[0] and other[1] <= one[1] and other != one for other in points)
    }


def tables_of_the_search(plan: Plan) -> list[Table]:
    """Return the tables of dropped layouts and of fallback plans, without empty tables."""
    dropped = sorted(plan.dropped.items(), key=lambda item: -item[1])
    before = plan.chosen
    losses = [
        (
            counted(len(one.hosts), "host"),
            seconds_text(one.chosen.step_time_s),
            f"{one.chosen.step_time_s / before.step_time_s - 1:+.0%}",
            one.chosen.layout.words(),
            checkpoint_words(before, one.chosen),
        )
        for one in plan.templates
    ]
    found = [
        Table("Combinations that fell out", ("reason", "layouts"), [(why, f"{count:,}") for why, count in dropped]),
        Table("Plans for fewer hosts", ("left", "step", "longer", "layout", "checkpoint"), losses),
    ]
    return [table for table in found if table.rows]


def step_parts(plan: Plan) -> dict[str, Any]:
    """Return bars with the parts of a step, for the chosen and the user's own configuration, on the same scale."""
    shown = [("chosen", plan.chosen)]
    if not (plan.keeps_own or plan.own_fault):
        shown.append(("yours", plan.own))
    longest_s = max(choice.step_time_s for _, choice in shown)
    bars, rows = [], []
    for name, choice in shown:
        parts = {part.replace("_", " "): seconds for part, seconds in choice.breakdown_s.items() if seconds > 0}
        ordered = sorted(parts, key=lambda part: PARTS.index(part) if part in PARTS else len(PARTS))
        segments = [Segment(part, parts[part], seconds_text(parts[part])) for part in ordered]
        bars.append(bar(name, segments, kinds=PARTS, whole=longest_s, total=seconds_text(choice.step_time_s)))
        rows += [(one.name, name, one.text, f"{one.size / choice.step_time_s:.1%}") for one in segments]
    table = Table("Parts of the step", ("part", "of", "time", "share"), rows)
    return {"bars": bars, "legend": legend(bars), "table": table}


def timeline_view(plan: Plan, picture: Picture | None) -> dict[str, Any] | None:
    """Return timelines of the chosen and the user's own step, with figures of each rank; None without `picture`."""
    if picture is None:
        return None
    shown = [("chosen", plan.chosen, picture.chosen)]
    if picture.own is not None:
        shown.append(("yours", plan.own, picture.own))
    longest_s = max(step.total_s for _, _, step in shown)
    steps, data = [], []
    for name, choice, step in shown:
        ranks = spaced(step.pp, max(2, MOST_ACTIONS * step.pp // len(step.rank_A)))
        rows, exposed, waiting = _figures(step)
        data.append(_numbers(step, ranks, longest_s / RESOLUTION))
        waits = f", and ranks wait {waiting:.1%} of this time on average" if step.pp > 1 else ""
        steps.append(
            {
                "title": f"{name.capitalize()}: {choice.layout.words()}, {choice.schedule}",
                "summary": f"Until the last backward ends, {exposed:.1%} of the time goes into communication that "
                f"nothing hides{waits}.",
                "hidden": step.pp - len(ranks),
                "total": seconds_text(choice.step_time_s),
                "table": Table(f"Ranks of {name}", HEAD, [rows[rank] for rank in ranks]),
            }
        )
    used = {kind for _, _, step in shown for kind in step.kind_A}
    names = [(style, words) for kind, style, words in LEGEND if kind in used]
    if any(seconds > 0 for _, _, step in shown for pair in step.exposed_s_S for seconds in pair):
        names.append(("exposed", "communication that nothing hides"))
    return {
        "steps": steps,
        "legend": [*names, ("after", "gradients, optimizer, gather")],
        "data": {"steps": data, "longest_s": longest_s, "resolution": RESOLUTION},
    }


def _figures(step: DrawnStep) -> tuple[list[tuple[object, ...]], float, float]:
    """Return a table row for each pipeline rank, and the mean shares of exposed communication and of waiting."""
    rank_A, kind_A = np.array(step.rank_A), np.array(step.kind_A)
    exposed_s_A = np.array(step.exposed_s_S)[list(step.stage_A), (kind_A != "F").astype(int)] * (kind_A != "W")
    busy_s_R = np.bincount(rank_A, np.subtract(step.end_s_A, step.start_s_A), step.pp)
    exposed_s_R, idle_s_R = np.bincount(rank_A, exposed_s_A, step.pp), step.makespan_s - busy_s_R
    times = zip(np.bincount(rank_A).tolist(), busy_s_R.tolist(), exposed_s_R.tolist(), idle_s_R.tolist(), strict=True)
    rows: list[tuple[object, ...]] = [
        (rank, count, *map(seconds_text, (busy_s, exposed_s, idle_s)), f"{idle_s / step.makespan_s:.1%}")
        for rank, (count, busy_s, exposed_s, idle_s) in enumerate(times)
    ]
    return rows, float(exposed_s_R.mean()) / step.makespan_s, float(idle_s_R.mean()) / step.makespan_s


def _numbers(step: DrawnStep, ranks: list[int], unit_s: float) -> dict[str, Any]:
    rank_A, each = np.array(step.rank_A), MOST_ACTIONS // len(ranks)
    drawn = []
    for rank in ranks:
        whole = np.flatnonzero(rank_A == rank).tolist()
        shown = whole[:each]
        drawn.append(
            {
                "rank": rank,
                "kinds": "".join(step.kind_A[index] for index in shown),
                "stages": [step.stage_A[index] for index in shown],
                "microbatches": [step.microbatch_A[index] for index in shown],
                "starts": [round(step.start_s_A[index] / unit_s) for index in shown],
                "lengths": [round((step.end_s_A[index] - step.start_s_A[index]) / unit_s) for index in shown],
                "left_out": len(whole) - len(shown),
            }
        )
    names = {"data_parallel": "gradients"}
    return {
        "ranks": drawn,
        "exposed": [[round(seconds / unit_s, 1) for seconds in pair] for pair in step.exposed_s_S],
        "makespan": round(step.makespan_s / unit_s),
        "after": [
            [names.get(name, name.replace("_", " ")), round(seconds / unit_s, 1)]
            for name, seconds in step.after_s
            if seconds > 0
        ],
    }


MOST_ROWS = 128
"""Largest number of hosts with a drawn row of ranks. On larger jobs, each host is drawn as a small square."""
MOST_HOSTS = 2048
"""Largest number of hosts that the page draws and lists."""
MOST_STAGES_NAMED = 32
PASSES = ("forward", "backward")
MOST_CELLS = 64
"""Most rows of a matrix. On larger jobs, a row stands for neighbouring hosts, and shows their slowest link."""
LEVELS = 7


def placement_view(plan: Plan) -> dict[str, Any]:
    """Return each host's ranks in the order of devices, and the runs of devices with the same pipeline stage."""
    size, layout = plan.devices_per_host, plan.chosen.layout
    hosts, rows = [], []
    for index, name in enumerate(plan.hosts[:MOST_HOSTS]):
        ranks = plan.chosen.placement[index * size : (index + 1) * size]
        stages = [layout.cell_of(rank).pp for rank in ranks]
        listed, named = rank_ranges(ranks), " ".join(map(str, dict.fromkeys(stages)))
        cells = list(zip(ranks, stages, strict=True))
        runs = [(stage, len(list(run))) for stage, run in itertools.groupby(stages)]
        tip = f"{name}\nranks {listed}\n{'stage' if len(set(stages)) == 1 else 'stages'} {named}"
        hosts.append({"name": name, "cells": cells, "runs": runs, "tip": tip})
        rows.append((name, listed, named))
    return {
        "hosts": hosts,
        "is_dense": len(plan.hosts) > MOST_ROWS,
        "hidden": len(plan.hosts) - len(hosts),
        "hues": [round(330 * stage / layout.pp) for stage in range(layout.pp)],
        "legend": spaced(layout.pp, MOST_STAGES_NAMED),
        "table": Table("Ranks of each host", ("host", "ranks", "stages"), rows),
    }


def layers_view(plan: Plan, measurements: Measurements | None) -> dict[str, Any] | None:
    """Draw the times of the layers that the plan's configurations run; None if no layer was timed."""
    timed = layer_times(measurements) if measurements else {}
    shown = {case_of(choice.layout) for choice in (plan.chosen, *plan.alternatives, plan.own)}
    used = {key: (times, pass_times_s(times)) for key, times in timed.items() if key[0] in shown}
    if not used:
        return None
    longest_s = max(sum(span_s) for _, span_s in used.values())
    bars, rows = [], []
    for (case, part), (times, span_s) in used.items():
        name = f"{part.replace('_', ' ')}, tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}"
        segments = [Segment(one, seconds, seconds_text(seconds)) for one, seconds in zip(PASSES, span_s, strict=True)]
        slowest_s = max(sum(pass_times_s([time])) for time in times)
        if sum(span_s) > 0:
            label = f"{name}{' (chosen)' if case == case_of(plan.chosen.layout) else ''}"
            bars.append(bar(label, segments, kinds=PASSES, whole=longest_s, total=seconds_text(sum(span_s))))
        rows.append((name, *(one.text for one in segments), seconds_text(slowest_s), len(times), times[0].source))
    table = Table("Layer times", ("layer", *PASSES, "both on the slowest slot", "slots", "source"), rows)
    if plan.provenance.source == "imagined":
        table = Table(table.caption, table.head[:3], [row[:3] for row in rows])
    return {"bars": bars, "hidden": len(timed) - len(used), "table": table}


def health_table(measurements: Measurements | None) -> Table | None:
    """Return a table with a row for each fault; None without faults. Faults that exclude a host come first."""
    rows = [
        (
            f"{one.host} → {one.other_host}" if one.other_host else one.host,
            one.device,
            one.kind.replace("-", " "),
            one.figure,
            one.peers,
            one.advice,
        )
        for one in sorted(measurements.verdicts if measurements else (), key=lambda one: not one.is_sick)
    ]
    return Table("Problems", ("where", "device", "problem", "seen", "its peers", "what to do"), rows) if rows else None


def links_view(plan: Plan, measurements: Measurements | None) -> dict[str, Any] | None:
    """Return the matrix of links in host order and in the plan's order, with scale and table; None without links."""
    if measurements is None:
        return None
    cluster, size = measurements.cluster, plan.devices_per_host
    between = len(cluster.hosts) > 1
    places, each = ("hosts", size) if between else ("devices", 1)
    links = cluster.between_hosts if between else cluster.within_host[0]
    count, rates = links.size, links.bandwidth_bytes_per_s
    if count < 2:
        return None
    names = [host.name for host in cluster.hosts] if between else [f"device {index}" for index in range(count)]
    before = list(range(count))
    after = sorted(before, key=lambda index: min(plan.chosen.placement[index * each : (index + 1) * each]))
    own = rates[~np.eye(count, dtype=bool)]
    slowest, fastest = float(own.min()), float(own.max())
    # The scale spans at least a factor of 2, so that small differences do not look large.
    scale = (min(slowest, fastest / 2), fastest)
    # Islands (groups of fast links) are the groups of near hosts that the planner also uses.
    tiers = tiers_of(links)
    islands = sorted(sorted(hosts.tolist()) for hosts in tiers.runs(0)) if tiers.num_tiers else []
    island_of = {place: number for number, island in enumerate(islands) for place in island}
    titles = [("In torchrun's order", before), ("In the order of the plan's ranks", after)]
    matrices = [
        _matrix(title, rates, names, order, scale=scale, island_of=island_of)
        for title, order in titles[: 1 if after == before else 2]
    ]
    rows = [_row(rates, names, index) for index in range(min(count, MOST_ROWS))]
    step = (scale[1] / scale[0]) ** (1 / LEVELS)
    levels = [
        f"{rate_text(scale[0] * step**one)} to {rate_text(scale[0] * step ** (one + 1))}" for one in range(LEVELS)
    ]
    return {
        "places": places,
        "matrices": matrices,
        "is_same": after == before,
        "range": rate_text(fastest) if slowest == fastest else f"{rate_text(slowest)} to {rate_text(fastest)}",
        "legend": [one for one in enumerate(levels) if any(matrix["paths"][one[0]] for matrix in matrices)],
        "islands": [
            names[one[0]] if len(one) == 1 else f"{names[one[0]]} … {names[one[-1]]} ({len(one)})" for one in islands
        ],
        "table": Table(f"Links from each of the {places}", ("from", "slowest", "to", "median", "fastest"), rows),
        "hidden": count - len(rows),
    }


def _matrix(
    title: str,
    rates_HH: Floats,
    names: list[str],
    order: list[int],
    *,
    scale: tuple[float, float],
    island_of: Mapping[int, int],
) -> dict[str, Any]:
    """Sort hosts by `order`, and join neighbouring hosts into blocks. Each block shows its slowest link's rate."""
    least = math.ceil(len(order) / MOST_CELLS)
    largest = max(np.bincount(list(island_of.values())), default=0)
    # A block's size is the smallest divisor of the largest island that gives at most MOST_CELLS rows, if one exists.
    size = next((size for size in range(least, largest + 1) if largest % size == 0), least)
    starts = list(range(0, len(order), size))
    blocks = [order[first : first + size] for first in starts]
    ordered = rates_HH[np.ix_(order, order)]
    np.fill_diagonal(ordered, np.inf)
    rates_BB = np.minimum.reduceat(np.minimum.reduceat(ordered, starts, axis=0), starts, axis=1)
    # Levels are equal steps of the logarithm of the rate: 0 for the slowest, and -1 for a block without links.
    place_BB = np.log(np.minimum(rates_BB, scale[1]) / scale[0]) / math.log(scale[1] / scale[0])
    level_BB = np.where(np.isinf(rates_BB), -1, np.minimum(place_BB * LEVELS, LEVELS - 1).astype(np.int64))
    paths = [
        "".join(f"M{column} {row}h1v1h-1z" for row, column in zip(*np.nonzero(level_BB == level), strict=True))
        for level in range(LEVELS)
    ]
    return {
        "title": title,
        "size": len(blocks),
        "paths": paths,
        # A diagonal cell of one host is not a link. A diagonal cell of several hosts shows the links among these hosts.
        "diagonal": [island_of.get(block[0], -1) if len(block) == 1 else -1 for block in blocks],
        "names": [" … ".join(dict.fromkeys((names[block[0]], names[block[-1]]))) for block in blocks],
        "rates": [[None if math.isinf(rate) else float(f"{rate:.3g}") for rate in row] for row in rates_BB.tolist()],
    }


def _row(rates_HH: Floats, names: list[str], index: int) -> tuple[str, ...]:
    rates, others = np.delete(rates_HH[index], index), [*names[:index], *names[index + 1 :]]
    slowest, median, fastest = (rate_text(float(rate)) for rate in (rates.min(), np.median(rates), rates.max()))
    return names[index], slowest, others[int(rates.argmin())], median, fastest


def plan_page(
    plan: Plan, measurements: Measurements | None = None, picture: Picture | None = None, outcome: Outcome | None = None
) -> str:
    """Draw a plan as one HTML file without network requests.

    Without the `measurements` that priced the plan, links, layer times and verdicts are left out. Without a `picture`,
    the timeline and the split of memory are left out. `outcome` belongs to the training; None after a short training.
    """
    template = _environment().get_template("page.html")
    return template.render(
        policy=POLICY,
        style=_text("page.css"),
        script=_text("page.js"),
        plan=plan,
        title=plan.chosen.layout.words(),
        tiles=tiles(plan),
        changes=what_changes(plan),
        alternatives=alternatives(plan),
        search=tables_of_the_search(plan),
        time=step_parts(plan),
        trials=trials_table(plan),
        outcome=None if outcome is None else outcome_table(outcome),
        memory=memory_view(plan, picture),
        timeline=timeline_view(plan, picture),
        links=links_view(plan, measurements),
        placement=placement_view(plan),
        layers=layers_view(plan, measurements),
        problems=health_table(measurements),
        is_measured=measurements is not None and plan.provenance.source != "imagined",
        job=_job(plan),
        flags=_flags(plan),
        notes=[*plan.advice, *plan.notes, LEFT_OUT],
        solve=seconds_text(plan.solve_s),
        num_layouts=f"{plan.num_layouts:,}",
    )


def _text(name: str) -> str:
    return resources.files("pipette_launch.report.page").joinpath(name).read_text(encoding="utf-8")


def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(_text)
    )
    # All values are escaped, because host names come from outside.
    environment.finalize = lambda value: printable(value, keep="\n") if type(value) is str else value
    return environment


def _job(plan: Plan) -> list[tuple[str, str]]:
    hosts, kind, setting = f"{len(plan.hosts)} x {plan.devices_per_host}", plan.device_kind, plan.setting
    if setting is None:
        return [("Machines", f"{hosts} {kind}"), ("Made", plan.provenance.made_at)]
    memory = bytes_text(setting.device_memory_bytes)
    rows = [
        ("Script", setting.script),
        ("Model", f"{count_text(setting.num_parameters)} parameters"),
        ("Step", f"{setting.global_batch_size:,} sequences = {count_text(setting.tokens_per_step)} tokens"),
        ("Machines", f"{hosts} {setting.device_name or kind} with {memory}, {setting.machines}"),
        ("Network", setting.network),
        ("Made", plan.provenance.made_at),
    ]
    return [(name, value) for name, value in rows if value]


def _flags(plan: Plan) -> dict[str, Any] | None:
    if plan.setting is None:
        return None
    old, new = plan.setting.arguments, plan.setting.new_arguments
    return {"changes": arguments_diff(old, new), "paste": paste_text(old, new) + schedule_words(plan)}
