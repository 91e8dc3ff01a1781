"""The passes of one step as numbers that the page's script draws: the chosen configuration beside the user's own."""

# A = actions of all pipeline ranks.

from __future__ import annotations

from typing import Any, NamedTuple

from pipette_launch.facts import Plan
from pipette_launch.planning.picture import DrawnStep, Picture
from pipette_launch.report.page.pieces import Table
from pipette_launch.text import seconds_text

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


LEGEND = (
    ("F", "forward", "forward"),
    ("B", "backward", "backward"),
    ("I", "input", "gradient of the input"),
    ("W", "weight", "gradient of the weights"),
)
HEAD = ("pipeline rank", "passes", "in passes", "of it exposed communication", "waiting (bubble)", "share")


def timeline_view(plan: Plan, picture: Picture | None) -> dict[str, Any] | None:
    """Return both steps on one scale, with a row of figures for each rank; None without a picture."""
    if picture is None:
        return None
    shown = [("chosen", plan.chosen, picture.chosen)]
    if picture.own is not None:
        shown.append(("yours", plan.own, picture.own))
    longest_s = max(step.total_s for _, _, step in shown)
    steps, data = [], []
    for name, choice, step in shown:
        ranks = _ranks_drawn(step)
        indices = _indices(step)
        figures = [_figures(step, rank, picked) for rank, picked in enumerate(indices)]
        waiting = sum(one.idle_s for one in figures) / step.pp / step.makespan_s
        exposed = sum(one.exposed_s for one in figures) / step.pp / step.makespan_s
        data.append(_numbers(step, {rank: indices[rank] for rank in ranks}, longest_s / RESOLUTION))
        steps.append(
            {
                "title": f"{name.capitalize()}: {choice.layout.words()}, {choice.schedule}",
                "summary": f"Until the last backward ends, {exposed:.1%} of the time goes into communication that "
                f"nothing hides{f', and ranks wait {waiting:.1%} of it in the mean' if step.pp > 1 else ''}.",
                "hidden": step.pp - len(ranks),
                "total": seconds_text(choice.step_time_s),
                "table": Table(f"Ranks of {name}", HEAD, [figures[rank].cells() for rank in ranks]),
            }
        )
    used = {kind for _, _, step in shown for kind in step.kind_A}
    legend = [(style, words) for kind, style, words in LEGEND if kind in used]
    if any(seconds > 0 for _, _, step in shown for pair in step.exposed_s_S for seconds in pair):
        legend.append(("exposed", "communication that nothing hides"))
    return {
        "steps": steps,
        "legend": [*legend, ("after", "gradients, optimizer, gather")],
        "data": {"steps": data, "longest_s": longest_s, "resolution": RESOLUTION},
    }


def _ranks_drawn(step: DrawnStep) -> list[int]:
    most = max(2, min(step.pp, MOST_ACTIONS * step.pp // len(step.rank_A)))
    if most >= step.pp:
        return list(range(step.pp))
    return sorted({round(index * (step.pp - 1) / (most - 1)) for index in range(most)})


def _indices(step: DrawnStep) -> list[list[int]]:
    """Where the actions of each rank stand."""
    found: list[list[int]] = [[] for _ in range(step.pp)]
    for index, rank in enumerate(step.rank_A):
        found[rank].append(index)
    return found


def _numbers(step: DrawnStep, ranks: dict[int, list[int]], unit_s: float) -> dict[str, Any]:
    """Columns for each drawn rank: kinds as one text, stages, micro-batches, starts and lengths."""
    each = MOST_ACTIONS // len(ranks)
    return {
        "ranks": [
            {
                "rank": rank,
                "kinds": "".join(step.kind_A[index] for index in picked[:each]),
                "stages": [step.stage_A[index] for index in picked[:each]],
                "microbatches": [step.microbatch_A[index] for index in picked[:each]],
                "starts": [round(step.start_s_A[index] / unit_s) for index in picked[:each]],
                "lengths": [round((step.end_s_A[index] - step.start_s_A[index]) / unit_s) for index in picked[:each]],
                "left_out": len(picked[each:]),
            }
            for rank, picked in ranks.items()
        ],
        "exposed": [[round(seconds / unit_s, 1) for seconds in pair] for pair in step.exposed_s_S],
        "makespan": round(step.makespan_s / unit_s),
        "after": [[AFTER_NAMES[name], round(seconds / unit_s, 1)] for name, seconds in step.after_s if seconds > 0],
    }


class _Figures(NamedTuple):
    """What one rank does with the step: passes, exchanges that nothing hides, and waiting."""

    rank: int
    passes: int
    busy_s: float
    exposed_s: float
    idle_s: float

    def cells(self) -> tuple[object, ...]:
        """As a row of the table."""
        times = map(seconds_text, (self.busy_s, self.exposed_s, self.idle_s))
        return (self.rank, self.passes, *times, f"{self.idle_s / (self.busy_s + self.idle_s):.1%}")


def _figures(step: DrawnStep, rank: int, picked: list[int]) -> _Figures:
    busy_s = sum(step.end_s_A[index] - step.start_s_A[index] for index in picked)
    exposed_s = sum(
        step.exposed_s_S[step.stage_A[index]][step.kind_A[index] != "F"]
        for index in picked
        if step.kind_A[index] != "W"
    )
    return _Figures(rank, len(picked), busy_s, exposed_s, step.makespan_s - busy_s)
