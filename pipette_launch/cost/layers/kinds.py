"""Blocks of each kind of layer, and costs of a whole layer as sums over its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipette_launch.cost.layers.attention import Attention
from pipette_launch.cost.layers.block import (
    Activations,
    Block,
    Parameters,
    as_matrix_input,
    has_narrow_copies,
    recompute_modules,
)
from pipette_launch.cost.layers.ends import depth_bytes
from pipette_launch.cost.layers.loads import Load, PassLoads
from pipette_launch.cost.layers.mlp import Experts, Mlp
from pipette_launch.cost.layers.sparse import SharedSparse, Sparse
from pipette_launch.cost.layers.ssm import Delta, Mamba
from pipette_launch.facts.job import ITERATION, Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import BLOCKS, BlockKind, LayerKind

CLASSES: dict[BlockKind, type[Block]] = {
    "mamba": Mamba,
    "delta": Delta,
    "attention": Attention,
    "sparse": Sparse,
    "shared_sparse": SharedSparse,
    "mlp": Mlp,
    "experts": Experts,
}
"""Class of each block in `BLOCKS`, the table of the blocks of each kind of layer."""
_KERNELS_PER_COLLECTIVE = 3.0
"""Host time for one collective of torch's process group, divided by the host time for launching a kernel."""


GRAPH_KERNELS = 2.0
"""Number of launches that replace the kernels of a graph in one pass: a copy of the input into the graph's buffer, and
the launch of the graph (Transformer Engine, graph.py, `Graphed`; Megatron core_v0.20, cuda_graphs.py)."""
_ALONE = Layout()


def blocks_of(job: Job, layout: Layout, kind: LayerKind, domain: int = 1) -> list[Block]:
    """Return the blocks of a layer, on NVLink domains of `domain` slots."""
    return [CLASSES[block](job, layout, domain) for block in BLOCKS[kind]]


def kind_parameters(job: Job, layout: Layout, kind: LayerKind) -> Parameters:
    """Count one layer's parameters on one rank, norms included; 0 for experts if the model has no experts."""
    if "experts" in BLOCKS[kind] and not job.model.num_experts:
        return Parameters()
    norms = Parameters(dense=len(BLOCKS[kind]) * job.model.norm_parameters())
    return sum((block.parameters() for block in blocks_of(job, layout, kind)), norms)


def kind_activations(job: Job, layout: Layout, kind: LayerKind) -> Activations:
    """Count the bytes that a layer keeps without recompute and offloading."""
    return sum((block.activations() for block in blocks_of(job, layout, kind)), Activations())


def kept_bytes(job: Job, layout: Layout, kind: LayerKind) -> int:
    """Count the bytes that a layer keeps if it is not fully recomputed."""
    modules, found = recompute_modules(layout), kind_activations(job, layout, kind)
    kept = found.total - found.recomputed(modules)
    if "core_attn" in modules and isinstance(first := blocks_of(job, layout, kind)[0], Attention):
        kept += first.held_for_recompute_bytes()
    return kept - offloaded(job, layout, kind).mean_left


def backward_bytes(job: Job, layout: Layout, kind: LayerKind) -> int:
    """Count the most bytes that the backward of one layer needs for a while, beyond the layer's kept activations.

    Autograd frees an operation's saved tensors when the operation's backward is done. The most bytes are needed in the
    MLP or experts, or in the attention core after the MLP's tensors are freed. With context parallelism, the forward of
    the attention core may need the most bytes, before the MLP's tensors exist. A layer with a single block counts like
    a whole transformer layer, which is an upper bound.
    """
    model, blocks = job.model, BLOCKS[kind]
    if "mamba" in blocks:
        # The offloaded tensors of a layer below may be back on the device already.
        returned = max(offloaded(job, layout, other).moved for other in {*model.layer_kinds})
        return Mamba(job, layout).backward_bytes() + returned
    has_experts = "experts" in blocks
    mixers = (block for block in blocks_of(job, layout, kind) if isinstance(block, (Attention, Delta)))
    mixer = next(mixers, Attention(job, layout))
    behind = (Experts if has_experts or (model.num_experts and not model.has_dense_mlps) else Mlp)(job, layout)
    kept, away = behind.activations(), offloaded(job, layout, kind)
    freed = kept.total - kept.dropout_masks - away.mlp
    peak = max(behind.backward_bytes(), mixer.backward_bytes() - freed)
    if has_experts and job.options.overlap_moe_expert_parallel_comm:
        # The forward of the next micro-batch runs beside the backward, layer by layer, so one more layer keeps its
        # activations (megatron-core, pipeline_parallel/combined_1f1b.py).
        peak += kept_bytes(job, layout, kind)
    return peak + away.moved


def prediction_bytes(job: Job, layout: Layout) -> int:
    """Count the bytes that multi-token prediction depths keep, under the recompute of the depths' layers."""
    model = job.model
    if not model.mtp_num_layers:
        return 0
    if layout.recompute.granularity == "full":
        layers = Mlp(job, layout).stream_bytes() * len(model.prediction_kinds)
    else:
        layers = sum(kept_bytes(job, layout, kind) for kind in model.prediction_kinds)
    return model.mtp_num_layers * (layers + depth_bytes(job, layout))


def kind_loads(job: Job, layout: Layout, kind: LayerKind) -> PassLoads:
    """Return the device's work for one layer.

    For communication, only the host's launches of communication kernels count. One graph holds all captured parts of a
    layer. The host launches a graph of a whole iteration once, which counts as 0 launches of a layer.
    """
    graphs = job.options.graphs
    parts: dict[str, PassLoads] = {}
    for block in blocks_of(job, layout, kind):
        parts |= _parts_with_norm(block)
    captured = graphs.captured(parts)
    launches = GRAPH_KERNELS if captured and graphs.impl != ITERATION else 0.0
    launched = (loads.launched(0.0 if name in captured else 1.0) for name, loads in parts.items())
    return sum(launched, PassLoads(forward=Load(kernels=launches), input_grad=Load(kernels=launches)))


def _parts_with_norm(block: Block) -> dict[str, PassLoads]:
    """Return the work of a block's parts. The first part has the norm, and the last has the residual connection."""
    norm, residual = _around_block(block)
    parts = block.loads_of_parts()
    parts[block.graph_parts[0]] += norm
    parts[block.graph_parts[-1]] += residual
    return parts


def _around_block(block: Block) -> tuple[PassLoads, PassLoads]:
    """Return the work of a block's norm, and of its residual connection and tensor-parallel collectives.

    Norm and bias-dropout-add run over T * h elements, split over tp by sequence parallelism. The backward adds up the
    gradients of block and residual connection, and sums gradients of biases over tokens. For collectives, only their
    launches count.
    """
    one, model, layout = block.residual_bytes, block.model, block.layout
    mask = 0.5 * one if model.hidden_dropout > 0 else 0.0
    biases = one if model.add_bias_linear else 0
    collectives = ((2, 3) if layout.sequence_parallel else (1, 1)) if layout.tp > 1 else (0, 0)
    forward, backward = (_KERNELS_PER_COLLECTIVE * count for count in collectives)
    norm = PassLoads(
        forward=Load(moved_bytes=2 * one, kernels=1),
        input_grad=Load(moved_bytes=3 * one, kernels=2),
    )
    residual = PassLoads(
        forward=Load(moved_bytes=3 * one + mask, kernels=2 + forward),
        input_grad=Load(moved_bytes=5 * one + mask + biases, kernels=3 + backward),
    )
    return norm, residual


def recompute_share(job: Job, layout: Layout, index_in_chunk: int, kind: LayerKind) -> float:
    """Return the share of a layer's forward that its backward runs again.

    Full recompute runs whole layers again: every layer with method `uniform`, the first `num_layers` of each chunk with
    method `block` (transformer_block.py). Selective recompute runs the modules of `--recompute-modules` again. A module
    counts by its share of the layer's FLOPs, so norms and activation functions count as 0.
    """
    recompute = layout.recompute
    if recompute.granularity == "full":
        return 1.0 if recompute.method == "uniform" or index_in_chunk < recompute.num_layers else 0.0
    names = set(recompute_modules(layout))
    names -= {"shared_experts"} if "moe" in names else set()
    if not names:
        return 0.0
    flops = _module_flops(job, kind)
    return sum(flops.get(name, 0.0) for name in names) / job.model.kind_flops_per_token(kind)


def column_share(job: Job, kind: LayerKind) -> float:
    """Return a mean column-parallel matrix's share of a layer's FLOPs; 0 if the layer has no such matrix.

    While the input gradient of a column-parallel matrix is computed, its input is gathered again. While the weight
    gradient of a column-parallel matrix is computed, the gradients of the matrix's input are reduced (layers.py,
    LinearWithGradAccumulationAndAsyncCommunication).
    """
    columns = [flops for block in blocks_of(job, _ALONE, kind) if (flops := block.column_flops())]
    return sum(columns) / max(len(columns), 1) / job.model.kind_flops_per_token(kind)


def attention_core_share(job: Job, kind: LayerKind = "layer") -> float:
    """Return the share of a layer's FLOPs in attention scores and context."""
    return _module_flops(job, kind).get("core_attn", 0.0) / job.model.kind_flops_per_token(kind)


def _module_flops(job: Job, kind: LayerKind) -> dict[str, float]:
    return {name: flops for block in blocks_of(job, _ALONE, kind) for name, flops in block.module_flops().items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloaded:
    """Bytes of one layer that fine-grained activation offloading moves.

    Megatron copies the tensors that autograd saves within the modules of `--offload-modules`, and frees most of these
    tensors on the device (megatron-core v0.16.1, pipeline_parallel/fine_grained_activation_offload.py). The tensors of
    a chunk's last layer stay on the device if the backward of this layer runs next. Each later backward of a module
    brings back the tensors of the same module in the layer below. So the device holds the offloaded tensors of one
    layer at any time of the backwards.
    """

    attention: int = 0
    """Bytes of norm and attention that leave the device."""
    mlp: int = 0
    """Bytes of the MLP and its norm that leave the device."""
    moved: int = 0
    """Bytes that are copied to the host, and later copied back for the backward."""
    share: float = 1.0
    """Share of the chunk's modules whose bytes leave the device (`--activation-offload-fraction`)."""
    in_forward: int = 0
    """Extra bytes of a forward that runs just before another micro-batch's backward. During this forward, the other
    micro-batch's last layer has its tensors back on the device, and the running layer's tensors are still there. The
    extra bytes of this forward include the scores of an unfused attention core."""

    @property
    def left(self) -> int:
        """Bytes that are freed on the device if the layer's modules are offloaded."""
        return self.attention + self.mlp

    @property
    def mean_left(self) -> int:
        """Bytes of one layer that are freed on the device, in the mean of a chunk's layers."""
        return int(self.share * self.left)


class _Tensor(NamedTuple):
    """Size and offloaded bytes of one tensor that autograd saves."""

    elements: int
    kept: int
    """Bytes that offloading this tensor frees on the device; 0 if another reference keeps the tensor on the device."""
    moved: int

    @classmethod
    def of(cls, elements: int, element_bytes: int) -> _Tensor:
        """Return a tensor that leaves the device."""
        return cls(elements, elements * element_bytes, elements * element_bytes)


def offloaded(job: Job, layout: Layout, kind: LayerKind) -> Offloaded:
    """Count the bytes of one layer that are offloaded, without tensors that selective recompute does not keep."""
    options, model = job.options, job.model
    modules, share = _offloading(job, layout)
    if not modules or model.transformer_impl != "transformer_engine":
        return Offloaded()
    block, blocks = Attention(job, layout), BLOCKS[kind]
    sides = (
        _attention_tensors(block) if "attention" in blocks else (),
        _expert_tensors(job, layout) if "experts" in blocks else (),
    )
    of_attention, of_mlp = (
        [tensor for tensor in side if tensor.elements >= options.min_offloaded_tensor_size] for side in sides
    )
    away, moved = (sum(getattr(tensor, name) for tensor in (*of_attention, *of_mlp)) for name in ("kept", "moved"))
    scores = block.core_bytes() if model.attention_backend == "unfused" and moved else 0
    return Offloaded(
        attention=sum(tensor.kept for tensor in of_attention),
        mlp=sum(tensor.kept for tensor in of_mlp),
        moved=moved,
        share=share,
        in_forward=moved + away + scores,
    )


def _offloading(job: Job, layout: Layout) -> tuple[tuple[str, ...], float]:
    """Return the offloaded modules and their share, from the layout if it offloads, else from the job's flags."""
    options, chosen = job.options, layout.recompute
    if chosen.offload_modules or not options.fine_grained_activation_offloading:
        return chosen.offload_modules, chosen.offload_share
    return options.offload_modules, options.activation_offload_fraction


def _stream(block: Block) -> _Tensor:
    return _Tensor(block.local_tokens * block.model.hidden_size, block.stream_bytes(), block.stream_bytes())


def _attention_tensors(block: Attention) -> Iterator[_Tensor]:
    """Yield saved tensors up to the output projection (MC transformer/attention.py, multi_latent_attention.py)."""
    job, model, recomputed = block.job, block.model, recompute_modules(block.layout)
    modules, _ = _offloading(job, block.layout)
    is_latent, output = model.latent_attention is not None, block.tokens * block.heads * block.value
    if is_latent and "attn_norm" in modules:
        yield _stream(block)
    if "qkv_linear" in modules:
        yield from _projection_tensors(block)
    if "core_attn" in modules and not {"core_attn", "mla_up_proj"} & set(recomputed):
        for channels in (block.heads * block.query, block.groups * block.query, block.groups * block.value):
            yield _Tensor.of(block.tokens * channels, model.dtype_bytes)
        if model.attention_backend == "unfused":
            # Without dropout, softmax and matrix product both save the probabilities, so two copies return to the
            # device.
            size, copies = block.core_bytes(), 1 if model.attention_dropout > 0 else 2
            yield _Tensor(block.tokens * block.heads * model.seq_length, size, copies * size)
        else:
            # The attention core and the output projection both save the core's output. If the projection offloads the
            # output, its bytes are counted with the projection.
            yield _Tensor(output, 0, output * model.dtype_bytes)
    if "attn_proj" in modules:
        narrow = has_narrow_copies(job) * (not is_latent) * as_matrix_input(job, output * model.dtype_bytes)
        yield _Tensor(output, output * model.dtype_bytes + narrow, narrow or output * model.dtype_bytes)


def _projection_tensors(block: Block) -> Iterator[_Tensor]:
    """Yield the inputs of the query, key and value projections, and the norm's input if a projection includes it."""
    model, latent, local = block.model, block.model.latent_attention, block.local_tokens
    if latent is None:
        yield _stream(block)
        size = as_matrix_input(block.job, local * model.hidden_size * model.dtype_bytes)
        yield _Tensor(local * model.hidden_size, size, size)
        return
    if "layernorm" not in recompute_modules(block.layout):
        yield _Tensor.of(local * model.hidden_size, model.dtype_bytes)
    query, key_value = latent.q_lora_rank or 0, latent.kv_lora_rank
    for width in (query, key_value + latent.qk_pos_emb_head_dim, *((query, key_value) if model.qk_layernorm else ())):
        yield _Tensor.of(local * width, model.dtype_bytes)


def _expert_tensors(job: Job, layout: Layout) -> Iterator[_Tensor]:
    """Yield the tensors that grouped experts and the norm before them save (MC transformer/moe/experts.py)."""
    model, options, recomputed = job.model, job.options, recompute_modules(layout)
    block, (modules, _) = Experts(job, layout), _offloading(job, layout)
    if "mlp_norm" in modules:
        yield _stream(block)
    if "moe" in recomputed or not options.moe_grouped_gemm:
        return
    rows, kept = block.rows(), block.kept()
    if "fused_group_mlp" in modules:
        # The manager is around the whole fused MLP, so all tensors that the MLP saves leave the device.
        for size in (kept.inputs, kept.outputs, kept.activation):
            yield _Tensor(size // model.dtype_bytes, size, size)
    if "expert_fc1" in modules:
        # If `expert_fc1` is offloaded, FP8 saves the input of the first matrix in 16 bits (`set_save_original_input`).
        yield _Tensor(rows * block.row_width, kept.inputs, rows * block.row_bytes)
    if "moe_act" in modules:
        width_bytes = rows * model.moe_ffn_hidden_size // layout.etp * model.dtype_bytes
        input_of_second = as_matrix_input(job, width_bytes)
        size = kept.outputs + (0 if "moe_act" in recomputed else kept.activation - input_of_second)
        yield _Tensor(kept.outputs // model.dtype_bytes, size, size)
