"""Peak bytes on each pipeline rank, for one layout or for many at once: an analytic sum.

The peak is the larger of the forward-backward part and of the optimizer step. Not in it: what lies outside the model's
tensors (context, communicators, workspaces and fragmentation, see `cost.memory.overhead`), and the alignment of each
parameter within its bucket.

Each tensor of a layer is counted once for each group of layouts that agree in what it depends on; numpy spreads the
figures over the stages of all layouts. One layout is a column of length one.
"""

# N = layouts, S = stages (pipeline ranks) of all layouts, one layout after another,
# R = stages of one layout of each group of layouts whose stages hold the same states.

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter

import numpy as np

from pipette_launch.cost.layers import activations, attention, embedding_and_head, experts, kinds, offloading
from pipette_launch.cost.layers.beside_weights import dummy_gradient_bytes, fp8_weight_bytes
from pipette_launch.cost.layers.optimizer import (
    buffered_parameters,
    gradient_bytes_per_parameter,
    held_gradients,
    optimizer_bytes,
    weight_bytes,
)
from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.cost.layers.sharding import end_parameters, sharding_of, whole_beside_shards
from pipette_launch.cost.memo import Memo
from pipette_launch.cost.memory.live_activations import (
    LAYER,
    Stages,
    beyond_first_chunk,
    chunk_bytes,
    input_bytes,
    live_bytes,
)
from pipette_launch.cost.memory.parts import MemoryParts, PeakParts
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Field, Ints, Layout, LayoutColumns
from pipette_launch.facts.model import KINDS_WITH_EXPERTS

_PARAMETERS: tuple[Field, ...] = ("tp", "pp", "ep", "etp", "vpp", "layers_per_chunk", "chunks_after_mtp")
"""What the parameters of a stage depend on."""
_SHARDS: tuple[Field, ...] = ("dp", "cp", "use_distributed_optimizer")
"""What their optimizer states depend on besides."""

_ENDS_LOAD = (0, 15)
"""First release in which the first and the last chunk alone load; before, all chunks of their ranks did."""

# A search predicts many batches of layouts, and most batches share these figures.
_LAYERS: Memo[Memo[dict[str, int]]] = Memo()
_COUNTS: Memo[Memo[Ints]] = Memo()


_PARTS = tuple(field.name for field in fields(MemoryParts))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryColumns:
    """Predicted peaks of N layouts, stage by stage."""

    starts_N: Ints
    """The first stage of each layout."""
    parts_S: PeakParts[Ints]

    @property
    def total_S(self) -> Ints:
        """The peak of each stage."""
        return self.parts_S.total

    def totals(self) -> tuple[tuple[int, ...], ...]:
        """Return the peaks of every layout's stages."""
        return tuple(tuple(stages.tolist()) for stages in np.split(self.total_S, self.starts_N)[1:])

    def of(self, row: int) -> tuple[MemoryParts, ...]:
        """Return the parts of one layout's stages."""
        columns = (np.split(getattr(self.parts_S, name), self.starts_N)[row + 1].tolist() for name in _PARTS)
        return tuple(MemoryParts(**dict(zip(_PARTS, stage, strict=True))) for stage in zip(*columns, strict=True))


def peak_memory_bytes(job: Job, layout: Layout) -> tuple[MemoryParts, ...]:
    """Predict every pipeline rank's peak for one layout.

    Raises:
        LayoutError: the layout cuts the layers or the batch unevenly.

    """
    return peak_memory_columns(job, LayoutColumns.of([layout])).of(0)


def kept_by_chunk(job: Job, layout: Layout) -> tuple[int, ...]:
    """Count the bytes of activations that each chunk keeps for one micro-batch, in model order."""
    columns = LayoutColumns.of([layout])
    _, bytes_C = chunk_bytes(job, columns, _by_layer(job, columns))
    return tuple(bytes_C.tolist())


def peak_memory_columns(job: Job, layouts: LayoutColumns) -> MemoryColumns:
    """Predict every pipeline rank's peak for many layouts.

    Raises:
        LayoutError: a row cuts the layers or the batch unevenly; the message names the row's numbers.

    """
    if not len(layouts):
        nothing = np.zeros(0, dtype=np.int64)
        return MemoryColumns(starts_N=nothing, parts_S=PeakParts(**dict.fromkeys(_PARTS, nothing)))
    stages = Stages.of(job, layouts)
    layer = _by_layer(job, layouts)
    none = np.zeros_like(layouts.pp)
    # The last stage without virtual ones goes straight from a forward to its backward.
    waiting = np.maximum(layer["backward"], layer["forward"])
    deferred = layer["deferred"] * embedding_and_head.deferred_microbatches(job, stages.microbatches_N)
    weights, gradients, optimizer, optimizer_step = _states(job, layouts, stages)
    chunks = chunk_bytes(job, layouts, layer)
    all_chunks_load = job.release < _ENDS_LOAD
    beyond = none if all_chunks_load else beyond_first_chunk(stages, *chunks)
    parts = PeakParts(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        shared_buffer=stages.spread(layer["shared"], last=layer["shared_last"]),
        dummy_gradients=stages.spread(layer["dummies"], last=layer["dummies_last"]),
        activations=live_bytes(stages, *chunks),
        embedding=input_bytes(stages, layer, all_chunks_load=all_chunks_load),
        recompute=stages.spread(_recompute(job, layouts, layer)),
        backward=stages.spread(waiting, last=np.where(layouts.vpp > 1, waiting, layer["backward"])),
        mask=stages.spread(
            none, first=np.maximum(layer["mask"] - beyond, 0), last=layer["mask"], prediction=layer["mask"]
        ),
        loading=_loading(stages, layer, beyond, *chunks),
        head=stages.spread(none, last=layer["head"]),
        deferred=stages.spread(none, last=np.where(layouts.pp > 1, deferred, 0)),
        # Received, sent, and the one sent before: its communication holds it until NCCL's watchdog has seen the end
        # (NVIDIA's golden values with a pipeline: one or two such tensors beyond the first two, of 4 and of 64 MiB).
        buffers=stages.spread(np.where(layouts.pp > 1, 3 * layer["stream"], 0)),
        optimizer_step=optimizer_step,
        whole=stages.spread(_whole(layouts, layer)),
    )
    return MemoryColumns(starts_N=stages.starts_N, parts_S=parts)


def shared_buffer_bytes(job: Job, layout: Layout, *, has_head: bool) -> int:
    """Count Megatron's global buffer, as large as its largest user on a pipeline rank.

    Users: the gathered input of sequence parallelism, by Megatron's own linear layers, of which TransformerEngine's
    models have the head alone; the tokens that the all-gather dispatcher gathers; local attention's scores.

    Args:
        job: its model and flags decide who uses the buffer.
        layout: its degrees decide the sizes.
        has_head: whether the rank is the last of the pipeline.

    """
    has_linear = job.model.transformer_impl == "local" or has_head
    gathers = layout.sequence_parallel and layout.tp > 1 and has_linear
    gathered = activations.residual_bytes(job.model, layout) * layout.tp if gathers else 0
    dispatched = experts.gather_buffer_bytes(job, layout)
    return max(gathered, dispatched, attention.scores_buffer_bytes(job.model, layout))


def _by_layer(job: Job, layouts: LayoutColumns) -> dict[str, Ints]:
    """Columns of N for the figures that depend on the fields `LAYER` alone."""
    groups = layouts.groups(*LAYER)
    known = _LAYERS.get(job, Memo)
    figures = [
        known.get(attrgetter(*LAYER)(layout), partial(_layer_figures, job, layout))
        for layout in map(layouts.layout, groups.first_U.tolist())
    ]
    table = np.array([list(each.values()) for each in figures], dtype=np.int64)
    return dict(zip(figures[0], table.T[:, groups.group_N], strict=True))


def _layer_figures(job: Job, layout: Layout) -> dict[str, int]:
    """Bytes of one layer and of the model's ends for one group of layouts."""
    model = job.model
    own = sorted({*model.layer_kinds})
    units = {kind: kinds.kind_activations(job, layout, kind) for kind in own}
    modules = activations.recompute_modules(layout)
    keeps_mask = layout.recompute.granularity == "full" or "core_attn" in modules
    mask = embedding_and_head.attention_mask_bytes(job, layout)
    away = [offloading.offloaded(job, layout, moe=kind in KINDS_WITH_EXPERTS, recomputed=modules) for kind in own]
    kept: dict[str, int] = {kind: kinds.kept_bytes(job, layout, kind) for kind in own}
    whole = whole_beside_shards(job, layout, gradient_bytes_per_parameter(job))
    return {
        **kept,
        "largest": max(kept.values()),
        "stream": activations.stream_bytes(job, layout),
        "prediction": kinds.prediction_bytes(job, layout),
        "recomputed": max(unit.recomputed(modules, moe=kind in KINDS_WITH_EXPERTS) for kind, unit in units.items()),
        "unit": max(unit.total for unit in units.values()),
        "forward": max(each.in_forward for each in away),
        "backward": max(kinds.backward_bytes(job, layout, kind) for kind in own),
        "embedding": embedding_and_head.embedding_bytes(job, layout),
        # Recompute of layers, and of the attention core alone, keeps its arguments for every live micro-batch, and the
        # mask is one of them (MC tensor_parallel/random.py, CheckpointFunction.forward).
        "mask": 0 if keeps_mask else mask,
        "kept_mask": mask if keeps_mask else 0,
        "loaded": embedding_and_head.loaded_mask_bytes(job, layout),
        "head": embedding_and_head.head_bytes(job, layout) + max(each.left for each in away),
        "deferred": embedding_and_head.deferred_bytes(job, layout),
        "shared_last": shared_buffer_bytes(job, layout, has_head=True),
        "shared": shared_buffer_bytes(job, layout, has_head=False),
        "dummies_last": dummy_gradient_bytes(job, layout, has_head=True),
        "dummies": dummy_gradient_bytes(job, layout, has_head=False),
        "whole": whole.weights + whole.gradients,
        "whole_gradients": whole.layer_gradients,
        "whole_weights": whole.layer_weights,
        "waiting": whole.waiting,
        "waiting_at_end": whole.waiting_at_end,
    }


def _loading(stages: Stages, layer: dict[str, Ints], beyond: Ints, chunk_N: Ints, bytes_C: Ints) -> Ints:
    """Count the loading of a mask, less the bytes of the forward pass behind it and less `beyond_first_chunk`."""
    layouts = stages.layouts
    last = chunk_N + layouts.pp * layouts.vpp - 1
    begun, predicting, ended = (
        np.maximum(layer["loaded"] - layer["kept_mask"] - bytes_C[chunk], 0)
        for chunk in (chunk_N, last - layouts.chunks_after_mtp, last)
    )
    first = np.maximum(begun - layer["embedding"] - beyond, 0)
    # A single stage keeps the token ids too.
    last = np.where(layouts.pp == 1, first, ended)
    return stages.spread(np.zeros_like(first), first=first, last=last, prediction=predicting)


def _stage_counts(job: Job, layout: Layout) -> Ints:
    """Dense and expert parameters of each stage, bytes of its FP8 copies, and parameters outside its layers."""
    counts, copies = stage_parameters(job.model, layout), fp8_weight_bytes(job, layout)
    rows = np.array([(each.dense, each.expert, copy, 0) for each, copy in zip(counts, copies, strict=True)])
    # Of a single stage both ends count.
    np.add.at(rows[:, -1], [0, -1], end_parameters(job.model, layout))
    return rows.astype(np.int64)


def _states(job: Job, layouts: LayoutColumns, stages: Stages) -> tuple[Ints, ...]:
    """Columns of S: weights, gradients, optimizer states and the optimizer step's temporaries."""
    groups = layouts.groups(*_PARAMETERS, *_SHARDS)
    chosen = layouts.take(groups.first_U)
    cut = chosen.groups(*_PARAMETERS)
    known = _COUNTS.get(job, Memo)
    counts = [
        known.get(attrgetter(*_PARAMETERS)(layout), partial(_stage_counts, job, layout))
        for layout in map(chosen.layout, cut.first_U.tolist())
    ]
    starts = np.cumsum([0, *map(len, counts)])[cut.group_N]
    table = np.concatenate(counts)
    row_R = np.repeat(np.arange(len(chosen)), chosen.pp)
    firsts = np.cumsum(chosen.pp) - chosen.pp
    dense, expert, copies, ends = table[starts[row_R] + np.arange(len(row_R)) - firsts[row_R]].T
    each = chosen.take(row_R)
    sharding = sharding_of(job)
    gradients = held_gradients if sharding and sharding.gradients else buffered_parameters
    figures = (
        weight_bytes(job, dense, expert, ends, each) + copies,
        gradients(job, dense, expert, each) * gradient_bytes_per_parameter(job),
        *optimizer_bytes(job, dense, expert, each),
    )
    place_S = np.repeat(firsts[groups.group_N], layouts.pp) + stages.stage_S
    return tuple(figure[place_S] for figure in figures)


def _whole(layouts: LayoutColumns, layer: dict[str, Ints]) -> Ints:
    """What FSDP holds whole: as the backward goes on, gradients come to wait and activations go, layer by layer.

    Gathered weights go too, once no layer is left to gather ahead.
    """
    by_layer = layer["whole_gradients"] - layer["largest"]
    grown = layer["waiting"] * np.maximum(by_layer, 0)
    grown = grown + layer["waiting_at_end"] * np.maximum(by_layer - layer["whole_weights"], 0)
    return np.where(layouts.dp * layouts.cp > 1, layer["whole"] + grown, 0)


def _recompute(job: Job, layouts: LayoutColumns, layer: dict[str, Ints]) -> Ints:
    """What recompute brings back for a while: what runs again, which is one unit of layers at a time.

    With the block method that is 0 unless every layer of a chunk runs again: otherwise the layers that were kept come
    first in the backward and are gone by then.
    """
    even = job.model.num_layers // (layouts.pp * layouts.vpp)
    sizes = np.array([[max(cut, default=0), min(filter(None, cut), default=0)] for cut in layouts.cuts])
    largest, smallest = sizes[layouts.layers_per_chunk].T
    largest, smallest = np.where(largest > 0, largest, even), np.where(smallest > 0, smallest, even)
    flags = [(each.method == "uniform", each.method == "block", each.num_layers) for each in layouts.recomputes]
    is_uniform, is_block, size = np.array(flags, dtype=np.int64)[layouts.recompute].T
    units = np.where(is_uniform, np.minimum(size, largest), is_block * (size >= smallest))
    is_selective = np.array([each.granularity == "selective" for each in layouts.recomputes])[layouts.recompute]
    back = units * layer["unit"] + is_selective * layer["recomputed"]
    return np.asarray(back, dtype=np.int64)
