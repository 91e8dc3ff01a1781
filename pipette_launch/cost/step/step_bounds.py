"""Lower bounds of the step time of many layouts at once, for the wide search.

The functions that predict one layout's step also count compute, collectives and parameters in this module. The bounds
call these functions once for each group of layouts with equal relevant fields, and for each kind of chunk.
`assemble.StepEnd` computes the time after the pipelines, as in predictions. The bounds differ from `Predictor.bound_s`
in two ways. First, lengths of paths (`pipeline_bound`) bound the times of pipelines, instead of a simulation. Second,
data-parallel groups that are too large for one host also use slow hosts, so the bound prices slow links for some
stages.
"""

# Letters of array axes: N = layouts, U = groups of layouts with equal pass times, T = groups with equal exchanges after
# the passes, R = groups with equal parameters, C = layer splits of the model, K = kinds of chunk, P = pipeline ranks, V
# = chunks of each rank. X = parts of a chunk: for each kind of layer, layers that run once and layers that full
# recompute repeats; then embedding, head, and depths of multi-token prediction.

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost import Memo
from pipette_launch.cost.communication.collectives import Fabric, GroupsOnHosts
from pipette_launch.cost.communication.exchanges import LayerCounts, Waits, exchanges_of, group_sizes, num_buckets
from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.cost.compute.stages import STAGE_FIELDS, ComputeTable
from pipette_launch.cost.layers import parameters
from pipette_launch.cost.layers.block import Parameters, residual_bytes
from pipette_launch.cost.layers.passes import Exchange, Hiding
from pipette_launch.cost.step.assemble import StepEnd, gather_waits_s, gathers_in_forward
from pipette_launch.cost.step.pipeline_bound import Pipelines, drains
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.cost.step.work import exposed_s, once_a_step, pass_s
from pipette_launch.errors import LayoutError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Field, Floats, Ints, Layout, LayoutColumns, codes_of, grouped
from pipette_launch.facts.measurements import Measurements

T = TypeVar("T")
GroupsLie = Literal["anywhere", "inside hosts", "tensor across hosts", "experts across hosts"]
"""Assumption about the hosts of tensor-parallel groups and of ranks that share experts. `inside hosts`: each
tensor-parallel group lies on one host if it fits, and so do the ranks that share experts. `tensor across hosts`: at
least one tensor-parallel group spans several hosts. `experts across hosts`: at least one set of ranks that share
experts spans several hosts."""
UNLIKE = 1.02
"""Two hosts count as equally fast if the speeds of their best links differ by less than this factor."""
_PARTS: Memo[Memo[Ints]] = Memo()
"""Cache of the parts of chunks, by model and layer split, because many layouts have the same layer split."""


class Content(NamedTuple):
    """Parts of the chunks of layouts with equal pp and vpp."""

    split_N: Ints
    kind_CVP: Ints
    parts_KX: Ints
    """Number of each part in each kind of chunk: each kind of layer without and with recompute, the seconds of the
    embedding, the head, the depths of multi-token prediction, and the parameters of the embedding."""


def contents_of(job: Job, columns: LayoutColumns) -> Content:
    """Count the parts of chunks, once for each layer split of layouts with equal pp and vpp; LayoutError if uneven."""
    fields = ("layers_per_chunk", "chunks_after_mtp", "recompute")
    splits = columns.groups(*fields)
    shape = (len(splits.first_U), int(columns.vpp[0]), int(columns.pp[0]))
    known = _PARTS.get(job.model, Memo)
    keys = columns.values(splits.first_U, *fields)
    parts_CSX = np.array(
        [
            known.get((shape[1:], *key), partial(_parts_SX, job, columns, row))
            for key, row in zip(keys, splits.first_U.tolist(), strict=True)
        ]
    )
    parts_RX = parts_CSX.reshape(-1, parts_CSX.shape[-1])
    first, kind = grouped(*parts_RX.T)
    return Content(splits.group_N, kind.reshape(shape), parts_RX[first])


def _parts_SX(job: Job, columns: LayoutColumns, row: int) -> Ints:
    layout, rows = columns.layout(row), []
    chunks = parameters.chunk_kinds(job.model, layout)
    for stage, (kinds, again) in enumerate(chunks):
        pairs = ((kinds[again:].count(kind), kinds[:again].count(kind)) for kind in job.model.possible_kinds)
        # The parameters of multi-token prediction include an embedding. On the first chunk it is the model's own, whose
        # parameters count once. But the chunk embeds tokens both for its first layer and for the prediction.
        holds_embedding = stage == 0 and (layout.pp == 1 or layout.mtp_chunk > 0 or not job.model.mtp_num_layers)
        ends = (stage == 0, stage == len(chunks) - 1, stage == layout.mtp_chunk, holds_embedding)
        rows.append([*chain(*pairs), *ends])
    return np.array(rows, dtype=np.int64)


class UnitTimes(NamedTuple):
    """Seconds of one micro-batch on each part of a chunk, for each group of layouts."""

    group_N: Ints
    passes_U4X: Floats
    """Seconds of forward, of backward with recompute, and of idle time in forward and in backward, at speed 1."""
    exchanges_U2X: Floats
    """Exposed seconds of the collectives in forward and in backward, over the best links."""
    hop_s_U: Floats
    """Seconds of a send between two slots over the best link."""

    def take(self, rows: Ints) -> UnitTimes:
        """Return the times of some of the layouts, and of the groups that contain these layouts."""
        used, group_N = np.unique(self.group_N[rows], return_inverse=True)
        return UnitTimes(group_N.reshape(-1), self.passes_U4X[used], self.exchanges_U2X[used], self.hop_s_U[used])

    def chunk_times(self, parts_KX: Ints, slowness: float, slowest: float) -> tuple[Floats, Floats]:
        """Return the seconds of forward and backward of each kind of chunk on a slot of speed 1 / slowness."""
        # The last part has parameters only.
        timed_XK = parts_KX[:, :-1].T
        passes_U4K, exchanges_U2K = self.passes_U4X @ timed_XK, self.exchanges_U2X @ timed_XK
        compute_U2K, idle_U2K = passes_U4K[:, :2], passes_U4K[:, 2:]
        # If a device idles longer in a pass than it computes, a slow slot may hide more, so assume the slowest slot.
        hides_U2K = idle_U2K * np.where(idle_U2K <= compute_U2K, slowness, slowest)
        seconds_U2K = pass_s(compute_U2K * slowness, exchanges_U2K, hides_U2K)
        return seconds_U2K[:, 0], seconds_U2K[:, 1]


class Tables:
    """Times and sizes that many layouts share, each computed once."""

    def __init__(self, job: Job, measurements: Measurements, compute: ComputeTable, fabric: Fabric) -> None:
        self.job, self.compute, self.fabric, cluster = job, compute, fabric, measurements.cluster
        self.once_a_step = once_a_step(job, measurements)
        slowness = [1.0 / speed for speed in cluster.slot_speed]
        self.fastest, self.slowest = min(slowness), max(slowness)
        self._num_slots, self.devices, self.num_hosts = cluster.num_slots, cluster.devices_per_host, len(cluster.hosts)
        shared_by: tuple[Field, ...] = ("ep", "etp") if compute.knows_shares else ()
        self._share_fields: tuple[Field, ...] = (
            ("sequence_parallel", "ep", "etp") if compute.copies_to_host else shared_by
        )
        """Fields of a layout, beyond its compute case, that decide pass times."""
        self._can_compute: Memo[bool] = Memo()
        self._can_split: Memo[bool] = Memo()
        self._passes: Memo[Floats] = Memo()
        self._hiding: Memo[Hiding] = Memo()
        self._networks: dict[tuple[object, ...], Floats] = {}
        self._parameters: Memo[list[list[float]]] = Memo()
        self._exchanges: dict[Layout, tuple[Exchange, ...]] = {}
        self._shard_fields: tuple[Field, ...] = ("dp", "recompute") if parameters.sharding_of(job) else ()
        """Fields that also decide exchanges under FSDP: replicas, and recompute, which hides some exchanges."""
        self._one_of_each = LayerCounts.one_of_each(job.model)

    def can_price_N(self, columns: LayoutColumns) -> NDArray[np.bool_]:
        """Return, for each layout, whether compute times are known and its degrees divide batch, layers and slots."""
        runs_N = np.ones(len(columns), dtype=bool)
        for fields, known, check in (
            (("tp", "cp", "micro_batch_size"), self._can_compute, self._computes),
            (("pp", "vpp", "layers_per_chunk"), self._can_split, self._splits),
        ):
            first_U, group_N = columns.groups(*fields)
            runs_N &= np.array(_each(columns, first_U, fields, known, check), dtype=bool)[group_N]
        world_N = columns.tp * columns.pp * columns.dp * columns.cp
        batch = self.job.batch.global_batch_size
        divides_N = batch % (columns.dp * columns.micro_batch_size) == 0
        # Check the micro-batch groups by the rule of `facts.schedule.check_interleaving`.
        microbatches_N = self.microbatches_N(columns)
        size_N = np.where(columns.microbatch_group_size > 0, columns.microbatch_group_size, columns.pp)
        rest_N = microbatches_N % size_N
        fills_N = (size_N >= columns.pp) & (size_N <= microbatches_N) & ((rest_N == 0) | (rest_N >= columns.pp))
        return np.asarray(runs_N & divides_N & (world_N == self._num_slots) & ((columns.vpp == 1) | fills_N))

    def microbatches_N(self, columns: LayoutColumns) -> Ints:
        """Return the micro-batches of one step."""
        return np.asarray(self.job.batch.global_batch_size // (columns.dp * columns.micro_batch_size))

    def lowering_N(self, columns: LayoutColumns) -> Floats:
        """Return the factor on each layout's bound, for rounding and for measured stages that are faster than usual.

        A step is at least its bound times this factor: no part of the step falls by more than the layout's compute.
        """
        shapes, measured = columns.groups(*STAGE_FIELDS), self.compute.factors.by_shape
        least_U = [min((1.0, *measured.get(key, ()))) for key in columns.values(shapes.first_U, *STAGE_FIELDS)]
        return np.array(least_U)[shapes.group_N] * (1 - _ROUNDING)

    def tensor_fits_hosts(self, columns: LayoutColumns) -> NDArray[np.bool_]:
        """Return whether each tensor-parallel group fits on one host; False if tp is 1 or the cluster has one host."""
        return self._fits_hosts(columns.tp)

    def experts_fit_hosts(self, columns: LayoutColumns) -> NDArray[np.bool_]:
        """Return whether the ranks that share experts fit on one host; False if ep is 1 or the cluster has one host."""
        return self._fits_hosts(columns.ep * columns.etp) & (columns.ep > 1) & parameters.experts_lie_in_stages(columns)

    def _fits_hosts(self, ranks: Ints) -> NDArray[np.bool_]:
        return np.asarray((ranks > 1) & (self.devices % ranks == 0) & (self.num_hosts > 1))

    def unit_times(self, columns: LayoutColumns, groups_lie: GroupsLie = "anywhere") -> UnitTimes:
        """Return the seconds of each part of a chunk, for each group of layouts."""
        # The number of layers under full recompute does not change the time of a single layer.
        kinds = [replace(one, num_layers=1) if one.granularity == "full" else one for one in columns.recomputes]
        place = {kind: index for index, kind in enumerate(dict.fromkeys(kinds))}
        merged = np.array([place[kind] for kind in kinds])[columns.recompute]
        columns = replace(columns, recompute=merged, recomputes=(*place,))
        computed_by = ("tp", "cp", "micro_batch_size", "recompute", *self._share_fields)
        sent_by = ("tp", "cp", "micro_batch_size", "sequence_parallel", "ep", "etp", *self._shard_fields)
        kernels, networks = columns.groups(*computed_by), columns.groups(*sent_by)
        both_N = networks.group_N * len(kernels.first_U) + kernels.group_N
        codes_U, group_N = np.unique(both_N, return_inverse=True)
        network_U, kernel_U = np.divmod(codes_U, len(kernels.first_U))

        def passes_4X(layout: Layout) -> Floats:
            rows: list[tuple[float, ...]] = [
                (one.forward_s, one.backward_s + one.recompute_s, one.forward_idle_s, one.backward_idle_s)
                for one in self.compute.unit_passes(layout)
            ]
            return np.asarray(np.array(rows).T)

        passes = np.array(_each(columns, kernels.first_U, computed_by, self._passes, passes_4X))
        keys = [(groups_lie, *key) for key in columns.values(networks.first_U, *sent_by)]
        new = [place for place, key in enumerate(keys) if key not in self._networks]
        if new:
            found = self._exchange_s_U3X(columns.take(networks.first_U[new]), groups_lie)
            self._networks.update(zip((keys[place] for place in new), found, strict=True))
        exchanges = np.array([self._networks[key] for key in keys])
        return UnitTimes(group_N.reshape(-1), passes[kernel_U], exchanges[network_U, :2], exchanges[network_U, 2, 0])

    def unit_parameters(self, columns: LayoutColumns) -> tuple[Ints, Ints]:
        """Return the group of each layout (N), and dense and expert parameters of each part on one rank (U, 2, X)."""
        first_U, group_N = grouped(columns.tp, columns.ep, columns.etp, (columns.pp > 1).astype(np.int64))

        def of_parts(layout: Layout) -> list[list[float]]:
            unit = parameters.unit_parameters(self.job, layout)
            layers = (each for each in unit.layers.values() for _ in range(2))
            parts = (*layers, Parameters(), unit.head, unit.prediction, unit.embedding)
            return [[part.dense for part in parts], [part.expert for part in parts]]

        found = _each(columns, first_U, ("tp", "ep", "etp", "pp"), self._parameters, of_parts)
        return group_N, np.array(found, dtype=np.int64)

    def _computes(self, layout: Layout) -> bool:
        return self.compute.source(case_of(layout)) is not None

    def _splits(self, layout: Layout) -> bool:
        with contextlib.suppress(LayoutError):
            return bool(layout.chunk_layers(self.job.model.num_layers))
        return False

    def slow_hosts(self, pp: int) -> list[tuple[int, int]]:
        """Return pairs (j, h): in every placement at least j stages have slots on the h hosts with the slowest links.

        j - 1 stages cannot fill these h hosts, so at least j stages have slots there. The first pair (j, h) is for the
        slowest host, and the second pair for all hosts that are nearly as slow.
        """
        if self.num_hosts < 2:
            return []
        slowness_H = self.fabric.slowness_falling_H
        first_P = np.arange(pp) * self.num_hosts // pp
        slowest, fastest = float(slowness_H[0]), float(slowness_H[-1])
        if slowest <= fastest * UNLIKE:
            return []
        last = int(np.flatnonzero(slowness_H[first_P] >= (fastest + slowest) / 2)[-1])
        return [(stages + 1, int(first_P[stages]) + 1) for stages in sorted({0, last})]

    def embedding_s_N(self, columns: LayoutColumns) -> Floats:
        """Return the seconds to reduce the gradients of the word embedding that the first and the last stage share."""
        # A layout with a single stage may use a single slot, and a cluster of one slot has no links.
        if not parameters.has_two_embeddings(self.job.model) or not (columns.pp > 1).any():
            return np.zeros(len(columns))
        each_bytes = parameters.reduced_gradient_bytes(self.job)
        tp_U, group_N = np.unique(columns.tp, return_inverse=True)
        bytes_U = [float(parameters.word_embedding_parameters(self.job.model, tp) * each_bytes) for tp in tp_U.tolist()]
        seconds_U = self.fabric.bounds_s("all_reduce", 2, np.array(bytes_U))
        return np.asarray(seconds_U[group_N.reshape(-1)] * (columns.pp > 1))

    def _exchange_s_U3X(self, columns: LayoutColumns, groups_lie: GroupsLie) -> Floats:
        """Return the exposed seconds of exchanges in forward and backward for each part, then the seconds of a send.

        Layouts that differ only in the micro-batch size are priced together, because message sizes are proportional to
        the micro-batch size. Only the messages of FSDP do not depend on the micro-batch size.
        """
        hidden_by = ("tp", "cp", "micro_batch_size", *dict.fromkeys((*self._shard_fields, *self._share_fields)))
        cases = columns.groups(*hidden_by)
        hiding_U = _each(columns, cases.first_U, hidden_by, self._hiding, self.compute.hiding)
        found = np.zeros((len(columns), 3, 2 * len(self.job.model.possible_kinds) + 3))
        degrees_of = columns.groups("tp", "cp", "sequence_parallel", "ep", "etp", *self._shard_fields)
        for rows in split_by_code(degrees_of.group_N):
            shape = columns.layout(int(rows[0]))
            degrees = {name: getattr(shape, name) for name in ("tp", "cp", "ep", "etp", "sequence_parallel")}
            one = Layout(**degrees, dp=shape.dp if self._shard_fields else shape.ep * shape.etp)
            samples = columns.micro_batch_size[rows].astype(np.float64)
            if one not in self._exchanges:
                self._exchanges[one] = exchanges_of(self.job, one, self._one_of_each, self.fabric.domain_slots)
            members = group_sizes(one, instances=parameters.shard_copies(self.job))
            across: tuple[str, ...] = ("tp",) if groups_lie == "tensor across hosts" else ()
            if groups_lie == "experts across hosts":
                # With etp above 1, the etp ranks of an expert or the ep ranks with equal parts of experts span hosts.
                across = ("ep_etp", "ep") if one.etp == 1 else ("ep_etp",)
            for item in self._exchanges[one]:
                sizes = item.size_bytes * (np.ones_like(samples) if item.is_sharding else samples)
                fewest = 2 if item.group in across else 1
                seconds = self.fabric.bounds_s(item.kind, members[item.group], sizes, fewest=fewest)
                if item.behind:
                    hidden_s = [hiding_U[case].seconds(item.behind) for case in cases.group_N[rows].tolist()]
                    seconds = exposed_s(seconds, np.array(hidden_s) * item.behind_share)
                found[rows, :2] += seconds[:, None, None] * np.array([item.forward, item.backward])
            if self._num_slots > 1:
                # A tensor-parallel group that fills a host leaves no slot for a second stage, so sends leave the host.
                fewest = 2 if one.tp == self.devices > 1 and groups_lie == "inside hosts" else 1
                hop_s = self.fabric.bounds_s("send", 2, residual_bytes(self.job, one) * samples, fewest=fewest)
                found[rows, 2] = hop_s[:, None]
        return found


def _each(
    columns: LayoutColumns, rows: Ints, fields: tuple[Field, ...], known: Memo[T], make: Callable[[Layout], T]
) -> list[T]:
    """Return a value for each row of layouts from the cache, keyed by `fields`. Build a layout only without a value."""
    keys = columns.values(rows, *fields)
    return [
        known.get(key, lambda: make(columns.layout(row)))  # noqa: B023 - called at once
        for key, row in zip(keys, rows.tolist(), strict=True)
    ]


def split_by_code(codes_N: Ints) -> list[Ints]:
    """Return one array of row indices for each different code."""
    order = np.argsort(codes_N, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(codes_N[order])) + 1)


_ROUNDING = 1e-9
"""Relative amount by which every bound is lowered, to cover rounding by another order of sums than in predictions."""
_AT_ONCE = 1 << 16
"""Largest number of stages in one numpy call, small enough for the cache of the processor."""


class BoundColumns:
    """Bounds the step time of layouts of one job on one allocation."""

    def __init__(self, job: Job, measurements: Measurements, predictor: Predictor | None = None) -> None:
        """Prepare the tables of a job, with the compute times of a predictor if one is given."""
        predictor = predictor or Predictor(job, measurements)
        self._tables = Tables(job, measurements, predictor.compute, predictor.fabric)

    def of_columns(self, columns: LayoutColumns) -> Floats:
        """Return a lower bound of each layout's step time over all placements; nan if the layout cannot be priced."""
        return self._bounds_N(columns, "anywhere")

    def rough_of_columns(self, columns: LayoutColumns) -> Floats:
        """Return a bound that is lower and much cheaper to compute, from one direct path through each pipeline rank.

        The first micro-batch reaches rank p through the first chunks of the ranks before it. Rank p runs all its
        passes, and the last backward returns through the first chunks of the ranks before rank p. Some rank has the
        slowest slot. The cheap bound leaves out exchanges after the passes.
        """
        seconds_N = np.full(len(columns), np.nan)
        known = np.flatnonzero(self._tables.can_price_N(columns))
        if not len(known):
            return seconds_N
        columns = columns.take(known)
        unit, n_N = self._tables.unit_times(columns), self._tables.microbatches_N(columns)
        for rows in split_by_code(codes_of([columns.pp, columns.vpp])):
            content, here = contents_of(self._tables.job, columns.take(rows)), unit.take(rows)
            first_U, group_N = grouped(here.group_N, content.split_N)
            unit_U, kinds_UVP = here.group_N[first_U], content.kind_CVP[content.split_N[first_U]]
            fastest, slowest = self._tables.fastest, self._tables.slowest
            fast_UVP, slow_UVP = (
                np.add(*here.chunk_times(content.parts_KX, slowness, slowest))[unit_U[:, None, None], kinds_UVP]
                for slowness in (fastest, slowest)
            )
            first_UP = fast_UVP[:, 0]
            hops_UP = 2 * here.hop_s_U[unit_U][:, None] * np.arange(first_UP.shape[1])
            beside_NP = (first_UP.cumsum(axis=1) - first_UP + hops_UP)[group_N]
            fast_NP, slow_NP = (n_N[rows][:, None] * each.sum(axis=1)[group_N] for each in (fast_UVP, slow_UVP))
            seconds_N[known[rows]] = np.maximum((fast_NP + beside_NP).max(axis=1), (slow_NP + beside_NP).min(axis=1))
        seconds_N[known] *= self._tables.lowering_N(columns)
        return seconds_N

    def sharpened(self, columns: LayoutColumns) -> Floats:
        """Return higher bounds at two or three times the cost; 0 s if no group inside layers fits on one host.

        For groups that fit on a host one of three cases holds: all groups lie inside hosts, some tensor-parallel group
        spans hosts, or some ranks that share experts span hosts. The result is the least bound of these three cases. If
        the ranks that share experts are whole tensor-parallel groups, the case `tensor across hosts` is part of
        `experts across hosts`.
        """
        seconds_N = np.zeros(len(columns))
        tensor_N, experts_N = self._tables.tensor_fits_hosts(columns), self._tables.experts_fit_hosts(columns)
        whole_N = ((columns.ep * columns.etp) % columns.tp == 0) & (columns.use_tp_pp_dp_mapping == 0)
        cases: tuple[tuple[GroupsLie, NDArray[np.bool_]], ...] = (
            ("inside hosts", tensor_N | experts_N),
            ("tensor across hosts", tensor_N & ~(experts_N & whole_N)),
            ("experts across hosts", experts_N),
        )
        seconds_N[tensor_N | experts_N] = np.inf
        for groups_lie, holds_N in cases:
            rows = np.flatnonzero(holds_N)
            if len(rows):
                seconds_N[rows] = np.minimum(seconds_N[rows], self._bounds_N(columns.take(rows), groups_lie))
        return seconds_N

    def _bounds_N(self, columns: LayoutColumns, groups_lie: GroupsLie) -> Floats:
        seconds_N = np.full(len(columns), np.nan)
        known = np.flatnonzero(self._tables.can_price_N(columns))
        if not len(known):
            return seconds_N
        columns = columns.take(known)
        crosses = groups_lie in ("tensor across hosts", "experts across hosts")
        unit = self._tables.unit_times(columns, "anywhere" if crosses else groups_lie)
        # The same fields of a layout decide `unit` and `crossing`, so both have the same groups of layouts.
        crossing = self._tables.unit_times(columns, groups_lie) if crosses else None
        group_N, unit_parameters_U2X = self._tables.unit_parameters(columns)
        for rows in split_by_code(codes_of([columns.pp, columns.vpp])):
            content = contents_of(self._tables.job, columns.take(rows))
            pieces = -(-len(rows) * int(columns.pp[rows[0]] * columns.vpp[rows[0]]) // _AT_ONCE)
            for place in np.array_split(np.arange(len(rows)), pieces):
                part = rows[place]
                some, here = columns.take(part), content._replace(split_N=content.split_N[place])
                passes = _Passes(self._tables, some, unit.take(part), here, crossing.take(part) if crossing else None)
                update = _UpdatePrices(self._tables, some, (group_N[part], unit_parameters_U2X), here, groups_lie)
                seconds_N[known[part]] = _step_s_N(some, passes, update)
        seconds_N[known] *= self._tables.lowering_N(columns)
        return seconds_N


class _Passes:
    """Bounds of the pipelines of each group of layouts."""

    def __init__(
        self, tables: Tables, columns: LayoutColumns, unit: UnitTimes, content: Content, crossing: UnitTimes | None
    ) -> None:
        """Bound the pipelines. With `crossing`, one unknown rank of each pipeline takes at least these times."""
        microbatches_N = tables.microbatches_N(columns)
        first_U, self.group_N = grouped(unit.group_N, content.split_N, microbatches_N, columns.microbatch_group_size)
        kinds_UVP = content.kind_CVP[content.split_N[first_U]]
        rows_U = unit.group_N[first_U]
        group_size_U = np.where(columns.microbatch_group_size > 0, columns.microbatch_group_size, columns.pp)[first_U]

        def pipelines(unit: UnitTimes, slowness: float) -> Pipelines:
            forward_RK, backward_RK = unit.chunk_times(content.parts_KX, slowness, tables.slowest)
            rows_U11 = rows_U[:, None, None]
            return Pipelines(
                forward_s_UVP=forward_RK[rows_U11, kinds_UVP],
                backward_s_UVP=backward_RK[rows_U11, kinds_UVP],
                hop_s_U=unit.hop_s_U[rows_U],
                microbatches_U=microbatches_N[first_U],
                group_size_U=group_size_U,
            )

        fast = slow = slowest = pipelines(unit, tables.fastest)
        if crossing is not None:
            slow, slowest = pipelines(crossing, tables.fastest), pipelines(crossing, tables.slowest)
        elif tables.slowest > tables.fastest:
            slow = slowest = pipelines(unit, tables.slowest)
        by_paths, slow_by_paths = fast, slow
        if Waits.of(tables.job, int(columns.vpp[0]), tables.compute.device_kind).meets_receivers:
            by_paths, slow_by_paths = _with_hops_in_passes(fast), _with_hops_in_passes(slow)
        self.drains = drains(by_paths, slow=slow_by_paths if slow is not fast else None)
        # Seconds of the first stage's forward on the fastest slot, and of its backward on the slowest slot. Gradient
        # reductions start at most this backward time before the end of the backward.
        self.first_forward_s_U = fast.forward_s_UVP[:, 0, 0]
        self.first_backward_s_U = slowest.backward_s_UVP[:, 0, 0]


def _with_hops_in_passes(pipelines: Pipelines) -> Pipelines:
    """Add the seconds of each message to the pass of its receiver, because the receiver is busy during the message."""
    shape = pipelines.forward_s_UVP.shape[1:]
    stages = int(np.prod(shape))
    hop_s_U11 = pipelines.hop_s_U[:, None, None]
    stage_VP = np.arange(stages).reshape(shape)
    return replace(
        pipelines,
        forward_s_UVP=pipelines.forward_s_UVP + hop_s_U11 * (stage_VP > 0),
        backward_s_UVP=pipelines.backward_s_UVP + hop_s_U11 * (stage_VP < stages - 1),
        hop_s_U=np.zeros_like(pipelines.hop_s_U),
    )


class _SlowGroups(NamedTuple):
    """Seconds of reductions and gathers whose groups use hosts with slow links."""

    stages: int
    """Least number of stages whose groups use slow hosts."""
    reduce_s_TVP: Floats
    gather_s_TVP: Floats


class _UpdatePrices:
    """Bytes and seconds of exchanges and optimizer after the passes, for groups of layouts with the same pp and vpp."""

    def __init__(
        self, tables: Tables, columns: LayoutColumns, unit: tuple[Ints, Ints], content: Content, groups_lie: GroupsLie
    ) -> None:
        """Price the exchanges and optimizer steps after the passes.

        `unit` has the group of each layout by parameters, and the parameters of a chunk's parts for each group.
        """
        job, (unit_N, parameters_R2X) = tables.job, unit
        fields = [columns.dp, columns.cp, columns.ep, columns.etp, columns.use_distributed_optimizer]
        first_T, self.group_N = grouped(unit_N, content.split_N, *fields)
        groups = columns.take(first_T)
        kinds_TVP = content.kind_CVP[content.split_N[first_T]]
        rows_T11 = unit_N[first_T][:, None, None]
        parameters_2RK = np.moveaxis(parameters_R2X @ content.parts_KX.T, 1, 0)
        counts = tuple(each_RK[rows_T11, kinds_TVP] for each_RK in parameters_2RK)
        prices = partial(_exchange_s, tables, groups, counts, _group_slots(tables, groups, groups_lie))
        self.reduce_s_TVP, self.gather_s_TVP = prices(tables.num_hosts)
        slow_hosts = tables.slow_hosts(int(columns.pp[0]))
        self.slow_groups = [_SlowGroups(stages, *prices(among)) for stages, among in slow_hosts]
        dense_PT, expert_PT = (count_TVP.sum(axis=1).T for count_TVP in counts)
        optimizer_s_PT = tables.once_a_step.seconds(
            parameters.resident_parameters(job, dense_PT, expert_PT, groups),
            parameters.held_gradients(job, dense_PT, expert_PT, groups) * parameters.gradient_bytes_per_parameter(job),
        )
        self.optimizer_s_TP = optimizer_s_PT.T * tables.fastest
        # Number of gradient buckets of the first stage; later stages have one bucket.
        dense_T, expert_T = (each_TVP[:, 0, 0] for each_TVP in counts)
        self.buckets_T = num_buckets(dense_T, expert_T, groups.dp * groups.cp)
        self.embedding_s_T = tables.embedding_s_N(groups)
        self.aligns_gathers = Waits.of(job, int(columns.vpp[0]), tables.compute.device_kind).aligns_gathers


def _group_slots(tables: Tables, groups: LayoutColumns, groups_lie: GroupsLie) -> tuple[Ints, Ints]:
    """Return the slots that dense and expert groups need on their hosts, slots filled by other groups included."""
    dense_slots_T, expert_slots_T = groups.dp * groups.cp, parameters.expert_dp(groups)
    if tables.fabric.cluster.keeps_residues:
        # Two members of a group whose ranks are equal modulo the number of slots of a host lie on different hosts.
        dense_slots_T = dense_slots_T * np.gcd(groups.tp, tables.devices)
        apart_T = np.gcd(groups.ep * groups.etp, tables.devices)
        expert_slots_T = expert_slots_T * np.where(parameters.experts_lie_in_stages(groups), apart_T, 1)
    elif groups_lie == "inside hosts":
        # Members of a data-parallel group are in different tensor-parallel or expert groups, and hosts hold whole ones.
        dense_slots_T = dense_slots_T * np.where(tables.tensor_fits_hosts(groups), groups.tp, 1)
        expert_slots_T = expert_slots_T * np.where(tables.experts_fit_hosts(groups), groups.ep * groups.etp, 1)
    return dense_slots_T, expert_slots_T


def _exchange_s(
    tables: Tables, groups: LayoutColumns, counts: tuple[Ints, ...], slots: tuple[Ints, Ints], among: int
) -> tuple[Floats, Floats]:
    """Return the seconds of gradient reduction and of parameter gathers for every stage.

    `counts` has the dense and expert parameters of each chunk, and `slots` the slots that dense and expert groups need
    on their hosts. Each group has a slot on at least one of the `among` hosts with the slowest links.
    """
    job, sharding = tables.job, parameters.sharding_of(tables.job)
    # FSDP exchanges gradients and weights during the passes. The bound leaves out FSDP's gather of embedding and head.
    gradient_bytes = 0 if sharding and sharding.gradients else parameters.reduced_gradient_bytes(job)
    weight_bytes = 0 if sharding and sharding.weights else job.model.dtype_bytes
    reduce_s, gather_s = np.zeros(counts[0].shape), np.zeros(counts[0].shape)
    is_sharded_T = groups.use_distributed_optimizer > 0
    dense = (groups.dp * groups.cp, slots[0], np.full(len(groups), True))
    experts = (parameters.expert_dp(groups), slots[1], parameters.experts_lie_in_stages(groups))
    for count_TVP, (size_T, slots_T, uses_T) in zip(counts, (dense, experts), strict=True):
        if not count_TVP.any():
            continue
        fewest_T = -(-slots_T // tables.devices)
        among_T = np.where(uses_T, among, tables.num_hosts)
        sharded, whole = (
            GroupsOnHosts(size_T=np.where(counts_T, size_T, 1), fewest_T=fewest_T, among_T=among_T)
            for counts_T in (is_sharded_T, ~is_sharded_T)
        )
        reduce_s += tables.fabric.groups_bound_s("all_reduce", whole, count_TVP * gradient_bytes)
        reduce_s += tables.fabric.groups_bound_s("reduce_scatter", sharded, count_TVP * gradient_bytes)
        gather_s += tables.fabric.groups_bound_s("all_gather", sharded, count_TVP * weight_bytes)
    return reduce_s, gather_s


def _step_s_N(columns: LayoutColumns, passes: _Passes, update: _UpdatePrices) -> Floats:
    """Bound the steps by the pipelines, followed by `StepEnd` with the best links and with the links of slow hosts."""
    t = update.group_N
    buckets_N = np.where(columns.overlap_grad_reduce > 0, update.buckets_T[t], 1)
    drain_VPN = _drains_VPN(columns, passes, update, buckets_N)
    # Only the first stage has several gradient buckets, which are reduced during the last backward.
    backward_VPN = np.zeros_like(drain_VPN)
    backward_VPN[0, 0] = passes.first_backward_s_U[passes.group_N]
    buckets_VPN = np.ones(drain_VPN.shape, dtype=np.int64)
    buckets_VPN[0, 0] = buckets_N
    end = StepEnd(
        layout=columns,
        drain_s_VPN=drain_VPN,
        backward_s_VPN=backward_VPN,
        num_buckets_VPN=buckets_VPN,
        reduce_s_VPN=_first_and_others_VPN(update.reduce_s_TVP, t),
        gather_s_VPN=update.gather_s_TVP.sum(axis=1)[t].T[None],
        optimizer_s_PN=update.optimizer_s_TP[t].T,
        embedding_s_N=update.embedding_s_T[t],
    )
    finish_N = end.finish_s_N + end.more_embedding_s_N
    later_N = end.update_s_PN.max(axis=0)
    steps_N: Floats = finish_N + later_N
    for slow in update.slow_groups:
        # At least `stages` stages use the links of slow hosts. For a lower bound, assume that the stages with the
        # quickest exchanges use the slow hosts.
        slower = replace(
            end,
            reduce_s_VPN=_first_and_others_VPN(slow.reduce_s_TVP, t),
            gather_s_VPN=slow.gather_s_TVP.sum(axis=1)[t].T[None],
        )
        slow_PN = np.maximum(slower.reduced_s_PN, finish_N) + np.maximum(slower.update_s_PN, later_N)
        steps_N = np.maximum(steps_N, np.partition(slow_PN, slow.stages - 1, axis=0)[slow.stages - 1])
    return steps_N


def _first_and_others_VPN(seconds_TVP: Floats, group_N: Ints) -> Floats:
    """Return the seconds of each rank's first chunk, and of all its other chunks together."""
    first_TP = seconds_TVP[:, 0]
    if seconds_TVP.shape[1] == 1:
        return np.asarray(first_TP[group_N].T[None])
    both_T2P = np.stack([first_TP, seconds_TVP[:, 1:].sum(axis=1)], axis=1)
    return np.asarray(both_T2P[group_N].transpose(1, 2, 0))


def _drains_VPN(columns: LayoutColumns, passes: _Passes, update: _UpdatePrices, buckets_N: Ints) -> Floats:
    """Bound the end of the last backward of each rank's first and last chunk, with waits for overlapped gathers.

    If gathers are aligned, every action depends on the first forward of stage 0, which waits for the whole gather of
    its parameters. If gathers are not aligned, the first forward of each stage waits for one bucket of parameters, and
    for the part of the gather that compute does not hide.
    """
    u, t = passes.group_N, update.group_N
    any_NP, early_NP = passes.drains.any_UP[u], passes.drains.early_UP[u]
    has_gather_N = gathers_in_forward(columns)
    own_N = update.gather_s_TVP[:, 0, 0][t]
    if update.aligns_gathers:
        wait_N1 = np.where(has_gather_N, own_N, 0.0)[:, None]
        any_NP, early_NP = any_NP + wait_N1, early_NP + wait_N1
    else:
        exposed_N = update.gather_s_TVP.sum(axis=(1, 2))[t] - own_N
        exposed_N += gather_waits_s(own_N, passes.first_forward_s_U[u], buckets_N)
        exposed_N = np.where(has_gather_N, exposed_N, 0.0)
        any_NP = np.maximum(any_NP, passes.drains.first_UP[u] + exposed_N[:, None])
    return np.stack([any_NP.T, early_NP.T] if columns.vpp[0] > 1 else [any_NP.T])
