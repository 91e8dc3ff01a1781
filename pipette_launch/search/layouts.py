"""All layouts that Megatron allows for a job, and the number of refused layouts by reason.

A base layout has degrees, layer split and micro-batch. The variants of a base layout add memory options: recompute,
sequence parallelism, distributed optimizer and overlap.
"""

# D = combinations (such as degrees), N = base layouts, M = variants, G = groups with equal flags, H = of equal depth.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.facts import ComputeCase, Job, Layout, Recompute
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.layout import FLAG_WORDS, NO_RECOMPUTE, Degrees, Ints, LayoutColumns, MemoryOptions, grouped
from pipette_launch.megatron.rules import degrees
from pipette_launch.megatron.rules.broken import Broken, Rules
from pipette_launch.megatron.rules.judge import broken_rule
from pipette_launch.megatron.rules.memory_options import recompute_faults, state_faults
from pipette_launch.search import layout_axes
from pipette_launch.search.layout_axes import LayerSeconds, by_flops, by_parts

K = TypeVar("K", bound=Hashable)


class SharedLists(Generic[K]):
    """Lists of rows (tuples of field values) by key. Each list is built once and shared; refused rows are counted."""

    def __init__(self, build: Callable[[K, Counter[str]], Iterable[tuple[int, ...]]], *, width: int) -> None:
        """Take a function that yields the rows of a key, and counts refused rows by reason."""
        self._build = build
        self._width = width
        self._places: dict[K, int] = {}
        self._rows: list[list[tuple[int, ...]]] = []
        self._faults: list[Counter[str]] = []

    def place(self, key: K) -> int:
        """Return the index of a key's list; the list is built at the first call."""
        if key not in self._places:
            self._faults.append(Counter())
            self._rows.append(list(self._build(key, self._faults[-1])))
            self._places[key] = len(self._rows) - 1
        return self._places[key]

    def places(self, keys: Iterable[K]) -> Ints:
        """Return the indices of the lists of several keys."""
        return np.array([self.place(key) for key in keys], dtype=np.int64)

    @property
    def lengths(self) -> Ints:
        """Number of rows in each list."""
        return np.array([len(rows) for rows in self._rows], dtype=np.int64)

    @property
    def heads(self) -> Ints:
        """First row of each list; zeros for an empty list."""
        return np.array([rows[0] if rows else (0,) * self._width for rows in self._rows], dtype=np.int64)

    def rows(self, place: int) -> list[tuple[int, ...]]:
        """Return the rows of the list with the index `place`."""
        return self._rows[place]

    def dropped(self, place_D: Ints) -> Counter[str]:
        """Count refused rows by reason; the rows of a list count once for each use of the list."""
        total: Counter[str] = Counter()
        uses = np.bincount(place_D, minlength=len(self._faults)).tolist()
        for faults, times in zip(self._faults, uses, strict=True):
            total.update({reason: count * times for reason, count in faults.items() if times})
        return total

    def spread(self, place_D: Ints) -> tuple[Ints, Ints]:
        """Repeat each combination for each row of its list; return the combinations' indices (N) and the rows."""
        lengths = self.lengths
        counts_D = lengths[place_D]
        row_N = np.repeat(np.arange(len(place_D)), counts_D)
        # Position of each row in its own list.
        inside_N = np.arange(len(row_N)) - (np.cumsum(counts_D) - counts_D)[row_N]
        table = np.array([row for rows in self._rows for row in rows], dtype=np.int64).reshape(-1, self._width)
        return row_N.astype(np.int64), table[(np.cumsum(lengths) - lengths)[place_D][row_N] + inside_N]


UNTIMED = "compute is timed with sequence parallelism wherever that is possible"


_Flags: TypeAlias = tuple[int, ...]
"""Sequence parallelism, distributed optimizer and overlaps of a layout, 0 or 1 each."""


class _Depth(NamedTuple):
    """Fields that decide the legal kinds of recompute."""

    layers: frozenset[int]
    """Distinct numbers of layers per chunk."""
    tp: int
    """1 without tensor parallelism, else 2, because the legal kinds of recompute do not depend on the degree."""


_Pair: TypeAlias = tuple[tuple[_Flags, ...], _Depth]
"""Legal flags of a base layout, and the fields that decide recompute."""


class MemoryOptionTables:
    """Legal memory options of many base layouts."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._numbers: dict[Recompute, int] = {NO_RECOMPUTE: 0}
        self._flags: SharedLists[tuple[int, int, bool]] = SharedLists(self._build_flags, width=len(FLAG_WORDS))
        self._depths: SharedLists[tuple[_Depth, bool]] = SharedLists(self._build_depths, width=1)
        self._pairs: SharedLists[_Pair] = SharedLists(self._build_pairs, width=len(MemoryOptions._fields))
        self._lean: SharedLists[_Pair] = SharedLists(self._build_lean, width=len(MemoryOptions._fields))

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Kinds of recompute; rows store a kind as its index in this tuple."""
        return tuple(self._numbers)

    def first(self, columns: LayoutColumns) -> tuple[LayoutColumns, Ints, Counter[str]]:
        """Give each base layout its first options; also return the numbers of variants (N), and the refused options."""
        if not len(columns):
            return columns, np.zeros(0, dtype=np.int64), Counter()
        flag_N, pair_N = self._places(columns, self._pairs)
        first = dict(zip(MemoryOptions._fields, self._pairs.heads[pair_N].T, strict=True))
        dropped = self._flags.dropped(flag_N) + self._pairs.dropped(pair_N)
        return replace(columns, **first, recomputes=self.recomputes), self._pairs.lengths[pair_N], dropped

    def variants(self, columns: LayoutColumns) -> tuple[Ints, LayoutColumns]:
        """Return all variants of some base layouts, and for each the index of its base layout (M)."""
        return self._spread(columns, self._pairs)

    def leanest(self, columns: LayoutColumns) -> LayoutColumns:
        """Give each base layout the options that should need the least memory."""
        return self._spread(columns, self._lean)[1]

    def _spread(self, columns: LayoutColumns, lists: SharedLists[_Pair]) -> tuple[Ints, LayoutColumns]:
        row_M, option_M5 = lists.spread(self._places(columns, lists)[1])
        options = dict(zip(MemoryOptions._fields, option_M5.T, strict=True))
        return row_M, replace(columns.take(row_M), **options, recomputes=self.recomputes)

    def _places(self, columns: LayoutColumns, lists: SharedLists[_Pair]) -> tuple[Ints, Ints]:
        """Return the index of each base layout's list of flags, and of its list of flags with recompute."""
        expert_dp = columns.tp * columns.cp * columns.dp // (columns.etp * columns.ep)
        has_replicas = ((columns.dp * columns.cp > 1) | (expert_dp > 1)).astype(np.int64)
        first, group_N = grouped(columns.tp, columns.cp, has_replicas)
        key_G = zip(
            *(each[first].tolist() for each in (columns.tp, columns.cp, has_replicas.astype(bool))), strict=True
        )
        flag_G = self._flags.places(key_G)
        flags_G = [tuple(self._flags.rows(place)) for place in flag_G.tolist()]
        # An even split is stored without numbers of layers per chunk, so compute the number from pp and vpp.
        even = self._rules.job.model.num_layers // (columns.pp * columns.vpp)
        has_tp = np.minimum(columns.tp, 2)
        is_even = np.array([not layers for layers in columns.cuts])[columns.layers_per_chunk]
        first, depth_N = grouped(columns.layers_per_chunk, np.where(is_even, even, 0), has_tp)
        fields = zip(*(each[first].tolist() for each in (columns.layers_per_chunk, even, has_tp)), strict=True)
        depth_H = [_Depth(frozenset(columns.cuts[split] or (layers,)), tp) for split, layers, tp in fields]
        first, pair_N = grouped(group_N, depth_N)
        pairs = ((flags_G[group_N[row]], depth_H[depth_N[row]]) for row in first.tolist())
        return flag_G[group_N], lists.places(pairs)[pair_N]

    def _build_flags(self, key: tuple[int, int, bool], dropped: Counter[str]) -> Iterator[_Flags]:
        tp, cp, has_replicas = key
        states = layout_axes.memory_flags(self._rules, tp, has_replicas=has_replicas)
        fastest: dict[tuple[bool, bool], MemoryOptions] = {}
        for state in states:
            if not drops(state_faults(self._rules, tp, cp, state), dropped):
                # Overlap never costs time or memory, so all variants have the most overlap that Megatron allows.
                fastest.setdefault((state.sequence_parallel, state.use_distributed_optimizer), state)
        legal = [*fastest.values()]
        # Megatron can distribute saved activations over ranks only without sequence parallelism.
        distributes = self._rules.options.distribute_saved_activations
        is_timed = any(state.sequence_parallel for state in legal) and not distributes
        for state in legal:
            if is_timed and not state.sequence_parallel:
                dropped[UNTIMED] += 1
            else:
                yield tuple(int(flag) for flag in state[:-1])

    def _build_depths(self, key: tuple[_Depth, bool], dropped: Counter[str]) -> Iterator[tuple[int, ...]]:
        depth, parallel = key
        for recompute in layout_axes.recomputes(self._rules.job, depth.layers):
            options = MemoryOptions(sequence_parallel=parallel, recompute=recompute)
            if not drops(recompute_faults(self._rules, depth.tp, depth.layers, options), dropped):
                yield (self._numbers.setdefault(recompute, len(self._numbers)),)

    def _build_pairs(self, key: _Pair, dropped: Counter[str]) -> Iterator[tuple[int, ...]]:
        """Yield all legal flags with recompute: the cheapest recompute of every flag set first."""
        states, depth = key
        place_S = self._depths.places((depth, bool(state[0])) for state in states)
        dropped += self._depths.dropped(place_S)
        numbers = [self._depths.rows(place) for place in place_S.tolist()]
        for turn in range(max(map(len, numbers), default=0)):
            for state, legal in zip(states, numbers, strict=True):
                yield from ((*state, *number) for number in legal[turn : turn + 1])

    def _build_lean(self, key: _Pair, dropped: Counter[str]) -> Iterator[tuple[int, ...]]:
        """Yield the legal options for least memory: ideally full recompute layer by layer, sharding, and no overlap."""
        rows = list(self._build_pairs(key, dropped))
        recomputes = self.recomputes

        def leanness(row: tuple[int, ...]) -> tuple[int, ...]:
            parallel, sharded, *overlaps, number = row
            recompute = recomputes[number]
            again = ("none", "selective", "full").index(recompute.granularity)
            # Uniform recompute needs less memory than block recompute.
            layers = -recompute.num_layers if recompute.method == "uniform" else recompute.num_layers - (1 << 20)
            return again, layers, len(recompute.modules), sharded, parallel, *(-on for on in overlaps)

        yield max(rows, key=leanness)


def drops(faults: Broken, dropped: Counter[str]) -> bool:
    """Count a refused combination under the first rule that it breaks; return whether it breaks a rule."""
    broken = next(faults, None)
    if broken:
        dropped[broken.reason] += 1
    return broken is not None


MOST = 1 << 17
"""Largest number of base layouts. If a job has more, the least promising base layouts are set aside."""
MANY_TIMES = 8
"""Layers are balanced by the times of the user's micro-batch, and of a micro-batch this many times larger."""
FEWEST_TOKENS = 512
"""If base layouts are set aside, each context-parallel rank must keep at least this number of tokens."""
_REST = ("vpp", "microbatch_group_size", "layers_per_chunk", "chunks_after_mtp", "micro_batch_size")
_Split: TypeAlias = tuple[int, int, int]
"""Layer split: (virtual stages, index in the list of layers per chunk, chunks after multi-token prediction)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseLayouts:
    """Legal base layouts as columns of fields, with their first memory options. TP inside a host comes first."""

    tables: MemoryOptionTables
    columns: LayoutColumns
    dropped: dict[str, int]
    """Number of refused combinations by the first broken rule. Combinations with the same refused fields count once."""
    own_fault: str | None
    """Rule that the user's own layout breaks, or None."""
    num_layouts: int
    """Number of all legal layouts: all variants of all base layouts."""

    def __len__(self) -> int:
        return len(self.columns)

    def variants(self, rows: Ints) -> tuple[Ints, LayoutColumns]:
        """Return all legal variants of some base layouts, and for each the index of its base layout in `rows` (M).

        Variants are sorted by recompute, the cheapest first, and then by flags, the fastest first.
        """
        return self.tables.variants(self.columns.take(rows))

    def __contains__(self, layout: Layout) -> bool:
        """Return whether a layout is a variant of a base layout."""
        columns = self.columns.take(self.of_degrees(layout))
        _, found = self.tables.variants(columns.take(np.flatnonzero(_num_base_choices(columns, layout) == 0)))
        return bool((_num_option_choices(found, layout) == 0).any())

    def of_degrees(self, layout: Layout) -> Ints:
        """Return the rows of the base layouts with the degrees of a layout."""
        same_N = np.ones(len(self), dtype=bool)
        for name in Degrees._fields:
            same_N &= getattr(self.columns, name) == getattr(layout, name)
        return np.flatnonzero(same_N)

    def neighbours(self, layout: Layout) -> LayoutColumns:
        """Return the legal layouts with the same degrees that differ from a layout in one choice.

        A choice is the micro-batch, the layer split, the group of micro-batches, sequence parallelism, the distributed
        optimizer, the overlaps, or recompute. Fields that must follow a choice may differ too: the group follows the
        micro-batch and the split, and the gather overlap follows the optimizer. Layouts with other degrees are not
        neighbours, because their ranks cannot use the placement of this layout.
        """
        rows = self.of_degrees(layout)
        rows = rows[_num_base_choices(self.columns.take(rows), layout) <= 1]
        _, found = self.variants(rows)
        num_M = _num_base_choices(found, layout) + _num_option_choices(found, layout)
        return found.take(np.flatnonzero(num_M == 1))


def base_layouts(
    job: Job, *, world_size: int, device_kind: str, domains: Domains, table: ComputeTable | None = None
) -> BaseLayouts:
    """List the legal degrees, layer splits and micro-batches of a job.

    TP larger than a host is legal in Megatron and is listed, because the cost model prices the slow links. If there are
    more than `MOST` base layouts, some are set aside and counted. The times in `table` balance uneven stages (None =
    use FLOPs).
    """
    rules, devices_per_host = Rules.of(job, device_kind=device_kind, rooms=domains), domains.devices_per_host
    dropped: Counter[str] = Counter()
    chunks_and_batches = _ChunksAndBatches(rules, table)
    dense_D4 = np.array([*_dense_degrees(rules, world_size, dropped)], dtype=np.int64).reshape(-1, 4)
    row_D, expert_D3 = _expert_degrees(rules, dense_D4, dropped)
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
        cuts=tuple(chunks_and_batches.layers),
    )
    tables = MemoryOptionTables(rules)
    columns, count_N, refused = tables.first(columns.take(np.argsort(columns.tp > devices_per_host, kind="stable")))
    own_broken = broken_rule(rules, job.own)
    return BaseLayouts(
        tables=tables,
        columns=columns.take(np.flatnonzero(count_N)),
        dropped=dict((dropped + refused).most_common()),
        own_fault=own_broken.reason if own_broken else None,
        num_layouts=int(count_N.sum()),
    )


def compute_cases(own: Layout, found: LayoutColumns) -> tuple[ComputeCase, ...]:
    """Return the distinct compute cases of layouts, most promising first.

    A compute case is a set of field values that decides compute times. The case of the user's own layout comes first,
    because every plan is compared with it. The other cases follow by distance, counted in doublings of TP, CP and
    micro-batch, from TP 1, CP 1 and micro-batches of 2. Jobs that fit in memory with these sizes usually run fastest.
    If two cases are equally far, the case of more layouts comes first.
    """
    groups = found.groups("tp", "cp", "micro_batch_size")
    sizes = np.bincount(groups.group_N, minlength=len(groups.first_U)).tolist()
    shapes = (column[groups.first_U].tolist() for column in (found.tp, found.cp, found.micro_batch_size))
    cases = [ComputeCase(tp=tp, cp=cp, micro_batch_size=size) for tp, cp, size in zip(*shapes, strict=True)]
    count = dict(zip(cases, sizes, strict=True))

    def distance(case: ComputeCase) -> tuple[float, int, ComputeCase]:
        doublings = math.log2(case.tp) + math.log2(case.cp) + abs(math.log2(case.micro_batch_size) - 1)
        return doublings, -count[case], case

    return tuple(dict.fromkeys((case_of(own), *sorted(cases, key=distance))))


def _dense_degrees(rules: Rules, world_size: int, dropped: Counter[str]) -> Iterator[tuple[int, int, int, int]]:
    job = rules.job
    for tp in layout_axes.values(job, "tp", layout_axes.divisors(world_size)):
        if world_size % tp or drops(degrees.tensor_faults(rules, tp), dropped):
            continue
        for pp in layout_axes.values(job, "pp", layout_axes.divisors(world_size // tp)):
            if world_size % (tp * pp) or drops(degrees.pipeline_faults(rules, pp), dropped):
                continue
            for cp in layout_axes.values(job, "cp", layout_axes.divisors(world_size // (tp * pp))):
                dp, rest = divmod(world_size, tp * pp * cp)
                if rest or dp not in layout_axes.values(job, "dp", (dp,)):
                    continue
                faults = chain(degrees.context_faults(rules, tp, cp), degrees.replicas_faults(rules, dp, cp))
                if not drops(faults, dropped):
                    yield tp, pp, dp, cp


def _expert_degrees(rules: Rules, dense_D4: Ints, dropped: Counter[str]) -> tuple[Ints, Ints]:
    """Repeat dense degrees for each legal EP, ETP and rank order; return the rows of `dense_D4`, and these values."""
    job = rules.job

    def legal(key: tuple[int, int, int, int], dropped: Counter[str]) -> Iterator[tuple[int, ...]]:
        pp, ranks, tp, dp = key
        for ep in layout_axes.values(job, "ep", layout_axes.divisors(job.model.num_experts or 1)):
            for etp in layout_axes.expert_tensor_sizes(job, tp):
                for swapped in layout_axes.rank_orders(job):
                    found = Degrees(tp, pp, dp, ranks // (tp * dp), ep, etp, swapped)
                    if not drops(degrees.expert_faults(rules, found), dropped):
                        yield ep, etp, int(swapped)
                        break

    lists = SharedLists(legal, width=3)
    # Expert degrees depend on the ranks of a stage, and on DP only in rank order tp-pp-dp. They depend on TP without
    # experts, and before Megatron 0.19, when ETP may have to equal TP.
    follows, asks = not job.model.num_experts or rules.release < (0, 19), any(layout_axes.rank_orders(job))
    keys = (
        (pp, tp * dp * cp, tp if follows else 1, dp if asks else tp * dp * cp // (tp if follows else 1))
        for tp, pp, dp, cp in dense_D4.tolist()
    )
    places = lists.places(keys)
    dropped += lists.dropped(places)
    return lists.spread(places)


class _ChunksAndBatches:
    """Legal layer splits, micro-batches and microbatch groups; one list for each DP, PP and set of splits."""

    def __init__(self, rules: Rules, table: ComputeTable | None) -> None:
        self.layers: dict[tuple[int, ...], int] = {(): 0}
        self.lists: SharedLists[tuple[int, int, tuple[_Split, ...]]] = SharedLists(self._rows, width=len(_REST))
        """Lists of rows with the fields `_REST`. A row stores layers per chunk as an index into `layers`."""
        self._rules = rules
        self._table = table
        self._seconds_of = cache(self._new_seconds)
        self._chunks_of = cache(self._new_chunks)

    def places(self, dense_D4: Ints) -> Ints:
        """For each row of dense degrees, return the index of the row's list."""
        return self.lists.places((dp, pp, self._chunks_of(tp, pp)) for tp, pp, dp, _ in dense_D4.tolist())

    def _new_chunks(self, tp: int, pp: int) -> tuple[_Split, ...]:
        chunks = (layout_axes.layer_splits(self._rules.job, pp, seconds) for seconds in self._seconds_of(tp))
        return tuple(
            (vpp, self.layers.setdefault(layers, len(self.layers)), after)
            for vpp, layers, after in dict.fromkeys(chain(*chunks))
        )

    def _new_seconds(self, tp: int) -> tuple[LayerSeconds, ...]:
        """Return times of the model's parts at this TP, for the user's micro-batch and for a large micro-batch.

        The host launches many kernels for a layer and few for the head. With small micro-batches, kernel launches limit
        the speed, so a layer takes longer relative to the head.
        """
        job = self._rules.job
        own = replace(case_of(job.own), tp=tp)
        cases = (own, replace(own, micro_batch_size=MANY_TIMES * own.micro_batch_size))
        found = [parts for case in cases if self._table and (parts := self._table.part_seconds(case))]
        return tuple(by_parts(job.model, parts) for parts in found) or (by_flops(job.model),)

    def _rows(self, key: tuple[int, int, tuple[_Split, ...]], dropped: Counter[str]) -> Iterator[tuple[int, ...]]:
        dp, pp, chunks = key
        rules, job = self._rules, self._rules.job
        samples = job.batch.global_batch_size // dp
        sizes = layout_axes.values(
            job, "micro_batch_size", layout_axes.micro_batch_sizes(samples, own=job.own.micro_batch_size)
        )
        legal = [size for size in sizes if not drops(degrees.batch_faults(rules, dp, size), dropped)]
        if not chunks:
            dropped[f"more pipeline ranks than num_layers={job.model.num_layers}"] += 1
        layers_of = list(self.layers)
        for vpp, split, after in chunks:
            if drops(degrees.chunks_faults(rules, pp, vpp, layers_of[split]), dropped):
                continue
            for size in legal:
                for group in layout_axes.group_sizes(job, pp, vpp, samples // size):
                    if not drops(degrees.schedule_faults(rules, pp, vpp, group, size * dp), dropped):
                        yield vpp, group, split, after, size


def _thinned(
    job: Job, degrees_D7: Ints, lengths: Ints, places_D: Ints, devices_per_host: int, dropped: Counter[str]
) -> Ints:
    """Set degrees aside, rule by rule, while there are over `MOST` base layouts; the user's own values stay."""
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
        if count_D[aside].sum():
            dropped[f"set aside, as there are more than {MOST}: {words}"] += int(count_D[aside].sum())
        kept = kept[~aside]
    return kept


def _num_base_choices(columns: LayoutColumns, layout: Layout) -> Ints:
    size_N = columns.micro_batch_size != layout.micro_batch_size
    is_same = np.array([each == layout.layers_per_chunk for each in columns.cuts])
    chunks_N = (columns.vpp != layout.vpp) | ~is_same[columns.layers_per_chunk]
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
