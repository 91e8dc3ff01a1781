"""Multi-latent attention and multi-token prediction: their parameters, and what autograd keeps of them.

Sources: megatron/core/transformer/multi_latent_attention.py (MLA), multi_token_prediction.py (MTP) and
models/gpt/gpt_model.py (GPT), line numbers of core_v0.16.1.
"""

# T = tokens of one micro-batch on a rank, n = its sequence-parallel share.

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.cost.layers.attention import local_tokens, tokens
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import LatentAttention, ModelSpec

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
