"""Pieces of several sections: an axis, a bar of coloured parts, a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


class Table(NamedTuple):
    """Rows under a head; the first cell of each names the row."""

    caption: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[object]]


class Segment(NamedTuple):
    """One part of a bar."""

    name: str
    size: float
    text: str


def bar(label: str, segments: Sequence[Segment], *, kinds: Sequence[str], whole: float, total: str) -> dict[str, Any]:
    """Lay segments end to end on a scale from 0 to `whole`; those without a size are left out.

    Args:
        label: what the bar is of.
        segments: in the order in which they are drawn.
        kinds: all names in the order of their colours; a segment with another name has the last colour.
        whole: the size that the full width stands for.
        total: what stands behind the bar.

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
    """Return colour and name of every kind that at least one bar shows."""
    return sorted({(segment["colour"], segment["name"]) for one in bars for segment in one["segments"]})


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Values from `low` to `high`, placed from 0 to 100 percent."""

    low: float
    high: float

    @classmethod
    def around(cls, values: list[float], *, from_zero: bool = False) -> Axis:
        """Hold all values with a tenth of their spread, or 2 % of the largest, to spare on each side."""
        low, high = (0.0 if from_zero else min(values)), max(values)
        spare = max((high - low) / 10, abs(high) / 50) or 1.0
        return cls(low=0.0 if from_zero else low - spare, high=high + spare)

    def percent(self, value: float) -> float:
        """Return the place of a value."""
        return round(100 * (value - self.low) / (self.high - self.low), 3)

    def ticks(self, most: int = 6) -> list[float]:
        """Return at most so many round values: 1, 2 or 5 times a power of ten apart."""
        step = self._step(most)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [count * step for count in range(first, last + 1)]

    def second_ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Return places of round times, and the times in one unit with as many digits as tell them apart."""
        unit, size = next((one for one in UNITS if self.high >= one[1]), UNITS[-1])
        decimals = max(0, -math.floor(math.log10(self._step(most) / size) + 1e-9))
        return [(self.percent(tick), f"{tick / size:.{decimals}f} {unit}") for tick in self.ticks(most) if tick >= 0]

    def _step(self, most: int) -> float:
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
