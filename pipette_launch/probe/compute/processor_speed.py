"""How fast this core computes at the moment: what a fixed computation takes, looked at again and again.

A virtual core shares a real one with others, whom no counter shows: a layer took 37 ms of processor time and 58 some
seconds later. What a millisecond of matrix products takes tells how it is: of layers of three models on four hosts the
times scattered by 4 to 17 % from one 0.4 s to the next, over the yardstick's by 3 to 8 % (correlation 0.6 to 0.96).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

YARD_S = 1.5e-3
"""What it takes on a core of usual speed. Times are told as if it always did, so those of all slots compare."""
SIDE, PRODUCTS = 192, 4
SPAN, SWEEPS = 1 << 19, 2
EVERY_S = 0.1
"""On the wall: a look says how it is for so long."""
REPEATS = 3
"""Their median is the look: behind a layer the first finds cold caches."""


class Yardstick:
    """One core's; `work` is the fixed computation, by default some of memory and some of products."""

    def __init__(
        self,
        work: Callable[[], object] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        computed: Callable[[], float] = time.thread_time,
    ) -> None:
        self._work = work or _work()
        self._clock = clock
        self._computed = computed
        self._looked_s = -EVERY_S
        self._looks_s: list[float] = []

    def look(self) -> None:
        """See how it is, unless that was seen just now."""
        now_s = self._clock()
        if now_s - self._looked_s >= EVERY_S:
            self._looked_s = now_s
            self._looks_s.append(statistics.median(self._once() for _ in range(REPEATS)))

    @property
    def now(self) -> float:
        """How much longer than on a usual core it took at the last look; 1 before the first."""
        return self._looks_s[-1] / YARD_S if self._looks_s else 1.0

    @property
    def usual(self) -> float:
        """The same of the median look."""
        return statistics.median(self._looks_s) / YARD_S if self._looks_s else 1.0

    def _once(self) -> float:
        before_s = self._computed()
        self._work()
        return self._computed() - before_s


def _work() -> Callable[[], object]:
    left, right, span = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE), torch.ones(SPAN)

    def work() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right)
        for _ in range(SWEEPS):
            span.mul_(0.5).add_(0.5)

    return work
