"""Whether a training has slowed down, from the step times that its script prints."""

from __future__ import annotations

import statistics
from collections import deque

from pipette_launch.text import seconds_text

WARM_UPS = 10
"""The first step times of an attempt, which count for nothing."""
WINDOW = 30
"""So many step times make the pace at the start, and so many the pace now: evaluations and checkpoints are fewer."""


class Slowdown:
    """Compares the pace of an attempt's last steps with that of its first."""

    def __init__(self, limit: float, *, restarts: bool) -> None:
        """Begin.

        Args:
            limit: by which fraction the steps may become longer.
            restarts: whether the machines are to be measured again when they do.

        """
        self._limit = limit
        self._restarts = restarts
        self.wants_restart = ""
        """Why the machines are to be measured again; empty while they are not."""
        self._num_seen = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._is_told = False

    def add(self, step_time_s: float, iteration: int) -> str:
        """Add a step time; returns what the user reads when the limit is passed, once in an attempt, else nothing."""
        self._num_seen += 1
        if self._num_seen <= WARM_UPS:
            return ""
        if len(self._first) < WINDOW:
            self._first.append(step_time_s)
            return ""
        self._last.append(step_time_s)
        if self._is_told or len(self._last) < WINDOW:
            return ""
        before_s, now_s = statistics.median(self._first), statistics.median(self._last)
        if now_s <= (1 + self._limit) * before_s:
            return ""
        self._is_told = True
        words = (
            f"steps take {now_s / before_s:.2f} times as long as at the start of this attempt: "
            f"{seconds_text(now_s)} (median of the last {WINDOW}, up to iteration {iteration}) instead of "
            f"{seconds_text(before_s)}"
        )
        if self._restarts:
            self.wants_restart = words
            return f"{words}; all machines are measured again"
        return f"{words}; --pipette-watch restart would measure all machines again and name the slow one"
