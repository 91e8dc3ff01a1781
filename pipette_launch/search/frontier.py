"""The layouts that could still be the fastest, by rising lower bound; a layout is built when the search reaches it."""

# N = base layouts, M = their variants.

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.memory.overhead import num_communicators, num_group_kinds
from pipette_launch.cost.step.step_bounds import BoundColumns
from pipette_launch.facts import Layout, Recompute
from pipette_launch.facts.layout import FLAG_WORDS, NO_RECOMPUTE, Floats, Ints, LayoutColumns
from pipette_launch.megatron.performance import plannable_offload
from pipette_launch.search.candidates import NOT_MEASURED, OVER_MEMORY, Promising, SearchInputs, limits_N
from pipette_launch.search.layouts import BaseLayouts
from pipette_launch.search.slots import IsLate

PRUNED = "its bound shows that no placement of it can win"
UNPROMISING = "layouts of the same degrees with lower bounds look slower than the best"
DOMINATED = "another that runs less again in the backward fits too, and is no slower"
OPENED_AT_ONCE = 1024
"""Number of base layouts whose variants are listed in one call, which is cheaper than one call for each."""
DIVED_AT_ONCE = 1024
LOOKED_THROUGH = 64
"""Number of layouts among which the search looks for layouts with less memory."""
OFFLOAD_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of modules whose activations a plan may offload."""
_DEGREES = ("tp", "pp", "cp", "ep")
ALL_DEGREES = (*_DEGREES, "etp")
"""Degrees by which the ranked list groups layouts."""

_Ready: TypeAlias = tuple[float, int, Layout]
"""Entry of a heap: (lower bound in seconds, position in the order of finding, layout). Tuples are compared fast."""


class Frontier:
    """Lists the variants of base layouts by rising bound, except variants that do not fit or cannot be priced.

    A base layout is bounded twice: roughly, then variant by variant. A base layout is dropped if its rough bound
    exceeds the best step so far. Memory is computed only for the layouts that remain.
    """

    def __init__(self, inputs: SearchInputs, base: BaseLayouts, bounds: BoundColumns) -> None:
        """Compute a rough lower bound of the step time of every base layout."""
        self._inputs, self._base, self._bounds = inputs, base, bounds
        self.dropped: Counter[str] = Counter()
        bare = base.columns.without_recompute()
        with_and_without = (replace(bare, sequence_parallel=np.full(len(bare), flag)) for flag in (0, 1))
        rough_N = np.fmin(*map(bounds.rough_of_columns, with_and_without)) * inputs.predictor.step_factor
        unknown = np.flatnonzero(np.isnan(rough_N))
        if len(unknown):
            self.dropped[NOT_MEASURED] = len(base.variants(unknown)[0])
        self._order_N = np.argsort(rough_N, kind="stable")[: len(rough_N) - len(unknown)]
        self._rough = rough_N[self._order_N].tolist()
        self._num_opened = 0
        self._ready: list[_Ready] = []
        self._num_ready = 0
        self._fitting: dict[Layout, list[Recompute]] = {}
        self.dominated: set[Layout] = set()
        """Layouts that fit but are useless, because a layout that differs only by less recompute fits too."""
        self._limits: dict[tuple[int, int], int] = {}

    def dive(self, count: int, *, below_s: float = math.inf) -> list[Promising]:
        """Return layouts that fit: up to `count` with the quickest flags, and `count` / 2 with the leanest flags.

        The returned layouts give the search a first step time to beat. `take` returns the same layouts again in the
        order of bounds. Base layouts with a rough bound above `below_s` are left out.
        """
        rows = self._order_N[: bisect.bisect_left(self._rough, below_s)]
        return self._fitting_ones(
            [*_unlike(self._quickest(rows, below_s), count), *_unlike(self._leanest(rows), count // 2)]
        )

    def take(self, count: int, *, below_s: float = math.inf, is_late: IsLate = lambda: False) -> list[Promising]:
        """Return at most `count` next layouts with bounds below a step time; no variants are listed after `is_late`."""
        while self._next_rough_s < min(below_s, self._next_ready_s) and not is_late():
            stop = min(self._num_opened + OPENED_AT_ONCE, bisect.bisect_left(self._rough, below_s))
            rows = self._order_N[self._num_opened : stop]
            self._num_opened = stop
            self._open(rows[self._could_fit_N(rows)], below_s)
        taken: list[_Ready] = []
        while len(taken) < count and self._next_ready_s < below_s:
            taken.append(heapq.heappop(self._ready))
        return self._with_peaks(taken)

    def leaner(self, count: int, *, most_bytes: float, below_s: float) -> list[Promising]:
        """Return `count` layouts that need at most `most_bytes`, by rising bound up to a step time."""
        rows = self._order_N[: bisect.bisect_left(self._rough, below_s)]
        if not len(rows):
            return []
        different = self._base.columns.take(rows).groups(*ALL_DEGREES, "vpp", "micro_batch_size").first_U
        spread = np.linspace(0, len(different) - 1, min(len(different), OPENED_AT_ONCE)).astype(np.int64)
        _, columns = self._base.variants(rows[np.sort(different)[spread]])
        fullest_N = self._inputs.predictor.fullest_N(columns)
        fits_N = fullest_N <= np.minimum(limits_N(self._inputs.job, columns, self._limit), most_bytes)
        columns = columns.take(np.flatnonzero(fits_N))
        least_N = self._bounds_s(columns)
        first = np.argsort(least_N, kind="stable")[:count]
        return self._with_peaks([(float(least_N[row]), row, columns.layout(row)) for row in first.tolist()])

    def with_offloading(self, layout: Layout, *, below_s: float) -> list[Promising]:
        """Return a layout without recompute, and neighbours, that fit only if a plan offloads activations.

        Each has the least sufficient share of offloaded modules, and a bound below a step time.
        """
        sets = plannable_offload(self._inputs.job) if self._inputs.measurements.host_bytes_per_s else []
        bare = replace(layout, recompute=NO_RECOMPUTE)
        near = self._base.neighbours(bare) if sets else LayoutColumns.of([])
        plain = [
            near.layout(row) for row in np.flatnonzero(near.recompute == near.recomputes.index(NO_RECOMPUTE)).tolist()
        ]
        columns = LayoutColumns.of([bare, *plain] if sets else [])
        columns = columns.take(np.flatnonzero(~self._fits_N(columns)))
        columns = columns.take(np.flatnonzero(self._bounds_s(columns) < below_s))
        found: list[Layout] = []
        for modules, share in product(sets, OFFLOAD_SHARES):
            option = replace(NO_RECOMPUTE, offload_modules=modules, offload_share=share)
            columns = replace(columns, recomputes=(option,))
            fits_N = self._fits_N(columns)
            found += [columns.layout(row) for row in np.flatnonzero(fits_N).tolist()]
            columns = columns.take(np.flatnonzero(~fits_N))
        return self._fitting_ones(found)

    def over_the_limit(self, *, live: float) -> list[Promising]:
        """Return layouts of several chunks that fit only with the share `live` of activations, by rising bound."""
        order_N = self._order_N[self._base.columns.vpp[self._order_N] > 1]
        _, columns = self._base.variants(order_N[:OPENED_AT_ONCE])
        columns = columns.take(np.flatnonzero(~self._fits_N(columns) & self._fits_N(columns, live=live)))
        least_N = self._bounds_s(columns)
        order = np.argsort(least_N, kind="stable")[:LOOKED_THROUGH].tolist()
        return self._with_peaks([(float(least_N[row]), row, columns.layout(row)) for row in order])

    def find_any(self) -> bool:
        """Return whether some layout fits and can be priced; if none fits, count all as over the limit."""
        if self.dive(1):
            return True
        for first in range(0, len(self._order_N), OPENED_AT_ONCE):
            rows = self._order_N[first : first + OPENED_AT_ONCE]
            lean = self._base.tables.leanest(self._base.columns.take(rows))
            place_M, columns = self._base.variants(rows)
            is_lean_M = np.ones(len(place_M), dtype=bool)
            for name in FLAG_WORDS:
                is_lean_M &= getattr(columns, name) == getattr(lean, name)[place_M]
            # Check all kinds of recompute, because a layout may fit in memory only with one of these kinds.
            if self._fits_N(columns.take(np.flatnonzero(is_lean_M))).any():
                return True
        self.dropped[OVER_MEMORY] += len(self._base.variants(self._order_N)[0]) if len(self._order_N) else 0
        return False

    @property
    def least_s(self) -> float:
        """Lower bound in seconds over all layouts that `take` has not returned yet."""
        return min(self._next_ready_s, self._next_rough_s)

    @property
    def _next_ready_s(self) -> float:
        return self._ready[0][0] if self._ready else math.inf

    @property
    def _next_rough_s(self) -> float:
        return self._rough[self._num_opened] if self._num_opened < len(self._rough) else math.inf

    def _bounds_s(self, columns: LayoutColumns) -> Floats:
        return self._bounds.of_columns(columns) * self._inputs.predictor.step_factor

    def _with_peaks(self, found: Sequence[_Ready]) -> list[Promising]:
        peaks = self._inputs.predictor.all_peaks([layout for _, _, layout in found]) if found else ()
        return [
            Promising(least_s=least_s, number=number, layout=layout, peak_bytes=peak_bytes)
            for (least_s, number, layout), peak_bytes in zip(found, peaks, strict=True)
        ]

    def _could_fit_N(self, rows: Ints) -> NDArray[np.bool_]:
        """Return whether base layouts fit without activations; variants of unfit base layouts count as over the limit.

        No variant needs less memory than the leanest variant without activations. If memory is short, most base layouts
        fail this check, which costs less than listing and bounding their variants.
        """
        lean = self._base.tables.leanest(self._base.columns.take(rows))
        fits_N = self._fits_N(lean.without_recompute(), live=0.0)
        if not fits_N.all():
            self.dropped[OVER_MEMORY] += len(self._base.variants(rows[~fits_N])[0])
        return fits_N

    def _open(self, rows: Ints, below_s: float) -> None:
        """List the variants of base layouts, and keep variants that fit and could beat a step time."""
        if not len(rows):
            return
        _, columns = self._base.variants(rows)
        least_M = self._bounds_s(columns)
        may_win = np.flatnonzero(least_M < below_s)
        fits = self._fits_N(columns.take(may_win))
        self.dropped[OVER_MEMORY] += int((~fits).sum())
        fitting = may_win[fits]
        for row in fitting[np.argsort(least_M[fitting], kind="stable")].tolist():
            self._admit(columns.layout(row), float(least_M[row]))

    def _admit(self, layout: Layout, least_s: float) -> None:
        """Keep a layout unless it is the user's own (priced anyway) or a kept layout needs no more recompute."""
        others = self._fitting.setdefault(replace(layout, recompute=NO_RECOMPUTE), [])
        if any(other.runs_no_more_than(layout.recompute) for other in others):
            self.dominated.add(layout)
            return
        others.append(layout.recompute)
        if layout != self._inputs.job.own:
            self._num_ready += 1
            heapq.heappush(self._ready, (least_s, self._num_ready, layout))

    def _quickest(self, rows: Ints, below_s: float) -> list[Layout]:
        """Return first base layouts that fit with the quickest flags, by rising bound up to a step time."""

        def by_bound(columns: LayoutColumns) -> LayoutColumns:
            columns = columns.take(np.flatnonzero(self._fits_N(columns)))
            least_N = self._bounds_s(columns)
            order = np.argsort(least_N, kind="stable")
            return columns.take(order[least_N[order] < below_s])

        return self._first_that_fit(rows, by_bound)

    def _leanest(self, rows: Ints) -> list[Layout]:
        """Return first base layouts that fit with the leanest flags, by rising rough bound."""

        def lean(columns: LayoutColumns) -> LayoutColumns:
            columns = self._base.tables.leanest(columns)
            return columns.take(np.flatnonzero(self._fits_N(columns)))

        return self._first_that_fit(rows, lean)

    def _first_that_fit(self, rows: Ints, that_fit: Callable[[LayoutColumns], LayoutColumns]) -> list[Layout]:
        """Return first layouts that `that_fit` selects from base layouts, and the first of each set of degrees."""
        found: list[Layout] = []
        num_found = 0
        for first in range(0, len(rows), DIVED_AT_ONCE):
            columns = that_fit(self._base.columns.take(rows[first : first + DIVED_AT_ONCE]))
            first_of_degrees = columns.groups(*_DEGREES).first_U.tolist() if len(columns) else ()
            some = sorted({*first_of_degrees, *range(min(LOOKED_THROUGH, len(columns)))})
            found += [columns.layout(row) for row in some]
            num_found += len(columns)
            if num_found > LOOKED_THROUGH:
                break
        return [layout for layout in found if layout != self._inputs.job.own]

    def _fitting_ones(self, layouts: Sequence[Layout]) -> list[Promising]:
        """Return the layouts that fit in memory, without bounds."""
        found = self._with_peaks([(math.inf, number, layout) for number, layout in enumerate(dict.fromkeys(layouts))])
        return [one for one in found if max(one.peak_bytes) <= self._limit(one.layout)]

    def _fits_N(self, columns: LayoutColumns, *, live: float = 1.0) -> NDArray[np.bool_]:
        """Return whether each layout fits in memory with the share `live` of its activations."""
        fullest_N = self._inputs.predictor.fullest_N(columns, live=live)
        return np.asarray(fullest_N <= limits_N(self._inputs.job, columns, self._limit))

    def _limit(self, layout: Layout) -> int:
        # The memory limit of a layout depends only on its communicators.
        groups = num_communicators(self._inputs.job, layout), num_group_kinds(layout)
        if groups not in self._limits:
            self._limits[groups] = self._inputs.limit_bytes(layout)
        return self._limits[groups]


def _unlike(layouts: Sequence[Layout], count: int) -> list[Layout]:
    """Return first one layout of each set of degrees, because layouts of equal degrees often fail together."""
    first: dict[tuple[int, ...], Layout] = {}
    for layout in layouts:
        first.setdefault(attrgetter(*_DEGREES)(layout), layout)
    return list(dict.fromkeys([*first.values(), *layouts]))[:count]
