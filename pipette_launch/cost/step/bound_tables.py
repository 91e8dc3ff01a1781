"""Tables for `step_bounds`: seconds and parameters of each part of a chunk, if every link were the best link."""

# N = layouts, U = groups of layouts with equal times, C = layer splits of the model, K = kinds of chunk,
# P = pipeline ranks, V = chunks of a pipeline rank.
# X = parts of a chunk: for each kind of layer, layers that run once and layers that full recompute repeats; then
# embedding, head, and depths of multi-token prediction.

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost import Memo
from pipette_launch.cost.communication.collectives import Fabric
from pipette_launch.cost.communication.exchanges import LayerCounts, exchanges_of
from pipette_launch.cost.communication.groups import group_sizes
from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.layers import parameters
from pipette_launch.cost.layers.block import residual_bytes
from pipette_launch.cost.layers.passes import Exchange, Hiding
from pipette_launch.cost.step.work import exposed_s, pass_s
from pipette_launch.errors import LayoutError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Field, Floats, Ints, Layout, LayoutColumns, grouped
from pipette_launch.facts.measurements import Measurements

T = TypeVar("T")
GroupsLie = Literal["anywhere", "inside hosts", "tensor across hosts", "experts across hosts"]
"""Assumption about the groups inside layers. `inside hosts`: each tensor-parallel group lies on one host if it fits,
and so do the ranks that share experts. `tensor across hosts`: at least one tensor-parallel group spans several hosts.
`experts across hosts`: at least one set of ranks that share experts spans several hosts."""
UNLIKE = 1.02
"""If the best links of two hosts differ by less than this factor, the hosts count as equal."""
_PARTS: Memo[Memo[Ints]] = Memo()
"""Parts of the chunks by model and layer split. Many layouts share a split, so the parts are cached."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """Parts of the chunks of layouts with equal pp and vpp."""

    split_N: Ints
    kind_CVP: Ints
    parts_KX: Ints
    """Number of each part in each kind of chunk."""


def contents_of(job: Job, columns: LayoutColumns) -> Content:
    """Count the parts of each chunk, once for each layer split; all layouts have the same pp and vpp.

    Raises:
        LayoutError: a layout splits the layers unevenly.

    """
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
    return Content(split_N=splits.group_N, kind_CVP=kind.reshape(shape), parts_KX=parts_RX[first])


def _parts_SX(job: Job, columns: LayoutColumns, row: int) -> Ints:
    layout, rows = columns.layout(row), []
    chunks = parameters.chunk_kinds(job.model, layout)
    for stage, (kinds, again) in enumerate(chunks):
        pairs = ((kinds[again:].count(kind), kinds[:again].count(kind)) for kind in job.model.possible_kinds)
        # The prediction part counts its own embedding. On the first chunk, both share one table, so count it once.
        has_embedding = stage == 0 and (layout.pp == 1 or layout.mtp_chunk > 0 or not job.model.mtp_num_layers)
        rows.append([*chain(*pairs), has_embedding, stage == len(chunks) - 1, stage == layout.mtp_chunk])
    return np.array(rows, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """Seconds of one micro-batch on each part of a chunk, for each group of layouts."""

    group_N: Ints
    passes_U4X: Floats
    """Seconds of forward, of backward with recompute, and of idle time in forward and in backward, at speed 1."""
    exchanges_U2X: Floats
    """Exposed seconds of the collectives in forward and in backward, over the best links."""
    hop_s_U: Floats
    """Seconds of a send between two slots over the best link."""
    fastest: float
    slowest: float

    def take(self, rows: Ints) -> UnitTimes:
        """Return the times of some of the layouts, with only the groups of these layouts."""
        used, group_N = np.unique(self.group_N[rows], return_inverse=True)
        return replace(
            self,
            group_N=group_N.reshape(-1),
            passes_U4X=self.passes_U4X[used],
            exchanges_U2X=self.exchanges_U2X[used],
            hop_s_U=self.hop_s_U[used],
        )

    def chunk_times(self, parts_KX: Ints, *, slow: bool) -> tuple[Floats, Floats]:
        """Return the seconds of forward and backward of each kind of chunk, on the slowest slot or the fastest slot."""
        slowness = self.slowest if slow else self.fastest
        passes_U4K, exchanges_U2K = self.passes_U4X @ parts_KX.T, self.exchanges_U2X @ parts_KX.T
        compute_U2K, idle_U2K = passes_U4K[:, :2], passes_U4K[:, 2:]
        # If a pass idles longer than it computes, a slow slot may hide more exchanges, so assume the slowest slot.
        hides_U2K = idle_U2K * np.where(idle_U2K <= compute_U2K, slowness, self.slowest)
        seconds_U2K = pass_s(compute_U2K * slowness, exchanges_U2K, hides_U2K)
        return seconds_U2K[:, 0], seconds_U2K[:, 1]


class Tables:
    """Times and sizes that many layouts share, each computed once."""

    def __init__(self, job: Job, measurements: Measurements, compute: ComputeTable, fabric: Fabric) -> None:
        self.job, self.compute, self.fabric, cluster = job, compute, fabric, measurements.cluster
        self.once_a_step = parameters.OnceAStep.of(measurements)
        slowness = [1.0 / speed for speed in cluster.slot_speed]
        self.fastest, self.slowest = min(slowness), max(slowness)
        self._num_slots, self.devices, self.num_hosts = cluster.num_slots, cluster.devices_per_host, len(cluster.hosts)
        shared_by: tuple[Field, ...] = ("ep", "etp") if compute.knows_shares else ()
        self._share_fields: tuple[Field, ...] = (
            ("sequence_parallel", "ep", "etp") if compute.copies_to_host else shared_by
        )
        """Fields that decide pass times, in addition to the compute case."""
        self._can_compute: Memo[bool] = Memo()
        self._can_split: Memo[bool] = Memo()
        self._passes: Memo[Floats] = Memo()
        self._hiding: Memo[Hiding] = Memo()
        self._networks: dict[tuple[object, ...], Floats] = {}
        self._parameters: Memo[list[list[float]]] = Memo()
        self._exchanges: dict[Layout, tuple[Exchange, ...]] = {}
        self._shard_fields: tuple[Field, ...] = ("dp", "recompute") if parameters.sharding_of(job) else ()
        """Further fields that decide exchanges under FSDP: replicas, and recompute, which hides some exchanges."""
        self._one_of_each = LayerCounts.one_of_each(job.model)

    def can_price_N(self, columns: LayoutColumns) -> NDArray[np.bool_]:
        """Return, for each layout, whether compute times are known and its degrees divide batch, layers and slots."""
        cases = columns.groups("tp", "cp", "micro_batch_size")
        known_U = _each(
            columns,
            cases.first_U,
            ("tp", "cp", "micro_batch_size"),
            self._can_compute,
            lambda layout: self.compute.source(case_of(layout)) is not None,
        )
        fields = ("pp", "vpp", "layers_per_chunk")
        splits = columns.groups(*fields)
        splits_U = _each(columns, splits.first_U, fields, self._can_split, self._splits)
        runs_N = np.array(known_U, dtype=bool)[cases.group_N] & np.array(splits_U, dtype=bool)[splits.group_N]
        world_N = columns.tp * columns.pp * columns.dp * columns.cp
        batch = self.job.batch.global_batch_size
        divides_N = batch % (columns.dp * columns.micro_batch_size) == 0
        # The rule of `facts.known_schedules.check_interleaving`.
        microbatches_N = self.microbatches_N(columns)
        size_N = np.where(columns.microbatch_group_size > 0, columns.microbatch_group_size, columns.pp)
        rest_N = microbatches_N % size_N
        fills_N = (size_N >= columns.pp) & (size_N <= microbatches_N) & ((rest_N == 0) | (rest_N >= columns.pp))
        return np.asarray(runs_N & divides_N & (world_N == self._num_slots) & ((columns.vpp == 1) | fills_N))

    def microbatches_N(self, columns: LayoutColumns) -> Ints:
        """Return the micro-batches of one step."""
        return np.asarray(self.job.batch.global_batch_size // (columns.dp * columns.micro_batch_size))

    def tensor_fits_hosts(self, columns: LayoutColumns) -> NDArray[np.bool_]:
        """Return whether each tensor-parallel group fits on one host; false if tp is 1 or there is only one host."""
        return self._fits_hosts(columns.tp)

    def experts_fit_hosts(self, columns: LayoutColumns) -> NDArray[np.bool_]:
        """Return whether the ranks that share experts fit on one host; false if ep is 1 or there is only one host."""
        return self._fits_hosts(columns.ep * columns.etp) & (columns.ep > 1) & parameters.experts_lie_in_stages(columns)

    def _fits_hosts(self, ranks: Ints) -> NDArray[np.bool_]:
        return np.asarray((ranks > 1) & (self.devices % ranks == 0) & (self.num_hosts > 1))

    def unit_times(self, columns: LayoutColumns, groups_lie: GroupsLie = "anywhere") -> UnitTimes:
        """Return the seconds of each part of a chunk, for each group of layouts."""
        # The number of layers that full recompute repeats does not change the time of one layer.
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
        return UnitTimes(
            group_N=group_N.reshape(-1),
            passes_U4X=passes[kernel_U],
            exchanges_U2X=exchanges[network_U, :2],
            hop_s_U=exchanges[network_U, 2, 0],
            fastest=self.fastest,
            slowest=self.slowest,
        )

    def unit_parameters(self, columns: LayoutColumns) -> tuple[Ints, Ints]:
        """Return the group of each layout (N), and dense and expert parameters of each part on one rank (U, 2, X)."""
        first_U, group_N = grouped(columns.tp, columns.ep, columns.etp, (columns.pp > 1).astype(np.int64))

        def of_parts(layout: Layout) -> list[list[float]]:
            unit = parameters.unit_parameters(self.job.model, layout)
            layers = (each for each in unit.layers.values() for _ in range(2))
            parts = (*layers, unit.embedding, unit.head, unit.prediction)
            return [[part.dense for part in parts], [part.expert for part in parts]]

        found = _each(columns, first_U, ("tp", "ep", "etp", "pp"), self._parameters, of_parts)
        return group_N, np.array(found, dtype=np.int64)

    def _splits(self, layout: Layout) -> bool:
        with contextlib.suppress(LayoutError):
            return bool(layout.chunk_layers(self.job.model.num_layers))
        return False

    def slow_hosts(self, pp: int) -> list[tuple[int, int]]:
        """Return pairs (j, h): in every placement at least j stages have slots on the h hosts with the slowest links.

        j - 1 stages cannot fill these h hosts, so at least j stages have slots there. One pair is for the slowest host,
        and the second pair for all hosts that are nearly as slow.
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
        # Without a second stage there may be a single slot, for which the fabric has no best link.
        if not parameters.has_two_embeddings(self.job.model) or not (columns.pp > 1).any():
            return np.zeros(len(columns))
        each_bytes = parameters.gradient_bytes_per_parameter(self.job)
        tp_U, group_N = np.unique(columns.tp, return_inverse=True)
        bytes_U = [float(parameters.word_embedding_parameters(self.job.model, tp) * each_bytes) for tp in tp_U.tolist()]
        seconds_U = self.fabric.bounds_s("all_reduce", 2, np.array(bytes_U))
        return np.asarray(seconds_U[group_N.reshape(-1)] * (columns.pp > 1))

    def _exchange_s_U3X(self, columns: LayoutColumns, groups_lie: GroupsLie) -> Floats:
        """Return the exposed seconds of exchanges in forward and backward by part, then the seconds of a send.

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
                # With etp above 1, the ranks of one expert may span hosts, or the ranks with equal parts of experts.
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
                hop_s = self.fabric.bounds_s("send", 2, residual_bytes(self.job.model, one) * samples, fewest=fewest)
                found[rows, 2] = hop_s[:, None]
        return found


def _each(
    columns: LayoutColumns, rows: Ints, fields: tuple[Field, ...], known: Memo[T], make: Callable[[Layout], T]
) -> list[T]:
    """Return a value for each row, which depends only on `fields`; build a layout only if no value is cached."""
    keys = columns.values(rows, *fields)
    return [
        known.get(key, lambda: make(columns.layout(row)))  # noqa: B023 - called at once
        for key, row in zip(keys, rows.tolist(), strict=True)
    ]


def split_by_code(codes_N: Ints) -> list[Ints]:
    """Return, for each code, the indices of the rows with this code."""
    order = np.argsort(codes_N, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(codes_N[order])) + 1)
