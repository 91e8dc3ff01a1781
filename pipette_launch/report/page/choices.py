"""Page sections on the chosen plan: key figures, changes, alternatives by step time and memory, passes of a step."""

# A = actions of all pipeline ranks; R = pipeline ranks.

from __future__ import annotations

from typing import Any

import numpy as np

from pipette_launch.facts import Choice, Plan
from pipette_launch.facts.layout import FLAG_WORDS
from pipette_launch.planning.picture import DrawnStep, Picture
from pipette_launch.report.page.tables_and_bars import Axis, Segment, Table, bar, legend, limit_in_view, spaced
from pipette_launch.report.plan import checkpoint_words, listed
from pipette_launch.text import GIB, MIB, bytes_text, count_text, flops_text, seconds_text

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
)
"""Names of a step's parts, in the order of the drawing and of the colours."""
RARE = ("context parallel (cp)", "expert parallel (ep)", "virtual stages (vpp)", "expert tensor parallel (etp)")
"""Rows that the table of changes leaves out if the chosen and the user's own configuration have the value 1."""
MOST_ACTIONS = 20_000
"""Largest number of passes in a drawn step (12 bytes each). Longer steps show some ranks and their first passes."""
RESOLUTION = 100_000
"""Number of time units in the longer of the two drawn steps. Drawn times are rounded to whole units."""
LEGEND = (
    ("F", "forward", "forward"),
    ("B", "backward", "backward"),
    ("I", "input", "gradient of the input"),
    ("W", "weight", "gradient of the weights"),
)
HEAD = ("pipeline rank", "passes", "in passes", "of it exposed communication", "waiting (bubble)", "share")


def tiles(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Return the id, name, value and remark of each key figure."""
    chosen, own, memory = plan.chosen, plan.own, plan.chosen.memory_shown
    step = "" if plan.keeps_own or plan.own_fault else f"yours: {seconds_text(own.step_time_s)}"
    found = [("step", "Step, predicted", seconds_text(chosen.step_time_s), step)]
    if plan.keeps_own:
        found.append(("saved", "Your own layout", "stays", "nothing else is better by the margin"))
    elif plan.own_fault:
        found.append(("saved", "Your own layout", "cannot run", "the reason stands below"))
    else:
        saved_s = own.step_time_s - chosen.step_time_s
        remark = f"{seconds_text(saved_s)} of each step" if saved_s > 0 else "see why below"
        remark = remark if own.fits else "but yours does not fit in memory"
        found.append(("saved", "Saved", f"{saved_s / own.step_time_s:.1%}", remark))
    need = max(memory.need_bytes)
    spare = memory.limit_bytes - need
    fit = f"fits: {bytes_text(spare)} below the limit" if spare >= 0 else f"too much by {bytes_text(-spare)}"
    found.append(("memory-need", "Memory, fullest device", bytes_text(need), fit))
    if chosen.rate:
        mfu = "" if chosen.rate.mfu is None else f", MFU {chosen.rate.mfu:.1%}"
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
    # Layers of each pipeline rank, with + between its model chunks; empty if all chunks have equally many layers.
    layers = ["+".join(map(str, layout.layers_per_chunk[rank :: layout.pp])) for rank in range(layout.pp)]
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
        "layers on each stage": " ".join(layers) if any(layers) else "",
        "step, predicted": seconds_text(choice.step_time_s),
        "fullest device": bytes_text(max(choice.memory_shown.need_bytes)),
    }


def alternatives(plan: Plan) -> dict[str, Any]:
    """Return a chart of all configurations by step time and by memory of the fullest pipeline rank."""
    shown = [(role or "alternative", choice) for role, choice in listed(plan)]
    sizes = [max(choice.memory_shown.need_bytes) for _, choice in shown]
    across = Axis.around([choice.step_time_s for _, choice in shown])
    limit = plan.chosen.memory_shown.limit_bytes
    shows_limit = limit_in_view(limit, max(sizes))
    unit, unit_name = (GIB, "GiB") if max(sizes) >= GIB else (MIB, "MiB")
    up = Axis.around([size / unit for size in (*sizes, *([limit] if shows_limit else []))], from_zero=True)
    best = front([(choice.step_time_s, size) for (_, choice), size in zip(shown, sizes, strict=True)])
    points, rows = [], []
    for index, ((role, choice), size) in enumerate(zip(shown, sizes, strict=True)):
        words, step, memory = choice.layout.words(), seconds_text(choice.step_time_s), bytes_text(size)
        points.append(
            {
                "mark": role.partition(",")[0],
                "tip": f"{role}: {words}, {choice.schedule}\n{step} a step, {memory} on the fullest device",
                "step_s": choice.step_time_s,
                "bytes": size,
                "x": across.percent(choice.step_time_s),
                "y": up.percent(size / unit),
                "is_best": index in best,
            }
        )
        rows.append((words, role, step, memory, choice.schedule, "yes" if index in best else ""))
    return {
        "points": points,
        "marks": list(dict.fromkeys(point["mark"] for point in points)),
        "front": sorted((point["x"], point["y"]) for point in points if point["is_best"]),
        "x_ticks": [tick for tick in across.second_ticks(5) if 2 < tick[0] < 98],
        "y_ticks": [(up.percent(tick), f"{tick:g} {unit_name}") for tick in up.ticks()],
        "limit": up.percent(limit / unit) if shows_limit else None,
        "limit_words": bytes_text(limit),
        "table": Table("Configurations", ("layout", "which", "step", "memory", "schedule", "on the front"), rows),
    }


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
            f"{len(one.hosts)} hosts",
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
