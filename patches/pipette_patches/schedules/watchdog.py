"""Says where a pipeline rank stands when it has not moved for long: which ranks wait for which is then plain."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""Longer than any pass and its messages should take, and shorter than the half hour of NCCL's and gloo's deadlines."""


class Watchdog:
    """Keeps what a rank does now, and since when."""

    def __init__(
        self, rank: int, *, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._patience_s = patience_s
        self._clock = clock
        self._doing = ""
        self._since_s = 0.0

    def begin(self, doing: str) -> None:
        """Note what the rank begins; empty where it leaves the pipeline."""
        self._doing, self._since_s = doing, self._clock()

    def complaint(self) -> str:
        """Say what takes so long, once for each time; empty while nothing does."""
        taken_s = self._clock() - self._since_s
        if not self._doing or taken_s < self._patience_s:
            return ""
        doing, self._doing = self._doing, ""
        return f"pipeline rank {self._rank} has been at {doing} for {taken_s:.0f} s"

    def start(self) -> None:
        """Look now and then from a thread of its own, and complain on stderr."""
        threading.Thread(target=self._watch, name="schedule-watchdog", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(self._patience_s / 4)
            complaint = self.complaint()
            if complaint:
                sys.stderr.write(f"pipette_patches.schedules: {complaint}\n")
                sys.stderr.flush()
