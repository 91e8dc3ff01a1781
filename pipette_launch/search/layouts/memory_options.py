"""The variants of a cut: recompute, sequence parallelism, distributed optimizer, overlap."""

# N = cuts, G = groups of cuts that agree in what the states depend on, H = in what recompute depends on, M = layouts.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipette_launch.facts import Recompute
from pipette_launch.facts.layout import NO_RECOMPUTE, Ints, LayoutColumns, MemoryOptions, codes_of
from pipette_launch.megatron.rules.broken import Broken, Rules
from pipette_launch.megatron.rules.memory_options import recompute_faults, state_faults
from pipette_launch.search.layouts import axes
from pipette_launch.search.layouts.shared_lists import SharedLists

UNTIMED = "compute is timed with sequence parallelism wherever that is possible"
_FLAGS = MemoryOptions._fields[:-1]


class _Where(NamedTuple):
    """What sequence parallelism, optimizer and overlap depend on."""

    tp: int
    cp: int
    has_replicas: bool


class _Depth(NamedTuple):
    """What recompute depends on."""

    layers: frozenset[int]
    """The different numbers of layers that chunks have."""
    tp: int
    """1, or 2 for more."""


_Pair = tuple[tuple[tuple[int, ...], ...], _Depth]
"""The legal states of a cut, and what recompute depends on."""


class MemoryOptionTables:
    """The memory options of many cuts; each list is built once and shared."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._numbers: dict[Recompute, int] = {NO_RECOMPUTE: 0}
        self._states: SharedLists[_Where] = SharedLists(self._build_states, width=len(_FLAGS))
        self._depths: SharedLists[tuple[_Depth, bool]] = SharedLists(self._build_depths, width=1)
        self._pairs: SharedLists[_Pair] = SharedLists(self._build_pairs, width=len(MemoryOptions._fields))
        self._lean: SharedLists[_Pair] = SharedLists(self._build_lean, width=len(MemoryOptions._fields))

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """The kinds of recompute that rows of numbers name by their place."""
        return tuple(self._numbers)

    def first(self, columns: LayoutColumns) -> tuple[LayoutColumns, Ints, Counter[str]]:
        """Give each cut the first of its options; return also how many each has (N), and what was refused."""
        if not len(columns):
            return columns, np.zeros(0, dtype=np.int64), Counter()
        state_N, pair_N = self._places(columns, self._pairs)
        first = dict(zip(MemoryOptions._fields, self._pairs.heads[pair_N].T, strict=True))
        dropped = self._states.dropped(state_N) + self._pairs.dropped(pair_N)
        return replace(columns, **first, recomputes=self.recomputes), self._pairs.lengths[pair_N], dropped

    def spread(self, columns: LayoutColumns) -> tuple[Ints, LayoutColumns]:
        """List all variants of some cuts: for each layout the number of its cut (M), and the layouts, cut by cut."""
        return self._spread(columns, self._pairs)

    def leanest(self, columns: LayoutColumns) -> LayoutColumns:
        """Give each of some cuts the options that should need the least memory."""
        return self._spread(columns, self._lean)[1]

    def _spread(self, columns: LayoutColumns, lists: SharedLists[_Pair]) -> tuple[Ints, LayoutColumns]:
        row_M, option_M5 = lists.spread(self._places(columns, lists)[1])
        options = dict(zip(MemoryOptions._fields, option_M5.T, strict=True))
        return row_M, replace(columns.take(row_M), **options, recomputes=self.recomputes)

    def _places(self, columns: LayoutColumns, lists: SharedLists[_Pair]) -> tuple[Ints, Ints]:
        """The list of states of each cut, and its list of states with recompute, each by its place."""
        where_G, group_N = self._wheres(columns)
        depth_H, depth_N = self._depths_of(columns)
        state_G = self._states.places(where_G)
        states_G = [tuple(self._states.rows(place)) for place in state_G.tolist()]
        first, pair_N = _grouped(group_N, depth_N)
        keys = ((states_G[group_N[row]], depth_H[depth_N[row]]) for row in first.tolist())
        return state_G[group_N], lists.places(keys)[pair_N]

    def _wheres(self, columns: LayoutColumns) -> tuple[list[_Where], Ints]:
        expert_dp = columns.tp * columns.cp * columns.dp // (columns.etp * columns.ep)
        has_replicas = ((columns.dp * columns.cp > 1) | (expert_dp > 1)).astype(np.int64)
        first, group_N = _grouped(columns.tp, columns.cp, has_replicas)
        keys = zip(columns.tp[first].tolist(), columns.cp[first].tolist(), has_replicas[first].tolist(), strict=True)
        return [_Where(tp, cp, bool(replicas)) for tp, cp, replicas in keys], group_N

    def _depths_of(self, columns: LayoutColumns) -> tuple[list[_Depth], Ints]:
        even = self._rules.job.model.num_layers // (columns.pp * columns.vpp)
        has_tp = np.minimum(columns.tp, 2)
        is_even = np.array([not cut for cut in columns.cuts])[columns.layers_per_chunk]
        first, depth_N = _grouped(columns.layers_per_chunk, np.where(is_even, even, 0), has_tp)
        rows = zip(columns.layers_per_chunk[first].tolist(), even[first].tolist(), has_tp[first].tolist(), strict=True)
        return [_Depth(frozenset(columns.cuts[cut] or (layers,)), tp) for cut, layers, tp in rows], depth_N

    def _build_states(self, where: _Where, dropped: Counter[str]) -> Iterator[tuple[int, ...]]:
        """Flags of the legal states."""
        states = axes.states(self._rules, where.tp, has_replicas=where.has_replicas)
        legal = [state for state in states if not drops(state_faults(self._rules, where.tp, where.cp, state), dropped)]
        # Megatron distributes saved activations only without sequence parallelism.
        distributes = self._rules.options.distribute_saved_activations
        is_timed = any(state.sequence_parallel for state in legal) and not distributes
        for state in legal:
            if is_timed and not state.sequence_parallel:
                dropped[UNTIMED] += 1
            else:
                yield tuple(int(flag) for flag in state[:-1])

    def _build_depths(self, key: tuple[_Depth, bool], dropped: Counter[str]) -> Iterator[tuple[int, ...]]:
        """Numbers of the legal recomputes."""
        depth, parallel = key
        for recompute in axes.recomputes(self._rules.job, depth.layers):
            options = MemoryOptions(parallel, False, False, False, recompute)
            if not drops(recompute_faults(self._rules, depth.tp, depth.layers, options), dropped):
                yield (self._numbers.setdefault(recompute, len(self._numbers)),)

    def _build_pairs(self, key: _Pair, dropped: Counter[str]) -> Iterator[tuple[int, ...]]:
        """Flags and recompute of all legal options of one kind of cut, ordered."""
        states, depth = key
        place_S = self._depths.places((depth, bool(state[0])) for state in states)
        dropped += self._depths.dropped(place_S)
        numbers = [self._depths.rows(place) for place in place_S.tolist()]
        for turn in range(max(map(len, numbers), default=0)):
            for state, legal in zip(states, numbers, strict=True):
                yield from ((*state, *number) for number in legal[turn : turn + 1])

    def _build_lean(self, key: _Pair, dropped: Counter[str]) -> Iterator[tuple[int, ...]]:
        """Recompute of every layer by itself, everything sharded, no buffers for overlap: as far as that is legal."""
        rows = list(self._build_pairs(key, dropped))
        recomputes = self.recomputes

        def leanness(row: tuple[int, ...]) -> tuple[int, ...]:
            parallel, sharded, reduces, gathers, number = row
            recompute = recomputes[number]
            again = ("none", "selective", "full").index(recompute.granularity)
            layers = -recompute.num_layers if recompute.method == "uniform" else recompute.num_layers - (1 << 20)
            return again, layers, len(recompute.modules), sharded, parallel, -reduces, -gathers

        yield max(rows, key=leanness)


def drops(faults: Broken, dropped: Counter[str]) -> bool:
    """Count the first broken rule by its reason; whether there is one."""
    broken = next(faults, None)
    if broken:
        dropped[broken.reason] += 1
    return broken is not None


def _grouped(*columns: Ints) -> tuple[Ints, Ints]:
    """Group rows that agree in some columns: a row of each group, and the group of each row."""
    _, first, group = np.unique(codes_of(columns), return_index=True, return_inverse=True)
    return first.astype(np.int64), group.reshape(-1).astype(np.int64)
