"""The choice and its alternatives: a sentence, points of step time against memory, and where the steps' time goes."""

from __future__ import annotations

from typing import Any

from pipette_launch.facts import Choice, Plan
from pipette_launch.facts.results.outcome import Outcome
from pipette_launch.report.figures import rate_words
from pipette_launch.report.page.axes import Axis
from pipette_launch.units import GIB, bytes_text, seconds_text

PARTS = (
    "compute",
    "recompute",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_transfer",
    "bubble",
    "data_parallel",
    "embedding_gradients",
    "optimizer",
    "parameter_gather",
)
"""Parts of a step, in the order in which they are drawn and coloured."""


def headline(plan: Plan) -> dict[str, Any]:
    """Say what was chosen, how long its step is and what it saves."""
    chosen, own = plan.chosen, plan.own
    saved = None
    if not (plan.keeps_own or plan.own_fault):
        saved = f"{1 - chosen.step_time_s / own.step_time_s:.1%}"
    return {
        "layout": chosen.layout.words(),
        "schedule": chosen.schedule,
        "step": seconds_text(chosen.step_time_s),
        "rate": rate_words(chosen.rate, chosen.layout.world_size) if chosen.rate else "",
        "own_layout": own.layout.words(),
        "own_step": seconds_text(own.step_time_s),
        "own_fault": plan.own_fault,
        "keeps_own": plan.keeps_own,
        "saved": saved,
        "gap": None if plan.gap is None else f"{plan.gap:.1%}",
        "memory": bytes_text(max(chosen.memory_shown.need_bytes)),
        "limit": bytes_text(chosen.memory_shown.limit_bytes),
    }


def alternatives(plan: Plan) -> dict[str, Any]:
    """Place every configuration of the plan by its step time and the memory of its fullest rank."""
    listed: list[tuple[str, Choice]] = [("chosen, yours" if plan.keeps_own else "chosen", plan.chosen)]
    listed += [("alternative", choice) for choice in plan.alternatives]
    if not (plan.keeps_own or plan.own_fault):
        listed.append(("yours" if plan.own.fits else "yours, too large", plan.own))
    sizes = [max(choice.memory_shown.need_bytes) for _, choice in listed]
    across = Axis.around([choice.step_time_s for _, choice in listed])
    limit = plan.chosen.memory_shown.limit_bytes
    up = Axis.around([size / GIB for size in (*sizes, limit)], from_zero=True)
    best = _front([(choice.step_time_s, size) for (_, choice), size in zip(listed, sizes, strict=True)])
    points = [
        {
            "role": role,
            "mark": role.partition(",")[0].split()[0],
            "layout": choice.layout.words(),
            "schedule": choice.schedule,
            "step": seconds_text(choice.step_time_s),
            "step_s": choice.step_time_s,
            "memory": bytes_text(size),
            "memory_bytes": size,
            "is_best": index in best,
            "x": across.percent(choice.step_time_s),
            "y": up.percent(size / GIB),
        }
        for index, ((role, choice), size) in enumerate(zip(listed, sizes, strict=True))
    ]
    return {
        "points": points,
        "front": sorted((point["x"], point["y"]) for point in points if point["is_best"]),
        "x_ticks": [(across.percent(tick), seconds_text(tick)) for tick in across.ticks(5) if tick > 0],
        "y_ticks": [(up.percent(tick), f"{tick:g} GiB") for tick in up.ticks()],
        "limit": up.percent(limit / GIB),
        "limit_words": bytes_text(limit),
    }


def _front(points: list[tuple[float, int]]) -> set[int]:
    """Return the places of those that nothing beats in both time and memory (the Pareto front)."""
    return {
        index
        for index, (step_s, size) in enumerate(points)
        if not any(
            other_s <= step_s and other <= size and (other_s, other) != (step_s, size) for other_s, other in points
        )
    }


def step_parts(plan: Plan) -> list[dict[str, Any]]:
    """Cut the steps of the chosen configuration and of the user's own into their parts, on one scale."""
    shown = [("chosen", plan.chosen)]
    if not (plan.keeps_own or plan.own_fault):
        shown.append(("yours", plan.own))
    longest_s = max(choice.step_time_s for _, choice in shown)
    return [
        {
            "name": f"{name}: {choice.layout.words()}",
            "total": seconds_text(choice.step_time_s),
            "parts": [
                {
                    "name": part.replace("_", " "),
                    "colour": PARTS.index(part) if part in PARTS else len(PARTS),
                    "seconds": seconds,
                    "text": seconds_text(seconds),
                    "share": f"{seconds / choice.step_time_s:.1%}",
                    "width": round(100 * max(seconds, 0.0) / longest_s, 3),
                }
                for part, seconds in sorted(choice.breakdown_s.items(), key=lambda item: _place(item[0]))
                if seconds
            ],
        }
        for name, choice in shown
    ]


def _place(part: str) -> int:
    return PARTS.index(part) if part in PARTS else len(PARTS)


def trials(plan: Plan) -> list[dict[str, Any]]:
    """Set measured runs beside what was predicted for them."""
    if plan.trials is None:
        return []
    return [
        {
            "layout": run.layout.words(),
            "whose": "yours" if run.is_own else "",
            "measured": seconds_text(run.step.median_s) if run.step else run.failure,
            "predicted": seconds_text(run.predicted_step_s),
            "spread": f"{run.step.spread:.0%}" if run.step else "",
        }
        for run in plan.trials.runs
    ]


def outcome_rows(outcome: Outcome | None) -> list[tuple[str, str, str, str]]:
    """Predicted, measured and the error of the step, and of the fullest rank that was read."""
    if outcome is None:
        return []
    measured_s = outcome.measured_step.median_s
    rows = [
        ("step", seconds_text(outcome.predicted_step_s), seconds_text(measured_s), f"{outcome.error:+.1%}"),
    ]
    peak = outcome.fullest
    if peak is not None and peak.measured_bytes:
        error = peak.predicted_bytes / peak.measured_bytes - 1
        name = f"memory of rank {peak.rank} ({peak.source})"
        rows.append((name, bytes_text(peak.predicted_bytes), bytes_text(peak.measured_bytes), f"{error:+.1%}"))
    return rows
