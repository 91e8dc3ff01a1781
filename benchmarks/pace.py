"""Evenness of this machine's speed while it is idle: processor time that neighbours take invisibly.

A virtual processor shares the caches and units of its core with processors of other machines. While these are busy it
is slower, and no counter shows it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

LOOKS = 200
QUICK_LOOKS = 20
ROUNDS = 200_000
"""Some 10 ms a look."""


def looks(number: int = LOOKS) -> list[float]:
    """Seconds of one and the same computation, again and again."""
    found = []
    for _ in range(number):
        began_s = time.perf_counter()
        sum(number * number for number in range(ROUNDS))
        found.append(time.perf_counter() - began_s)
    return found


def words(seconds: Sequence[float]) -> str:
    """Say how far the looks lie apart."""
    low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
    least, most = 1e3 * min(seconds), 1e3 * max(seconds)
    half = f"half of {len(seconds)} within {low:.1f} to {high:.1f}"
    return f"{middle:.1f} ms in the median, {half}, all {least:.1f} to {most:.1f}"
