"""Lower bounds of the step time of many layouts at once, for the wide search.

The functions that predict one layout's step also count compute, collectives and parameters in this module. The bounds
call these functions once for each group of layouts with equal relevant fields, and for each kind of chunk. The bounds
differ from `Predictor.bound_s` in one way: direct paths through the schedule replace the simulation of the pipeline.
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
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost import Memo
from pipette_launch.cost.communication.collectives import Fabric
from pipette_launch.cost.communication.exchanges import (
    LayerCounts,
    exchanges_of,
    group_sizes,
    num_buckets,
    rank_strides,
)
from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.layers import parameters
from pipette_launch.cost.layers.block import Parameters, residual_bytes
from pipette_launch.cost.layers.loads import Exchange, Hiding
from pipette_launch.cost.step.assemble import gather_waits_s, gathers_in_forward
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.cost.step.work import exposed_s, once_a_step, pass_s
from pipette_launch.errors import LayoutError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Field, Floats, Ints, Layout, LayoutColumns, codes_of, grouped
from pipette_launch.facts.measurements import Measurements

T = TypeVar("T")
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
    hop_bytes_U: Floats
    """Bytes of a message between two stages."""

    def take(self, rows: Ints) -> UnitTimes:
        """Return the times of some of the layouts, and of the groups that contain these layouts."""
        used, group_N = np.unique(self.group_N[rows], return_inverse=True)
        return UnitTimes(group_N.reshape(-1), self.passes_U4X[used], self.exchanges_U2X[used], self.hop_bytes_U[used])

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
        self._num_slots = cluster.num_slots
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
        # Check the micro-batch groups by the rule of `facts.schedule.StockSchedule`.
        microbatches_N = self.microbatches_N(columns)
        size_N = np.where(columns.microbatch_group_size > 0, columns.microbatch_group_size, columns.pp)
        rest_N = microbatches_N % size_N
        fills_N = (size_N >= columns.pp) & (size_N <= microbatches_N) & ((rest_N == 0) | (rest_N >= columns.pp))
        return np.asarray(runs_N & divides_N & (world_N == self._num_slots) & ((columns.vpp == 1) | fills_N))

    def microbatches_N(self, columns: LayoutColumns) -> Ints:
        """Return the micro-batches of one step."""
        return np.asarray(self.job.batch.global_batch_size // (columns.dp * columns.micro_batch_size))

    def hop_s_U(self, columns: LayoutColumns, bytes_U: Floats) -> Floats:
        """Return the seconds of messages between stages over the best link, for layouts with equal pp."""
        pp = int(columns.pp[0])
        stride = 1 if columns.use_tp_pp_dp_mapping.any() else self._num_slots // pp
        return self.fabric.bounds_s("send", min(pp, 2), bytes_U, fewest=self.fabric.least_hosts(2, stride))

    def unit_times(self, columns: LayoutColumns) -> UnitTimes:
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
        keys = columns.values(networks.first_U, *sent_by)
        new = [place for place, key in enumerate(keys) if key not in self._networks]
        if new:
            found = self._exchange_U3X(columns.take(networks.first_U[new]))
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

    def _exchange_U3X(self, columns: LayoutColumns) -> Floats:
        """Return the exposed seconds of exchanges in forward and backward for each part, then the bytes of a message.

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
            members, strides = group_sizes(one, instances=parameters.shard_copies(self.job)), rank_strides(one)
            for item in self._exchanges[one]:
                sizes = item.size_bytes * (np.ones_like(samples) if item.is_sharding else samples)
                fewest = self.fabric.least_hosts(members[item.group], strides[item.group])
                seconds = self.fabric.bounds_s(item.kind, members[item.group], sizes, fewest=fewest)
                if item.behind:
                    hidden_s = [hiding_U[case].seconds(item.behind) for case in cases.group_N[rows].tolist()]
                    seconds = exposed_s(seconds, np.array(hidden_s) * item.behind_share)
                found[rows, :2] += seconds[:, None, None] * np.array([item.forward, item.backward])
            found[rows, 2] = (residual_bytes(self.job, one) * samples)[:, None]
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


class BoundColumns:
    """Bounds the step time of layouts of one job on one allocation."""

    def __init__(self, job: Job, measurements: Measurements, predictor: Predictor | None = None) -> None:
        """Prepare the tables of a job, with the compute times of a predictor if one is given."""
        predictor = predictor or Predictor(job, measurements)
        self._tables = Tables(job, measurements, predictor.compute, predictor.fabric)

    def of_columns(self, columns: LayoutColumns) -> Floats:
        """Return a lower bound of each layout's step time over all placements; nan if the layout cannot be priced."""
        return self._bounds_N(columns, has_end=True)

    def rough_of_columns(self, columns: LayoutColumns) -> Floats:
        """Return a bound that is lower and cheaper to compute, because it ends with the passes of the first stage."""
        return self._bounds_N(columns, has_end=False)

    def _bounds_N(self, columns: LayoutColumns, *, has_end: bool) -> Floats:
        tables, seconds_N = self._tables, np.full(len(columns), np.nan)
        known = np.flatnonzero(tables.can_price_N(columns))
        if not len(known):
            return seconds_N
        columns = columns.take(known)
        unit = tables.unit_times(columns)
        for rows in split_by_code(codes_of([columns.pp, columns.vpp])):
            some = columns.take(rows)
            content = contents_of(tables.job, some)
            paths = _Paths.of(tables, some, unit.take(rows), content)
            if has_end:
                seconds_N[known[rows]] = _step_s_N(some, paths, _StepEnds.of(tables, some, content))
            else:
                seconds_N[known[rows]] = paths.drained_s_UP[paths.group_N, 0]
        seconds_N[known] *= 1 - _ROUNDING
        return seconds_N


class _Paths(NamedTuple):
    """Lengths of direct paths through the passes of each group of layouts.

    The first micro-batch reaches rank p through the first chunks of the ranks before it. Rank p runs all its passes,
    and the last backward returns through the first chunks of the ranks before rank p. The simulated time of a schedule
    is the length of its longest path (`cost.pipeline.engine`), so no path is longer.
    """

    group_N: Ints
    drained_s_UP: Floats
    """Earliest end of the last backward of each pipeline rank. Some rank has the slowest slot."""
    first_forward_s_U: Floats
    """Seconds of the first stage's forward, and of its backward, on the slowest slot."""
    first_backward_s_U: Floats

    @classmethod
    def of(cls, tables: Tables, columns: LayoutColumns, unit: UnitTimes, content: Content) -> _Paths:
        """Compute the paths of layouts with equal pp and vpp."""
        first_U, group_N = grouped(unit.group_N, content.split_N)
        unit_U, kinds_UVP = unit.group_N[first_U], content.kind_CVP[content.split_N[first_U]]
        fast_2UVP, slow_2UVP = (
            np.stack(unit.chunk_times(content.parts_KX, slowness, tables.slowest))[:, unit_U[:, None, None], kinds_UVP]
            for slowness in (tables.fastest, tables.slowest)
        )
        way_2UP, ranks = fast_2UVP[:, :, 0], np.arange(int(columns.pp[0]))
        in_UP, out_UP = (
            way_2UP.cumsum(axis=2) - way_2UP + tables.hop_s_U(columns, unit.hop_bytes_U[unit_U])[:, None] * ranks
        )
        microbatches_U1 = tables.microbatches_N(columns)[first_U][:, None]
        fast_UP, slow_UP = (microbatches_U1 * each_2UVP.sum(axis=(0, 2)) for each_2UVP in (fast_2UVP, slow_2UVP))
        drained_UP = in_UP + fast_UP
        slowest_U = (in_UP + slow_UP + out_UP).min(axis=1)
        drained_UP[:, 0] = np.maximum((drained_UP + out_UP).max(axis=1), slowest_U)
        return cls(group_N, drained_UP, *slow_2UVP[:, :, 0, 0])


class _StepEnds(NamedTuple):
    """Seconds over the best links, and of the optimizer, after the passes of each group of layouts (T)."""

    group_N: Ints
    reduce_s_TVP: Floats
    gather_s_TVP: Floats
    optimizer_s_TP: Floats
    buckets_T: Ints
    """Number of gradient buckets of the first stage; later stages have one bucket."""

    @classmethod
    def of(cls, tables: Tables, columns: LayoutColumns, content: Content) -> _StepEnds:
        """Price the exchanges and the optimizer of layouts with equal pp and vpp."""
        job, (unit_N, parameters_R2X) = tables.job, tables.unit_parameters(columns)
        fields = [columns.dp, columns.cp, columns.ep, columns.etp, columns.use_distributed_optimizer]
        first_T, group_N = grouped(unit_N, content.split_N, *fields)
        groups = columns.take(first_T)
        kinds_TVP = content.kind_CVP[content.split_N[first_T]]
        parameters_2RK = np.moveaxis(parameters_R2X @ content.parts_KX.T, 1, 0)
        dense_TVP, expert_TVP = (each_RK[unit_N[first_T][:, None, None], kinds_TVP] for each_RK in parameters_2RK)
        reduce_s, gather_s = _exchange_s(tables, groups, dense_TVP, expert_TVP)
        dense_PT, expert_PT = (count_TVP.sum(axis=1).T for count_TVP in (dense_TVP, expert_TVP))
        optimizer_s_PT = tables.once_a_step.seconds(
            parameters.resident_parameters(job, dense_PT, expert_PT, groups),
            parameters.held_gradients(job, dense_PT, expert_PT, groups) * parameters.gradient_bytes_per_parameter(job),
        )
        return cls(
            group_N=group_N,
            reduce_s_TVP=reduce_s,
            gather_s_TVP=gather_s,
            optimizer_s_TP=optimizer_s_PT.T * tables.fastest,
            buckets_T=num_buckets(dense_TVP[:, 0, 0], expert_TVP[:, 0, 0], groups.dp * groups.cp),
        )


def _exchange_s(tables: Tables, groups: LayoutColumns, dense_TVP: Ints, expert_TVP: Ints) -> tuple[Floats, Floats]:
    """Return the seconds of gradient reduction and of parameter gathers for each chunk of each pipeline rank."""
    job, sharding = tables.job, parameters.sharding_of(tables.job)
    # FSDP exchanges gradients and weights during the passes. The bound leaves out FSDP's gather of embedding and head.
    gradient_bytes = 0 if sharding and sharding.gradients else parameters.reduced_gradient_bytes(job)
    weight_bytes = 0 if sharding and sharding.weights else job.model.dtype_bytes
    reduce_s, gather_s = np.zeros(dense_TVP.shape), np.zeros(dense_TVP.shape)
    dense = (dense_TVP, groups.dp * groups.cp, groups.tp)
    experts = (expert_TVP, parameters.expert_dp(groups), groups.ep * groups.etp)
    for count_TVP, size_T, stride_T in (dense, experts):
        for rows in split_by_code(codes_of([size_T, stride_T, groups.use_distributed_optimizer])):
            some, size = count_TVP[rows], int(size_T[rows[0]])
            bounds_s = partial(tables.fabric.bounds_s, fewest=tables.fabric.least_hosts(size, int(stride_T[rows[0]])))
            if groups.use_distributed_optimizer[rows[0]]:
                reduce_s[rows] += bounds_s("reduce_scatter", size, some * gradient_bytes)
                gather_s[rows] += bounds_s("all_gather", size, some * weight_bytes)
            else:
                reduce_s[rows] += bounds_s("all_reduce", size, some * gradient_bytes)
    return reduce_s, gather_s


def _step_s_N(columns: LayoutColumns, paths: _Paths, ends: _StepEnds) -> Floats:
    """Return the seconds of steps: a path to some rank's last pass, its exposed reduction, and the longest update.

    With overlap, only the reduction of a rank's first chunk follows the last pass, and a backward hides all buckets but
    the last. Every path begins with the first forward, which waits for an overlapped gather of its parameters.
    """
    u, t = paths.group_N, ends.group_N
    overlaps_N = columns.overlap_grad_reduce > 0
    exposed_NP = np.where(overlaps_N[:, None], ends.reduce_s_TVP[:, 0][t], ends.reduce_s_TVP.sum(axis=1)[t])
    buckets_N = np.where(overlaps_N, ends.buckets_T[t], 1)
    hidden_N = paths.first_backward_s_U[u] * (buckets_N - 1) / buckets_N
    exposed_NP[:, 0] = np.maximum(exposed_NP[:, 0] - hidden_N, exposed_NP[:, 0] / buckets_N)
    finish_N = (paths.drained_s_UP[u] + exposed_NP).max(axis=1)
    gather_TP, first_gather_N = ends.gather_s_TVP.sum(axis=1), ends.gather_s_TVP[:, 0, 0][t]
    waits_N = first_gather_N
    if columns.vpp[0] == 1:
        waits_N = gather_waits_s(first_gather_N, paths.first_forward_s_U[u], buckets_N)
    update_T, overlapped_T = (ends.optimizer_s_TP + gather_TP).max(axis=1), ends.optimizer_s_TP.max(axis=1)
    later_N = np.where(columns.overlap_param_gather > 0, overlapped_T[t], update_T[t])
    return np.asarray(finish_N + later_N + np.where(gathers_in_forward(columns), waits_N, 0.0))
