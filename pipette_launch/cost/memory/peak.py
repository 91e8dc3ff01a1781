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

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial, reduce
from operator import attrgetter
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.layers import activations, attention, ends, experts, kinds, offloading
from pipette_launch.cost.layers.activations import computes_in_fp8
from pipette_launch.cost.layers.attention import is_local
from pipette_launch.cost.layers.ends import whole_mask_bytes
from pipette_launch.cost.layers.experts import router_parameters
from pipette_launch.cost.layers.parameters import (
    buffered_parameters,
    chunk_kinds,
    end_parameters,
    gradient_bytes_per_parameter,
    held_gradients,
    kind_parameters,
    optimizer_bytes,
    sharding_of,
    stage_parameters,
    weight_bytes,
    whole_beside_shards,
)
from pipette_launch.cost.memo import Memo
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
from pipette_launch.facts.model import KINDS_WITH_EXPERTS, TRANSFORMER_KINDS, LayerKind, ModelSpec
from pipette_launch.megatron.performance import performance_options
from pipette_launch.text import bytes_text, plural

Bytes = TypeVar("Bytes", int, NDArray[np.int64])


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakParts(Generic[Bytes]):
    """Bytes by kind at the peak: numbers for one pipeline rank, or columns for many."""

    weights: Bytes
    """With their copies in FP8."""
    gradients: Bytes
    optimizer: Bytes
    shared_buffer: Bytes
    """Megatron's global buffer, which Megatron keeps once it was used."""
    dummy_gradients: Bytes
    """Stand-ins for gradients that are added to the buffer as they are computed; they are never freed."""
    activations: Bytes
    """Kept by the layers of all live micro-batches."""
    embedding: Bytes
    """Inputs of the model for all live micro-batches, on the first rank."""
    recompute: Bytes
    """Activations of one recomputed layer while its backward runs."""
    backward: Bytes
    """Largest extra need of the backward pass of a layer, with offloading, or with a forward between backwards."""
    mask: Bytes
    """The data loader's attention mask, while a forward pass runs."""
    loading: Bytes
    """The whole mask while it is loaded, less the bytes that the forward pass after it will keep."""
    head: Bytes
    """Final norm, logits and loss of one micro-batch, and what offloading leaves of the last layer until then."""
    deferred: Bytes
    """Inputs and gradients kept for the deferred weight gradients of the head."""
    buffers: Bytes
    """The pipeline's tensors in flight."""
    optimizer_step: Bytes
    """Temporaries of the optimizer step, which runs when no activation is kept any more."""
    whole: Bytes
    """Under FSDP: weights and gradients of the layers at work, beside the shards."""

    @property
    def static(self) -> Bytes:
        """Bytes held all the time."""
        return self.weights + self.gradients + self.optimizer + self._lasting

    @property
    def total(self) -> Bytes:
        """The peak: static, and the larger of forward-backward and optimizer step."""
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
        """The end of a forward pass, where the loss is computed, a layer's backward, and loading: never at once."""
        return self.mask + self.head, self.recompute + self.backward, self.loading


class MemoryParts(PeakParts[int]):
    """Bytes on one pipeline rank at its peak, by kind."""

    __slots__ = ()

    def by_kind(self) -> dict[str, int]:
        """Split the peak as users read it; the values add up to `total`.

        At the peak one of four things happens: the loss with its logits, the backward of a layer, the loading of a
        mask, or the step of the optimizer, whose temporaries count as buffers.
        """
        kinds = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        at_loss, at_backward, at_loading = self._instants
        if self._kept + max(self._instants) < self.optimizer_step:
            return {**kinds, "activations": 0, "logits": 0, "buffers": self._lasting + self.optimizer_step}
        is_loss = at_loss >= max(at_backward, at_loading)
        return {
            **kinds,
            "activations": self.activations + self.embedding + (self.mask if is_loss else max(at_backward, at_loading)),
            "logits": self.deferred + (self.head if is_loss else 0),
            "buffers": self._lasting + self.buffers + self.whole,
        }


_COPIES_BYTES = 2
"""One byte as it is, and one transposed for the backward."""
_FIRST_DUMMY_RELEASE = (0, 14)


def fp8_weight_bytes(job: Job, layout: Layout) -> tuple[int, ...]:
    """Count each pipeline rank's copies: two bytes for every parameter of its layers' matrices.

    TransformerEngine casts a weight with the first micro-batch of a step and keeps the result and its transpose in the
    module (TE v2.8, module/linear.py:242-262, module/base.py get_weight_workspace). With `--fp8-param-gather` the
    weights themselves are in FP8, and with their transpose as large as in bf16. No golden row of the development data
    runs in FP8 without that flag. Biases, which stay as they are, are counted with the matrices.
    """
    model = job.model
    if not computes_in_fp8(job) or performance_options(job).fp8_param_gather:
        return (0,) * layout.pp
    matrices = {kind: _matrices(model, layout, kind) for kind in model.possible_kinds}
    chunks = [sum(matrices[kind] for kind in kinds) for kinds, _ in chunk_kinds(model, layout)]
    return tuple(_COPIES_BYTES * sum(chunks[rank :: layout.pp]) for rank in range(layout.pp))


def _matrices(model: ModelSpec, layout: Layout, kind: LayerKind) -> int:
    """Parameters of one layer's linears; of a Mamba layer both projections."""
    if kind == "mamba_layer" and model.hybrid:
        return model.hybrid.mamba_matrices(model.hidden_size) // layout.tp
    norms = (2 if kind in TRANSFORMER_KINDS else 1) * model.norm_parameters()
    router = router_parameters(model) if kind in KINDS_WITH_EXPERTS else 0
    return max(0, kind_parameters(model, layout, kind).count - norms - router)


def dummy_gradient_bytes(job: Job, layout: Layout, *, has_head: bool) -> int:
    """Count one tensor in the weights' type for each distinct shape of a rank's matrices.

    Args:
        job: its model, release and flags decide.
        layout: tensor parallelism cuts the matrices.
        has_head: whether the rank is the last of the pipeline.

    """
    model = job.model
    release = tuple(int(part) for part in job.megatron_version.split(".")[:2] if part.isdigit())
    fused = performance_options(job).gradient_accumulation_fusion
    if model.transformer_impl == "local" or release < _FIRST_DUMMY_RELEASE or not fused:
        return 0
    # Outputs and inputs of the matrices of attention, dense MLPs and shared experts.
    hidden = model.hidden_size
    first = 2 if model.gated_linear_unit else 1
    kinds = set(model.layer_kinds)
    widths = {
        0 if kinds.isdisjoint(("layer", "mlp_layer")) else model.ffn_hidden_size,
        model.moe_shared_expert_intermediate_size,
    } - {0}
    shapes = {(first * width // layout.tp, hidden) for width in widths}
    shapes |= {(hidden, width // layout.tp) for width in widths}
    if model.hybrid and "mamba_layer" in kinds:
        shapes |= {(model.hybrid.mamba_projected // layout.tp, hidden)}
        shapes |= {(hidden, model.hybrid.mamba_channels // layout.tp)}
    if model.latent_attention is None and not kinds.isdisjoint((*TRANSFORMER_KINDS, "attention_layer")):
        query = model.num_attention_heads // layout.tp * model.kv_channels
        key_value = 2 * max(1, model.num_query_groups // layout.tp) * model.kv_channels
        shapes |= {(query + key_value, hidden), (hidden, query)}
    if has_head:
        shapes.add((model.padded_vocab_size(layout.tp) // layout.tp, hidden))
    return model.dtype_bytes * sum(rows * columns for rows, columns in shapes)


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
    mask = ends.attention_mask_bytes(job, layout)
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
        "embedding": ends.embedding_bytes(job, layout),
        # Recompute of layers, and of the attention core alone, keeps its arguments for every live micro-batch, and the
        # mask is one of them (MC tensor_parallel/random.py, CheckpointFunction.forward).
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


def folded_peaks(job: Job, layout: Layout, live_bytes: Sequence[int]) -> tuple[MemoryParts, ...]:
    """Predict every pipeline rank's peak for a layout of two equal chunks on each rank, folded.

    Args:
        job: the training job.
        layout: three pipeline ranks or more, so that one of them has no end of the model under Megatron's placement.
        live_bytes: what each rank's chunks keep of all live micro-batches.

    Raises:
        LayoutError: the layout cuts the layers or the batch unevenly.

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


NO_MASK = "--no-create-attention-mask-in-dataloader"
MATTERS = 0.01
"""Smallest share of a stage's peak for which the mask has a note."""
_RESET = "--reset-attention-mask"
_SFT_ASSERTS = (0, 16)
"""First release whose data set for --sft asserts that it is to make no mask (sft_dataset.py, __getitem__)."""
_HOST_BYTES = 8
"""For each entry of a mask: ones and their lower triangle, both in fp32 (gpt_dataset.py)."""


def without_mask(job: Job) -> Job | None:
    """Return the job whose data loader makes no mask; None where it makes none, or where attention reads it."""
    reads = is_local(job.model) or job.model.attention_backend == "unfused"
    if not whole_mask_bytes(job, job.own) or (reads and _RESET in job.performance_flags):
        return None
    return _with_no_mask(job)


def _with_no_mask(job: Job) -> Job:
    return replace(job, performance_flags=tuple(sorted((*job.performance_flags, NO_MASK))))


def mask_notes(job: Job, layout: Layout) -> tuple[str, ...]:
    """Name the stages that the mask makes larger, in one sentence, and say how to leave it out."""
    whole = whole_mask_bytes(job, layout)
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
