"""Elements of page sections (axes, bars and tables), and the sections on memory, trials and the outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipette_launch.facts import Plan
from pipette_launch.facts.outcome import Outcome
from pipette_launch.facts.prediction import PARTS
from pipette_launch.planning.picture import Picture
from pipette_launch.report.screen import limit_words
from pipette_launch.text import bytes_text, seconds_text

UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
MOST_STAGES = 64
"""Largest number of bars. A longer pipeline shows the first, last and fullest stages, and some other stages."""


class Table(NamedTuple):
    """Table with a head and rows. The first cell of each row is the row's name."""

    caption: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[object]]


class Segment(NamedTuple):
    """One coloured part of a bar."""

    name: str
    size: float
    text: str


def bar(label: str, segments: Sequence[Segment], *, kinds: Sequence[str], whole: float, total: str) -> dict[str, Any]:
    """Lay segments end to end on a scale from 0 to `whole`, without empty segments. The text `total` follows the bar.

    `kinds` has the names of segments in the order of colours. A segment with another name has the last colour.
    """
    shown = [segment for segment in segments if segment.size > 0]
    return {
        "label": label,
        "total": total,
        "tip": "\n".join([f"{label}: {total}", *(f"{segment.name}: {segment.text}" for segment in shown)]),
        "segments": [
            {
                "name": segment.name,
                "text": segment.text,
                "colour": kinds.index(segment.name) if segment.name in kinds else len(kinds),
                "width": round(100 * segment.size / whole, 3),
            }
            for segment in shown
        ],
    }


def legend(bars: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the colour and name of every kind of segment that at least one bar shows."""
    return sorted({(segment["colour"], segment["name"]) for one in bars for segment in one["segments"]})


def spaced(count: int, most: int) -> list[int]:
    """Return all indices below `count`, or `most` (at least 2) evenly spaced indices that include both ends."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


class Axis(NamedTuple):
    """Axis that maps values from `low` to `high` to positions from 0 to 100 percent."""

    low: float
    high: float

    @classmethod
    def around(cls, values: list[float], *, from_zero: bool = False) -> Axis:
        """Return an axis around the values, with a margin of 10 % of their spread, and at least 2 % of the largest."""
        low, high = (0.0 if from_zero else min(values)), max(values)
        spare = max((high - low) / 10, abs(high) / 50) or 1.0
        return cls(low=0.0 if from_zero else low - spare, high=high + spare)

    def percent(self, value: float) -> float:
        """Return the position of a value on the axis, in percent of the axis."""
        return round(100 * (value - self.low) / (self.high - self.low), 3)

    def ticks(self, most: int = 6) -> list[float]:
        """Return at most `most` round values: 1, 2 or 5 times a power of ten apart."""
        step = self._step(most)
        return [count * step for count in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def second_ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Return the positions of round times, and their labels in one unit with enough digits to differ."""
        unit, size = next((one for one in UNITS if self.high >= one[1]), UNITS[-1])
        decimals = max(0, -math.floor(math.log10(self._step(most) / size) + 1e-9))
        return [(self.percent(tick), f"{tick / size:.{decimals}f} {unit}") for tick in self.ticks(most) if tick >= 0]

    def _step(self, most: int) -> float:
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


def memory_view(plan: Plan, picture: Picture | None) -> dict[str, Any]:
    """Return a memory bar for each drawn stage. Without a picture, the bars show only totals."""
    shown = plan.chosen.memory
    needs, limit = shown.need_bytes, shown.limit_bytes
    shows_limit = limit_in_view(limit, max(needs))
    whole = max(limit, *needs) if shows_limit else max(needs)
    kinds = picture.memory_bytes if picture else tuple({"all": need} for need in needs)
    names = PARTS if picture else ("all",)
    drawn = stages_drawn(needs)
    bars = []
    for stage in drawn:
        total = bytes_text(needs[stage]) + (", over the limit" if needs[stage] > limit else "")
        segments = [Segment(name, size, bytes_text(size)) for name, size in kinds[stage].items()]
        bars.append(bar(f"stage {stage}", segments, kinds=names, whole=whole, total=total))
    words = limit_words(limit, shown.free_bytes, shown.margin)
    rows = [
        (stage, *(bytes_text(kinds[stage].get(name, 0)) for name in names), bytes_text(needs[stage])) for stage in drawn
    ]
    return {
        "bars": bars,
        "legend": legend(bars),
        "hidden": len(needs) - len(drawn),
        "limit": round(100 * limit / whole, 3) if shows_limit else None,
        "limit_words": f"{words[0].upper()}{words[1:]}{'' if shows_limit else ', far beyond these bars'}",
        "table": Table("Memory of each stage", ("stage", *names, "peak"), rows),
    }


def limit_in_view(limit_bytes: int, need_bytes: int) -> bool:
    """Return true if bars stay visible on a scale up to the memory limit; else only a sentence names the limit."""
    return limit_bytes <= 5 * need_bytes


def stages_drawn(needs: tuple[int, ...]) -> list[int]:
    """Return all stages of a short pipeline, else MOST_STAGES stages with the first, the last and the fullest."""
    few = spaced(len(needs), MOST_STAGES - (len(needs) > MOST_STAGES))
    return sorted({*few, needs.index(max(needs))})


def trials_table(plan: Plan) -> Table | None:
    """Return the table of trials with measured and predicted step times; None without trials."""
    if plan.trials is None:
        return None
    rows = [
        (
            run.layout.words() + (" (yours)" if run.is_own else ""),
            seconds_text(run.predicted_step_s),
            seconds_text(run.step.median_s) if run.step else run.failure,
            f"{run.predicted_step_s / run.step.median_s - 1:+.1%}" if run.step and run.step.median_s > 0 else "",
            f"{run.step.spread:.0%}" if run.step else "",
        )
        for run in plan.trials.runs
    ]
    return Table("Trials", ("layout", "predicted", "measured", "error", "spread"), rows)


def outcome_table(outcome: Outcome) -> Table:
    """Return a table of predicted and measured values and errors, for step time and memory of the fullest rank."""
    measured, peak = outcome.measured_step, outcome.fullest
    times = seconds_text(outcome.predicted_step_s), seconds_text(measured.median_s), f"{outcome.error:+.1%}"
    spread = f"{measured.spread:.0%}{', unstable' if measured.is_unstable else ''}"
    rows = [(f"step, up to iteration {outcome.last_iteration}", *times, spread)]
    if peak is not None and peak.measured_bytes:
        sizes = bytes_text(peak.predicted_bytes), bytes_text(peak.measured_bytes)
        error = f"{peak.predicted_bytes / peak.measured_bytes - 1:+.1%}"
        rows.append((f"memory of rank {peak.rank}, by its {peak.source}", *sizes, error, ""))
    return Table(f"It ran: {outcome.layout.words()}", ("", "predicted", "measured", "error", "spread"), rows)
