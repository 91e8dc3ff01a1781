"""Where values stand on an axis, and which of them are written beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Values from `low` to `high`, placed from 0 to 100 percent."""

    low: float
    high: float

    @classmethod
    def around(cls, values: list[float], *, from_zero: bool = False) -> Axis:
        """Hold all values, with a tenth of their spread to spare."""
        low, high = (0.0 if from_zero else min(values)), max(values)
        spare = (high - low or abs(high) or 1.0) / 10
        return cls(low=0.0 if from_zero else low - spare, high=high + spare)

    def percent(self, value: float) -> float:
        """Return the place of a value."""
        return round(100 * (value - self.low) / (self.high - self.low), 3)

    def ticks(self, most: int = 6) -> list[float]:
        """Return at most so many round values: 1, 2 or 5 times a power of ten apart."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [count * step for count in range(first, last + 1)]
