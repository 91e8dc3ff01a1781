"""The kinds of layers: the blocks of each kind, and the sums over its blocks.

A new kind of layer needs a name in `facts/model.py` and an entry in `KINDS`. A new block needs a class like
`mamba.Mamba` and an entry in `BLOCKS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipette_launch.cost.layers import attention, mlp
from pipette_launch.cost.layers.attention import ATTENTION
from pipette_launch.cost.layers.block import (
    FP32_BYTES,
    Activations,
    Block,
    Load,
    Parameters,
    PassLoads,
    is_captured,
    local_tokens,
    matrix_input_bytes,
    recompute_modules,
    residual_bytes,
    tokens,
)
from pipette_launch.cost.layers.ends import depth_bytes
from pipette_launch.cost.layers.mamba import MAMBA
from pipette_launch.cost.layers.mlp import EXPERTS, MLP
from pipette_launch.facts.job import ITERATION, Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import TRANSFORMER_KINDS, LayerKind, ModelSpec
from pipette_launch.megatron.performance import performance_options

KINDS: dict[LayerKind, tuple[Block, ...]] = {
    "layer": (ATTENTION, MLP),
    "moe_layer": (ATTENTION, EXPERTS),
    "mamba_layer": (MAMBA,),
    "attention_layer": (ATTENTION,),
    "mlp_layer": (MLP,),
    "expert_layer": (EXPERTS,),
}
"""Blocks of each kind of layer, in order. The kinds with one block belong to hybrid models."""
BLOCKS: tuple[Block, ...] = (MAMBA, ATTENTION, MLP, EXPERTS)
_KERNELS_PER_COLLECTIVE = 3.0
"""Host time for one collective of torch's process group, as a number of kernel launches."""


def kind_parameters(model: ModelSpec, layout: Layout, kind: LayerKind) -> Parameters:
    """Count one layer on one rank, with a norm for each block; 0 for experts in a model without experts."""
    blocks = KINDS[kind]
    if EXPERTS in blocks and not model.num_experts:
        return Parameters()
    norms = Parameters(dense=len(blocks) * model.norm_parameters())
    return sum((block.parameters(model, layout) for block in blocks), norms)


def kind_activations(job: Job, layout: Layout, kind: LayerKind) -> Activations:
    """Count the bytes that a layer keeps without recompute and offloading."""
    return sum((block.activations(job, layout) for block in KINDS[kind]), Activations())


def kept_bytes(job: Job, layout: Layout, kind: LayerKind) -> int:
    """Count the bytes that a layer keeps if it is not fully recomputed."""
    modules, found = recompute_modules(layout), kind_activations(job, layout, kind)
    kept = found.total - found.recomputed(modules)
    if ATTENTION in KINDS[kind] and "core_attn" in modules:
        kept += attention.held_for_recompute_bytes(job.model, layout)
    if kind in TRANSFORMER_KINDS:
        kept -= offloaded(job, layout, kind).left
    return kept


def backward_bytes(job: Job, layout: Layout, kind: LayerKind) -> int:
    """Count the most bytes that the backward of one layer needs for a while, beyond the layer's kept activations.

    Autograd frees an operation's saved tensors when the operation's backward is done. The peak is in the MLP or
    experts, or in the attention core after the MLP's tensors are freed. Context parallelism may need more in the core's
    forward, before the MLP's tensors exist. Layers of one block count like a transformer layer, which is an upper
    bound.
    """
    if MAMBA in KINDS[kind]:
        return MAMBA.backward_bytes(job, layout)
    behind = EXPERTS if EXPERTS in KINDS[kind] else MLP
    kept, away = behind.activations(job, layout), offloaded(job, layout, kind)
    freed = kept.total - kept.dropout_masks - away.mlp
    peak = max(behind.backward_bytes(job, layout), ATTENTION.backward_bytes(job, layout) - freed)
    if behind is EXPERTS and performance_options(job).overlap_moe_expert_parallel_comm:
        # The next micro-batch's forward runs beside this backward, layer by layer, so one more layer keeps its
        # activations (megatron-core, pipeline_parallel/combined_1f1b.py).
        peak += kept_bytes(job, layout, "moe_layer")
    return peak + away.moved


def prediction_bytes(job: Job, layout: Layout) -> int:
    """Count the bytes that the depths of multi-token prediction keep, with the recompute of their layers."""
    model = job.model
    if not model.mtp_num_layers:
        return 0
    if layout.recompute.granularity == "full":
        layers = residual_bytes(model, layout) * len(model.prediction_kinds)
    else:
        layers = sum(kept_bytes(job, layout, kind) for kind in model.prediction_kinds)
    return model.mtp_num_layers * (layers + depth_bytes(job, layout))


def kind_loads(job: Job, layout: Layout, kind: LayerKind) -> PassLoads:
    """Return the device's work for one layer; of communication only the kernel launches on the host count."""
    options, (first, *others) = performance_options(job), KINDS[kind]
    around = _around_blocks(job.model, layout, len(KINDS[kind]))
    loads = (first.loads(job, layout) + around).without_launches(float(is_captured(options, first.graph_module)))
    loads = sum((block.loads(job, layout) for block in others), loads)
    return loads.without_launches(float(is_captured(options, ITERATION)))


def _around_blocks(model: ModelSpec, layout: Layout, blocks: int) -> PassLoads:
    """Return the work of norms, residual connections, and the launches of tensor-parallel collectives.

    Each block has one norm and one bias-dropout-add over T * h elements, split over tp by sequence parallelism. The
    backward adds up the gradients of block and residual connection, and sums gradients of biases over tokens.
    """
    one = residual_bytes(model, layout)
    mask = 0.5 * one if model.hidden_dropout > 0 else 0.0
    biases = one if model.add_bias_linear else 0
    forward, backward = ((2, 3) if layout.sequence_parallel else (1, 1)) if layout.tp > 1 else (0, 0)
    return PassLoads(
        forward=Load(
            moved_bytes=blocks * (2 * one + 3 * one + mask), kernels=blocks * (3 + forward * _KERNELS_PER_COLLECTIVE)
        ),
        input_grad=Load(
            moved_bytes=blocks * (3 * one + 2 * one + mask + 3 * one + biases),
            kernels=blocks * (5 + backward * _KERNELS_PER_COLLECTIVE),
        ),
    )


def recompute_share(model: ModelSpec, layout: Layout, index_in_chunk: int, kind: LayerKind) -> float:
    """Return the share of a layer's forward that its backward runs again.

    Full recompute runs whole layers again: every layer with method `uniform`, the first `num_layers` of each chunk with
    method `block` (transformer_block.py). Selective recompute runs the named modules again. A module's share is its
    share of the layer's FLOPs, so norms and activation functions count as 0.
    """
    recompute = layout.recompute
    if recompute.granularity == "full":
        return 1.0 if recompute.method == "uniform" or index_in_chunk < recompute.num_layers else 0.0
    names = set(recompute_modules(layout))
    names -= {"shared_experts"} if "moe" in names else set()
    flops = _module_flops(model, kind)
    return sum(flops.get(name, 0.0) for name in names) / model.kind_flops_per_token(kind) if names else 0.0


def column_share(model: ModelSpec, kind: LayerKind) -> float:
    """Return a mean column-parallel matrix's share of a layer's FLOPs; 0 if the layer has no such matrix.

    While the input gradient of such a matrix is computed, its input is gathered again. While its weight gradient is
    computed, the input's gradients are reduced (layers.py, LinearWithGradAccumulationAndAsyncCommunication).
    """
    columns = [flops for block in KINDS[kind] if (flops := block.column_flops(model))]
    return sum(columns) / max(len(columns), 1) / model.kind_flops_per_token(kind)


def attention_core_share(model: ModelSpec, kind: LayerKind = "layer") -> float:
    """Return the share of a layer's FLOPs in attention scores and context."""
    return _module_flops(model, kind).get("core_attn", 0.0) / model.kind_flops_per_token(kind)


def _module_flops(model: ModelSpec, kind: LayerKind) -> dict[str, float]:
    return {name: flops for block in KINDS[kind] for name, flops in block.module_flops(model).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloaded:
    """Bytes of one layer that fine-grained activation offloading moves.

    Megatron copies the tensors that autograd saves within the modules of `--offload-modules`, and frees most of these
    tensors on the device (megatron-core v0.16.1, pipeline_parallel/ fine_grained_activation_offload.py). The tensors of
    a chunk's last layer stay on the device if the layer's backward is next. Each later backward of a module brings back
    the tensors of the same module in the layer below. So the tensors of one layer are on the device at any time.
    """

    attention: int = 0
    """Bytes of norm and attention that leave the device."""
    mlp: int = 0
    """Bytes of the MLP and its norm that leave the device."""
    moved: int = 0
    """Bytes that are copied to the host, and back for the backward."""
    in_forward: int = 0
    """Extra bytes of a forward that runs just before another micro-batch's backward. The tensors of the other
    micro-batch's last layer are back on the device, and the running layer's tensors have not left the device. The
    scores of an unfused core are included."""

    @property
    def left(self) -> int:
        """Bytes that leave the device."""
        return self.attention + self.mlp


class _Tensor(NamedTuple):
    """One tensor that autograd saves."""

    elements: int
    kept: int
    """Bytes that leave the device with the tensor; 0 if another reference keeps the tensor on the device."""
    moved: int


def offloaded(job: Job, layout: Layout, kind: LayerKind) -> Offloaded:
    """Count one layer's bytes that leave the device, without tensors that selective recompute does not keep."""
    options, model = performance_options(job), job.model
    if not options.fine_grained_activation_offloading or model.transformer_impl != "transformer_engine":
        return Offloaded()
    sides = (_offloaded_attention(job, layout), _offloaded_experts(job, layout) if EXPERTS in KINDS[kind] else ())
    of_attention, of_mlp = (
        [tensor for tensor in side if tensor.elements >= options.min_offloaded_tensor_size] for side in sides
    )
    away, moved = (sum(getattr(tensor, name) for tensor in (*of_attention, *of_mlp)) for name in ("kept", "moved"))
    scores = attention.core_bytes(job, layout) if model.attention_backend == "unfused" and moved else 0
    return Offloaded(
        attention=sum(tensor.kept for tensor in of_attention),
        mlp=sum(tensor.kept for tensor in of_mlp),
        moved=moved,
        in_forward=moved + away + scores,
    )


def _hidden(job: Job, layout: Layout, *, is_stream: bool) -> _Tensor:
    """Return a tensor of n * h elements: the tensor between layers if `is_stream`, else the output of a norm."""
    elements = local_tokens(job.model, layout) * job.model.hidden_size
    wide = is_stream and performance_options(job).fp32_residual_connection
    size = elements * (FP32_BYTES if wide else job.model.dtype_bytes)
    return _Tensor(elements, size, size)


def _offloaded_attention(job: Job, layout: Layout) -> Iterator[_Tensor]:
    """Yield the tensors saved up to the output projection (MC transformer/attention.py, multi_latent_attention.py)."""
    model, modules, recomputed = job.model, performance_options(job).offload_modules, recompute_modules(layout)
    is_latent = model.latent_attention is not None
    if is_latent and "attn_norm" in modules:
        yield _hidden(job, layout, is_stream=True)
    if "qkv_linear" in modules:
        yield from _offloaded_projection(job, layout)
    if "core_attn" in modules and not {"core_attn", "mla_up_proj"} & set(recomputed):
        yield from _offloaded_core(job, layout)
    if "attn_proj" in modules:
        elements = _output_elements(model, layout)
        in_fp8 = elements if matrix_input_bytes(job) == 1 and not is_latent else 0
        yield _Tensor(elements, elements * model.dtype_bytes + in_fp8, in_fp8 or elements * model.dtype_bytes)


def _offloaded_projection(job: Job, layout: Layout) -> Iterator[_Tensor]:
    """Yield the inputs of the query, key and value projections, and the norm's input if a projection includes it."""
    model, latent, shard = job.model, job.model.latent_attention, local_tokens(job.model, layout)
    if latent is None:
        yield _hidden(job, layout, is_stream=True)
        size = shard * model.hidden_size * matrix_input_bytes(job)
        yield _Tensor(shard * model.hidden_size, size, size)
        return
    if "layernorm" not in recompute_modules(layout):
        yield _hidden(job, layout, is_stream=False)
    query, key_value = latent.q_lora_rank or 0, latent.kv_lora_rank
    for width in (query, key_value + latent.qk_pos_emb_head_dim, *((query, key_value) if model.qk_layernorm else ())):
        yield _Tensor(shard * width, shard * width * model.dtype_bytes, shard * width * model.dtype_bytes)


def _offloaded_core(job: Job, layout: Layout) -> Iterator[_Tensor]:
    """Yield query, key, value, other tensors of the core, and its output, which the output projection also keeps."""
    model, latent = job.model, job.model.latent_attention
    vectors, heads = tokens(model, layout), model.num_attention_heads // layout.tp
    if latent is None:
        groups = max(1, model.num_query_groups // layout.tp)
        widths = [count * model.kv_channels for count in (heads, groups, groups)]
    else:
        widths = [heads * width for width in (latent.query_channels, latent.query_channels, latent.v_head_dim)]
    for width in widths:
        size = vectors * width * model.dtype_bytes
        yield _Tensor(vectors * width, size, size)
    if model.attention_backend == "unfused":
        # Without dropout, softmax and product save the same probabilities: two copies come back.
        size, copies = attention.core_bytes(job, layout), 1 if model.attention_dropout > 0 else 2
        yield _Tensor(vectors * heads * model.seq_length, size, copies * size)
        return
    # The core and the output projection both save this tensor. If the projection offloads it, it is counted with the
    # projection.
    elements = _output_elements(model, layout)
    yield _Tensor(elements, 0, elements * model.dtype_bytes)


def _output_elements(model: ModelSpec, layout: Layout) -> int:
    channels = model.latent_attention.v_head_dim if model.latent_attention else model.kv_channels
    return tokens(model, layout) * (model.num_attention_heads // layout.tp) * channels


def _offloaded_experts(job: Job, layout: Layout) -> Iterator[_Tensor]:
    """Yield the tensors that grouped experts and the norm before them save (MC transformer/moe/experts.py)."""
    model, options, recomputed = job.model, performance_options(job), recompute_modules(layout)
    if "mlp_norm" in options.offload_modules:
        yield _hidden(job, layout, is_stream=True)
    if "moe" in recomputed or not options.moe_grouped_gemm:
        return
    rows, routed = mlp.expert_rows(job, layout), mlp.expert_activations(job, layout)
    if "expert_fc1" in options.offload_modules:
        # If this module is offloaded, FP8 saves the input in 16 bits (`set_save_original_input`).
        yield _Tensor(rows * model.hidden_size, routed.inputs, rows * model.hidden_size * model.dtype_bytes)
    if "moe_act" in options.offload_modules:
        input_of_second = rows * model.moe_ffn_hidden_size // layout.etp * matrix_input_bytes(job)
        between = 0 if "moe_act" in recomputed else routed.activation - input_of_second
        yield _Tensor(routed.outputs // model.dtype_bytes, routed.outputs + between, routed.outputs + between)
