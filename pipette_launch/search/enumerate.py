"""Every layout that Megatron allows for a job, and how many fell out for which reason.

A *cut* is a layout without the choice of what saves memory: degrees, chunks, micro-batch. Thousands of them stand as
numpy columns; the *savers* of a cut are its variants, listed only where somebody asks.
"""

# N = cuts.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipette_launch.cost.layout_columns import Ints, LayoutColumns
from pipette_launch.facts import ComputeCase, Job, Layout, Recompute
from pipette_launch.search import axes
from pipette_launch.search.rules import Degrees, Rules, Saver


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """The legal cuts as columns, each with the first of its savers: those that keep TP in a host first."""

    rules: Rules
    columns: LayoutColumns
    dropped: dict[str, int]
    """Combinations by the first constraint they break; what breaks one early counts once, whatever could follow."""
    own_fault: str | None
    """The constraint that the user's own layout breaks, if any."""
    num_layouts: int
    """All legal layouts: the cuts with all their savers, and the user's own."""

    def __len__(self) -> int:
        """N."""
        return len(self.columns)

    def layout(self, row: int) -> Layout:
        """One cut with the first of its savers."""
        return self.columns.layout(row)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All cuts with the first of their savers; some microseconds each."""
        return tuple(self.columns.layout(row) for row in range(len(self)))

    def savers(self, row: int) -> tuple[Layout, ...]:
        """All legal variants of a cut, the quickest kinds first."""
        return savers(self.rules, self.columns.layout(row))


@dataclass(frozen=True, kw_only=True, slots=True)
class Enumeration:
    """The layouts to look at, the user's own first, and the combinations that Megatron refuses."""

    layouts: tuple[Layout, ...]
    dropped: dict[str, int]
    """As in `Cuts`."""
    own_fault: str | None
    """The constraint that the user's own layout breaks, if any."""


def cuts(job: Job, *, world_size: int, devices_per_host: int, device_kind: str) -> Cuts:
    """Enumerate the legal degrees, chunks and micro-batches of a job.

    TP beyond `devices_per_host` is legal in Megatron, so it stays in, after the cuts that keep TP in a host; the cost
    model prices its slow links.

    Args:
        job: the model, the batch, the user's own layout and its pins.
        world_size: ranks of the job.
        devices_per_host: slots of one host.
        device_kind: `cuda` or `cpu`.

    """
    rules = Rules.of(job, device_kind=device_kind)
    dropped: Counter[str] = Counter()
    tails = _Tails(rules)
    degrees: list[Degrees] = []
    places: list[int] = []
    for one in _degrees(rules, world_size, dropped):
        place = tails.place(one)
        if place is not None:
            degrees.append(one)
            places.append(place)
    degrees_D = np.array(degrees, dtype=np.int64).reshape(-1, len(Degrees._fields))
    columns = _columns(degrees_D, np.array(places, dtype=np.int64), tails)
    columns = columns.take(np.argsort(columns.tp > devices_per_host, kind="stable"))
    columns, num_layouts = _with_savers(rules, columns, dropped)
    own_fault = rules.fault(job.own)
    return Cuts(
        rules=rules,
        columns=columns,
        dropped=dict((dropped + tails.dropped).most_common()),
        own_fault=own_fault,
        num_layouts=num_layouts + (own_fault is not None),
    )


def savers(rules: Rules, cut: Layout) -> tuple[Layout, ...]:
    """All legal variants of a cut: recompute, sequence parallelism, optimizer, overlap; the quickest kinds first."""
    kinds = _savers(rules, _degrees_of(cut), rules.layers_of_chunks(cut), Counter())
    return tuple(replace(cut, **saver._asdict()) for saver in kinds)


def layouts(job: Job, *, world_size: int, devices_per_host: int, device_kind: str) -> Enumeration:
    """List every legal layout of a job, the user's own first: all cuts with all their savers (see `cuts`)."""
    found = cuts(job, world_size=world_size, devices_per_host=devices_per_host, device_kind=device_kind)
    every = (layout for row in range(len(found)) for layout in found.savers(row))
    return Enumeration(
        layouts=tuple(dict.fromkeys((job.own, *every))), dropped=found.dropped, own_fault=found.own_fault
    )


def compute_cases(candidates: Sequence[Layout]) -> tuple[ComputeCase, ...]:
    """Name the distinct shapes of computation that layouts need, most promising first.

    The first layout (the user's own) comes first: nothing can be compared without it. Then the rest by how many
    doublings they lie from one tensor rank, one context rank and micro-batches of two, where jobs that fit run best;
    those that more layouts share win ties.
    """
    count = Counter(
        ComputeCase(tp=layout.tp, cp=layout.cp, micro_batch_size=layout.micro_batch_size) for layout in candidates
    )
    own = next(iter(count), None)

    def doublings(case: ComputeCase) -> float:
        return math.log2(case.tp) + math.log2(case.cp) + abs(math.log2(case.micro_batch_size) - 1)

    return tuple(sorted(count, key=lambda case: (case != own, doublings(case), -count[case], case)))


def _degrees(rules: Rules, world_size: int, dropped: Counter[str]) -> Iterator[Degrees]:
    """Yield the legal degrees; each axis is checked before the next is looked at."""
    for tp, pp, cp in _dense_degrees(rules, world_size, dropped):
        dp = world_size // (tp * pp * cp)
        for ep in axes.expert_sizes(rules.job):
            for etp in axes.expert_tensor_sizes(rules.job, tp):
                degrees = Degrees(tp, pp, dp, cp, ep, etp, rules.job.own.use_tp_pp_dp_mapping)
                if not _drops(rules.expert_fault(degrees), dropped):
                    yield degrees


def _dense_degrees(rules: Rules, world_size: int, dropped: Counter[str]) -> Iterator[tuple[int, int, int]]:
    job = rules.job
    for tp in axes.values(job, "tp", axes.divisors(world_size)):
        if world_size % tp or _drops(rules.tensor_fault(tp), dropped):
            continue
        for pp in axes.values(job, "pp", axes.divisors(world_size // tp)):
            if world_size % (tp * pp) or _drops(rules.pipeline_fault(pp), dropped):
                continue
            for cp in axes.values(job, "cp", axes.divisors(world_size // (tp * pp))):
                dp, rest = divmod(world_size, tp * pp * cp)
                if rest or dp not in axes.values(job, "dp", (dp,)):
                    continue
                if not _drops(rules.context_fault(tp, cp) or rules.replicas_fault(dp, cp), dropped):
                    yield tp, pp, cp


class _Tails:
    """What may follow some degrees: chunks, micro-batches and their groups; the same for all that share DP and PP."""

    def __init__(self, rules: Rules) -> None:
        self.tables: list[list[tuple[int, int, int, int]]] = []
        """Rows of vpp, group size, place in `cuts`, micro-batch size."""
        self.cuts: dict[tuple[int, ...], int] = {(): 0}
        self._rules = rules
        self._places: dict[tuple[int, int], int] = {}
        self._faults: list[Counter[str]] = []
        self._uses: list[int] = []

    def place(self, degrees: Degrees) -> int | None:
        """Which table follows these degrees; None where none is left."""
        key = degrees.dp, degrees.pp
        if key not in self._places:
            self._places[key] = len(self.tables)
            self._faults.append(Counter())
            self._uses.append(0)
            self.tables.append(list(self._rows(*key, self._faults[-1])))
        place = self._places[key]
        self._uses[place] += 1
        return place if self.tables[place] else None

    @property
    def dropped(self) -> Counter[str]:
        """What fell out, as often as it was looked at."""
        total: Counter[str] = Counter()
        for faults, uses in zip(self._faults, self._uses, strict=True):
            total.update({reason: count * uses for reason, count in faults.items()})
        return total

    def _rows(self, dp: int, pp: int, dropped: Counter[str]) -> Iterator[tuple[int, int, int, int]]:
        rules, job = self._rules, self._rules.job
        samples = job.batch.global_batch_size // dp
        sizes = axes.values(
            job, "micro_batch_size", axes.micro_batch_sizes(samples, own=job.own.micro_batch_size) if samples else (1,)
        )
        legal = [size for size in sizes if not _drops(rules.batch_fault(dp, size), dropped)]
        for vpp, layers_per_chunk in axes.chunk_cuts(job, pp):
            if _drops(rules.chunks_fault(pp, vpp, layers_per_chunk), dropped):
                continue
            cut = self.cuts.setdefault(layers_per_chunk, len(self.cuts))
            for size in legal:
                for group in axes.group_sizes(job):
                    if not _drops(rules.schedule_fault(pp, vpp, group, samples // size), dropped):
                        yield vpp, group, cut, size


def _columns(degrees_D: Ints, place_D: Ints, tails: _Tails) -> LayoutColumns:
    """Spread degrees over what follows them."""
    lengths = np.array([len(table) for table in tails.tables], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    table = np.array([row for rows in tails.tables for row in rows], dtype=np.int64).reshape(-1, 4)
    counts_D = lengths[place_D]
    firsts_D = np.cumsum(counts_D) - counts_D
    inner_N = np.arange(counts_D.sum()) - np.repeat(firsts_D, counts_D)
    tail = dict(
        zip(
            ("vpp", "microbatch_group_size", "layers_per_chunk", "micro_batch_size"),
            table[np.repeat(starts[place_D], counts_D) + inner_N].T,
            strict=True,
        )
    )
    head = {name: np.repeat(column, counts_D) for name, column in zip(Degrees._fields, degrees_D.T, strict=True)}
    none = np.zeros(len(inner_N), dtype=np.int64)
    return LayoutColumns(
        **head, **tail, **dict.fromkeys(Saver._fields, none), recomputes=(axes.NO_RECOMPUTE,), cuts=tuple(tails.cuts)
    )


def _with_savers(rules: Rules, columns: LayoutColumns, dropped: Counter[str]) -> tuple[LayoutColumns, int]:
    """Give each cut the first of its savers and drop those without any; and count all."""
    groups = columns.groups("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "layers_per_chunk")
    sizes = np.bincount(groups.group_N, minlength=len(groups.first_U))
    memo: dict[object, tuple[tuple[Saver, ...], Counter[str]]] = {}
    recomputes: dict[Recompute, int] = {axes.NO_RECOMPUTE: 0}
    first_U5 = np.zeros((len(groups.first_U), 5), dtype=np.int64)
    legal_U = np.zeros(len(groups.first_U), dtype=np.int64)
    for place, (row, size) in enumerate(zip(groups.first_U.tolist(), sizes.tolist(), strict=True)):
        cut = columns.layout(row)
        degrees, layers = _degrees_of(cut), rules.layers_of_chunks(cut)
        key = degrees.tp, degrees.cp, degrees.dp * degrees.cp > 1, degrees.expert_dp > 1, layers
        if key not in memo:
            faults: Counter[str] = Counter()
            memo[key] = _savers(rules, degrees, layers, faults), faults
        kinds, faults = memo[key]
        dropped.update({reason: count * size for reason, count in faults.items()})
        legal_U[place] = len(kinds)
        if kinds:
            *flags, recompute = kinds[0]
            first_U5[place] = *flags, recomputes.setdefault(recompute, len(recomputes))
    chosen = dict(zip(Saver._fields, first_U5[groups.group_N].T, strict=True))
    columns = replace(columns, **chosen, recomputes=tuple(recomputes))
    return columns.take(np.flatnonzero(legal_U[groups.group_N])), int(legal_U @ sizes)


def _savers(rules: Rules, degrees: Degrees, layers: frozenset[int], dropped: Counter[str]) -> tuple[Saver, ...]:
    """List the legal savers of cuts with these degrees and these numbers of layers in their chunks."""
    states = [
        state
        for state in axes.states(rules, degrees)
        if not _drops(rules.state_fault(degrees.tp, degrees.cp, state), dropped)
    ]
    kinds = (state._replace(recompute=recompute) for recompute in axes.recomputes(rules.job) for state in states)
    return tuple(saver for saver in kinds if not _drops(rules.recompute_fault(degrees.tp, layers, saver), dropped))


def _degrees_of(layout: Layout) -> Degrees:
    return Degrees(*(getattr(layout, name) for name in Degrees._fields))


def _drops(fault: str | None, dropped: Counter[str]) -> bool:
    """Count a fault; whether there is one."""
    if fault:
        dropped[fault] += 1
    return bool(fault)
