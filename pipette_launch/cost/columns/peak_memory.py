"""Peak bytes of many layouts at once, for the wide search: the figures of `cost.memory.peak`, to the byte.

Every tensor is counted by the very functions that count one layout, once for each group of layouts that agree in what
these depend on; numpy spreads the figures over the stages of all layouts.
"""

# N = layouts, U = groups of layouts that agree, S = stages (pipeline ranks) of all layouts, one layout after another,
# R = stages of one layout of each group.

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from pipette_launch.cost.columns.layouts import Field, Ints, LayoutColumns
from pipette_launch.cost.columns.live_activations import (
    LAYER,
    Stages,
    chunk_bytes,
    input_bytes,
    is_uniform_or_block,
    live_bytes,
)
from pipette_launch.cost.layers import activations, embedding_and_head
from pipette_launch.cost.layers.dummy_gradients import dummy_gradient_bytes
from pipette_launch.cost.layers.fp8_weights import fp8_weight_bytes
from pipette_launch.cost.layers.optimizer import (
    gradient_bytes_per_parameter,
    kept_bytes_per_parameter,
    padded,
    shard,
    step_bytes_per_parameter,
)
from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.cost.memo import Memo
from pipette_launch.cost.memory.peak import MemoryParts, shared_buffer_bytes
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.megatron.performance import performance_options

_PARAMETERS: tuple[Field, ...] = ("tp", "pp", "ep", "etp", "vpp", "layers_per_chunk")
"""What the parameters of a stage depend on."""
_SHARDS: tuple[Field, ...] = ("dp", "cp", "use_distributed_optimizer")
"""What their optimizer states depend on besides."""

# A search asks in many batches, of which most share these.
_LAYERS: Memo[tuple[int, ...]] = Memo()
_COUNTS: Memo[list[tuple[int, int, int]]] = Memo()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryColumns:
    """Predicted peaks of N layouts, stage by stage: the parts of `MemoryParts` as columns of S."""

    starts_N: Ints
    """The first stage of each layout."""
    row_S: Ints
    """The layout of each stage."""
    stage_S: Ints
    """Its pipeline rank."""
    parts: dict[str, Ints]
    """Columns of S by the names of MemoryParts's fields."""

    @property
    def total_S(self) -> Ints:
        """The peak of each stage, put together as `MemoryParts.total` is."""
        part = self.parts
        static = part["weights"] + part["gradients"] + part["optimizer"] + part["shared_buffer"]
        static = static + part["dummy_gradients"]
        kept = part["activations"] + part["embedding"] + part["deferred"] + part["buffers"]
        instants = np.maximum(part["mask"] + part["head"], part["recompute"] + part["backward"])
        total: Ints = static + np.maximum(kept + instants, part["optimizer_step"])
        return total

    @property
    def peak_N(self) -> Ints:
        """The largest stage of each layout."""
        if not len(self.starts_N):
            return np.zeros(0, dtype=np.int64)
        peak: Ints = np.maximum.reduceat(self.total_S, self.starts_N)
        return peak

    def totals(self) -> tuple[tuple[int, ...], ...]:
        """Return the peaks of every layout's stages."""
        stops = [*self.starts_N[1:].tolist(), len(self.row_S)]
        totals = self.total_S.tolist()
        return tuple(tuple(totals[start:stop]) for start, stop in zip(self.starts_N.tolist(), stops, strict=False))

    def of(self, row: int) -> tuple[MemoryParts, ...]:
        """One layout's stages, as `peak_memory_bytes` gives them."""
        first = self.starts_N[row]
        stop = self.starts_N[row + 1] if row + 1 < len(self.starts_N) else len(self.row_S)
        return tuple(
            MemoryParts(**{name: int(self.parts[name][at]) for name in self.parts}) for at in range(first, stop)
        )


def peak_memory_columns(job: Job, layouts: LayoutColumns) -> MemoryColumns:
    """Predict every pipeline rank's peak for many layouts.

    Raises:
        LayoutError: a row cuts the layers or the batch unevenly; the message names the row.

    """
    stages = Stages.of(job, layouts)
    layer = _by_layer(job, layouts)
    none = np.zeros_like(layer["mask"])
    parts = {
        **_states(job, layouts, stages),
        "shared_buffer": stages.spread(layer["shared"], last=layer["shared_last"]),
        "dummy_gradients": stages.spread(layer["dummies"], last=layer["dummies_last"]),
        "activations": live_bytes(stages, chunk_bytes(job, layouts, layer)),
        "embedding": input_bytes(stages, layer),
        "recompute": stages.spread(_recompute(job, layouts, layer)),
        "backward": stages.spread(layer["backward"]),
        "mask": stages.spread(none, first=layer["mask"], last=layer["mask"]),
        "head": stages.spread(none, last=layer["head"]),
        "deferred": stages.spread(none, last=_deferred(job, layouts)),
        "buffers": stages.spread(np.where(layouts.pp > 1, 3 * layer["stream"], 0)),
    }
    ordered = {field.name: parts[field.name] for field in fields(MemoryParts)}
    return MemoryColumns(starts_N=stages.starts_N, row_S=stages.row_S, stage_S=stages.stage_S, parts=ordered)


def _by_layer(job: Job, layouts: LayoutColumns) -> dict[str, Ints]:
    """Columns of N that a layer's key decides."""
    groups = layouts.groups(*LAYER)
    names = (
        "dense",
        "moe",
        "stream",
        "prediction",
        "recomputed",
        "unit",
        "backward",
        "embedding",
        "mask",
        "kept_mask",
        "head",
        "shared_last",
        "shared",
        "dummies_last",
        "dummies",
    )
    chosen = [layouts.layout(int(row)) for row in groups.first_U]
    figures = [_LAYERS.get((job, _key(layout, LAYER)), partial(_layer_figures, job, layout)) for layout in chosen]
    table = np.array(figures, dtype=np.int64)
    columns = table.reshape(-1, len(names)).T[:, groups.group_N]
    return dict(zip(names, columns, strict=True))


def _layer_figures(job: Job, layout: Layout) -> tuple[int, ...]:
    """What `_by_layer` tells of one group of layouts, in its order."""
    model = job.model
    kinds = sorted({bool(kind) for kind in model.moe_layer_freq}) or [False]
    units = [activations.layer_activations(job, layout, moe=moe) for moe in kinds]
    modules = activations.recompute_modules(layout)
    is_full = layout.recompute.granularity == "full"
    mask = embedding_and_head.attention_mask_bytes(job, layout)
    return (
        activations.kept_bytes(job, layout, moe=False),
        activations.kept_bytes(job, layout, moe=bool(model.num_experts)),
        activations.stream_bytes(job, layout),
        activations.prediction_bytes(job, layout),
        max(unit.recomputed(modules, moe=moe) for unit, moe in zip(units, kinds, strict=True)),
        max(unit.total for unit in units),
        max(activations.backward_bytes(job, layout, moe=moe) for moe in kinds),
        embedding_and_head.embedding_bytes(job, layout),
        0 if is_full else mask,
        mask if is_full else 0,
        embedding_and_head.head_bytes(job, layout),
        shared_buffer_bytes(job, layout, layout.pp - 1),
        shared_buffer_bytes(job, layout, layout.pp - 2),
        dummy_gradient_bytes(job, layout, has_head=True),
        dummy_gradient_bytes(job, layout, has_head=False),
    )


def _key(layout: Layout, fields_: tuple[Field, ...]) -> tuple[object, ...]:
    return tuple(getattr(layout, name) for name in fields_)


def _stage_counts(job: Job, layout: Layout) -> list[tuple[int, int, int]]:
    """Dense and expert parameters of each stage, and bytes of its FP8 copies."""
    counts, copies = stage_parameters(job.model, layout), fp8_weight_bytes(job, layout)
    return [(each.dense, each.expert, copy) for each, copy in zip(counts, copies, strict=True)]


def _states(job: Job, layouts: LayoutColumns, stages: Stages) -> dict[str, Ints]:
    """Columns of S: weights, gradients, optimizer states and the step's temporaries (`memory.rank_states`)."""
    cut = layouts.groups(*_PARAMETERS)
    counts_C3: list[tuple[int, int, int]] = []
    starts = []
    for row in cut.first_U:
        layout = layouts.layout(int(row))
        starts.append(len(counts_C3))
        counts_C3 += _COUNTS.get((job, _key(layout, _PARAMETERS)), partial(_stage_counts, job, layout))
    table = np.array(counts_C3, dtype=np.int64).reshape(-1, 3)
    starts_N = np.array(starts, dtype=np.int64)[cut.group_N]
    groups = layouts.groups(*_PARAMETERS, *_SHARDS)
    chosen = layouts.take(groups.first_U)
    rows = np.repeat(groups.first_U, chosen.pp)
    firsts = np.cumsum(chosen.pp) - chosen.pp
    own = np.arange(len(rows)) - np.repeat(firsts, chosen.pp)
    figures = _state_figures(job, layouts, rows, table[starts_N[rows] + own])
    place = np.repeat(firsts[groups.group_N], layouts.pp) + stages.stage_S
    names = ("weights", "gradients", "optimizer", "optimizer_step")
    return {name: figure[place] for name, figure in zip(names, figures, strict=True)}


def _state_figures(job: Job, layouts: LayoutColumns, row_R: Ints, counts_R3: Ints) -> tuple[Ints, ...]:
    """Bytes of states of some stages: R rows of the table, each with its dense and expert parameters and FP8 copies."""
    dp, cp, tp, pp = (column[row_R] for column in (layouts.dp, layouts.cp, layouts.tp, layouts.pp))
    # cost.parameters.expert_dp
    expert_dp = tp * cp * dp * pp // (layouts.etp[row_R] * layouts.ep[row_R] * pp)
    is_sharded = layouts.use_distributed_optimizer[row_R] > 0
    pairs = ((counts_R3[:, 0], dp * cp), (counts_R3[:, 1], expert_dp))
    count = counts_R3[:, 0] + counts_R3[:, 1]
    buffered = np.where(is_sharded, sum(padded(job, *pair) for pair in pairs), count)
    resident = np.where(is_sharded, sum(shard(job, *pair) for pair in pairs), count)
    states = np.rint(resident * kept_bytes_per_parameter(job)).astype(np.int64)
    weights = buffered * job.model.dtype_bytes + counts_R3[:, 2]
    gradients = buffered * gradient_bytes_per_parameter(job)
    return weights, gradients, states, resident * step_bytes_per_parameter(job)


def _recompute(job: Job, layouts: LayoutColumns, layer: dict[str, Ints]) -> Ints:
    """What recompute brings back for a while (`memory.recompute_working_set_bytes`)."""
    even = job.model.num_layers // (layouts.pp * layouts.vpp)
    sizes = np.array([[max(cut, default=0), min(filter(None, cut), default=0)] for cut in layouts.cuts])
    largest, smallest = sizes[layouts.layers_per_chunk].T
    largest, smallest = np.where(largest > 0, largest, even), np.where(smallest > 0, smallest, even)
    chosen = layouts.recomputes
    is_uniform, is_block = np.array([is_uniform_or_block(each.method) for each in chosen])[layouts.recompute].T
    size = np.array([each.num_layers for each in chosen])[layouts.recompute]
    units = np.where(is_uniform, np.minimum(size, largest), is_block & (size >= smallest))
    is_selective = np.array([each.granularity == "selective" for each in chosen])[layouts.recompute]
    back = units * layer["unit"] + is_selective * layer["recomputed"]
    return np.asarray(back, dtype=np.int64)


def _deferred(job: Job, layouts: LayoutColumns) -> Ints:
    """What deferred weight gradients of the head wait with, on the last stage."""
    if not performance_options(job).defer_embedding_wgrad_compute:
        return np.zeros(len(layouts), dtype=np.int64)
    groups = layouts.groups("tp", "cp", "dp", "pp", "micro_batch_size", "sequence_parallel", "ep", "etp")
    table: list[int] = []
    for row in groups.first_U:
        layout = layouts.layout(int(row))
        table.append(
            embedding_and_head.deferred_bytes(job, layout, layout.num_microbatches(job.batch.global_batch_size))
        )
    return np.array(table, dtype=np.int64)[groups.group_N]
