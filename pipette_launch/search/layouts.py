"""Lists of values that many combinations share: each is built once, and numpy repeats combinations for their values."""

# D = combinations, N = combinations with each value of their list.
# N = cuts, G = groups of cuts that agree in what the states depend on, H = in what recompute depends on, M = layouts.
# D = degrees, N = cuts, M = layouts.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.facts import ComputeCase, Job, Layout, Recompute
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.layout import NO_RECOMPUTE, Degrees, Ints, LayoutColumns, MemoryOptions, codes_of
from pipette_launch.megatron.rules.broken import Broken, Rules
from pipette_launch.megatron.rules.degrees import (
    batch_faults,
    chunks_faults,
    context_faults,
    expert_faults,
    pipeline_faults,
    replicas_faults,
    schedule_faults,
    tensor_faults,
)
from pipette_launch.megatron.rules.judge import broken_rule
from pipette_launch.megatron.rules.memory_options import recompute_faults, state_faults
from pipette_launch.search import layout_axes
from pipette_launch.search.layout_axes import LayerSeconds, by_flops, by_parts

K = TypeVar("K", bound=Hashable)

Build = Callable[[K, "Counter[str]"], Iterable[tuple[int, ...]]]
"""SharedLists what follows a key, and counts what is refused."""


class SharedLists(Generic[K]):
    """A list of rows of numbers for each key, with the reasons why others are not in it."""

    def __init__(self, build: Build[K], *, width: int) -> None:
        self._build = build
        self._width = width
        self._places: dict[K, int] = {}
        self._rows: list[list[tuple[int, ...]]] = []
        self._faults: list[Counter[str]] = []

    def place(self, key: K) -> int:
        """Return the place of a key's list, which is built when first asked for."""
        if key not in self._places:
            faults: Counter[str] = Counter()
            rows = list(self._build(key, faults))
            self._places[key] = len(self._rows)
            self._rows.append(rows)
            self._faults.append(faults)
        return self._places[key]

    def places(self, keys: Iterable[K]) -> Ints:
        """Return the places of some keys' lists."""
        return np.array([self.place(key) for key in keys], dtype=np.int64)

    @property
    def lengths(self) -> Ints:
        """Rows of each list."""
        return np.array([len(rows) for rows in self._rows], dtype=np.int64)

    @property
    def heads(self) -> Ints:
        """The first row of each list; zeros for an empty one."""
        return np.array([rows[0] if rows else (0,) * self._width for rows in self._rows], dtype=np.int64)

    def rows(self, place: int) -> list[tuple[int, ...]]:
        """One list."""
        return self._rows[place]

    def dropped(self, place_D: Ints) -> Counter[str]:
        """Count what is refused, as often as its list is used."""
        total: Counter[str] = Counter()
        uses = np.bincount(place_D, minlength=len(self._faults)).tolist()
        for faults, times in zip(self._faults, uses, strict=True):
            if times:
                total.update({reason: count * times for reason, count in faults.items()})
        return total

    def spread(self, place_D: Ints) -> tuple[Ints, Ints]:
        """Repeat each combination for every row of its list: its number (N), and the rows (N x width)."""
        lengths = self.lengths
        starts = np.cumsum(lengths) - lengths
        counts_D = lengths[place_D] if len(place_D) else np.zeros(0, dtype=np.int64)
        firsts_D = np.cumsum(counts_D) - counts_D
        row_N = np.repeat(np.arange(len(place_D)), counts_D)
        at_N = np.arange(len(row_N)) - firsts_D[row_N] + (starts[place_D] if len(place_D) else counts_D)[row_N]
        table = np.array([row for rows in self._rows for row in rows], dtype=np.int64).reshape(-1, self._width)
        return row_N.astype(np.int64), table[at_N]


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
        states = layout_axes.states(self._rules, where.tp, has_replicas=where.has_replicas)
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
        for recompute in layout_axes.recomputes(self._rules.job, depth.layers):
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


MOST = 1 << 17
"""More cuts than these are thinned out, by what is least likely to be quick."""
MANY_TIMES = 8
"""Layers are balanced by the times of the user's micro-batch, and by those of one so many times as large."""
FEWEST_TOKENS = 512
"""Where cuts are thinned out, a context rank keeps so many tokens of a sequence."""
_REST = ("vpp", "microbatch_group_size", "layers_per_chunk", "chunks_after_mtp", "micro_batch_size")
_Split: TypeAlias = tuple[int, int, int]
"""Virtual stages, place of the layers of chunks in a list, chunks behind multi-token prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """The legal cuts as columns, each as its first variant; those that keep TP in a host come first."""

    tables: MemoryOptionTables
    columns: LayoutColumns
    dropped: dict[str, int]
    """Combinations by the first constraint that they break; one that an early axis breaks counts once."""
    own_fault: str | None
    """The constraint that the user's own layout breaks, if any."""
    num_layouts: int
    """All legal layouts: all variants of all cuts."""

    def __len__(self) -> int:
        """N."""
        return len(self.columns)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The first variant of every cut; some microseconds each."""
        return tuple(self.columns.layout(row) for row in range(len(self)))

    def spread(self, rows: Ints) -> tuple[Ints, LayoutColumns]:
        """List all legal variants of some cuts: for each the place of its cut in `rows` (M), and the layouts by cut.

        The cheapest recompute comes first, and the quickest kinds of each.
        """
        return self.tables.spread(self.columns.take(rows))

    def neighbours(self, layout: Layout) -> LayoutColumns:
        """List the legal layouts with the same degrees that differ in one choice.

        A choice is the micro-batch, how the layers are cut into chunks, the group of micro-batches, sequence
        parallelism, the distributed optimizer, the overlaps, or recompute. What has to follow a choice may differ with
        it: the group follows micro-batch and chunks, the gathers' overlap follows the optimizer. Other degrees move
        ranks to other cells, so that the placement says nothing: that is no neighbour.
        """
        same_N = np.ones(len(self), dtype=bool)
        for name in Degrees._fields:
            same_N &= getattr(self.columns, name) == getattr(layout, name)
        rows = np.flatnonzero(same_N)
        rows = rows[_num_cut_choices(self.columns.take(rows), layout) <= 1]
        _, found = self.spread(rows)
        num_M = _num_cut_choices(found, layout) + _num_option_choices(found, layout)
        return found.take(np.flatnonzero(num_M == 1))


def cuts(
    job: Job,
    *,
    world_size: int,
    devices_per_host: int,
    device_kind: str,
    table: ComputeTable | None = None,
    rooms: Domains | None = None,
) -> Cuts:
    """Enumerate the legal degrees, chunks and micro-batches of a job.

    TP beyond `devices_per_host` is legal in Megatron, so it stays in, after the cuts that keep TP in a host; the cost
    model prices its slow links. Only where there are more than `MOST` cuts, some are set aside, and counted.

    Args:
        job: the model, the batch, the user's own layout and its pins.
        world_size: ranks of the job.
        devices_per_host: slots of one host.
        device_kind: `cuda` or `cpu`.
        table: measured times, by which uneven stages are balanced; by FLOPs without, or for a TP that was not measured.
        rooms: the hosts and their NVLink domains; None where domains are not known.

    """
    rules = Rules.of(job, device_kind=device_kind, rooms=rooms or Domains(devices_per_host=devices_per_host))
    dropped: Counter[str] = Counter()
    grids, chunks_and_batches = _ExpertGrids(rules), _ChunksAndBatches(rules, table)
    dense_D4 = np.array([*_dense_degrees(rules, world_size, dropped)], dtype=np.int64).reshape(-1, 4)
    row_D, expert_D3 = grids.spread(dense_D4, dropped)
    degrees_D7 = np.concatenate([dense_D4[row_D], expert_D3], axis=1)
    places_D = chunks_and_batches.places(dense_D4)[row_D]
    kept_D = _thinned(job, degrees_D7, chunks_and_batches.lists.lengths, places_D, devices_per_host, dropped)
    degrees_D7, places_D = degrees_D7[kept_D], places_D[kept_D]
    dropped += chunks_and_batches.lists.dropped(places_D)
    row_N, rest_N5 = chunks_and_batches.lists.spread(places_D)
    none = np.zeros(len(row_N), dtype=np.int64)
    columns = LayoutColumns(
        **dict(zip(Degrees._fields, degrees_D7[row_N].T, strict=True)),
        **dict(zip(_REST, rest_N5.T, strict=True)),
        **dict.fromkeys(MemoryOptions._fields, none),
        recomputes=(NO_RECOMPUTE,),
        cuts=tuple(chunks_and_batches.cuts),
    )
    tables = MemoryOptionTables(rules)
    columns, count_N, refused = tables.first(columns.take(np.argsort(columns.tp > devices_per_host, kind="stable")))
    own_broken = broken_rule(rules, job.own)
    return Cuts(
        tables=tables,
        columns=columns.take(np.flatnonzero(count_N)),
        dropped=dict((dropped + refused).most_common()),
        own_fault=own_broken.reason if own_broken else None,
        num_layouts=int(count_N.sum()),
    )


def compute_cases(own: Layout, found: LayoutColumns) -> tuple[ComputeCase, ...]:
    """Name the distinct shapes of computation that layouts need, most promising first.

    The user's own comes first: nothing can be compared without it. Then the rest by how many doublings they lie from
    one tensor rank, one context rank and micro-batches of two, where jobs that fit run best; those that more layouts
    share win ties.
    """
    groups = found.groups("tp", "cp", "micro_batch_size")
    sizes = np.bincount(groups.group_N, minlength=len(groups.first_U)).tolist()
    shapes = (column[groups.first_U].tolist() for column in (found.tp, found.cp, found.micro_batch_size))
    cases = [ComputeCase(tp=tp, cp=cp, micro_batch_size=size) for tp, cp, size in zip(*shapes, strict=True)]
    count = dict(zip(cases, sizes, strict=True))

    def doublings(case: ComputeCase) -> float:
        return math.log2(case.tp) + math.log2(case.cp) + abs(math.log2(case.micro_batch_size) - 1)

    first = ComputeCase(tp=own.tp, cp=own.cp, micro_batch_size=own.micro_batch_size)
    rest = sorted(cases, key=lambda case: (doublings(case), -count[case], case))
    return tuple(dict.fromkeys((first, *rest)))


def _dense_degrees(rules: Rules, world_size: int, dropped: Counter[str]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the legal TP, PP, DP and CP; each is checked before the next is looked at."""
    job = rules.job
    for tp in layout_axes.values(job, "tp", layout_axes.divisors(world_size)):
        if world_size % tp or drops(tensor_faults(rules, tp), dropped):
            continue
        for pp in layout_axes.values(job, "pp", layout_axes.divisors(world_size // tp)):
            if world_size % (tp * pp) or drops(pipeline_faults(rules, pp), dropped):
                continue
            for cp in layout_axes.values(job, "cp", layout_axes.divisors(world_size // (tp * pp))):
                dp, rest = divmod(world_size, tp * pp * cp)
                if rest or dp not in layout_axes.values(job, "dp", (dp,)):
                    continue
                if not drops(chain(context_faults(rules, tp, cp), replicas_faults(rules, dp, cp)), dropped):
                    yield tp, pp, dp, cp


class _ExpertGrids:
    """The grids of experts that may go with dense degrees: EP, ETP and the rank order."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._lists: SharedLists[tuple[int, int, int, int]] = SharedLists(self._rows, width=3)

    def spread(self, dense_D4: Ints, dropped: Counter[str]) -> tuple[Ints, Ints]:
        """Repeat dense degrees for each of their grids."""
        job = self._rules.job
        # Grids depend on the ranks of a stage; on TP only where ETP follows it, on DP only under the other rank order.
        follows, asks = not job.model.num_experts, any(layout_axes.rank_orders(job))
        keys = (
            (pp, tp * dp * cp, tp if follows else 1, dp if asks else tp * dp * cp // (tp if follows else 1))
            for tp, pp, dp, cp in dense_D4.tolist()
        )
        places = self._lists.places(keys)
        dropped += self._lists.dropped(places)
        return self._lists.spread(places)

    def _rows(self, key: tuple[int, int, int, int], dropped: Counter[str]) -> Iterator[tuple[int, ...]]:
        pp, ranks, tp, dp = key
        job = self._rules.job
        for ep in layout_axes.expert_sizes(job):
            for etp in layout_axes.expert_tensor_sizes(job, tp):
                for swapped in layout_axes.rank_orders(job):
                    degrees = Degrees(tp, pp, dp, ranks // (tp * dp), ep, etp, swapped)
                    if not drops(expert_faults(self._rules, degrees), dropped):
                        yield ep, etp, int(swapped)
                        break


class _ChunksAndBatches:
    """Chunks, micro-batches and their groups that may go with degrees; one list for all of equal DP, PP and chunks."""

    def __init__(self, rules: Rules, table: ComputeTable | None) -> None:
        self.cuts: dict[tuple[int, ...], int] = {(): 0}
        self.lists: SharedLists[tuple[int, int, tuple[_Split, ...]]] = SharedLists(self._rows, width=len(_REST))
        """Rows of the fields `_REST`; of the layers of chunks, their place in `cuts`."""
        self._rules = rules
        self._table = table
        self._seconds: dict[int, tuple[LayerSeconds, ...]] = {}
        self._chunks: dict[tuple[int, int], tuple[_Split, ...]] = {}

    def places(self, dense_D4: Ints) -> Ints:
        """Which list follows these dense degrees."""
        return self.lists.places((dp, pp, self._chunks_of(tp, pp)) for tp, pp, dp, _ in dense_D4.tolist())

    def _chunks_of(self, tp: int, pp: int) -> tuple[_Split, ...]:
        if (tp, pp) not in self._chunks:
            chunks = (layout_axes.splits(self._rules.job, pp, seconds) for seconds in self._seconds_of(tp))
            self._chunks[tp, pp] = tuple(
                (vpp, self.cuts.setdefault(cut, len(self.cuts)), after)
                for vpp, cut, after in dict.fromkeys(chain(*chunks))
            )
        return self._chunks[tp, pp]

    def _seconds_of(self, tp: int) -> tuple[LayerSeconds, ...]:
        """Times of the parts at this TP, in the measured cases nearest to the user's own and to one of many tokens.

        The host launches many kernels for a layer and few for the head: where a micro-batch is so small that it sets
        the time, a head is worth fewer layers than where the device does.
        """
        if tp not in self._seconds:
            job = self._rules.job
            own = ComputeCase(tp=tp, cp=job.own.cp, micro_batch_size=job.own.micro_batch_size)
            cases = (own, replace(own, micro_batch_size=MANY_TIMES * own.micro_batch_size)) if self._table else ()
            found = [parts for case in cases if self._table and (parts := self._table.part_seconds(case))]
            self._seconds[tp] = tuple(by_parts(job.model, parts) for parts in found) or (by_flops(job.model),)
        return self._seconds[tp]

    def _rows(self, key: tuple[int, int, tuple[_Split, ...]], dropped: Counter[str]) -> Iterator[tuple[int, ...]]:
        dp, pp, chunks = key
        rules, job = self._rules, self._rules.job
        samples = job.batch.global_batch_size // dp
        sizes = layout_axes.values(
            job, "micro_batch_size", layout_axes.micro_batch_sizes(samples, own=job.own.micro_batch_size)
        )
        legal = [size for size in sizes if not drops(batch_faults(rules, dp, size), dropped)]
        if not chunks:
            dropped[f"more pipeline ranks than num_layers={job.model.num_layers}"] += 1
        layers_of = list(self.cuts)
        for vpp, cut, after in chunks:
            if drops(chunks_faults(rules, pp, vpp, layers_of[cut]), dropped):
                continue
            for size in legal:
                for group in layout_axes.group_sizes(job, pp, vpp, samples // size):
                    if not drops(schedule_faults(rules, pp, vpp, group, size * dp), dropped):
                        yield vpp, group, cut, after, size


def _thinned(
    job: Job, degrees_D7: Ints, lengths: Ints, places_D: Ints, devices_per_host: int, dropped: Counter[str]
) -> Ints:
    """Set degrees aside while there are more than `MOST` cuts, rule by rule; the user's own values always stay."""
    kept = np.arange(len(degrees_D7), dtype=np.int64)
    tp_D, _, _, cp_D, _, etp_D, _ = degrees_D7.T
    own = job.own
    context = max(own.cp, job.model.seq_length // FEWEST_TOKENS)
    asides = (
        ("etp", etp_D > max(devices_per_host, own.etp), "tensor parallelism of the experts beyond a host"),
        ("cp", cp_D > context, f"contexts of fewer than {FEWEST_TOKENS} tokens"),
        ("tp", tp_D > max(devices_per_host, own.tp), "tensor parallelism beyond a host"),
    )
    for name, is_aside_D, words in asides:
        count_D = lengths[places_D[kept]] if len(kept) else kept
        if count_D.sum() <= MOST or name in job.pinned:
            continue
        aside = is_aside_D[kept]
        number = int(count_D[aside].sum())
        if number:
            dropped[f"set aside, as there are more than {MOST}: {words}"] += number
        kept = kept[~aside]
    return kept


def _num_cut_choices(columns: LayoutColumns, layout: Layout) -> Ints:
    size_N = columns.micro_batch_size != layout.micro_batch_size
    cut = np.array([each == layout.layers_per_chunk for each in columns.cuts])
    chunks_N = (columns.vpp != layout.vpp) | ~cut[columns.layers_per_chunk]
    chunks_N |= columns.chunks_after_mtp != layout.chunks_after_mtp
    group_N = (columns.microbatch_group_size != layout.microbatch_group_size) & ~size_N & ~chunks_N
    num_N: Ints = size_N.astype(np.int64) + chunks_N + group_N
    return num_N


def _num_option_choices(columns: LayoutColumns, layout: Layout) -> Ints:
    again = np.array([each == layout.recompute for each in columns.recomputes])
    optimizer_N = columns.use_distributed_optimizer != layout.use_distributed_optimizer
    overlap_N = columns.overlap_grad_reduce != layout.overlap_grad_reduce
    overlap_N |= (columns.overlap_param_gather != layout.overlap_param_gather) & ~optimizer_N
    parallel_N = columns.sequence_parallel != layout.sequence_parallel
    num_N: Ints = parallel_N.astype(np.int64) + optimizer_N + overlap_N + ~again[columns.recompute]
    return num_N
