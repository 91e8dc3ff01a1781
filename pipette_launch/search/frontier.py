"""The layouts that could still win, the most promising first, made only as far as the search gets to them."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.layout_columns import LayoutColumns
from pipette_launch.cost.overhead import num_communicators
from pipette_launch.facts import Layout
from pipette_launch.facts.layout import NO_RECOMPUTE
from pipette_launch.search.candidates import NOT_MEASURED, OVER_MEMORY, Field
from pipette_launch.search.enumerate import Cuts

BEATEN = "its bound shows that no placement of it can win"
CUTS_AT_ONCE = 16
"""So many are opened together, which is cheaper than one by one."""

STATES = ((True, True, True), (True, False, False), (False, True, False), (False, False, False))
"""Distributed optimizer, overlapped reduction, overlapped gather: a cut is as fast as with the best of these."""

Bounds = Callable[[LayoutColumns], NDArray[np.float64]]
"""Lower bounds of the step times of layouts, in seconds; nan where one cannot be priced."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Promising:
    """A layout that fits, with what it needs and how fast it could be at best."""

    least_s: float
    """No placement is faster; a cruder bound than the predictor's."""
    number: int
    """The order in which layouts were met: it settles ties."""
    layout: Layout
    peak_bytes: tuple[int, ...]


class Frontier:
    """Opens cuts by rising bound, drops what does not fit or cannot be priced, and hands out the rest in order.

    A cut is bounded without recompute and with whatever state of the optimizer is fastest, so none of its variants is
    faster: cuts whose bound is no better than the best step time so far need never be opened.
    """

    def __init__(self, field: Field, cuts: Cuts, bounds: Bounds) -> None:
        self._field = field
        self._savers = cuts.savers
        self._bounds = bounds
        # A cut that cannot be priced is opened all the same: its variants are counted.
        least_N = np.nan_to_num(_least_N(cuts.columns, bounds)) * field.predictor.least_factor
        order = np.argsort(least_N, kind="stable")
        self._cuts = [int(index) for index in order]
        self._least = least_N[order].tolist()
        self._opened = 0
        self._ready: list[Promising] = []
        self._limits: dict[int, int] = {}
        self.num_met = 0
        """Layouts of the opened cuts."""
        self.dropped: Counter[str] = Counter()

    def take(self, count: int, *, below_s: float = math.inf) -> list[Promising]:
        """Take the next layouts, at most so many, whose bounds are below a step time."""
        taken: list[Promising] = []
        while len(taken) < count:
            self._open(below_s)
            if not self._ready or self._ready[0].least_s >= below_s:
                break
            taken.append(heapq.heappop(self._ready))
        return taken

    def lean(self, count: int, *, most_bytes: float) -> list[Promising]:
        """Take the next layouts, of those opened, that need no more memory than this."""
        found = heapq.nsmallest(count, (one for one in self._ready if max(one.peak_bytes) <= most_bytes))
        self._ready = [one for one in self._ready if one not in found]
        heapq.heapify(self._ready)
        return found

    @property
    def is_empty(self) -> bool:
        """Whether no layout is left that fits and can be priced."""
        self._open(math.inf)
        return not self._ready

    @property
    def least_s(self) -> float:
        """No layout that is left can be faster."""
        ready = self._ready[0].least_s if self._ready else math.inf
        closed = self._least[self._opened] if self._opened < len(self._cuts) else math.inf
        return min(ready, closed)

    @property
    def num_left(self) -> int:
        """Layouts, and unopened cuts, that were not taken."""
        return len(self._ready) + self.num_closed

    @property
    def num_closed(self) -> int:
        """Cuts that were not opened."""
        return len(self._cuts) - self._opened

    def _open(self, below_s: float) -> None:
        """Open cuts until none of the rest can hold the next layout."""
        while self._opened < len(self._cuts):
            least_s = self._least[self._opened]
            if least_s >= below_s or (self._ready and self._ready[0].least_s <= least_s):
                return
            some = self._cuts[self._opened : self._opened + CUTS_AT_ONCE]
            self._opened += len(some)
            self._admit([layout for cut in some for layout in self._savers(cut)])

    def _admit(self, layouts: Sequence[Layout]) -> None:
        """Sort layouts into those that fit, those that do not, and those that cannot be priced."""
        field = self._field
        layouts = [layout for layout in layouts if layout != field.job.own]
        if not layouts:
            return
        least_N = self._bounds(LayoutColumns.of(layouts)).tolist()
        for layout, peak_bytes, least_s in zip(layouts, field.predictor.all_peaks(layouts), least_N, strict=True):
            self.num_met += 1
            if max(peak_bytes) > self._limit(layout):
                self.dropped[OVER_MEMORY] += 1
            elif math.isnan(least_s):
                self.dropped[NOT_MEASURED] += 1
            else:
                bound_s = least_s * field.predictor.factor(layout)
                heapq.heappush(
                    self._ready,
                    Promising(least_s=bound_s, number=self.num_met, layout=layout, peak_bytes=peak_bytes),
                )

    def _limit(self, layout: Layout) -> int:
        """The memory limit; nothing of a layout but its number of communicators moves it."""
        groups = num_communicators(layout)
        if groups not in self._limits:
            self._limits[groups] = self._field.limit_bytes(layout)
        return self._limits[groups]


def _least_N(columns: LayoutColumns, bounds: Bounds) -> NDArray[np.float64]:
    """Bound cuts by the fastest of `STATES`, legal for each of them or not; all at once, as they share most of it.

    Those with sequence parallelism, which a cut has where it can, are bounded without it as well.
    """
    parallel = np.flatnonzero(columns.sequence_parallel)
    least_N = _fastest_N(columns, bounds)
    if len(parallel):
        without = replace(columns.take(parallel), sequence_parallel=np.zeros(len(parallel), dtype=np.int64))
        least_N[parallel] = np.fmin(least_N[parallel], _fastest_N(without, bounds))
    return least_N


def _fastest_N(columns: LayoutColumns, bounds: Bounds) -> NDArray[np.float64]:
    size = len(columns)
    shards, reduces, gathers = (np.repeat(on, size) for on in np.array(STATES, dtype=np.int64).T)
    every = replace(
        columns.take(np.tile(np.arange(size), len(STATES))),
        recompute=np.zeros(size * len(STATES), dtype=np.int64),
        recomputes=(NO_RECOMPUTE,),
        use_distributed_optimizer=shards,
        overlap_grad_reduce=reduces,
        overlap_param_gather=gathers,
    )
    least_N: NDArray[np.float64] = np.fmin.reduce(bounds(every).reshape(len(STATES), size))
    return least_N
