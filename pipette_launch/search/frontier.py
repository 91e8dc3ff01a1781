"""The layouts that could still win, by rising bound; a layout is made only when the search comes to it."""

# N = cuts, M = their variants.

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.memory.overhead import num_communicators, num_group_kinds
from pipette_launch.cost.step.step_bounds import BoundColumns
from pipette_launch.facts import Layout, Recompute
from pipette_launch.facts.layout import NO_RECOMPUTE, LayoutColumns, codes_of
from pipette_launch.search.candidates import NOT_MEASURED, OVER_MEMORY, Promising, SearchInputs, limits_N
from pipette_launch.search.layouts import Cuts

BEATEN = "its bound shows that no placement of it can win"
UNPROMISING = "layouts of the same degrees with lower bounds look slower than the best"
OUTDONE = "another that runs less again in the backward fits too, and is no slower"
CUTS_AT_ONCE = 1024
"""The variants of so many cuts are listed together, which is cheaper than one by one."""
DIVED_AT_ONCE = 1024
RARELY_RULED_OUT = 0.97
"""Cuts whose rough bound is below this part of the step time to beat are opened without the next bound: that is rarely
higher by more, and ruled out 1 % of them."""
LOOKED_THROUGH = 64
"""Layouts among which those that need less memory are looked for."""
_KIND = ("tp", "pp", "cp", "ep")
_STATE_FIELDS = ("sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class _Ready(NamedTuple):
    """A layout that fits and was not handed out."""

    least_s: float
    number: int
    layout: Layout


class Frontier:
    """Lists the variants of cuts by rising bound, drops what does not fit or has no price, hands out the rest in order.

    A cut is bounded three times, each time more sharply: roughly, then without recompute in its fastest state, then
    variant by variant. A bound that is no better than the best step time so far ends this. Memory is computed for
    the layouts that remain.
    """

    def __init__(self, inputs: SearchInputs, cuts: Cuts, bounds: BoundColumns) -> None:
        """Bound all cuts roughly.

        Args:
            inputs: what layouts are judged by.
            cuts: the legal ones.
            bounds: lower bounds of the job on this allocation.

        """
        self._inputs = inputs
        self._cuts = cuts
        self._bounds = bounds
        self._is_late: Callable[[], bool] = lambda: False
        self.dropped: Counter[str] = Counter()
        self.num_met = 0
        """Variants of the cuts that were listed."""
        rough_N = _rough_N(cuts.columns, bounds) * inputs.predictor.step_factor
        unknown = np.flatnonzero(np.isnan(rough_N))
        if len(unknown):
            self.dropped[NOT_MEASURED] = len(cuts.spread(unknown)[0])
        self._order_N = np.argsort(rough_N, kind="stable")[: len(rough_N) - len(unknown)]
        self._rough = rough_N[self._order_N].tolist()
        self._num_opened = 0
        self._ready: list[_Ready] = []
        self._num_ready = 0
        self._fitting: dict[Layout, list[Recompute]] = {}
        self.outdone: set[Layout] = set()
        """Those that fit, as does another that differs in recompute alone and runs less again."""
        self._quick: list[Layout] = []
        self._lean: list[Layout] = []
        self._limits: dict[tuple[int, int], int] = {}

    def hurry_when(self, is_late: Callable[[], bool]) -> None:
        """From now on, list no more cuts once it is late."""
        self._is_late = is_late

    def dive(self, count: int, *, below_s: float = math.inf) -> list[Promising]:
        """Return layouts of any cuts that fit: `count` in their quickest state, and half as many in their leanest.

        They give the search a first step time to beat. `take` hands them out again in their order.

        Args:
            count: how many to return, at most.
            below_s: seconds; cuts with a higher rough bound are left out.

        """
        rows = self._order_N[: bisect.bisect_left(self._rough, below_s)]
        self._quick = self._that_fit(rows, below_s)
        self._lean = self._that_fit(rows, math.inf, leanest=True)
        found = _unlike(self._quick, count)
        self._quick = [layout for layout in self._quick if layout not in found]
        return self._with_peaks([*found, *_unlike(self._lean, count // 2)])

    def take(self, count: int, *, below_s: float = math.inf) -> list[Promising]:
        """Take the next layouts, at most so many, whose bounds are below a step time."""
        while self._next_rough_s < min(below_s, self._ready[0].least_s if self._ready else math.inf):
            if self._is_late():
                break
            hopeful = bisect.bisect_left(self._rough, below_s)
            stop = min(self._num_opened + CUTS_AT_ONCE, hopeful)
            first_unsure = bisect.bisect_left(self._rough, RARELY_RULED_OUT * below_s, self._num_opened, stop)
            rows = self._order_N[self._num_opened : stop]
            could_fit_N = self._could_fit_N(rows)
            is_sure_N = np.arange(self._num_opened, stop) < first_unsure
            self._num_opened = stop
            perhaps = self._could_win(rows[could_fit_N & ~is_sure_N], below_s)
            self._open(np.concatenate([rows[could_fit_N & is_sure_N], perhaps]), below_s)
        taken: list[_Ready] = []
        while len(taken) < count and self._ready and self._ready[0].least_s < below_s:
            taken.append(heapq.heappop(self._ready))
        peaks = self._inputs.predictor.all_peaks([one.layout for one in taken]) if taken else ()
        return [
            Promising(least_s=one.least_s, number=one.number, layout=one.layout, peak_bytes=peak_bytes)
            for one, peak_bytes in zip(taken, peaks, strict=True)
        ]

    def neighbours(self, layout: Layout, *, below_s: float) -> list[Promising]:
        """Return what differs from a layout in one choice, fits, and has a bound below a step time; by rising bound."""
        columns = self._cuts.neighbours(layout)
        if not len(columns):
            return []
        least_M = self._bounds.of_columns(columns) * self._inputs.predictor.step_factor
        order = np.argsort(least_M, kind="stable")
        order = order[least_M[order] < below_s]
        return self._with_peaks([columns.layout(row) for row in order.tolist()])

    def runners_up(self, count: int, *, most_bytes: float) -> list[Promising]:
        """Return some that `dive` found and did not return: the quickest, and lean ones by rising rough bound."""
        quick = self._with_peaks(self._quick[:count])
        lean = self._with_peaks(self._lean[:LOOKED_THROUGH])
        return quick + [one for one in lean if max(one.peak_bytes) <= most_bytes][:count]

    def over_the_limit(self, *, live: float) -> list[Promising]:
        """List pipelines of several chunks that do not fit, and would if they kept this part of their activations.

        They come by rising bound, that of Megatron's own schedule.
        """
        order_N = self._order_N[self._cuts.columns.vpp[self._order_N] > 1]
        _, columns = self._cuts.spread(order_N[:CUTS_AT_ONCE])
        columns = columns.take(np.flatnonzero(~self._fits_N(columns) & self._fits_N(columns, live=live)))
        least_N = self._bounds.of_columns(columns) * self._inputs.predictor.step_factor
        order = np.argsort(least_N, kind="stable")[:LOOKED_THROUGH].tolist()
        layouts = [columns.layout(row) for row in order]
        peaks = self._inputs.predictor.all_peaks(layouts) if layouts else ()
        return [
            Promising(least_s=float(least_N[row]), number=row, layout=layout, peak_bytes=peak_bytes)
            for row, layout, peak_bytes in zip(order, layouts, peaks, strict=True)
        ]

    def find_any(self) -> bool:
        """Whether some layout fits and can be priced; where none fits, all are counted as over the limit."""
        if self.dive(1):
            return True
        for first in range(0, len(self._order_N), CUTS_AT_ONCE):
            if self._could_fit(self._order_N[first : first + CUTS_AT_ONCE]):
                return True
        self.dropped[OVER_MEMORY] += len(self._cuts.spread(self._order_N)[0]) if len(self._order_N) else 0
        return False

    @property
    def least_s(self) -> float:
        """No layout that is left can be faster."""
        return min(self._ready[0].least_s if self._ready else math.inf, self._next_rough_s)

    @property
    def _next_rough_s(self) -> float:
        return self._rough[self._num_opened] if self._num_opened < len(self._rough) else math.inf

    def _could_fit_N(self, rows: Ints) -> NDArray[np.bool_]:
        """Whether each of some cuts would fit without activations; the variants of others count as over the limit.

        No variant needs less than the leanest state of its cut without activations. Where memory is short most cuts
        need more than the limit even so, and to list and bound their variants would cost more than this.
        """
        lean = self._cuts.tables.leanest(self._cuts.columns.take(rows))
        fits_N = self._fits_N(lean.without_recompute(), live=0.0)
        if not fits_N.all():
            num_over = len(self._cuts.spread(rows[~fits_N])[0])
            self.num_met += num_over
            self.dropped[OVER_MEMORY] += num_over
        return fits_N

    def _could_win(self, rows: Ints, below_s: float) -> Ints:
        """Return those cuts of which some variant could beat a step time."""
        if not len(rows):
            return rows
        return rows[_least_N(self._cuts, rows, self._bounds) * self._inputs.predictor.step_factor < below_s]

    def _open(self, rows: Ints, below_s: float) -> None:
        """Make ready those variants of some cuts that fit and could beat a step time."""
        if not len(rows):
            return
        predictor = self._inputs.predictor
        _, columns = self._cuts.spread(rows)
        least_M = self._bounds.of_columns(columns) * predictor.step_factor
        self.num_met += len(columns)
        hopeful = np.flatnonzero(least_M < below_s)
        some = columns.take(hopeful)
        fits = self._fits_N(some)
        self.dropped[OVER_MEMORY] += int((~fits).sum())
        fitting = hopeful[fits]
        least_M[fitting] = np.fmax(
            least_M[fitting], self._bounds.sharpened(columns.take(fitting)) * predictor.step_factor
        )
        for row in fitting[np.argsort(least_M[fitting], kind="stable")].tolist():
            if least_M[row] < below_s:
                self._admit(columns.layout(row), float(least_M[row]))

    def _admit(self, layout: Layout, least_s: float) -> None:
        """Make a layout ready, unless one that recomputes no more is; the user's own layout is priced anyway."""
        others = self._fitting.setdefault(replace(layout, recompute=NO_RECOMPUTE), [])
        if any(other.runs_no_more_than(layout.recompute) for other in others):
            self.outdone.add(layout)
            return
        others.append(layout.recompute)
        if layout != self._inputs.job.own:
            self._num_ready += 1
            heapq.heappush(self._ready, _Ready(least_s, self._num_ready, layout))

    def _that_fit(self, rows: Ints, below_s: float, *, leanest: bool = False) -> list[Layout]:
        """List some of the cuts that fit: in their quickest state by rising bound, as far as that is below a step time.

        Or in their leanest state, as they come, which is by rising rough bound. The first of each kind of degrees is
        among them.
        """
        found: list[Layout] = []
        num_found = 0
        for first in range(0, len(rows), DIVED_AT_ONCE):
            columns = self._cuts.columns.take(rows[first : first + DIVED_AT_ONCE])
            columns = self._cuts.tables.leanest(columns) if leanest else columns
            # Memory first: where it is short it leaves few, and bounds cost more.
            columns = columns.take(np.flatnonzero(self._fits_N(columns)))
            if not leanest:
                least_N = self._bounds.of_columns(columns) * self._inputs.predictor.step_factor
                order = np.argsort(least_N, kind="stable")
                columns = columns.take(order[least_N[order] < below_s])
            first_of_kind = columns.groups(*_KIND).first_U.tolist() if len(columns) else ()
            some = sorted({*first_of_kind, *range(min(LOOKED_THROUGH, len(columns)))})
            found += [columns.layout(row) for row in some]
            num_found += len(columns)
            if num_found > LOOKED_THROUGH:
                break
        return [layout for layout in found if layout != self._inputs.job.own]

    def _could_fit(self, rows: Ints) -> bool:
        """Whether any variant of some cuts fits: all kinds of recompute are tried in the state that is leanest."""
        lean = self._cuts.tables.leanest(self._cuts.columns.take(rows))
        place_M, columns = self._cuts.spread(rows)
        in_state_M = np.ones(len(place_M), dtype=bool)
        for name in _STATE_FIELDS:
            in_state_M &= getattr(columns, name) == getattr(lean, name)[place_M]
        some = columns.take(np.flatnonzero(in_state_M))
        return bool(self._fits_N(some).any())

    def _with_peaks(self, layouts: Sequence[Layout]) -> list[Promising]:
        """Return those layouts that fit, with their peaks; their infinite bound says nothing, as they come again."""
        layouts = list(dict.fromkeys(layouts))
        peaks = self._inputs.predictor.all_peaks(layouts) if layouts else ()
        return [
            Promising(least_s=math.inf, number=number, layout=layout, peak_bytes=peak_bytes)
            for number, (layout, peak_bytes) in enumerate(zip(layouts, peaks, strict=True))
            if max(peak_bytes) <= self._limit(layout)
        ]

    def _fits_N(self, columns: LayoutColumns, *, live: float = 1.0) -> NDArray[np.bool_]:
        """Whether each of many layouts fits into its memory limit, with this part of its activations."""
        fullest_N = self._inputs.predictor.fullest_N(columns, live=live)
        fits_N: NDArray[np.bool_] = fullest_N <= limits_N(self._inputs.job, columns, self._limit)
        return fits_N

    def _limit(self, layout: Layout) -> int:
        """Return the memory limit; nothing of a layout but its communicators moves it."""
        groups = num_communicators(self._inputs.job, layout), num_group_kinds(layout)
        if groups not in self._limits:
            self._limits[groups] = self._inputs.limit_bytes(layout)
        return self._limits[groups]


def _unlike(layouts: Sequence[Layout], count: int) -> list[Layout]:
    """Return the first layout of each kind of degrees, then the others: layouts of equal degrees often fail alike."""
    first: dict[tuple[int, ...], Layout] = {}
    for layout in layouts:
        first.setdefault(attrgetter(*_KIND)(layout), layout)
    return list(dict.fromkeys([*first.values(), *layouts]))[:count]


def _rough_N(columns: LayoutColumns, bounds: BoundColumns) -> Floats:
    """Bound cuts roughly, with sequence parallelism or without, whichever is faster."""
    bare = columns.without_recompute()
    with_and_without = (replace(bare, sequence_parallel=np.full(len(bare), flag)) for flag in (0, 1))
    rough_N: Floats = np.fmin(*(bounds.rough_of_columns(each) for each in with_and_without))
    return rough_N


def _least_N(cuts: Cuts, rows: Ints, bounds: BoundColumns) -> Floats:
    """Bound cuts by the fastest of their states without recompute, as recompute only adds time."""
    least_N = np.full(len(rows), np.inf)
    place_M, columns = cuts.spread(rows)
    # A bound is no higher with overlapped reductions than without: of states that differ in nothing else one will do.
    order = np.argsort(-columns.overlap_grad_reduce, kind="stable")
    others = [getattr(columns, name) for name in _STATE_FIELDS if name != "overlap_grad_reduce"]
    codes_M = codes_of([place_M, *others])
    first = order[np.unique(codes_M[order], return_index=True)[1]]
    np.fmin.at(least_N, place_M[first], bounds.of_columns(columns.take(first).without_recompute()))
    return least_N
