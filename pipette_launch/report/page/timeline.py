"""The passes of one step as numbers that the page's script draws: the chosen configuration beside the user's own."""

# A = actions of all pipeline ranks.

from __future__ import annotations

from typing import Any

from pipette_launch.facts import Plan
from pipette_launch.forecast.picture import DrawnStep, Picture
from pipette_launch.units import seconds_text

MOST_ACTIONS = 20_000
"""Of one step; of more, some pipeline ranks are drawn, and of those the first passes. Each takes some 12 bytes."""
RESOLUTION = 100_000
"""Times are whole numbers of this part of the longer step."""
AFTER_NAMES = {
    "data_parallel": "gradients",
    "embedding_gradients": "embedding gradients",
    "optimizer": "optimizer",
    "parameter_gather": "parameter gather",
}


def timeline_view(plan: Plan, picture: Picture | None) -> dict[str, Any] | None:
    """Return both steps on one scale, with a row of figures for each rank; None without a picture."""
    if picture is None:
        return None
    shown = [("chosen", plan.chosen, picture.chosen)]
    if picture.own is not None:
        shown.append(("yours", plan.own, picture.own))
    longest_s = max(step.total_s for _, _, step in shown)
    steps = []
    for name, choice, step in shown:
        ranks = _ranks_drawn(step)
        steps.append(
            {
                "name": name,
                "title": f"{'Chosen' if name == 'chosen' else 'Yours'}: {choice.layout.words()}, {choice.schedule}",
                "data": _numbers(step, ranks, longest_s / RESOLUTION),
                "rows": [_figures(step, rank) for rank in ranks],
                "hidden": step.pp - len(ranks),
                "total": seconds_text(step.total_s),
            }
        )
    return {"steps": steps, "longest_s": longest_s, "resolution": RESOLUTION}


def _ranks_drawn(step: DrawnStep) -> list[int]:
    most = max(2, min(step.pp, MOST_ACTIONS * step.pp // len(step.rank_A)))
    if most >= step.pp:
        return list(range(step.pp))
    return sorted({round(index * (step.pp - 1) / (most - 1)) for index in range(most)})


def _numbers(step: DrawnStep, ranks: list[int], unit_s: float) -> dict[str, Any]:
    """Columns for each drawn rank: kinds as one text, stages, micro-batches, starts and lengths."""
    each = MOST_ACTIONS // len(ranks)
    rows: dict[int, list[int]] = {rank: [] for rank in ranks}
    for index, rank in enumerate(step.rank_A):
        if rank in rows and len(rows[rank]) < each:
            rows[rank].append(index)
    return {
        "ranks": [
            {
                "rank": rank,
                "kinds": "".join(step.kind_A[index] for index in picked),
                "stages": [step.stage_A[index] for index in picked],
                "microbatches": [step.microbatch_A[index] for index in picked],
                "starts": [round(step.start_s_A[index] / unit_s) for index in picked],
                "lengths": [round((step.end_s_A[index] - step.start_s_A[index]) / unit_s) for index in picked],
                "left_out": sum(one == rank for one in step.rank_A) - len(picked),
            }
            for rank, picked in rows.items()
        ],
        "exposed": [[round(seconds / unit_s, 1) for seconds in pair] for pair in step.exposed_s_S],
        "makespan": round(step.makespan_s / unit_s),
        "after": [[AFTER_NAMES[name], round(seconds / unit_s, 1)] for name, seconds in step.after_s if seconds > 0],
    }


def _figures(step: DrawnStep, rank: int) -> dict[str, str]:
    """What one rank does with the step: passes, exchanges that nothing hides, and waiting."""
    picked = [index for index, one in enumerate(step.rank_A) if one == rank]
    busy_s = sum(step.end_s_A[index] - step.start_s_A[index] for index in picked)
    exposed_s = sum(step.exposed_s_S[step.stage_A[index]][step.kind_A[index] != "F"] for index in picked)
    idle_s = step.makespan_s - busy_s
    return {
        "rank": str(rank),
        "passes": str(len(picked)),
        "busy": seconds_text(busy_s),
        "exposed": seconds_text(exposed_s),
        "idle": seconds_text(idle_s),
        "share": f"{idle_s / step.makespan_s:.1%}",
    }
