"""The layouts that could still win, the most promising first, made only as far as the search gets to them."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.bound_columns import BoundColumns
from pipette_launch.cost.layout_columns import LayoutColumns
from pipette_launch.cost.overhead import num_communicators
from pipette_launch.facts import Layout, Recompute
from pipette_launch.facts.layout import NO_RECOMPUTE
from pipette_launch.search.candidates import NOT_MEASURED, OVER_MEMORY, Field
from pipette_launch.search.enumerate import Cuts

BEATEN = "its bound shows that no placement of it can win"
BOUNDED_AT_ONCE = 256
CUTS_AT_ONCE = 16
CHECKED_AT_ONCE = 64
"""So many cuts are bounded, and opened, and layouts checked, together: that is cheaper than one by one."""
LOOKED_THROUGH = 512
"""Layouts among which those that need less memory are looked for."""

STATES = ((True, True, True), (True, True, False), (True, False, False), (False, True, False), (False, False, False))
"""Distributed optimizer, overlapped reduction, overlapped gather: a cut is as fast as with the best of these."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Promising:
    """A layout that fits, with what it needs and how fast it could be at best."""

    least_s: float
    """No placement is faster; a cruder bound than the predictor's."""
    number: int
    """The order in which layouts were met: it settles ties."""
    layout: Layout
    peak_bytes: tuple[int, ...]


class _Opened(NamedTuple):
    """A layout that stands in columns until somebody wants it."""

    columns: LayoutColumns
    row: int
    cut: int

    def read(self) -> Layout:
        return self.columns.layout(self.row)


_Key = tuple[int, Layout]


def recomputes_no_more(one: Recompute, other: Recompute) -> bool:
    """Whether whatever one kind of recompute runs again, the other runs again too: it is no slower in any placement."""
    if one == NO_RECOMPUTE:
        return True
    if other.granularity == "full" and other.method == "uniform":
        return True
    if one.granularity == other.granularity == "full":
        return one.method == other.method == "block" and one.num_layers <= other.num_layers
    return one.granularity == other.granularity == "selective" and set(one.modules) <= set(other.modules)


class Frontier:
    """Opens cuts by rising bound, drops what does not fit or cannot be priced, and hands out the rest in order.

    A cut is bounded without recompute and with whatever state of the optimizer is fastest, so none of its variants is
    faster: cuts whose bound is no better than the best step time so far need never be opened. Nor need those be bounded
    whose rough bound is no better.
    """

    def __init__(self, field: Field, cuts: Cuts, bounds: BoundColumns) -> None:
        self._field = field
        self._cuts = cuts
        self._bounds = bounds
        # A cut that cannot be priced is opened all the same: its variants are counted.
        rough_N = np.nan_to_num(bounds.rough_of_columns(_bare(cuts.columns))) * field.predictor.least_factor
        self._order_N = np.argsort(rough_N, kind="stable")
        self._rough = rough_N[self._order_N].tolist()
        self._num_bounded = 0
        self._closed: list[tuple[float, int]] = []
        self._opened: list[tuple[float, int, _Opened]] = []
        self._fitting: dict[_Key, list[Recompute]] = {}
        self._spare: list[Promising] = []
        """Slower than another that fits, wherever it lies, but leaner."""
        self._ready: list[Promising] = []
        self._limits: dict[int, int] = {}
        self.num_met = 0
        """Layouts of the opened cuts."""
        self.dropped: Counter[str] = Counter()

    def take(self, count: int, *, below_s: float = math.inf) -> list[Promising]:
        """Take the next layouts, at most so many, whose bounds are below a step time."""
        taken: list[Promising] = []
        while len(taken) < count:
            self._fill(below_s)
            if not self._ready or self._ready[0].least_s >= below_s:
                break
            taken.append(heapq.heappop(self._ready))
        return taken

    def lean(self, count: int, *, most_bytes: float) -> list[Promising]:
        """Take the next layouts, of some hundred that were opened, that need no more memory than this."""
        self._check(LOOKED_THROUGH, math.inf)
        every = (*self._ready, *self._spare)
        found = heapq.nsmallest(count, (one for one in every if max(one.peak_bytes) <= most_bytes))
        self._ready = [one for one in self._ready if one not in found]
        self._spare = [one for one in self._spare if one not in found]
        heapq.heapify(self._ready)
        return found

    @property
    def is_empty(self) -> bool:
        """Whether no layout is left that fits and can be priced."""
        self._fill(math.inf)
        return not self._ready

    @property
    def least_s(self) -> float:
        """No layout that is left can be faster."""
        return min(_first(self._ready), _first(self._opened), _first(self._closed), self._next_rough_s)

    @property
    def num_left(self) -> int:
        """Layouts, and unopened cuts, that were not taken."""
        return len(self._ready) + len(self._opened) + len(self._closed) + len(self._rough) - self._num_bounded

    @property
    def _next_rough_s(self) -> float:
        return self._rough[self._num_bounded] if self._num_bounded < len(self._rough) else math.inf

    def _fill(self, below_s: float) -> None:
        """Open cuts and check layouts until none of the rest can be the next."""
        while True:
            self._open(min(below_s, _first(self._ready)))
            if _first(self._opened) >= min(below_s, _first(self._ready)):
                return
            self._check(CHECKED_AT_ONCE, below_s)

    def _open(self, below_s: float) -> None:
        """Open cuts until none of the rest can hold the next layout."""
        while True:
            least_s = min(below_s, _first(self._opened))
            self._bound(least_s)
            some: list[int] = []
            while len(some) < CUTS_AT_ONCE and _first(self._closed) < least_s:
                some.append(heapq.heappop(self._closed)[1])
            if not some:
                return
            self._admit(np.array(some, dtype=np.int64))

    def _bound(self, below_s: float) -> None:
        """Bound cuts until none of the rest can be the next to open."""
        while self._next_rough_s < min(below_s, _first(self._closed)):
            rows = self._order_N[self._num_bounded : self._num_bounded + BOUNDED_AT_ONCE]
            rough = self._rough[self._num_bounded : self._num_bounded + BOUNDED_AT_ONCE]
            self._num_bounded += len(rows)
            least_N = np.nan_to_num(_least_N(self._cuts.columns.take(rows), self._bounds))
            for row, rough_s, least_s in zip(rows.tolist(), rough, least_N.tolist(), strict=True):
                bound_s = max(rough_s, least_s * self._field.predictor.least_factor)
                heapq.heappush(self._closed, (bound_s, row))

    def _admit(self, rows: NDArray[np.int64]) -> None:
        """Bound all layouts of opened cuts."""
        place_M, columns = self._cuts.spread(rows)
        least_M = self._bounds.of_columns(columns)
        self.dropped[NOT_MEASURED] += int(np.isnan(least_M).sum())
        for row in np.flatnonzero(~np.isnan(least_M)).tolist():
            layout = _Opened(columns, row, int(rows[place_M[row]]))
            factor = self._field.predictor.factor(layout.read()) if self._field.predictor.least_factor < 1 else 1.0
            heapq.heappush(self._opened, (least_M[row] * factor, self.num_met + row, layout))
        self.num_met += len(least_M)

    def _check(self, count: int, below_s: float) -> None:
        """Keep those of the next layouts that fit in memory and of which no leaner recompute fits."""
        some: list[tuple[float, int, Layout]] = []
        keys: list[_Key] = []
        while len(some) < count and _first(self._opened) < below_s:
            least_s, number, opened = heapq.heappop(self._opened)
            layout = opened.read()
            some.append((least_s, number, layout))
            keys.append((opened.cut, replace(layout, recompute=NO_RECOMPUTE)))
        peaks = self._field.predictor.all_peaks([layout for _, _, layout in some]) if some else ()
        for (least_s, number, layout), peak_bytes, key in zip(some, peaks, keys, strict=True):
            one = Promising(least_s=least_s, number=number, layout=layout, peak_bytes=peak_bytes)
            fitting = self._fitting.setdefault(key, [])
            is_own = layout == self._field.job.own
            if max(peak_bytes) > self._limit(layout):
                self.dropped[OVER_MEMORY] += not is_own
            elif any(recomputes_no_more(other, layout.recompute) for other in fitting):
                self._spare.append(one)
            else:
                fitting.append(layout.recompute)
                if not is_own:
                    heapq.heappush(self._ready, one)

    def _limit(self, layout: Layout) -> int:
        """The memory limit; nothing of a layout but its number of communicators moves it."""
        groups = num_communicators(layout)
        if groups not in self._limits:
            self._limits[groups] = self._field.limit_bytes(layout)
        return self._limits[groups]


def _first(heap: Sequence[Promising] | Sequence[tuple[float, int]] | Sequence[tuple[float, int, _Opened]]) -> float:
    """Return the least bound on a heap."""
    if not heap:
        return math.inf
    first = heap[0]
    return first.least_s if isinstance(first, Promising) else first[0]


def _bare(columns: LayoutColumns) -> LayoutColumns:
    """The same cuts without recompute."""
    return replace(columns, recompute=np.zeros(len(columns), dtype=np.int64), recomputes=(NO_RECOMPUTE,))


def _least_N(columns: LayoutColumns, bounds: BoundColumns) -> NDArray[np.float64]:
    """Bound cuts by the fastest of `STATES`, legal for each of them or not; all at once, as they share most of it."""
    size = len(columns)
    shards, reduces, gathers = (np.repeat(on, size) for on in np.array(STATES, dtype=np.int64).T)
    every = replace(
        _bare(columns.take(np.tile(np.arange(size), len(STATES)))),
        use_distributed_optimizer=shards,
        overlap_grad_reduce=reduces,
        overlap_param_gather=gathers,
    )
    least_N: NDArray[np.float64] = np.fmin.reduce(bounds.of_columns(every).reshape(len(STATES), size))
    return least_N
