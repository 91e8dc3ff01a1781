"""Memory of each pipeline rank, stacked by kind, against what a rank may hold."""

from __future__ import annotations

from typing import Any

from pipette_launch.facts import Plan
from pipette_launch.facts.results.prediction import PARTS
from pipette_launch.forecast.picture import Picture
from pipette_launch.report.figures import limit_words
from pipette_launch.units import bytes_text

MOST_STAGES = 64
"""Of longer pipelines the first, the last, the fullest and some between them are drawn."""


def memory_view(plan: Plan, picture: Picture | None) -> dict[str, Any]:
    """Return the stacks; without a picture the totals alone."""
    shown = plan.chosen.memory_shown
    needs = shown.need_bytes
    whole = max(shown.limit_bytes, *needs)
    kinds = picture.memory_bytes if picture else tuple({"all": need} for need in needs)
    rows = []
    for stage in stages_drawn(needs):
        parts = [
            {
                "name": name,
                "colour": PARTS.index(name) if name in PARTS else 0,
                "text": bytes_text(size),
                "bytes": size,
                "width": round(100 * size / whole, 3),
            }
            for name, size in kinds[stage].items()
            if size
        ]
        rows.append(
            {
                "stage": stage,
                "parts": parts,
                "cells": [bytes_text(kinds[stage].get(name, 0)) for name in PARTS] if picture else [],
                "total": bytes_text(needs[stage]),
                "too_much": needs[stage] > shown.limit_bytes,
            }
        )
    return {
        "rows": rows,
        "kinds": PARTS if picture else (),
        "hidden": len(needs) - len(rows),
        "limit": round(100 * shown.limit_bytes / whole, 3),
        "limit_words": limit_words(shown.limit_bytes, shown.free_bytes, shown.margin),
    }


def stages_drawn(needs: tuple[int, ...], most: int = MOST_STAGES) -> list[int]:
    """All stages of a short pipeline; of a long one at most so many, its ends and the fullest among them."""
    if len(needs) <= most:
        return list(range(len(needs)))
    spaced = {round(index * (len(needs) - 1) / (most - 2)) for index in range(most - 1)}
    return sorted(spaced | {needs.index(max(needs))})
