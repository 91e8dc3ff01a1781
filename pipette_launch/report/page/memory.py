"""Memory of each pipeline rank, stacked by kind, against what a rank may hold."""

from __future__ import annotations

from typing import Any

from pipette_launch.facts import Plan
from pipette_launch.facts.prediction import PARTS
from pipette_launch.planning.picture import Picture
from pipette_launch.report.figures import limit_words
from pipette_launch.report.page.pieces import Segment, Table, bar, legend
from pipette_launch.text import bytes_text

MOST_STAGES = 64
"""Of longer pipelines the first, the last, the fullest and some between them are drawn."""


def memory_view(plan: Plan, picture: Picture | None) -> dict[str, Any]:
    """Return the stacks; without a picture the totals alone."""
    shown = plan.chosen.memory_shown
    needs = shown.need_bytes
    shows_limit = limit_in_view(shown.limit_bytes, max(needs))
    whole = max(shown.limit_bytes, *needs) if shows_limit else max(needs)
    kinds = picture.memory_bytes if picture else tuple({"all": need} for need in needs)
    names = PARTS if picture else ("all",)
    drawn = stages_drawn(needs)
    bars = []
    for stage in drawn:
        total = bytes_text(needs[stage]) + (", too much" if needs[stage] > shown.limit_bytes else "")
        segments = [Segment(name, size, bytes_text(size)) for name, size in kinds[stage].items()]
        bars.append(bar(f"stage {stage}", segments, kinds=names, whole=whole, total=total))
    words = limit_words(shown.limit_bytes, shown.free_bytes, shown.margin)
    rows = [
        (stage, *(bytes_text(kinds[stage].get(name, 0)) for name in names), bytes_text(needs[stage])) for stage in drawn
    ]
    return {
        "bars": bars,
        "legend": legend(bars),
        "hidden": len(needs) - len(drawn),
        "limit": round(100 * shown.limit_bytes / whole, 3) if shows_limit else None,
        "limit_words": f"{words[0].upper()}{words[1:]}{'' if shows_limit else ', far beyond these bars'}",
        "table": Table("Memory of each stage", ("stage", *names, "peak"), rows),
    }


def limit_in_view(limit_bytes: int, need_bytes: int) -> bool:
    """Whether a scale that holds the limit still shows what is needed; else the limit is told in words alone."""
    return limit_bytes <= 5 * need_bytes


def stages_drawn(needs: tuple[int, ...], most: int = MOST_STAGES) -> list[int]:
    """All stages of a short pipeline; of a long one at most so many, its ends and the fullest among them."""
    if len(needs) <= most:
        return list(range(len(needs)))
    spaced = {round(index * (len(needs) - 1) / (most - 2)) for index in range(most - 1)}
    return sorted(spaced | {needs.index(max(needs))})
