"""The attention block: multi-head or multi-latent attention, counted for the implementation that the job runs.

TE = TransformerEngine v2.8, pytorch/attention/dot_product_attention; MC = megatron/core of core_v0.16.1;
MLA = MC transformer/multi_latent_attention.py.
"""

# T = tokens of one micro-batch on a rank, s = sequence, a = heads of a rank, k = its query groups, d = channels of one
# head, t = tp, h = hidden size.

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipette_launch.cost.layers.block import (
    FP32_BYTES,
    MASK_BYTES,
    Activations,
    Block,
    Exchange,
    Load,
    Parameters,
    PassLoads,
    Product,
    computes_in_fp8,
    dropout_mask_bytes,
    local_tokens,
    matrix,
    residual_bytes,
    stream_bytes,
    tokens,
)
from pipette_launch.facts.job import RING, Job
from pipette_launch.facts.layout import Ints, Layout
from pipette_launch.facts.model import LatentAttention, ModelSpec
from pipette_launch.megatron.performance import performance_options

_STATISTICS_BYTES = {"LayerNorm": 8, "RMSNorm": 4}
"""Bytes of statistics for each normalised vector: mean and reciprocal deviation in fp32; RMSNorm has no mean."""
_ANGLES = 4
"""Number of tensors of sines and cosines, for queries and for keys (MC
models/common/embeddings/rope_utils.py:113-125)."""


class Attention(Block):
    """Attention block: projections, rotary embedding and attention core."""

    graph_module = "attn"

    def parameters(self, model: ModelSpec, layout: Layout) -> Parameters:
        """Count the parameters of projections, of their biases, and of the norms of query and key."""
        if model.latent_attention:
            return Parameters(dense=_latent_parameters(model, model.latent_attention, layout.tp))
        query, key_value = _heads(model, layout) * model.kv_channels, _pair_channels(model, layout)
        bias = query + key_value if model.add_bias_linear or model.add_qkv_bias else 0
        bias += model.hidden_size if model.add_bias_linear else 0
        # Norms of one head's query and key (MC transformer/attention.py, q_layernorm and k_layernorm).
        norms = 2 * model.kv_channels * (2 if model.normalization == "LayerNorm" else 1) if model.qk_layernorm else 0
        return Parameters(dense=model.hidden_size * (query + key_value + query) + bias + norms)

    def shapes(self, model: ModelSpec, layout: Layout) -> set[tuple[int, int]]:
        """Return the shapes of both projections; latent attention's projections are left out."""
        if model.latent_attention:
            return set()
        query = _heads(model, layout) * model.kv_channels
        return {(query + _pair_channels(model, layout), model.hidden_size), (model.hidden_size, query)}

    def activations(self, job: Job, layout: Layout) -> Activations:
        """Count the activations of norm, projections and attention core.

        A whole layer of Llama with fused attention keeps s*b*h*(12 + 4k/a + 6f/h)/t bytes with sequence parallelism.
        Without sequence parallelism the factor of s*b*h is 8 + (4 + 4k/a + 6f/h)/t. For a GPT with dropout the factors
        are 34/t and 10 + 24/t (Korthikanti et al. 2022, section 4). Executing megatron-core confirmed these factors.
        """
        model = job.model
        is_fp8, uses_te = computes_in_fp8(job), model.transformer_impl == "transformer_engine"
        # In FP8 the projection's input is a copy of the context in one byte an element (TE module/linear.py).
        kept, latents = projected_bytes(job, layout), 0
        kept += tokens(model, layout) * _heads(model, layout) * model.kv_channels if is_fp8 else 0
        if model.latent_attention:
            fused = uses_te and performance_options(job).apply_rope_fusion
            latent = latent_bytes(model, model.latent_attention, layout, fused_rope=fused)
            # Ring attention keeps the last keys and values in its own buffer, which recompute of projections does not
            # free.
            pair = pair_bytes(model, layout) if ring_steps(job, layout) else 0
            kept, latents = latent.compressed + latent.context + pair, latent.projected - pair
        return Activations(
            layer_input=stream_bytes(job, layout),
            attention_norm=norm_bytes(job, layout),
            attention=kept,
            latent_projections=latents,
            core_attention=core_bytes(job, layout),
            dropout_masks=dropout_mask_bytes(model, layout),
            fuses_attention_norm=uses_te and model.latent_attention is None,
        )

    def backward_bytes(self, job: Job, layout: Layout) -> int:
        """Return the larger need: the core's backward with two gradients of the residual, or the ring's exchange."""
        residual = residual_bytes(job.model, layout)
        return max(2 * residual + core_backward_bytes(job, layout), exchange_bytes(job, layout))

    def loads(self, job: Job, layout: Layout) -> PassLoads:
        """Return the work of projections, rotary embedding and core."""
        model = job.model
        count, latent = tokens(model, layout), model.latent_attention
        if latent:
            matrices = _latent_loads(model, latent, layout)
            groups, width = model.num_attention_heads, latent.qk_pos_emb_head_dim
        else:
            query = _heads(model, layout) * model.kv_channels
            matrices = matrix(count, query + _pair_channels(model, layout), model.hidden_size)
            matrices += matrix(count, model.hidden_size, query)
            groups, width = max(layout.tp, model.num_query_groups), model.kv_channels
        turned = (model.num_attention_heads + groups) // layout.tp * width
        rotary = 4.0 * count * turned * model.dtype_bytes if latent or model.position_embedding_type == "rope" else 0.0
        turn = Load(moved_bytes=rotary, kernels=4 if rotary else 0)
        return matrices + PassLoads(forward=turn, input_grad=turn) + core_loads(model, layout)

    def module_flops(self, model: ModelSpec) -> dict[str, float]:
        """Return the FLOPs per token of the core and, with multi-latent attention, of the up-projections."""
        found = {"core_attn": model.core_flops_per_token}
        if model.latent_attention:
            found["mla_up_proj"] = 2.0 * model.latent_attention.up_weights(model.num_attention_heads)
        return found

    def column_flops(self, model: ModelSpec) -> float:
        """Return the FLOPs per token of the query-key-value matrix, or the mean of latent up-projections."""
        if model.latent_attention:
            return 1.0 * model.latent_attention.up_weights(model.num_attention_heads)
        heads = model.num_attention_heads + 2 * model.num_query_groups
        return 2.0 * model.hidden_size * heads * model.kv_channels

    def exchanges(
        self,
        job: Job,
        layout: Layout,
        once_S: Ints,
        again_S: Ints,
        domain: int,  # noqa: ARG002
    ) -> Iterator[Exchange]:
        """Yield ring attention's exchange: keys and values in the forward, with their gradients in the backward.

        The attention of one of the cp pieces hides each of the ring's cp - 1 hops (Liu et al. 2023, section 3).
        """
        if layout.cp == 1:
            return
        model, latent = job.model, job.model.latent_attention
        channels = latent.query_channels + latent.v_head_dim if latent else 2 * model.kv_channels
        groups = max(1, (model.num_attention_heads if latent else model.num_query_groups) // layout.tp)
        size = model.dtype_bytes * groups * channels * tokens(model, layout) * layout.cp
        share = (layout.cp - 1) / layout.cp
        yield Exchange.of(
            "all_gather", "cp", size, once_S, 2 * once_S + again_S, behind="core_attention_s", share=share
        )


ATTENTION = Attention()


def norm_bytes(job: Job, layout: Layout) -> int:
    """Count the output of the norm before an attention or Mamba block, in FP8 if the norm is part of the matrix."""
    residual = residual_bytes(job.model, layout)
    is_narrow = computes_in_fp8(job) and job.model.latent_attention is None
    return residual // job.model.dtype_bytes if is_narrow else residual


def projected_bytes(job: Job, layout: Layout) -> int:
    """Count query, key, value and context, at least T*(2a + 2k)*d elements, and the tensors kept between them.

    The whole output of the query-key-value matrix is not kept, because TE makes query, key and value contiguous. With
    query groups a reshape copies the query (TE utils.py, get_qkv_layout; MC transformer/attention.py:1463).
    """
    model = job.model
    element = model.dtype_bytes * tokens(model, layout)
    heads, groups = _heads(model, layout), _groups(model, layout)
    kept = 2 * element * (heads + groups) * model.kv_channels
    if not is_local(model) and model.attention_backend == "flash" and layout.micro_batch_size > 1:
        # Flash attention needs the batch dimension first. With more than one sample, FlashAttention.forward transposes
        # its output back for the projection, which keeps a copy of its own. So the output is kept twice (TE
        # backends.py, v1.7 to v1.11 and from v2.3 on). NVIDIA's golden values on A100 show the copy: 32 MiB a layer for
        # 7B with tp 4 and micro-batch 2. With context parallelism they show 1 MiB a layer, at 6 and at 12 layers.
        kept += element * heads * model.kv_channels
    if model.qk_layernorm:
        # Inputs of the norms of query and key, and their statistics (MC transformer/attention.py:1477-1481).
        vectors = tokens(model, layout) * (heads + groups)
        kept += vectors * (model.dtype_bytes * model.kv_channels + _STATISTICS_BYTES[model.normalization])
    if model.position_embedding_type == "rope" and not performance_options(job).apply_rope_fusion:
        # The unfused embedding computes sines and cosines for query and for key (rope_utils.py:90-130).
        kept += 2 * 2 * model.dtype_bytes * model.seq_length // layout.cp * model.kv_channels
    return kept


def core_bytes(job: Job, layout: Layout) -> int:
    """Count the bytes that the attention core keeps, by backend.

    Flash and fused attention keep the log-sum-exp in fp32. Unfused attention, Megatron's own included, keeps
    probabilities. With dropout it also keeps a mask and the dropped probabilities: 5as/(h*t) in bf16. If Megatron's
    softmax is neither fused nor in the element type, probabilities are kept in fp32: 7as/(h*t) (MC
    fusions/fused_softmax.py:289-320).
    """
    model = job.model
    rows = _heads(model, layout) * tokens(model, layout)
    if not is_local(model) and model.attention_backend != "unfused":
        return FP32_BYTES * rows
    has_dropout = model.attention_dropout > 0
    wide = is_local(model) and _softmax_is_wide(job, layout)
    probabilities = FP32_BYTES if wide else model.dtype_bytes
    dropped = model.dtype_bytes + MASK_BYTES if has_dropout else 0
    cast = model.dtype_bytes if wide and not has_dropout else 0
    return rows * model.seq_length * (probabilities + dropped + cast)


def held_for_recompute_bytes(model: ModelSpec, layout: Layout) -> int:
    """Count the bytes of the query-key-value output that recompute of the core holds beyond query, key and value.

    Query, key and value are views of the output of one matrix. Recompute keeps the core's arguments, not contiguous
    copies. If a rotary embedding makes a new query and key, the value's view alone keeps the whole output alive.
    Otherwise the views need no more than the output, unless query groups make a copy of the query. Norms of query and
    key keep the output anyway, so the result is 0. By abstract execution: 8 MiB a layer for T = 2048, a * d = k * d =
    1024.
    """
    if model.latent_attention or model.qk_layernorm:
        return 0
    heads, groups = _heads(model, layout), _groups(model, layout)
    vector = model.dtype_bytes * tokens(model, layout) * model.kv_channels
    if model.position_embedding_type == "rope":
        return vector * (heads + groups)
    return vector * heads if heads > groups else 0


def scores_buffer_bytes(model: ModelSpec, layout: Layout) -> int:
    """Count the scores of local attention, 2as/(h*t), in one buffer for all layers (dot_product_attention.py).

    If every layer kept its scores, a layer would keep 7as/(h*t). NVIDIA's golden values of the local implementation fit
    5as/(h*t) a layer and one buffer. The predicted peak is 69, 70 and 74 MiB below the measured peak for 12, 6 and 3
    layers, and workspaces explain this difference.
    """
    if not is_local(model):
        return 0
    return model.dtype_bytes * _heads(model, layout) * tokens(model, layout) * model.seq_length


def core_backward_bytes(job: Job, layout: Layout) -> int:
    """Count the bytes that the core's backward needs beyond its kept activations.

    The backward needs the gradients of query, key, value and context. Unfused attention also needs a gradient as large
    as the probabilities, before the dropped ones are freed. Ring attention has two buffers, each for keys, values and
    their gradients. Ring attention also holds one step's gradients, with the gradients of keys and values twice (TE
    context_parallel.py, AttnFuncWithCPAndKVP2P.backward).
    """
    model, latent, heads = job.model, job.model.latent_attention, _heads(job.model, layout)
    query = latent.query_channels if latent else model.kv_channels
    channels = 2 * (heads + _groups(model, layout)) * model.kv_channels
    if latent:
        channels = 2 * heads * (query + latent.v_head_dim)
    unfused = is_local(model) or model.attention_backend == "unfused"
    scores = heads * tokens(model, layout) * model.seq_length if unfused else 0
    if ring_steps(job, layout):
        channels += heads * query + 5 * _pair_channels(model, layout)
    return model.dtype_bytes * (tokens(model, layout) * channels + scores)


def exchange_bytes(job: Job, layout: Layout) -> int:
    """Count the bytes that context parallelism holds in one layer beside the core's inputs and output.

    Ring attention keeps keys, values, output and statistics of every step until the last step corrects all outputs. On
    the rank with the last piece of the sequence every output has full size. `all_gather` holds the keys and values of
    the whole sequence. `a2a` holds no additional bytes (TE context_parallel.py, forward of AttnFuncWithCPAndKVP2P and
    AttnFuncWithCPAndKVAllGather, v1.7 to v2.18).
    """
    model, steps = job.model, ring_steps(job, layout)
    gathers = layout.cp > 1 and "all_gather" in performance_options(job).cp_comm_type
    pairs = max(steps, layout.cp if gathers else 0)
    channels = model.latent_attention.v_head_dim if model.latent_attention else model.kv_channels
    output = tokens(model, layout) * _heads(model, layout) * (model.dtype_bytes * channels + FP32_BYTES)
    return steps * output + pairs * pair_bytes(model, layout)


def ring_steps(job: Job, layout: Layout) -> int:
    """Return the number of ranks in a layer's longest ring of context parallelism; 0 without a ring."""
    options = performance_options(job)
    steps = {RING: layout.cp, f"a2a+{RING}": (options.hierarchical_context_parallel_sizes or (layout.cp,))[-1]}
    longest = max((steps.get(kind, 1) for kind in options.cp_comm_type), default=1)
    return longest if longest > 1 else 0


def pair_bytes(model: ModelSpec, layout: Layout) -> int:
    """Count the keys and values of one layer on one rank."""
    return model.dtype_bytes * tokens(model, layout) * _pair_channels(model, layout)


def is_local(model: ModelSpec) -> bool:
    """Return True if Megatron's own attention runs, which is never fused."""
    return model.transformer_impl == "local" or model.attention_backend == "local"


def is_flash(model: ModelSpec) -> bool:
    """Return True if attention keeps its scores on chip, as flash and fused attention do."""
    return not is_local(model) and model.attention_backend != "unfused"


def core_loads(model: ModelSpec, layout: Layout) -> PassLoads:
    """Return the work of scores, softmax and context, for flash attention or with all scores written to memory.

    Flash attention skips the scores behind the causal mask, half of 2 * T * s * a * (d of query + d of value), and the
    scores outside a window (in the mean of all layers). Flash attention has 2 products in the forward and 5 in the
    backward (Dao 2023). Other backends compute all scores, and they write, mask, normalise, drop and read T * s * a
    scores.
    """
    count, one, latent = tokens(model, layout), model.seq_length, model.latent_attention
    heads = _heads(model, layout)
    query, value = (latent.query_channels, latent.v_head_dim) if latent else (model.kv_channels, model.kv_channels)
    if is_flash(model):
        scores_seen = 0.5 * count * one * heads * model.window_share
        flops = 2.0 * scores_seen * (query + value)
        return PassLoads(
            forward=Load(attention_flops=flops, exponentials=scores_seen, kernels=2),
            input_grad=Load(attention_flops=2.5 * flops, exponentials=scores_seen, kernels=4),
        )
    batch = heads * count / one
    scores = Product(m=one, n=one, k=query, count=batch)
    context = Product(m=one, n=value, k=one, count=batch)
    probabilities = batch * one * one * model.dtype_bytes
    dropout = 2.5 * probabilities if model.attention_dropout > 0 else 0.0
    backward = (scores, scores, context, context)
    return PassLoads(
        forward=Load(products=(scores, context), moved_bytes=2 * probabilities + dropout, kernels=8),
        input_grad=Load(products=backward, moved_bytes=3 * probabilities + dropout, kernels=10),
    )


class LatentBytes(NamedTuple):
    """Bytes that multi-latent attention keeps in one layer, without the attention core."""

    compressed: int
    """Bytes of compressed queries, keys and values, and of the inputs of their norms."""
    projected: int
    """Bytes of query, key and value of all heads, which recompute of `mla_up_proj` does not keep."""
    context: int
    """Bytes of the attention core's output."""


def latent_bytes(model: ModelSpec, latent: LatentAttention, layout: Layout, *, fused_rope: bool) -> LatentBytes:
    """Count the bytes that a layer's latent attention keeps (MLA:580-850).

    Query, key and value are assembled from the outputs of the up-projections; these outputs are not kept. An unfused
    rotary embedding keeps the sines and cosines of queries and keys. Latents are split over the sequence, like the
    norm's output.
    """
    shard, heads = local_tokens(model, layout), _heads(model, layout)
    ranks = latent.kv_lora_rank + (latent.q_lora_rank or 0)
    angles = 0 if fused_rope else _ANGLES * model.seq_length // layout.cp * latent.qk_pos_emb_head_dim
    widths = ranks + latent.qk_pos_emb_head_dim + (ranks if model.qk_layernorm else 0)
    vectors = model.dtype_bytes * tokens(model, layout) * heads
    return LatentBytes(
        compressed=model.dtype_bytes * (shard * widths + angles),
        projected=vectors * (2 * latent.query_channels + latent.v_head_dim),
        context=vectors * latent.v_head_dim,
    )


def _latent_parameters(model: ModelSpec, latent: LatentAttention, tp: int) -> int:
    """Count one layer's latent attention on one rank (MLA:441-553).

    Up-projections and the output projection are split over tp. Transformer Engine's layers have the whole
    down-projections on every rank (models/gpt/gpt_layer_specs.py:245-262, from core_v0.14 on), but Megatron's own
    layers split the down-projections. The latents have norms only with `--qk-layernorm`.
    """
    down_shards = 1 if model.transformer_impl == "transformer_engine" else tp
    heads = model.num_attention_heads
    count = model.hidden_size * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim) // down_shards
    count += latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim) // tp
    count += heads * latent.v_head_dim * model.hidden_size // tp
    if latent.q_lora_rank is None:
        count += model.hidden_size * heads * latent.query_channels // tp
    else:
        count += model.hidden_size * latent.q_lora_rank // down_shards
        count += latent.q_lora_rank * heads * latent.query_channels // tp
    normed = (latent.kv_lora_rank + (latent.q_lora_rank or 0)) if model.qk_layernorm else 0
    bias = model.hidden_size if model.add_bias_linear else 0
    return count + normed * (2 if model.normalization == "LayerNorm" else 1) + bias


def _latent_loads(model: ModelSpec, latent: LatentAttention, layout: Layout) -> PassLoads:
    """Return the work of the whole down-projections and of the up-projections to a rank's heads (MLA:441-553)."""
    count, hidden, heads = tokens(model, layout), model.hidden_size, _heads(model, layout)
    query = heads * latent.query_channels
    loads = matrix(count, latent.kv_lora_rank + latent.qk_pos_emb_head_dim, hidden)
    loads += matrix(count, heads * (latent.qk_head_dim + latent.v_head_dim), latent.kv_lora_rank)
    loads += matrix(count, hidden, heads * latent.v_head_dim)
    if latent.q_lora_rank is None:
        return loads + matrix(count, query, hidden)
    return loads + matrix(count, latent.q_lora_rank, hidden) + matrix(count, query, latent.q_lora_rank)


def _softmax_is_wide(job: Job, layout: Layout) -> bool:
    """Return True if Megatron's softmax runs unfused, in fp32, on narrower scores (MC fusions/fused_softmax.py:239)."""
    model, options = job.model, performance_options(job)
    matrices = layout.micro_batch_size * _heads(model, layout)
    fits_kernel = 16 < model.seq_length <= 4096 and model.seq_length % 4 == 0 and matrices % 4 == 0
    in_fp32 = options.attention_softmax_in_fp32 or options.apply_query_key_layer_scaling
    return in_fp32 and not (fits_kernel and options.masked_softmax_fusion) and model.params_dtype != "fp32"


def _heads(model: ModelSpec, layout: Layout) -> int:
    return model.num_attention_heads // layout.tp


def _groups(model: ModelSpec, layout: Layout) -> int:
    """Return a rank's query groups; with fewer groups than ranks each rank has 1 (MC transformer/attention.py)."""
    return max(1, model.num_query_groups // layout.tp)


def _pair_channels(model: ModelSpec, layout: Layout) -> int:
    """Return the channels of the keys and values of one token on one rank."""
    latent = model.latent_attention
    if latent:
        return _heads(model, layout) * (latent.query_channels + latent.v_head_dim)
    return 2 * _groups(model, layout) * model.kv_channels
