"""Peak bytes on each pipeline rank, for one layout or for many at once, as an analytic sum.

The peak is the larger need of forward and backward, and of the optimizer step. Not included: bytes outside the model's
tensors (context, communicators, workspaces, fragmentation; see `overhead`), and the alignment of each parameter within
its bucket.

The sizes of a layer's tensors are computed once for all layouts with equal values in the fields that decide these
sizes. numpy then copies the sizes to the stages of all layouts. A single layout is a column of length 1.
"""

# N = layouts, S = stages (pipeline ranks) of all layouts, layout by layout, C = chunks of all layouts. R = stages of
# chosen layouts: one of each group of layouts whose stages hold equal states.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial, reduce
from operator import attrgetter
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost import Memo
from pipette_launch.cost.layers import attention, ends, kinds
from pipette_launch.cost.layers.block import Sizes, recompute_modules, residual_bytes
from pipette_launch.cost.layers.mlp import Experts
from pipette_launch.cost.layers.parameters import (
    buffered_parameters,
    dummy_gradient_bytes,
    end_parameters,
    fp8_weight_bytes,
    gradient_bytes_per_parameter,
    held_gradients,
    optimizer_bytes,
    sharding_of,
    stage_parameters,
    weight_bytes,
    whole_beside_shards,
)
from pipette_launch.cost.memory.live_activations import (
    LAYER,
    Stages,
    beyond_first_chunk,
    chunk_bytes,
    input_bytes,
    live_bytes,
)
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Field, Ints, Layout, LayoutColumns
from pipette_launch.megatron.performance import performance_options
from pipette_launch.text import bytes_text, plural

Bytes = TypeVar("Bytes", int, NDArray[np.int64])

_PARAMETERS: tuple[Field, ...] = ("tp", "pp", "ep", "etp", "vpp", "layers_per_chunk", "chunks_after_mtp")
"""Fields of a layout that decide the number of parameters of a stage."""
_SHARDS: tuple[Field, ...] = ("dp", "cp", "use_distributed_optimizer")
"""Further fields of a layout that decide the optimizer states of a stage."""
_ENDS_LOAD = (0, 15)
"""First release in which only the first and the last chunk load data. In earlier releases, all chunks of the first and
of the last rank load data."""

NO_MASK = "--no-create-attention-mask-in-dataloader"
MATTERS = 0.01
"""Smallest share of a stage's peak for which a note names the attention mask."""
_RESET = "--reset-attention-mask"
_SFT_ASSERTS = (0, 16)
"""First release whose data set for --sft asserts that no mask is requested (sft_dataset.py, __getitem__)."""
_HOST_BYTES = 8
"""Host bytes for each entry of a mask: ones and their lower triangle, both in fp32 (gpt_dataset.py)."""

# Figures that a search needs again for most of its batches of layouts.
_LAYERS: Memo[Memo[dict[str, int]]] = Memo()
_COUNTS: Memo[Memo[Ints]] = Memo()


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakParts(Generic[Bytes]):
    """Bytes by kind at the peak: numbers for one pipeline rank, or columns for many."""

    weights: Bytes
    """Bytes of weights, with their copies in FP8."""
    gradients: Bytes
    optimizer: Bytes
    shared_buffer: Bytes
    """Bytes of Megatron's global memory buffer, which is never freed after its first use."""
    dummy_gradients: Bytes
    """Bytes of dummy gradients, which are never freed. TransformerEngine returns them if gradients go directly into
    their buffer."""
    activations: Bytes
    """Activations that the layers of all live micro-batches keep."""
    embedding: Bytes
    """Bytes of the model's inputs for all live micro-batches, on the first rank."""
    recompute: Bytes
    """Activations of one recomputed layer while its backward runs."""
    backward: Bytes
    """Largest extra bytes that a layer's backward needs for a while. With offloading a forward between backwards may
    need more."""
    mask: Bytes
    """The data loader's attention mask, while a forward pass runs."""
    loading: Bytes
    """Bytes of the whole attention mask while it is loaded, minus the bytes that the next forward pass will keep."""
    head: Bytes
    """Bytes of final norm, logits and loss of one micro-batch, and of the last layer's activations that offloading
    moves only afterwards."""
    deferred: Bytes
    """Inputs and gradients kept for the deferred weight gradients of the head."""
    buffers: Bytes
    """Bytes of the tensors that pipeline stages are sending and receiving."""
    optimizer_step: Bytes
    """Temporaries of the optimizer step, which runs when no activations are kept."""
    whole: Bytes
    """Bytes that FSDP holds whole beside the shards: gathered layers, waiting gradients, embedding and head."""

    @property
    def static(self) -> Bytes:
        """Bytes held during the whole step."""
        return self.weights + self.gradients + self.optimizer + self._lasting

    @property
    def total(self) -> Bytes:
        """The peak: static bytes, plus the larger of forward-backward and optimizer step."""
        larger = max if isinstance(self.weights, int) else np.maximum
        return self.static + larger(self._kept + reduce(larger, self._instants), self.optimizer_step)

    @property
    def _lasting(self) -> Bytes:
        return self.shared_buffer + self.dummy_gradients

    @property
    def _kept(self) -> Bytes:
        return self.activations + self.embedding + self.deferred + self.buffers + self.whole

    @property
    def _instants(self) -> tuple[Bytes, Bytes, Bytes]:
        """Bytes at three different times: end of a forward with the loss, a layer's backward, and loading of a mask."""
        return self.mask + self.head, self.recompute + self.backward, self.loading


class MemoryParts(PeakParts[int]):
    """Bytes on one pipeline rank at its peak, by kind."""

    __slots__ = ()

    def by_kind(self) -> dict[str, int]:
        """Split the peak into the kinds that users see; the values add up to `total`.

        The peak occurs in the loss with its logits, in the backward of a layer, while a mask is loaded, or in the
        optimizer step, whose temporaries count as buffers.
        """
        by_kind = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        at_loss, at_backward, at_loading = self._instants
        if self._kept + max(self._instants) < self.optimizer_step:
            return {**by_kind, "activations": 0, "logits": 0, "buffers": self._lasting + self.optimizer_step}
        is_loss = at_loss >= max(at_backward, at_loading)
        return {
            **by_kind,
            "activations": self.activations + self.embedding + (self.mask if is_loss else max(at_backward, at_loading)),
            "logits": self.deferred + (self.head if is_loss else 0),
            "buffers": self._lasting + self.buffers + self.whole,
        }


_PARTS = tuple(field.name for field in fields(MemoryParts))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryColumns:
    """Predicted peaks of the stages of N layouts."""

    starts_N: Ints
    """First stage of each layout."""
    parts_S: PeakParts[Ints]

    def totals(self) -> tuple[tuple[int, ...], ...]:
        """Return the peak bytes of each stage of each layout."""
        return tuple(tuple(stages.tolist()) for stages in np.split(self.parts_S.total, self.starts_N)[1:])

    def of(self, row: int) -> tuple[MemoryParts, ...]:
        """Return the peak's parts on each stage of layout number `row`."""
        columns = (np.split(getattr(self.parts_S, name), self.starts_N)[row + 1].tolist() for name in _PARTS)
        return tuple(MemoryParts(**dict(zip(_PARTS, stage, strict=True))) for stage in zip(*columns, strict=True))


def peak_memory_bytes(job: Job, layout: Layout) -> tuple[MemoryParts, ...]:
    """Predict every pipeline rank's peak for one layout.

    Raises:
        LayoutError: the layout divides the layers or the batch unevenly.

    """
    return peak_memory_columns(job, LayoutColumns.of([layout])).of(0)


def kept_by_chunk(job: Job, layout: Layout) -> tuple[int, ...]:
    """Count the bytes of activations that each chunk keeps for one micro-batch, in model order."""
    columns = LayoutColumns.of([layout])
    _, bytes_C = chunk_bytes(job, columns, _by_layer(job, columns))
    return tuple(bytes_C.tolist())


def folded_peaks(job: Job, layout: Layout, live_bytes: Sequence[int]) -> tuple[MemoryParts, ...]:
    """Predict each pipeline rank's peak in a V placement: two equal chunks a rank, both model ends on the first rank.

    Args:
        job: the training job.
        layout: a layout with at least three pipeline ranks, so that under Megatron's placement some rank has no end of
            the model.
        live_bytes: activations of all live micro-batches on each rank.

    Raises:
        LayoutError: the layout divides the layers or the batch unevenly.

    """
    first, middle, *_, last = peak_memory_bytes(job, layout)
    held = {
        kind: getattr(first, kind) + getattr(last, kind) - getattr(middle, kind)
        for kind in ("weights", "gradients", "optimizer", "dummy_gradients", "optimizer_step")
    }
    held |= {kind: max(getattr(first, kind), getattr(last, kind)) for kind in ("shared_buffer", "loading")}
    held["embedding"] = first.embedding
    ranks = ({**asdict(last), **held}, *(asdict(middle) for _ in live_bytes[1:]))
    return tuple(MemoryParts(**{**parts, "activations": live}) for parts, live in zip(ranks, live_bytes, strict=True))


def peak_memory_columns(job: Job, layouts: LayoutColumns) -> MemoryColumns:
    """Predict every pipeline rank's peak for many layouts.

    Raises:
        LayoutError: a row divides the layers or the batch unevenly; the message names the row's numbers.

    """
    if not len(layouts):
        nothing = np.zeros(0, dtype=np.int64)
        return MemoryColumns(starts_N=nothing, parts_S=PeakParts(**dict.fromkeys(_PARTS, nothing)))
    stages = Stages.of(job, layouts)
    layer = _by_layer(job, layouts)
    none = np.zeros_like(layouts.pp)
    # Without virtual stages the last stage runs each backward directly after its forward.
    waiting = np.maximum(layer["backward"], layer["forward"])
    deferred = layer["deferred"] * ends.deferred_microbatches(job, stages.microbatches_N)
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
        # Three tensors: the received tensor, the sent tensor, and the tensor sent before. torch holds a sent tensor
        # until NCCL's watchdog has seen the end of the send. NVIDIA's golden values with a pipeline have one or two
        # such tensors, of 4 and of 64 MiB, beside the first two tensors.
        buffers=stages.spread(np.where(layouts.pp > 1, 3 * layer["stream"], 0)),
        optimizer_step=optimizer_step,
        whole=stages.spread(_whole(layouts, layer)),
    )
    return MemoryColumns(starts_N=stages.starts_N, parts_S=parts)


def shared_buffer_bytes(job: Job, layout: Layout, *, has_head: bool) -> int:
    """Count the bytes of Megatron's global buffer, which is as large as the largest tensor that uses it.

    Megatron's own linear layers store their gathered input there under sequence parallelism. With TransformerEngine
    only the head is such a layer. The all-gather dispatcher stores gathered tokens, and local attention stores scores.
    `has_head` is True for the last pipeline rank.
    """
    has_linear = job.model.transformer_impl == "local" or has_head
    gathers = layout.sequence_parallel and layout.tp > 1 and has_linear
    gathered = residual_bytes(job.model, layout) * layout.tp if gathers else 0
    return max(
        gathered,
        Experts(job.model, layout).gather_buffer_bytes(job),
        attention.Attention(job.model, layout).scores_buffer_bytes(),
    )


def _by_layer(job: Job, layouts: LayoutColumns) -> dict[str, Ints]:
    """Return a column of N values for each figure that depends only on the fields `LAYER`."""
    groups = layouts.groups(*LAYER)
    known = _LAYERS.get(job, Memo)
    figures = [
        known.get(attrgetter(*LAYER)(layout), partial(_layer_figures, job, layout))
        for layout in map(layouts.layout, groups.first_U.tolist())
    ]
    table = np.array([list(each.values()) for each in figures], dtype=np.int64)
    return dict(zip(figures[0], table.T[:, groups.group_N], strict=True))


def _layer_figures(job: Job, layout: Layout) -> dict[str, int]:
    """Return the bytes of one layer and of the model's ends."""
    own = sorted({*job.model.layer_kinds})
    units = [kinds.kind_activations(job, layout, kind) for kind in own]
    modules = recompute_modules(layout)
    keeps_mask = layout.recompute.granularity == "full" or "core_attn" in modules
    mask = ends.attention_mask_bytes(job, layout)
    away = [kinds.offloaded(job, layout, kind) for kind in own]
    kept: dict[str, int] = {kind: kinds.kept_bytes(job, layout, kind) for kind in own}
    whole = whole_beside_shards(job, layout, gradient_bytes_per_parameter(job))
    return {
        **kept,
        "largest": max(kept.values()),
        "stream": Sizes(job.model, layout).stream_bytes(job),
        "prediction": kinds.prediction_bytes(job, layout),
        "recomputed": max(unit.recomputed(modules) for unit in units),
        "unit": max(unit.total for unit in units),
        "forward": max(each.in_forward for each in away),
        "backward": max(kinds.backward_bytes(job, layout, kind) for kind in own),
        "embedding": ends.embedding_bytes(job, layout),
        # Recompute of layers, or of the attention core alone, keeps all arguments for every live micro-batch. The mask
        # is such an argument (megatron-core, tensor_parallel/random.py, CheckpointFunction.forward).
        "mask": 0 if keeps_mask else mask,
        "kept_mask": mask if keeps_mask else 0,
        "loaded": ends.loaded_mask_bytes(job, layout),
        "head": ends.head_bytes(job, layout) + max(each.left for each in away),
        "deferred": ends.deferred_bytes(job, layout),
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
    """Count the bytes for loading a mask, minus the bytes of the next forward pass and minus `beyond_first_chunk`."""
    layouts = stages.layouts
    last = chunk_N + layouts.pp * layouts.vpp - 1
    begun, predicting, ended = (
        np.maximum(layer["loaded"] - layer["kept_mask"] - bytes_C[chunk], 0)
        for chunk in (chunk_N, last - layouts.chunks_after_mtp, last)
    )
    first = np.maximum(begun - layer["embedding"] - beyond, 0)
    # A single stage also keeps the token ids, so it counts as a first stage.
    last = np.where(layouts.pp == 1, first, ended)
    return stages.spread(np.zeros_like(first), first=first, last=last, prediction=predicting)


def _stage_counts(job: Job, layout: Layout) -> Ints:
    """Count each stage's dense and expert parameters, bytes of FP8 copies, and parameters outside its layers."""
    counts, copies = stage_parameters(job.model, layout), fp8_weight_bytes(job, layout)
    rows = np.array([(each.dense, each.expert, copy, 0) for each, copy in zip(counts, copies, strict=True)])
    # A single stage has embedding and head; `np.add.at` adds both to the same row.
    np.add.at(rows[:, -1], [0, -1], end_parameters(job.model, layout))
    return rows.astype(np.int64)


def _states(job: Job, layouts: LayoutColumns, stages: Stages) -> tuple[Ints, ...]:
    """Return columns of S: weights, gradients, optimizer states and the optimizer step's temporaries."""
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
    dense, expert, copies, outside = table[starts[row_R] + np.arange(len(row_R)) - firsts[row_R]].T
    each = chosen.take(row_R)
    sharding = sharding_of(job)
    gradients = held_gradients if sharding and sharding.gradients else buffered_parameters
    figures = (
        weight_bytes(job, dense, expert, outside, each) + copies,
        gradients(job, dense, expert, each) * gradient_bytes_per_parameter(job),
        *optimizer_bytes(job, dense, expert, each),
    )
    place_S = np.repeat(firsts[groups.group_N], layouts.pp) + stages.stage_S
    return tuple(figure[place_S] for figure in figures)


def _whole(layouts: LayoutColumns, layer: dict[str, Ints]) -> Ints:
    """Count the whole weights and gradients under FSDP at the peak of the backward.

    During the backward each finished layer adds waiting gradients and frees its activations. When all layers have been
    gathered, each finished layer also frees its gathered weights.
    """
    by_layer = layer["whole_gradients"] - layer["largest"]
    grown = layer["waiting"] * np.maximum(by_layer, 0)
    grown = grown + layer["waiting_at_end"] * np.maximum(by_layer - layer["whole_weights"], 0)
    return np.where(layouts.dp * layouts.cp > 1, layer["whole"] + grown, 0)


def _recompute(job: Job, layouts: LayoutColumns, layer: dict[str, Ints]) -> Ints:
    """Count the bytes of activations that recompute restores for a while, for one unit of layers at a time.

    With method `block` the result is 0 unless every layer of a chunk runs again. If some layers are kept, their
    backward runs first, so their activations are freed before the recompute.
    """
    even = job.model.num_layers // (layouts.pp * layouts.vpp)
    sizes = np.array([[max(cut, default=0), min(filter(None, cut), default=0)] for cut in layouts.cuts])
    largest, smallest = sizes[layouts.layers_per_chunk].T
    largest, smallest = np.where(largest > 0, largest, even), np.where(smallest > 0, smallest, even)
    flags = [(each.method == "uniform", each.method == "block", each.num_layers) for each in layouts.recomputes]
    is_uniform, is_block, size = np.array(flags, dtype=np.int64)[layouts.recompute].T
    units = np.where(is_uniform, np.minimum(size, largest), is_block * (size >= smallest))
    is_selective = np.array([each.granularity == "selective" for each in layouts.recomputes])[layouts.recompute]
    return np.asarray(units * layer["unit"] + is_selective * layer["recomputed"], dtype=np.int64)


def without_mask(job: Job) -> Job | None:
    """Return the job without its data loader's mask; None if it makes no mask, or if attention reads the mask.

    Causal attention of Transformer Engine's flash and fused backends reads no mask. Unfused attention, Megatron's own
    included, adds the mask to the causal one, so the mask changes the result only if `--reset-attention-mask` separates
    documents (TE v2.8, dot_product_attention/utils.py, get_full_mask; megatron/core fusions/fused_softmax.py of
    core_v0.16.1). No plan adds the flag against the mask, because attention of a user's script may read the mask.
    """
    reads = attention.is_local(job.model) or job.model.attention_backend == "unfused"
    if not ends.attention_mask_bytes(job, job.own) or (reads and _RESET in job.performance_flags):
        return None
    return _with_no_mask(job)


def _with_no_mask(job: Job) -> Job:
    return replace(job, performance_flags=tuple(sorted((*job.performance_flags, NO_MASK))))


def mask_notes(job: Job, layout: Layout) -> tuple[str, ...]:
    """Return a sentence with the stage whose peak the mask raises, and the flag that prevents the mask."""
    whole = layout.cp * ends.attention_mask_bytes(job, layout)
    if whole and performance_options(job).sft and job.release >= _SFT_ASSERTS:
        return (f"With --sft the first sample ends the job: its data set makes no attention mask; add {NO_MASK}.",)
    with_mask, without = ([part.total for part in peak_memory_bytes(one, layout)] for one in (job, _with_no_mask(job)))
    raised = [rank for rank, peak in enumerate(with_mask) if peak > (1 + MATTERS) * without[rank]]
    if not raised:
        return ()
    fullest = max(raised, key=lambda rank: with_mask[rank])
    cut = " before context parallelism cuts it" if layout.cp > 1 else ""
    need, bare_need = bytes_text(with_mask[fullest]), bytes_text(without[fullest])
    advice = f"{NO_MASK} leaves it out; causal attention needs none. " if without_mask(job) else ""
    workers = performance_options(job).num_workers
    maker = f"each of the {workers} {plural('worker', workers)} of a data loader" if workers else "the data loader"
    note = (
        f"The data loader's attention mask, {bytes_text(whole)} a micro-batch, goes whole to the device{cut}: with it "
        f"the tensors of stage {fullest} need {need}, without it {bare_need}. {advice}To make one, {maker} needs "
        f"{bytes_text(_HOST_BYTES * job.model.seq_length**2)} of host memory."
    )
    return (note,)
