"""Peak bytes on each pipeline rank as a sum of formulas, for one layout or for many layouts at once.

The peak is the larger need of forward and backward, and of the optimizer step. Left out are bytes outside the model's
tensors (context, communicators, workspaces and fragmentation are in `overhead`), and the alignment of each parameter
within its bucket.

The sizes of a layer's tensors are computed once for all layouts with equal degrees, micro-batch and recompute. numpy
then copies the sizes to the stages of all layouts. A single layout is computed as a column of length 1.
"""

# Letters of array axes: N = layouts, S = stages (pipeline ranks) of all layouts, layout by layout, C = chunks of all
# layouts. R = stages of chosen layouts: one of each group of layouts whose stages hold equal states. V = chunks of one
# stage, M = passes of a stage's chunks in schedule order.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial, reduce
from operator import attrgetter
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost import Memo
from pipette_launch.cost.layers import ends, kinds, parameters
from pipette_launch.cost.layers.attention import Attention, is_flash
from pipette_launch.cost.layers.block import in_bf16, narrow_layers, recompute_modules
from pipette_launch.cost.layers.mlp import Experts
from pipette_launch.facts.job import ITERATION, Job
from pipette_launch.facts.layout import Field, Ints, Layout, LayoutColumns
from pipette_launch.facts.schedule import num_warmup, schedule_table
from pipette_launch.text import bytes_text, plural

Bytes = TypeVar("Bytes", int, NDArray[np.int64])

_LAYER: tuple[Field, ...] = ("tp", "cp", "ep", "etp", "micro_batch_size", "sequence_parallel", "recompute")
"""Fields of a layout that decide the bytes of a layer, of the embedding and of the head."""
_PARAMETERS: tuple[Field, ...] = ("tp", "pp", "ep", "etp", "vpp", "layers_per_chunk", "chunks_after_mtp")
"""Fields of a layout that decide the number of parameters of a stage."""
_SHARDS: tuple[Field, ...] = ("dp", "cp", "use_distributed_optimizer")
"""Fields that, beside `_PARAMETERS`, decide the optimizer states of a stage."""

_WIDE = " in bf16"
"""Ending of the names of kinds of layers, for layers that `--first-last-layers-bf16` keeps in bf16."""
NO_MASK = "--no-create-attention-mask-in-dataloader"
MATTERS = 0.01
"""Smallest share of a stage's peak for which a note names the attention mask."""
_RESET = "--reset-attention-mask"
_HOST_BYTES = 8
"""Host bytes for each entry of an attention mask: a matrix of ones, and its lower triangle, both in fp32
(gpt_dataset.py)."""

# Caches for figures of layers and parameter counts, which a search needs again for most batches of layouts.
_LAYERS: Memo[Memo[dict[str, int]]] = Memo()
_COUNTS: Memo[Memo[Ints]] = Memo()


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakParts(Generic[Bytes]):
    """Bytes by kind at the peak, as numbers for one pipeline rank or as columns for many pipeline ranks."""

    weights: Bytes
    """Bytes of weights and of their FP8 copies."""
    gradients: Bytes
    optimizer: Bytes
    shared_buffer: Bytes
    """Bytes of Megatron's global memory buffer, which is never freed after its first use."""
    dummy_gradients: Bytes
    """Bytes of dummy gradients, which are never freed. TransformerEngine returns dummy gradients if the real gradients
    go directly into their buffer."""
    activations: Bytes
    """Bytes of activations that layers keep for all live micro-batches."""
    kept_masks: Bytes
    """Bytes of the attention masks that recompute keeps for all live micro-batches."""
    recompute: Bytes
    """Bytes of activations of one recomputed layer while the layer's backward runs."""
    backward: Bytes
    """Largest extra bytes that a layer's backward needs for a while. With activation offloading, a forward between two
    backwards may need the most extra bytes."""
    mask: Bytes
    """Bytes of the data loader's attention mask while a forward pass runs."""
    loading: Bytes
    """Bytes of the whole attention mask during its loading, minus the bytes that the next forward will keep."""
    head: Bytes
    """Bytes of final norm, logits and loss of one micro-batch, and of the last layer's activations that offloading
    moves only afterwards."""
    deferred: Bytes
    """Bytes of inputs and gradients that the head keeps for its deferred weight gradients."""
    buffers: Bytes
    """Bytes of the tensors that pipeline stages are sending and receiving."""
    optimizer_step: Bytes
    """Bytes of temporaries of the optimizer step, which runs when no activations are kept."""
    whole: Bytes
    """Unsharded bytes that FSDP holds beside the shards: gathered layers, waiting gradients, embedding and head."""
    graph: Bytes
    """Bytes that a CUDA graph of a whole iteration adds. The graph reads the inputs of all micro-batches from fixed
    places, and the optimizer step cannot use the graph's own pool (core_v0.20, full_cuda_graph.py)."""

    @property
    def static(self) -> Bytes:
        """Bytes that the rank holds during the whole step."""
        return self.weights + self.gradients + self.optimizer + self._lasting

    @property
    def total(self) -> Bytes:
        """Bytes at the peak: static bytes, plus the larger need of forward and backward, or of the optimizer step."""
        larger = max if isinstance(self.weights, int) else np.maximum
        return self.static + larger(self.passing, self.optimizer_step)

    @property
    def passing(self) -> Bytes:
        """Largest bytes beyond the static bytes during forward and backward."""
        larger = max if isinstance(self.weights, int) else np.maximum
        return self._kept + reduce(larger, self._instants)

    @property
    def _lasting(self) -> Bytes:
        return self.shared_buffer + self.dummy_gradients + self.graph

    @property
    def _kept(self) -> Bytes:
        return self.activations + self.kept_masks + self.deferred + self.buffers + self.whole

    @property
    def _instants(self) -> tuple[Bytes, Bytes, Bytes]:
        """Bytes at three times: in a forward with the loss, in a layer's backward, and during mask loading."""
        return self.mask + self.head, self.recompute + self.backward, self.loading


class MemoryParts(PeakParts[int]):
    """Bytes on one pipeline rank at its peak, by kind."""

    __slots__ = ()

    def by_kind(self) -> dict[str, int]:
        """Split the peak into the kinds of memory that screens show; the values add up to `total`.

        The peak is in the loss, in the backward of a layer, while a mask is loaded, or in the optimizer step.
        Temporaries of the optimizer step count as buffers.
        """
        by_kind = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        at_loss, at_backward, at_loading = self._instants
        if self._kept + max(self._instants) < self.optimizer_step:
            return {**by_kind, "activations": 0, "logits": 0, "buffers": self._lasting + self.optimizer_step}
        is_loss, kept = at_loss >= max(at_backward, at_loading), self.activations + self.kept_masks
        return {
            **by_kind,
            "activations": kept + (self.mask if is_loss else max(at_backward, at_loading)),
            "logits": self.deferred + (self.head if is_loss else 0),
            "buffers": self._lasting + self.buffers + self.whole,
        }


_PARTS = tuple(field.name for field in fields(MemoryParts))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryColumns:
    """Predicted peaks of the stages of N layouts."""

    starts_N: Ints
    """Index of the first stage of each layout."""
    parts_S: PeakParts[Ints]

    def totals(self) -> tuple[tuple[int, ...], ...]:
        """Return the peak bytes of each stage of each layout."""
        return tuple(tuple(stages.tolist()) for stages in np.split(self.parts_S.total, self.starts_N)[1:])

    def of(self, row: int) -> tuple[MemoryParts, ...]:
        """Return the peak's parts on each stage of layout number `row`."""
        columns = (np.split(getattr(self.parts_S, name), self.starts_N)[row + 1].tolist() for name in _PARTS)
        return tuple(MemoryParts(**dict(zip(_PARTS, stage, strict=True))) for stage in zip(*columns, strict=True))


def peak_memory_bytes(job: Job, layout: Layout) -> tuple[MemoryParts, ...]:
    """Predict every pipeline rank's peak; raises LayoutError if the layout divides layers or batch unevenly."""
    return peak_memory_columns(job, LayoutColumns.of([layout])).of(0)


def peak_memory_columns(job: Job, layouts: LayoutColumns) -> MemoryColumns:
    """Predict every pipeline rank's peak for many layouts; raises LayoutError like `peak_memory_bytes`."""
    if not len(layouts):
        nothing = np.zeros(0, dtype=np.int64)
        return MemoryColumns(starts_N=nothing, parts_S=PeakParts(**dict.fromkeys(_PARTS, nothing)))
    stages, layer = _Stages(job, layouts), _by_layer(job, layouts)
    # Without virtual stages the last stage runs each micro-batch's backward directly after its forward, so no other
    # forward runs between two backwards.
    waiting = np.maximum(layer["backward"], layer["forward"])
    # `--wgrad-deferral-limit` 0 defers the head's weight gradients of all micro-batches.
    limit = job.options.wgrad_deferral_limit or job.batch.global_batch_size
    deferred = layer["deferred"] * np.minimum(stages.microbatches_N, limit)
    weights, gradients, optimizer, optimizer_step = _states(job, layouts, stages)
    chunk_N, bytes_C = _chunk_bytes(job, layouts, layer)
    mask, has_pipeline = layer["mask"], layouts.pp > 1
    activations = _live_bytes(stages, chunk_N, bytes_C)
    stays = job.options.delta_offload_bytes_across_pp_ranks * stages.stage_S
    if stays.any():
        bare = layer | {kind: layer[kind] + layer[f"{kind} away"] for kind in {*job.model.layer_kinds}}
        whole = _live_bytes(stages, *_chunk_bytes(job, layouts, bare))
        activations = activations + np.minimum(stays, whole - activations)
    loading = np.maximum(layer["loaded"] - layer["kept_mask"] - bytes_C[chunk_N], 0)
    parts = PeakParts(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        shared_buffer=stages.spread(layer["shared"], last=layer["shared_last"]),
        dummy_gradients=stages.spread(layer["dummies"], last=layer["dummies_last"]),
        activations=activations,
        kept_masks=_kept_masks(stages, layer["kept_mask"]),
        recompute=stages.spread(_recompute(job, layouts, layer)),
        backward=stages.spread(waiting, last=np.where(layouts.vpp > 1, waiting, layer["backward"])),
        mask=stages.spread(0, first=mask, last=mask, prediction=mask),
        loading=stages.spread(0, first=loading, last=loading, prediction=loading),
        head=stages.spread(0, last=layer["head"]),
        deferred=stages.spread(0, last=np.where(has_pipeline, deferred, 0)),
        # A rank holds three message tensors: the received tensor, the sent tensor, and the tensor sent before. torch
        # holds a sent tensor until NCCL's watchdog has seen the end of the send.
        buffers=stages.spread(np.where(has_pipeline, 3 * layer["stream"], 0)),
        optimizer_step=optimizer_step,
        whole=stages.spread(_whole(layouts, layer)),
        graph=stages.spread(0),
    )
    if job.options.freeze_all_layers:
        # Without gradients, a layer's tensors live only until its forward ends.
        none_S = stages.spread(0)
        parts = replace(parts, gradients=none_S, optimizer=none_S, optimizer_step=none_S, dummy_gradients=none_S)
        parts = replace(parts, activations=none_S, recompute=none_S, backward=stages.spread(layer["unit"]))
    if job.options.graphs.impl == ITERATION:
        inputs = job.batch.global_batch_size // layouts.dp * ends.sample_bytes(job)
        inputs = stages.spread(0, first=inputs, last=inputs, prediction=inputs)
        parts = replace(parts, graph=inputs + np.minimum(parts.passing, parts.optimizer_step))
    return MemoryColumns(starts_N=stages.starts_N, parts_S=parts)


class _Stages:
    """Stages of several layouts, in one row for all layouts.

    LayoutError is raised if a layout divides the batch unevenly.
    """

    def __init__(self, job: Job, layouts: LayoutColumns) -> None:
        self.layouts = layouts
        self.microbatches_N, rest = np.divmod(job.batch.global_batch_size, layouts.micro_batch_size * layouts.dp)
        for row in np.flatnonzero(rest)[:1]:
            layouts.layout(int(row)).num_microbatches(job.batch.global_batch_size)
        self.starts_N: Ints = np.cumsum(layouts.pp) - layouts.pp
        self.last_N: Ints = self.starts_N + layouts.pp - 1
        self.row_S: Ints = np.repeat(np.arange(len(layouts)), layouts.pp)
        """Index of the layout to which each stage belongs."""
        self.stage_S: Ints = np.arange(len(self.row_S)) - self.starts_N[self.row_S]
        size_N = np.where(layouts.microbatch_group_size > 0, layouts.microbatch_group_size, layouts.pp)
        self.schedule_S = tuple(each[self.row_S] for each in (layouts.pp, layouts.vpp, size_N, self.microbatches_N))
        """Columns of S: stages, chunks of a stage, micro-batches that a chunk runs in a row, and those of a step."""

    def spread(
        self, size_N: Ints | int, *, first: Ints | None = None, last: Ints | None = None, prediction: Ints | None = None
    ) -> Ints:
        """Give all stages of a layout one size, except its first, its last and its multi-token prediction stage.

        The only stage of a layout gets the size `last`.
        """
        pp = self.layouts.pp
        size_S: Ints = np.repeat(size_N + 0 * pp, pp)
        if prediction is not None:
            size_S[self.last_N - self.layouts.chunks_after_mtp % pp] = prediction
        if first is not None:
            size_S[self.starts_N] = first
        if last is not None:
            size_S[self.last_N] = last
        return size_S


def _by_layer(job: Job, layouts: LayoutColumns) -> dict[str, Ints]:
    """Return a column of N values for each figure that depends only on the fields `_LAYER`."""
    groups = layouts.groups(*_LAYER)
    known = _LAYERS.get(job, Memo)
    figures = [
        known.get(attrgetter(*_LAYER)(layout), partial(_layer_figures, job, layout))
        for layout in map(layouts.layout, groups.first_U.tolist())
    ]
    table = np.array([list(each.values()) for each in figures], dtype=np.int64)
    return dict(zip(figures[0], table.T[:, groups.group_N], strict=True))


def _layer_figures(job: Job, layout: Layout) -> dict[str, int]:
    """Return the bytes of one layer, of the embedding and of the head."""
    own, modules = sorted({*job.model.layer_kinds}), recompute_modules(layout)
    units = [kinds.kind_activations(job, layout, kind) for kind in own]
    away = [kinds.offloaded(job, layout, kind) for kind in own]
    kept: dict[str, int] = {kind: kinds.kept_bytes(job, layout, kind) for kind in own}
    if not all(narrow_layers(job)):
        kept |= {f"{kind}{_WIDE}": kinds.kept_bytes(in_bf16(job), layout, kind) for kind in own}
    whole = parameters.whole_beside_shards(job, layout)
    # Recompute of layers, or of the attention core alone, keeps all arguments for every live micro-batch, also the mask
    # (megatron-core, tensor_parallel/random.py, CheckpointFunction.forward).
    keeps_mask = layout.recompute.granularity == "full" or "core_attn" in modules
    mask = ends.attention_mask_bytes(job, layout)
    return {
        **kept,
        **{f"{kind} away": each.mean_left for kind, each in zip(own, away, strict=True)},
        "largest": max(kept.values()),
        "stream": Attention(job, layout).stream_bytes(),
        "prediction": kinds.prediction_bytes(job, layout),
        "recomputed": max(unit.recomputed(modules) for unit in units),
        "unit": max(unit.total for unit in units),
        "forward": max(each.in_forward for each in away),
        "backward": max(kinds.backward_bytes(job, layout, kind) for kind in own),
        "mask": 0 if keeps_mask else mask,
        "kept_mask": mask if keeps_mask else 0,
        "loaded": ends.loaded_mask_bytes(job, layout),
        "head": ends.head_bytes(job, layout) + max(each.left for each in away),
        "deferred": ends.deferred_bytes(job, layout),
        "shared_last": shared_buffer_bytes(job, layout, has_head=True),
        "shared": shared_buffer_bytes(job, layout, has_head=False),
        "dummies_last": parameters.dummy_gradient_bytes(job, layout, has_head=True),
        "dummies": parameters.dummy_gradient_bytes(job, layout, has_head=False),
        "whole": whole.weights + whole.gradients,
        "whole_gradients": whole.layer_gradients,
        "whole_weights": whole.layer_weights,
        "waiting": whole.waiting,
        "waiting_at_end": whole.waiting_at_end,
    }


def shared_buffer_bytes(job: Job, layout: Layout, *, has_head: bool) -> int:
    """Count the bytes of Megatron's global buffer, which is as large as the largest tensor that uses it.

    Under sequence parallelism Megatron's own linear layers store their gathered input in this buffer. With
    TransformerEngine only the head is one of Megatron's own linear layers. The all-gather dispatcher stores gathered
    tokens in this buffer, and local attention stores its scores there. `has_head` is True for the last pipeline rank.
    """
    block = Attention(job, layout)
    gathers = layout.sequence_parallel and layout.tp > 1 and (job.model.transformer_impl == "local" or has_head)
    gathered = block.residual_bytes * layout.tp if gathers else 0
    return max(gathered, Experts(job, layout).gather_buffer_bytes(), block.scores_buffer_bytes())


def _states(job: Job, layouts: LayoutColumns, stages: _Stages) -> tuple[Ints, ...]:
    """Return the bytes of weights, gradients, optimizer states and optimizer temporaries on each stage."""
    groups = layouts.groups(*_PARAMETERS, *_SHARDS)
    chosen = layouts.take(groups.first_U)
    cut = chosen.groups(*_PARAMETERS)
    known = _COUNTS.get(job, Memo)
    counts = [
        known.get(attrgetter(*_PARAMETERS)(layout), partial(_stage_counts, job, layout))
        for layout in map(chosen.layout, cut.first_U.tolist())
    ]
    starts = np.cumsum([0, *map(len, counts)])[cut.group_N]
    row_R = np.repeat(np.arange(len(chosen)), chosen.pp)
    firsts = np.cumsum(chosen.pp) - chosen.pp
    dense, expert, copies, outside = np.concatenate(counts)[starts[row_R] + np.arange(len(row_R)) - firsts[row_R]].T
    each, sharding = chosen.take(row_R), parameters.sharding_of(job)
    held = parameters.held_gradients if sharding and sharding.gradients else parameters.buffered_parameters
    figures = (
        parameters.weight_bytes(job, dense, expert, outside, each) + copies,
        held(job, dense, expert, each) * parameters.gradient_bytes_per_parameter(job),
        *parameters.optimizer_bytes(job, dense, expert, each, ends=outside),
    )
    place_S = np.repeat(firsts[groups.group_N], layouts.pp) + stages.stage_S
    return tuple(figure[place_S] for figure in figures)


def _stage_counts(job: Job, layout: Layout) -> Ints:
    """Count each stage's dense and expert parameters, bytes of FP8 copies, and parameters outside its layers."""
    stages, copies = parameters.stage_parameters(job, layout), parameters.narrow_weight_bytes(job, layout)
    rows = np.array([(each.dense, each.expert, copy, 0) for each, copy in zip(stages, copies, strict=True)])
    # A single stage has embedding and head; `np.add.at` adds both to the same row.
    np.add.at(rows[:, -1], [0, -1], parameters.end_parameters(job, layout))
    return rows.astype(np.int64)


def _whole(layouts: LayoutColumns, layer: dict[str, Ints]) -> Ints:
    """Count the bytes of unsharded weights and gradients under FSDP at the peak of the backward.

    During the backward each finished layer adds waiting gradients and frees its activations. When all layers have been
    gathered, each finished layer also frees its gathered weights.
    """
    by_layer = layer["whole_gradients"] - layer["largest"]
    grown = layer["waiting"] * np.maximum(by_layer, 0)
    grown = grown + layer["waiting_at_end"] * np.maximum(by_layer - layer["whole_weights"], 0)
    return np.where(layouts.dp * layouts.cp > 1, layer["whole"] + grown, 0)


def _recompute(job: Job, layouts: LayoutColumns, layer: dict[str, Ints]) -> Ints:
    """Count the bytes of activations that recompute restores for a while, for one unit of layers at a time.

    With recompute method `block` the result is 0 unless every layer of a chunk runs again. If some layers of a chunk
    keep their activations, their backward runs first and frees these activations before the recompute.
    """
    even = job.model.num_layers // (layouts.pp * layouts.vpp)
    sizes = np.array([[max(cut, default=0), min(filter(None, cut), default=0)] for cut in layouts.cuts])
    largest, smallest = (np.where(size > 0, size, even) for size in sizes[layouts.layers_per_chunk].T)
    is_uniform, is_block, is_selective, size = _recompute_fields(layouts)
    units = np.where(is_uniform, np.minimum(size, largest), is_block * (size >= smallest))
    return np.asarray(units * layer["unit"] + is_selective * layer["recomputed"], dtype=np.int64)


def _recompute_fields(layouts: LayoutColumns) -> Ints:
    """Return 4 columns of N: flags for recompute methods `uniform`, `block` and selective, and the number of layers."""
    fields_of = [
        (each.method == "uniform", each.method == "block", each.granularity == "selective", each.num_layers)
        for each in layouts.recomputes
    ]
    return np.asarray(np.array(fields_of, dtype=np.int64)[layouts.recompute].T)


def _chunk_bytes(job: Job, layouts: LayoutColumns, layer: dict[str, Ints]) -> tuple[Ints, Ints]:
    """Return the index of each layout's first chunk (N), and the bytes that each chunk's layers keep (C).

    The bytes of chunks are for one micro-batch. The other chunks of a layout follow its first chunk in model order.
    Layouts with equal bytes share the entries of their chunks. Full recompute keeps only the input of each unit of
    layers. With recompute method `uniform` a unit is k layers. With recompute method `block` each of a chunk's first k
    layers is a unit, and the chunk's other layers keep all activations.
    """
    groups = layouts.groups(*_LAYER, "pp", "vpp", "layers_per_chunk", "chunks_after_mtp")
    layouts, layer = layouts.take(groups.first_U), {name: each[groups.first_U] for name, each in layer.items()}
    counts = layouts.pp * layouts.vpp
    starts, rows = np.cumsum(counts) - counts, np.repeat(np.arange(len(layouts)), counts)
    layers = (job.model.num_layers // np.maximum(counts, 1))[rows]
    for index, cut in enumerate(layouts.cuts):
        mine = np.flatnonzero(layouts.layers_per_chunk == index)
        # `chunk_layers` raises LayoutError for a division of layers that is not allowed, or for the first uneven
        # division.
        for row in mine[:1] if cut else mine[job.model.num_layers % counts[mine] != 0][:1]:
            layouts.layout(int(row)).chunk_layers(job.model.num_layers)
        if cut:
            layers[np.isin(rows, mine)] = np.tile(np.array(cut, dtype=np.int64), len(mine))
    # Number of model layers before each chunk, within the layout of this chunk.
    before = np.cumsum(layers) - layers
    before -= before[starts][rows]
    is_uniform, is_block, _, size = _recompute_fields(layouts)[:, rows]
    first = np.minimum(np.maximum(size, 1), layers)
    # CPU offloading of layers holds the activations of all other layers (TE cpu_offload.py, 2.10 on). It excludes
    # recompute and pipelines.
    again = np.minimum(job.options.cpu_offloading_num_layers, layers)
    again = np.where(is_uniform, layers, np.where(is_block, first, again))
    inputs = np.where(is_uniform, -(-layers // np.maximum(size, 1)), np.where(is_block, first, 0))
    size_C = inputs * layer["stream"][rows]
    pairs = zip(job.model.layer_kinds, narrow_layers(job), strict=True)
    kind_of_layer = np.array([kind if is_narrow else f"{kind}{_WIDE}" for kind, is_narrow in pairs])
    for kind in set(kind_of_layer.tolist()):
        ahead = np.concatenate(([0], np.cumsum(kind_of_layer == kind, dtype=np.int64)))
        size_C += (ahead[before + layers] - ahead[before + again]) * layer[kind][rows]
    size_C[starts + counts - 1 - layouts.chunks_after_mtp] += layer["prediction"]
    return starts[groups.group_N], size_C


def kept_by_chunk(job: Job, layout: Layout) -> tuple[int, ...]:
    """Count the bytes of activations that each chunk keeps for one micro-batch, in model order."""
    columns = LayoutColumns.of([layout])
    return tuple(_chunk_bytes(job, columns, _by_layer(job, columns))[1].tolist())


def _live_passes(stages: _Stages) -> Ints:
    """Count the most micro-batch passes of each stage's chunks whose backward has not run.

    1F1B has min(m, p - r) of m micro-batches on rank r of p (Narayanan et al. 2021, section 2.2). In the interleaved
    schedule this count is the number of warm-up passes plus one, but at most the number of all passes (megatron-core,
    pipeline_parallel/schedules.py:762-786 of core_v0.16.1).
    """
    pp, vpp, group_size, microbatches = stages.schedule_S
    ahead = num_warmup(pp, vpp, group_size, stages.stage_S)
    one_chunk = np.minimum(microbatches, pp - stages.stage_S)
    return np.asarray(np.where(vpp > 1, np.minimum(ahead + 1, microbatches * vpp), one_chunk))


def _live_counts(stages: _Stages, turn_S: Ints) -> Ints:
    """Count the micro-batches that chunk number `turn_S` of each stage keeps when the stage first keeps the most."""
    _, vpp, group_size, microbatches = stages.schedule_S
    rounds, rest = np.divmod(_live_passes(stages), group_size * vpp)
    return np.minimum(rounds * group_size + np.clip(rest - turn_S * group_size, 0, group_size), microbatches)


def _have_equal_chunks(pp: Ints, vpp: Ints, first: Ints, bytes_C: Ints) -> NDArray[np.bool_]:
    """Return True for stages whose chunks all keep the same bytes; `first` = index of each stage's first chunk."""
    equal = np.ones(len(first), dtype=bool)
    for turn in range(1, int(vpp.max(initial=1))):
        some = np.flatnonzero(equal & (vpp > turn))
        equal[some] = bytes_C[first[some] + turn * pp[some]] == bytes_C[first[some]]
    return equal


def _live_bytes(stages: _Stages, chunk_N: Ints, bytes_C: Ints) -> Ints:
    """Count the bytes of all live micro-batches on each stage; `chunk_N` and `bytes_C` come from `_chunk_bytes`."""
    pp, vpp, group_size, microbatches = stages.schedule_S
    own = chunk_N[stages.row_S] + stages.stage_S
    kept: Ints = _live_passes(stages) * bytes_C[own]
    for stage in np.flatnonzero(~_have_equal_chunks(pp, vpp, own, bytes_C)).tolist():
        figures = (each[stage] for each in (pp, vpp, group_size, stages.stage_S, microbatches))
        sizes = bytes_C[own[stage] : own[stage] + pp[stage] * vpp[stage] : pp[stage]]
        kept[stage] = peak_live_bytes(*map(int, figures), tuple(sizes.tolist()))
    return kept


@lru_cache(maxsize=1 << 16)
def peak_live_bytes(
    pp: int,
    vpp: int,
    group_size: int,
    stage: int,
    num_microbatches: int,
    chunk_bytes_V: tuple[int, ...],
) -> int:
    """Count the most bytes that a stage's chunks hold for micro-batches whose backward has not run.

    Each chunk runs `group_size` micro-batches in a row (0 means `pp`), and keeps `chunk_bytes_V` bytes for each
    micro-batch.
    """
    if vpp == 1:
        return min(num_microbatches, pp - stage) * chunk_bytes_V[0]
    group_size = group_size or pp
    ahead = num_warmup(pp, vpp, group_size, stage)
    # Groups of micro-batches in the middle are left out, because after the warm-up all groups reach the same peak.
    groups, rest = divmod(num_microbatches, group_size)
    repeating = min(groups, -(-ahead // (vpp * group_size)) + 2) * group_size + rest
    _, chunks_M = schedule_table(vpp, repeating, group_size)
    weights_V = np.array(chunk_bytes_V, dtype=np.int64)
    forward = np.cumsum(weights_V[chunks_M])
    backward = np.concatenate(([0], np.cumsum(weights_V[vpp - 1 - chunks_M])))
    done = np.maximum(np.arange(len(forward)) - ahead, 0)
    return int((forward - backward[done]).max())


def _kept_masks(stages: _Stages, mask_N: Ints) -> Ints:
    """Count the bytes of the attention masks that recompute keeps, because they are arguments of recomputed layers.

    The first chunk, the last chunk, and the chunk of multi-token prediction load masks.
    """
    layouts = stages.layouts
    last, prediction = layouts.vpp - 1, layouts.vpp - 1 - layouts.chunks_after_mtp // layouts.pp
    of_first, of_last, of_prediction = (
        mask_N * _live_counts(stages, turn_N[stages.row_S])[place_N]
        for turn_N, place_N in (
            (0 * last, stages.starts_N),
            (last, stages.last_N),
            (prediction, stages.last_N - layouts.chunks_after_mtp % layouts.pp),
        )
    )
    return stages.spread(0, first=of_first, last=of_last, prediction=of_prediction)


def folded_peaks(job: Job, layout: Layout, live_bytes: Sequence[int]) -> tuple[MemoryParts, ...]:
    """Predict each pipeline rank's peak in a V placement: two equal chunks a rank, both model ends on the first rank.

    The layout has at least three pipeline ranks, so that Megatron's placement has a rank without embedding and head.
    `live_bytes` are the activations of all live micro-batches on each rank.
    """
    first, middle, *_, last = peak_memory_bytes(job, layout)
    held = {
        kind: getattr(first, kind) + getattr(last, kind) - getattr(middle, kind)
        for kind in ("weights", "gradients", "optimizer", "dummy_gradients", "optimizer_step")
    }
    held |= {kind: max(getattr(first, kind), getattr(last, kind)) for kind in ("shared_buffer", "loading")}
    ranks = ({**asdict(last), **held}, *(asdict(middle) for _ in live_bytes[1:]))
    return tuple(MemoryParts(**{**parts, "activations": live}) for parts, live in zip(ranks, live_bytes, strict=True))


def without_mask(job: Job) -> Job | None:
    """Return the job without its data loader's attention mask; None if no mask is made, or if attention reads it.

    Causal attention of Transformer Engine's flash and fused backends reads no mask. Unfused attention, Megatron's own
    included, combines the mask with the causal mask, so the data loader's mask changes the result only if
    `--reset-attention-mask` separates documents (TE v2.8, dot_product_attention/utils.py, get_full_mask; megatron/core
    fusions/fused_softmax.py of core_v0.16.1). Plans never add the flag that prevents the mask, because attention in the
    user's script may read the mask.
    """
    if not ends.attention_mask_bytes(job, job.own) or (not is_flash(job.model) and _RESET in job.performance_flags):
        return None
    return _bare(job)


def _bare(job: Job) -> Job:
    return replace(job, options=replace(job.options, create_attention_mask_in_dataloader=False))


def mask_notes(job: Job, layout: Layout) -> tuple[str, ...]:
    """Return a sentence about the stage whose peak the attention mask raises, and the flag that prevents the mask."""
    whole = layout.cp * ends.attention_mask_bytes(job, layout)
    if whole and job.options.sft:  # sft_dataset.py, __getitem__
        return (
            f"With --sft the first sample ends the job, because the data set makes no attention mask; add {NO_MASK}.",
        )
    with_mask, without = ([part.total for part in peak_memory_bytes(one, layout)] for one in (job, _bare(job)))
    raised = [rank for rank, peak in enumerate(with_mask) if peak > (1 + MATTERS) * without[rank]]
    if not raised:
        return ()
    fullest = max(raised, key=lambda rank: with_mask[rank])
    cut = " before context parallelism cuts it" if layout.cp > 1 else ""
    need, bare_need = bytes_text(with_mask[fullest]), bytes_text(without[fullest])
    advice = f"{NO_MASK} leaves the mask out, which causal attention does not need. " if without_mask(job) else ""
    workers = job.options.num_workers
    maker = f"each of the {workers} {plural('worker', workers)} of a data loader" if workers else "the data loader"
    note = (
        f"The data loader's attention mask, {bytes_text(whole)} a micro-batch, goes whole to the device{cut}: with the "
        f"mask the tensors of stage {fullest} need {need}, without it {bare_need}. {advice}To make a mask, {maker} "
        f"needs {bytes_text(_HOST_BYTES * job.model.seq_length**2)} of host memory."
    )
    return (note,)
