"""What `step_bounds` looks up: times and parameters of what chunks are made of, and the best of all links."""

# N = layouts, U = groups of layouts that agree, C = cuts of the model into chunks, K = kinds of chunk,
# P = pipeline ranks, V = chunks of each, L = lines whose lowest counts.
# X = what chunks are made of: of each kind of layer those that run once and those that full recompute runs again;
# embedding, head, depths of multi-token prediction.

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.collectives import Fabric
from pipette_launch.cost.communication.exchanges import Exchange, Hiding, LayerCounts, exchanges_of, hop_bytes
from pipette_launch.cost.communication.groups import group_sizes
from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.layers.parameters import (
    OnceAStep,
    chunk_kinds,
    experts_lie_in_stages,
    gradient_bytes_per_parameter,
    has_two_embeddings,
    shard_copies,
    sharding_of,
    unit_parameters,
    word_embedding_parameters,
)
from pipette_launch.cost.memo import Memo
from pipette_launch.errors import LayoutError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Field, Layout, LayoutColumns, codes_of
from pipette_launch.facts.measurements import Measurements

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T")
GroupsLie = Literal["anywhere", "inside hosts", "tensor across hosts", "experts across hosts"]
"""Where groups inside layers lie. `inside hosts`: all tensor-parallel groups, and all ranks that share experts, if they
fit. `tensor across hosts`: some tensor-parallel group does not; `experts across hosts`: some that share do not."""
UNLIKE = 1.02
"""Hosts whose best links differ by less than this factor count as alike."""
_PARTS: Memo[Memo[Ints]] = Memo()
"""Of each model what its cuts are made of: most come again with every degree and micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What the chunks of some layouts of one shape hold."""

    cut_N: Ints
    kind_CVP: Ints
    parts_KX: Ints
    """How many of each part."""


def contents_of(job: Job, columns: LayoutColumns) -> Content:
    """Count what each chunk holds, once for each cut; every layout has the same pp and vpp.

    Raises:
        LayoutError: a row cuts the layers unevenly.

    """
    fields = ("layers_per_chunk", "chunks_after_mtp", "recompute")
    cuts = columns.groups(*fields)
    shape = (len(cuts.first_U), int(columns.vpp[0]), int(columns.pp[0]))
    known = _PARTS.get(job.model, Memo)
    keys = columns.values(cuts.first_U, *fields)
    parts_CSX = np.array(
        [
            known.get((shape[1:], *key), partial(_parts_SX, job, columns, row))
            for key, row in zip(keys, cuts.first_U.tolist(), strict=True)
        ]
    )
    parts_RX = parts_CSX.reshape(-1, parts_CSX.shape[-1])
    _, first, kind = np.unique(codes_of([*parts_RX.T]), return_index=True, return_inverse=True)
    return Content(cut_N=cuts.group_N, kind_CVP=kind.reshape(shape), parts_KX=parts_RX[first])


def _parts_SX(job: Job, columns: LayoutColumns, row: int) -> Ints:
    """Count the parts of every chunk of a row."""
    layout, rows = columns.layout(row), []
    chunks = chunk_kinds(job.model, layout)
    for stage, (kinds, again) in enumerate(chunks):
        pairs = ((kinds[again:].count(kind), kinds[:again].count(kind)) for kind in job.model.possible_kinds)
        # Parameters of a prediction hold an embedding, and on the first chunk both use the same table.
        has_embedding = stage == 0 and (layout.pp == 1 or layout.mtp_chunk > 0 or not job.model.mtp_num_layers)
        rows.append([*chain(*pairs), has_embedding, stage == len(chunks) - 1, stage == layout.mtp_chunk])
    return np.array(rows, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """Seconds of one micro-batch on what chunks are made of, for each group of layouts."""

    group_N: Ints
    passes_U4X: Floats
    """Forward and backward with recompute on a slot of speed 1, and what of each the device waits for the host."""
    exchanges_U2X: Floats
    """Collectives of forward and backward that nothing hides, over the best links."""
    hop_s_U: Floats
    """Between two slots, over the best link."""
    fastest: float
    """1 / speed of the fastest slot."""
    slowest: float

    def take(self, rows: Ints) -> UnitTimes:
        """Some of the layouts, and the groups that these have."""
        used, group_N = np.unique(self.group_N[rows], return_inverse=True)
        return replace(
            self,
            group_N=group_N.reshape(-1),
            passes_U4X=self.passes_U4X[used],
            exchanges_U2X=self.exchanges_U2X[used],
            hop_s_U=self.hop_s_U[used],
        )

    def chunk_times(self, parts_KX: Ints, *, slow: bool) -> tuple[Floats, Floats]:
        """Forward and backward of every kind of chunk for every group, on the fastest slot or on the slowest."""
        slowness = self.slowest if slow else self.fastest
        passes_U4K, exchanges_U2K = self.passes_U4X @ parts_KX.T, self.exchanges_U2X @ parts_KX.T
        compute_U2K, idle_U2K = passes_U4K[:, :2], passes_U4K[:, 2:]
        # Were more of a pass idle than it lasts, a faster slot could be the slower one.
        hides_U2K = idle_U2K * np.where(idle_U2K <= compute_U2K, slowness, self.slowest)
        seconds_U2K = compute_U2K * slowness + np.maximum(exchanges_U2K - hides_U2K, 0.0)
        return seconds_U2K[:, 0], seconds_U2K[:, 1]


class Tables:
    """Everything that many layouts share, worked out once."""

    def __init__(self, job: Job, measurements: Measurements, compute: ComputeTable, fabric: Fabric) -> None:
        self.job = job
        self.compute = compute
        self.once_a_step = OnceAStep.of(measurements)
        self.fabric = fabric
        slowness = [1.0 / speed for speed in measurements.cluster.slot_speed]
        self.fastest, self.slowest = min(slowness), max(slowness)
        cluster = measurements.cluster
        self._num_slots, self.devices, self.num_hosts = cluster.num_slots, cluster.devices_per_host, len(cluster.hosts)
        shared_by: tuple[Field, ...] = ("ep", "etp") if compute.knows_shares else ()
        self._cut_by: tuple[Field, ...] = ("sequence_parallel", "ep", "etp") if compute.copies_to_host else shared_by
        """What passes depend on besides their case."""
        self._can_compute: Memo[bool] = Memo()
        self._can_cut: Memo[bool] = Memo()
        self._passes: Memo[Floats] = Memo()
        self._hiding: Memo[Hiding] = Memo()
        self._networks: dict[tuple[object, ...], Floats] = {}
        self._parameters: Memo[list[list[float]]] = Memo()
        self._embedding_s: Memo[float] = Memo()
        self._exchanges: dict[Layout, tuple[Exchange, ...]] = {}
        self._of_shards: tuple[Field, ...] = ("dp", "recompute") if sharding_of(job) else ()
        """What exchanges depend on besides where FSDP has some: the replicas, and what recompute hides."""
        self._one_of_each = LayerCounts.one_of_each(job.model)

    def can_price_N(self, columns: LayoutColumns) -> NDArray[np.bool_]:
        """Whether compute times are known, and batch, layers and slots divide as the layouts have them."""
        cases = columns.groups("tp", "cp", "micro_batch_size")
        known_U = _each(columns, cases.first_U, ("tp", "cp", "micro_batch_size"), self._can_compute, self._computes)
        fields = ("pp", "vpp", "layers_per_chunk")
        cuts = columns.groups(*fields)
        cuts_U = _each(columns, cuts.first_U, fields, self._can_cut, self._cuts)
        runs_N = np.array(known_U, dtype=bool)[cases.group_N] & np.array(cuts_U, dtype=bool)[cuts.group_N]
        world_N = columns.tp * columns.pp * columns.dp * columns.cp
        batch = self.job.batch.global_batch_size
        divides_N = batch % (columns.dp * columns.micro_batch_size) == 0
        # facts.schedules.check_interleaving
        microbatches_N = self.microbatches_N(columns)
        size_N = np.where(columns.microbatch_group_size > 0, columns.microbatch_group_size, columns.pp)
        rest_N = microbatches_N % size_N
        fills_N = (size_N >= columns.pp) & (size_N <= microbatches_N) & ((rest_N == 0) | (rest_N >= columns.pp))
        return np.asarray(runs_N & divides_N & (world_N == self._num_slots) & ((columns.vpp == 1) | fills_N))

    def microbatches_N(self, columns: LayoutColumns) -> Ints:
        """Micro-batches of one step."""
        return np.asarray(self.job.batch.global_batch_size // (columns.dp * columns.micro_batch_size))

    def tensor_fits_hosts(self, columns: LayoutColumns) -> NDArray[np.bool_]:
        """Whether all tensor-parallel groups can lie on one host each, and need not."""
        return self._fits_hosts(columns.tp)

    def experts_fit_hosts(self, columns: LayoutColumns) -> NDArray[np.bool_]:
        """Whether all ranks that share the experts of a layer can lie on one host, and need not."""
        return self._fits_hosts(columns.ep * columns.etp) & (columns.ep > 1) & experts_lie_in_stages(columns)

    def _fits_hosts(self, ranks: Ints) -> NDArray[np.bool_]:
        return np.asarray((ranks > 1) & (self.devices % ranks == 0) & (self.num_hosts > 1))

    def unit_times(self, columns: LayoutColumns, groups_lie: GroupsLie = "anywhere") -> UnitTimes:
        """Look up, or work out, the times of what the layouts' chunks are made of."""
        columns = _recomputes_merged(columns)
        computed_by = ("tp", "cp", "micro_batch_size", "recompute", *self._cut_by)
        sent_by = ("tp", "cp", "micro_batch_size", "sequence_parallel", "ep", "etp", *self._of_shards)
        kernels, networks = columns.groups(*computed_by), columns.groups(*sent_by)
        both_N = networks.group_N * len(kernels.first_U) + kernels.group_N
        codes_U, group_N = np.unique(both_N, return_inverse=True)
        network_U, kernel_U = np.divmod(codes_U, len(kernels.first_U))
        passes = np.array(_each(columns, kernels.first_U, computed_by, self._passes, self._unit_passes))
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
        """Count the parameters of what the layouts' chunks are made of.

        Returns:
            The group of each layout (N), and of each group the dense and the expert parameters of X on one rank.

        """
        codes_N = codes_of([columns.tp, columns.ep, columns.etp, (columns.pp > 1).astype(np.int64)])
        _, first_U, group_N = np.unique(codes_N, return_index=True, return_inverse=True)
        found = _each(columns, first_U, ("tp", "ep", "etp", "pp"), self._parameters, self._parameters_of)
        return group_N.reshape(-1), np.array(found, dtype=np.int64)

    def _parameters_of(self, layout: Layout) -> list[list[float]]:
        """Dense and expert parameters of X on one rank."""
        unit = unit_parameters(self.job.model, layout)
        layers = (each for each in unit.layers.values() for _ in range(2))
        parts = (*layers, unit.embedding, unit.head, unit.prediction)
        return [[part.dense for part in parts], [part.expert for part in parts]]

    def _computes(self, layout: Layout) -> bool:
        return self.compute.source(case_of(layout)) is not None

    def _cuts(self, layout: Layout) -> bool:
        with contextlib.suppress(LayoutError):
            return bool(layout.chunk_layers(self.job.model.num_layers))
        return False

    def slow_hosts(self, pp: int) -> list[tuple[int, int]]:
        """Return pairs: so many stages have slots on some of so many hosts, those with the slowest links.

        However ranks lie, the j - 1 stages that the slowest hosts fill hold no more slots than there are, so the next
        host's are of another stage. The slowest host counts, and the last that is about as slow.
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
        """Sum the gradient of a word embedding that the first and the last stage both hold."""
        # One slot alone has no links that the bound could be taken from.
        if not has_two_embeddings(self.job.model) or not (columns.pp > 1).any():
            return np.zeros(len(columns))
        seconds = [self._embedding_s.get(tp, partial(self._embedding_s_of, tp)) for tp in columns.tp.tolist()]
        return np.array(seconds) * (columns.pp > 1)

    def _embedding_s_of(self, tp: int) -> float:
        size_bytes = word_embedding_parameters(self.job.model, tp) * gradient_bytes_per_parameter(self.job)
        return float(self.fabric.bounds_s("all_reduce", 2, np.array([float(size_bytes)]))[0])

    def _unit_passes(self, layout: Layout) -> Floats:
        """Rows of X: forward, backward with recompute, and what of each the device waits."""
        rows = [
            (one.forward_s, one.backward_s + one.recompute_s, one.forward_idle_s, one.backward_idle_s)
            for one in self.compute.unit_passes(layout)
        ]
        passes_4X: Floats = np.array(rows).T
        return passes_4X

    def _exchange_s_U3X(self, columns: LayoutColumns, groups_lie: GroupsLie) -> Floats:
        """Exposed seconds of forward and backward by part over the best links; third, X times, those of a hop.

        Sizes grow with the micro-batch and nothing else does, so layouts that differ in it are priced together. Those
        of shards do not grow.
        """
        hidden_by = ("tp", "cp", "micro_batch_size", *dict.fromkeys((*self._of_shards, *self._cut_by)))
        cases = columns.groups(*hidden_by)
        hiding_U = _each(columns, cases.first_U, hidden_by, self._hiding, self.compute.hiding)
        # Two parts for each kind of layer, embedding, head and prediction.
        found = np.zeros((len(columns), 3, 2 * len(self.job.model.possible_kinds) + 3))
        degrees_of = columns.groups("tp", "cp", "sequence_parallel", "ep", "etp", *self._of_shards)
        for rows in split_by_code(degrees_of.group_N):
            shape = columns.layout(int(rows[0]))
            degrees = {name: getattr(shape, name) for name in ("tp", "cp", "ep", "etp", "sequence_parallel")}
            one = Layout(**degrees, dp=shape.dp if self._of_shards else shape.ep * shape.etp)
            samples = columns.micro_batch_size[rows].astype(np.float64)
            if one not in self._exchanges:
                self._exchanges[one] = exchanges_of(self.job, one, self._one_of_each, self.fabric.domain_slots)
            members = group_sizes(one, instances=shard_copies(self.job))
            for item in self._exchanges[one]:
                sizes = item.size_bytes * (np.ones_like(samples) if item.is_sharding else samples)
                fewest = 2 if item.group in _across_hosts(groups_lie, one) else 1
                seconds = self.fabric.bounds_s(item.kind, members[item.group], sizes, fewest=fewest)
                if item.behind:
                    hidden_s = [hiding_U[case].seconds(item.behind) for case in cases.group_N[rows].tolist()]
                    seconds = np.maximum(seconds - np.array(hidden_s) * item.behind_share, 0.0)
                found[rows, :2] += seconds[:, None, None] * np.array([item.forward, item.backward])
            if self._num_slots > 1:
                # A group that fills a host leaves no room for another stage.
                fewest = 2 if one.tp == self.devices > 1 and groups_lie == "inside hosts" else 1
                hop_s = self.fabric.bounds_s("send", 2, hop_bytes(self.job, one) * samples, fewest=fewest)
                found[rows, 2] = hop_s[:, None]
        return found


def _recomputes_merged(columns: LayoutColumns) -> LayoutColumns:
    """Merge full recompute of any number of layers: that decides how many layers run again, not how long each takes."""
    kinds = [replace(one, num_layers=1) if one.granularity == "full" else one for one in columns.recomputes]
    place = {kind: index for index, kind in enumerate(dict.fromkeys(kinds))}
    return replace(
        columns, recompute=np.array([place[kind] for kind in kinds])[columns.recompute], recomputes=(*place,)
    )


def _each(
    columns: LayoutColumns, rows: Ints, fields: tuple[Field, ...], known: Memo[T], make: Callable[[Layout], T]
) -> list[T]:
    """Work out for some rows what only these fields decide, unless it is known; a layout is made only for new ones."""
    keys = columns.values(rows, *fields)
    return [
        known.get(key, lambda: make(columns.layout(row)))  # noqa: B023 - called at once
        for key, row in zip(keys, rows.tolist(), strict=True)
    ]


def _across_hosts(groups_lie: GroupsLie, layout: Layout) -> tuple[str, ...]:
    """Name the groups of which one at least lies on several hosts."""
    if groups_lie == "experts across hosts":
        # The ranks that share a layer's experts do; with etp above 1 those of one expert may, or those of equal parts.
        return ("ep_etp", "ep") if layout.etp == 1 else ("ep_etp",)
    return ("tp",) if groups_lie == "tensor across hosts" else ()


def split_by_code(codes_N: Ints) -> list[Ints]:
    """Rows of each code."""
    order = np.argsort(codes_N, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(codes_N[order])) + 1)
