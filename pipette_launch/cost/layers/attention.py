"""What the attention of one layer keeps for one micro-batch, by the implementation that runs.

TE = TransformerEngine v2.8, pytorch/attention/dot_product_attention; MC = megatron/core of core_v0.16.1.
"""

# T = tokens of one micro-batch on a rank, s = sequence, a = heads of a rank, k = its query groups, d = channels of one.
# T = tokens of one micro-batch on a rank, n = its sequence-parallel share.

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.facts.job import RING, Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import LatentAttention, ModelSpec
from pipette_launch.megatron.performance import performance_options

_FP32_BYTES = 4
_LOG_SUM_EXP_BYTES = 4
_MASK_BYTES = 1
_STATISTICS_BYTES = {"LayerNorm": 8, "RMSNorm": 4}
"""Mean and reciprocal deviation of each normalised vector, or the latter alone, in fp32."""


def projected_bytes(job: Job, layout: Layout) -> int:
    """Query, key, value and context, and what the way between them keeps besides: T*(2a + 2k)*d elements at least.

    The query-key-value matrix's whole output is not kept: TE makes query, key and value contiguous, and the query is
    copied by its reshape with query groups (TE utils.py get_qkv_layout; MC transformer/attention.py:1463).
    """
    model = job.model
    element = model.dtype_bytes * tokens(model, layout)
    heads, groups = _heads(model, layout), _groups(model, layout)
    kept = 2 * element * (heads + groups) * model.kv_channels
    if not is_local(model) and model.attention_backend == "flash" and layout.micro_batch_size > 1:
        # Flash attention wants the batch in front: with more than one sample its output is kept in both orders. TE
        # backends.py, FlashAttention.forward: inputs are transposed and made contiguous, the output is transposed back
        # for the projection, which keeps its own copy (v1.7 to v1.11, and from v2.3 on). On the golden A100 rows: 7B,
        # tp 4, micro-batch 2: 32 MiB a layer; with context parallelism 1 MiB a layer, at 6 and at 12 layers.
        kept += element * heads * model.kv_channels
    if model.qk_layernorm:
        # Inputs of the norms of query and key, and their statistics (MC transformer/attention.py:1477-1481).
        vectors = tokens(model, layout) * (heads + groups)
        kept += vectors * (model.dtype_bytes * model.kv_channels + _STATISTICS_BYTES[model.normalization])
    if model.position_embedding_type == "rope" and not performance_options(job).apply_rope_fusion:
        # Sines and cosines that the unfused embedding computes for query and for key (rope_utils.py:90-130).
        kept += 2 * 2 * model.dtype_bytes * model.seq_length // layout.cp * model.kv_channels
    return kept


def core_bytes(job: Job, layout: Layout) -> int:
    """Count what the attention core keeps, by backend.

    Flash and fused: the log-sum-exp in fp32. Unfused, Megatron's local implementation too: probabilities, and with
    dropout a mask and the dropped probabilities: 5as/(h*t) in bf16. Where Megatron's softmax is neither fused nor in
    the element type, the probabilities are kept in fp32: 7as/(h*t) (MC fusions/fused_softmax.py:289-320).
    """
    model = job.model
    rows = _heads(model, layout) * tokens(model, layout)
    if not is_local(model) and model.attention_backend != "unfused":
        return _LOG_SUM_EXP_BYTES * rows
    has_dropout = model.attention_dropout > 0
    wide = is_local(model) and _softmax_is_wide(job, layout)
    probabilities = _FP32_BYTES if wide else model.dtype_bytes
    dropped = model.dtype_bytes + _MASK_BYTES if has_dropout else 0
    cast = model.dtype_bytes if wide and not has_dropout else 0
    return rows * model.seq_length * (probabilities + dropped + cast)


def held_for_recompute_bytes(model: ModelSpec, layout: Layout) -> int:
    """Count what recompute of the core holds beyond query, key and value: the rest of the tensor that they lie in.

    Query, key and value are views of one output, and recompute keeps what the core was called with, not contiguous
    copies. Where a rotary embedding has made a new query and key, the value alone holds the whole; otherwise that is no
    more than the three, but for the query that query groups copy. Norms of query and key hold that part anyway. By
    abstract execution: 8 MiB a layer for T = 2048, a * d = k * d = 1024.
    """
    if model.latent_attention or model.qk_layernorm:
        return 0
    vector = model.dtype_bytes * tokens(model, layout) * model.kv_channels
    if model.position_embedding_type == "rope":
        return vector * (_heads(model, layout) + _groups(model, layout))
    return vector * _heads(model, layout) if _heads(model, layout) > _groups(model, layout) else 0


def scores_buffer_bytes(model: ModelSpec, layout: Layout) -> int:
    """Local attention's scores 2as/(h*t): written to one buffer for all layers (dot_product_attention.py).

    Were they kept by every layer, a layer would keep 7as/(h*t); NVIDIA's golden values of the local implementation fit
    5as and one buffer, to the workspaces (12, 6 and 3 layers: 69, 70 and 74 MiB below the measured peak).
    """
    if not is_local(model):
        return 0
    return model.dtype_bytes * _heads(model, layout) * tokens(model, layout) * model.seq_length


def backward_bytes(job: Job, layout: Layout) -> int:
    """Count what the core's backward needs beyond what it kept, while it runs.

    Gradients of query, key and value beside that of the context; unfused also a gradient as large as the probabilities,
    before the dropped ones are freed. A ring has two buffers, each for keys, values and their gradients. It also has
    one step's gradients, for keys and values twice (TE context_parallel.py, AttnFuncWithCPAndKVP2P.backward).
    """
    model = job.model
    rows = _heads(model, layout) * tokens(model, layout)
    channels = 2 * (_heads(model, layout) + _groups(model, layout)) * model.kv_channels
    if model.latent_attention:
        latent = model.latent_attention
        channels = 2 * _heads(model, layout) * (latent.query_channels + latent.v_head_dim)
    unfused = is_local(model) or model.attention_backend == "unfused"
    scores = rows * model.seq_length if unfused else 0
    if ring_steps(job, layout):
        query = model.latent_attention.query_channels if model.latent_attention else model.kv_channels
        channels += _heads(model, layout) * query + 5 * _pair_channels(model, layout)
    return model.dtype_bytes * (tokens(model, layout) * channels + scores)


def exchange_bytes(job: Job, layout: Layout) -> int:
    """Count bytes of one layer's attention beside its inputs and its output, while keys and values go round.

    A ring keeps the keys and values of every step, its output and its statistics until the last step corrects them all.
    On the rank of the last piece every output is whole. `all_gather` holds the keys and values of the whole sequence.
    Exchanges by `a2a` keep the sizes (TE context_parallel.py, forward of AttnFuncWithCPAndKVP2P and of
    AttnFuncWithCPAndKVAllGather, v1.7 to v2.18).
    """
    model, heads, steps = job.model, _heads(job.model, layout), ring_steps(job, layout)
    gathers = layout.cp > 1 and "all_gather" in performance_options(job).cp_comm_type
    pairs = max(steps, layout.cp if gathers else 0)
    channels = model.latent_attention.v_head_dim if model.latent_attention else model.kv_channels
    output = tokens(model, layout) * heads * (model.dtype_bytes * channels + _LOG_SUM_EXP_BYTES)
    return steps * output + pairs * pair_bytes(model, layout)


def ring_steps(job: Job, layout: Layout) -> int:
    """Number of ranks in a layer's longest ring of context parallelism; 0 without one."""
    options = performance_options(job)
    steps = {RING: layout.cp, f"a2a+{RING}": (options.hierarchical_context_parallel_sizes or (layout.cp,))[-1]}
    longest = max((steps.get(kind, 1) for kind in options.cp_comm_type), default=1)
    return longest if longest > 1 else 0


def pair_bytes(model: ModelSpec, layout: Layout) -> int:
    """Count the keys and values of one layer's attention on one rank."""
    return model.dtype_bytes * tokens(model, layout) * _pair_channels(model, layout)


def is_local(model: ModelSpec) -> bool:
    """Whether Megatron's own attention runs, which is never fused."""
    return model.transformer_impl == "local" or model.attention_backend == "local"


def tokens(model: ModelSpec, layout: Layout) -> int:
    """T = s * b / cp: tokens of one micro-batch on one rank, before sequence parallelism."""
    return model.seq_length * layout.micro_batch_size // layout.cp


def local_tokens(model: ModelSpec, layout: Layout) -> int:
    """Tokens of one micro-batch on one rank where sequence parallelism splits them: norms, router and dispatcher."""
    return tokens(model, layout) // (layout.tp if layout.sequence_parallel else 1)


def _softmax_is_wide(job: Job, layout: Layout) -> bool:
    """Whether Megatron's softmax runs unfused and in fp32 on narrower scores (MC fusions/fused_softmax.py:239-275)."""
    model = job.model
    options = performance_options(job)
    matrices = layout.micro_batch_size * _heads(model, layout)
    fits_kernel = 16 < model.seq_length <= 4096 and model.seq_length % 4 == 0 and matrices % 4 == 0
    fused = fits_kernel and options.masked_softmax_fusion
    in_fp32 = options.attention_softmax_in_fp32 or options.apply_query_key_layer_scaling
    return in_fp32 and not fused and model.params_dtype != "fp32"


def _heads(model: ModelSpec, layout: Layout) -> int:
    return model.num_attention_heads // layout.tp


def _groups(model: ModelSpec, layout: Layout) -> int:
    """With fewer groups than ranks, each rank holds a whole group (MC transformer/attention.py)."""
    return max(1, model.num_query_groups // layout.tp)


def _pair_channels(model: ModelSpec, layout: Layout) -> int:
    """Channels of the keys and values of one token on one rank."""
    latent = model.latent_attention
    if latent:
        return _heads(model, layout) * (latent.query_channels + latent.v_head_dim)
    return 2 * _groups(model, layout) * model.kv_channels


_ANGLES = 4
"""Sine and cosine, for queries and for keys (common/embeddings/rope_utils.py:113-125)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentActivations:
    """Bytes that latent attention keeps for one micro-batch in one layer, without the attention core's own."""

    latents: int
    """Compressed queries, keys and values, and their norms."""
    projected: int
    """Query, key and value of all heads: what recomputing `mla_up_proj` brings back."""
    context: int
    """Output of the attention core."""


def attention_parameters(model: ModelSpec, latent: LatentAttention, tp: int) -> int:
    """Count one layer's latent attention on one rank (MLA:441-553).

    Up-projections and the output projection are split over tp. Transformer Engine's layers have the down-projections
    whole on every rank (models/gpt/gpt_layer_specs.py:245-262, from core_v0.14 on), Megatron's own split them. The
    latents have norms only with `--qk-layernorm`.
    """
    down_shards = 1 if model.transformer_impl == "transformer_engine" else tp
    heads = model.num_attention_heads
    key_value = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    count = model.hidden_size * key_value // down_shards
    count += latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim) // tp
    count += heads * latent.v_head_dim * model.hidden_size // tp
    if latent.q_lora_rank is None:
        count += model.hidden_size * heads * latent.query_channels // tp
    else:
        count += model.hidden_size * latent.q_lora_rank // down_shards
        count += latent.q_lora_rank * heads * latent.query_channels // tp
    normed = (latent.kv_lora_rank + (latent.q_lora_rank or 0)) if model.qk_layernorm else 0
    norm_width = 2 if model.normalization == "LayerNorm" else 1
    bias = model.hidden_size if model.add_bias_linear else 0
    return count + normed * norm_width + bias


def attention_activations(
    model: ModelSpec, latent: LatentAttention, layout: Layout, *, fused_rope: bool
) -> LatentActivations:
    """Count what one layer's latent attention keeps for one micro-batch (MLA:580-850).

    Query, key and value are put together anew from the up-projections' outputs, which are not kept; an unfused rotary
    embedding keeps the sines and cosines of queries and keys. Latents are split over the sequence, as the norm's
    output is.
    """
    shard = local_tokens(model, layout)
    heads = model.num_attention_heads // layout.tp
    compressed = latent.kv_lora_rank + latent.qk_pos_emb_head_dim + (latent.q_lora_rank or 0)
    normed = latent.kv_lora_rank + (latent.q_lora_rank or 0) if model.qk_layernorm else 0
    angles = 0 if fused_rope else _ANGLES * model.seq_length // layout.cp * latent.qk_pos_emb_head_dim
    return LatentActivations(
        latents=model.dtype_bytes * (shard * (compressed + normed) + angles),
        projected=model.dtype_bytes * tokens(model, layout) * heads * (2 * latent.query_channels + latent.v_head_dim),
        context=model.dtype_bytes * tokens(model, layout) * heads * latent.v_head_dim,
    )


def prediction_parameters(model: ModelSpec, layout: Layout) -> int:
    """Count what one depth of multi-token prediction has beside its layer (MTP:593-650).

    Norms of embedding and hidden state, the projection of both to one, which is split over tp, and a final norm.
    """
    return 3 * model.norm_parameters() + 2 * model.hidden_size * model.hidden_size // layout.tp


def prediction_activations(model: ModelSpec, layout: Layout) -> int:
    """Count what one depth keeps for one micro-batch beside its layer and its head (MTP:653-745, GPT:592-625).

    The inputs of three norms, the two halves of the projection's input, and the depth's part of the tensor that all
    heads read.
    """
    return 6 * model.dtype_bytes * local_tokens(model, layout) * model.hidden_size
