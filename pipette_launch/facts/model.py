"""The shape of a transformer as Megatron's flags give it, and the parameters and FLOPs of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipette_launch.errors import FactError
from pipette_launch.facts.checks import check_numbers
from pipette_launch.facts.files import ADDED_LATER


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434): queries, keys and values through low-rank latents.

    Field names are Megatron's. One head has `qk_head_dim + qk_pos_emb_head_dim` channels of query and key, and
    `v_head_dim` of value.
    """

    q_lora_rank: int | None
    """Channels of the query's latent; None = queries come from the hidden state by one matrix."""
    kv_lora_rank: int
    qk_head_dim: int
    """Channels of one head that carry no position."""
    qk_pos_emb_head_dim: int
    """Channels that carry the rotary position, shared by all heads of the key."""
    v_head_dim: int

    def __post_init__(self) -> None:
        check_numbers(self, "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")

    @property
    def query_channels(self) -> int:
        """Channels of one head's query, and of its key."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    def up_weights(self, heads: int) -> int:
        """Weights of the projections from the latents to the heads: what `mla_up_proj` recomputes."""
        query = (self.q_lora_rank or 0) * heads * self.query_channels
        return query + self.kv_lora_rank * heads * (self.qk_head_dim + self.v_head_dim)

    def weights(self, hidden_size: int, heads: int) -> int:
        """Weights of one layer's attention: down to the latents, up to the heads, and the output projection."""
        query = self.q_lora_rank or heads * self.query_channels
        down = hidden_size * (query + self.kv_lora_rank + self.qk_pos_emb_head_dim)
        return down + self.up_weights(heads) + heads * self.v_head_dim * hidden_size


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Field names are Megatron's; sizes are of the whole model, before any cut."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Equal to `num_attention_heads` without grouped queries."""
    kv_channels: int
    """Channels of one head."""
    seq_length: int
    max_position_embeddings: int
    vocab_size: int
    """Tokens the tokenizer knows; see `padded_vocab_size`."""
    make_vocab_size_divisible_by: int
    gated_linear_unit: bool
    """SwiGLU and its kin: the first MLP matrix is twice as wide."""
    normalization: Literal["LayerNorm", "RMSNorm"]
    add_bias_linear: bool
    add_qkv_bias: bool
    position_embedding_type: Literal["learned_absolute", "rope", "none"]
    untie_embeddings_and_output_weights: bool
    attention_dropout: float
    hidden_dropout: float
    params_dtype: Literal["fp32", "fp16", "bf16"]
    transformer_impl: Literal["local", "transformer_engine"]
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"]
    num_experts: int | None
    moe_layer_freq: tuple[int, ...]
    """One entry for each layer: 1 has experts, 0 is dense. Empty without experts."""
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_shared_expert_intermediate_size: int
    """0 without a shared expert."""
    latent_attention: LatentAttention | None = field(default=None, metadata=ADDED_LATER)
    """Multi-latent attention; `num_query_groups` and `kv_channels` then say nothing."""
    mtp_num_layers: int = field(default=0, metadata=ADDED_LATER)
    """Depths of multi-token prediction, each with a transformer layer of its own on the last pipeline rank."""
    qk_layernorm: bool = field(default=False, metadata=ADDED_LATER)
    """Query and key (with latent attention: their latents) are normalised."""

    def __post_init__(self) -> None:
        check_numbers(self, "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
        check_numbers(self, "kv_channels", "seq_length", "vocab_size", "make_vocab_size_divisible_by")
        check_numbers(self, "mtp_num_layers", limit=0)
        if self.num_attention_heads % self.num_query_groups:
            raise FactError(
                f"num_query_groups={self.num_query_groups} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if len(self.moe_layer_freq) != (self.num_layers if self.num_experts else 0):
            raise FactError(f"moe_layer_freq has {len(self.moe_layer_freq)} entries for {self.num_layers} layers")

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one parameter or activation element."""
        return 4 if self.params_dtype == "fp32" else 2

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has experts."""
        return bool(self.moe_layer_freq) and self.moe_layer_freq[layer] == 1

    @property
    def has_expert_prediction(self) -> bool:
        """Whether the layers of multi-token prediction have experts: they are built as the last layer is."""
        return bool(self.mtp_num_layers and self.moe_layer_freq and self.moe_layer_freq[-1])

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding: the vocabulary padded to a multiple of `make_vocab_size_divisible_by * tp`."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def attention_parameters(self) -> int:
        """Weights and biases of one layer's attention: query, key, value and output projections."""
        query = self.kv_channels * self.num_attention_heads
        qkv = query + 2 * self.kv_channels * self.num_query_groups
        bias = (qkv if self.add_bias_linear or self.add_qkv_bias else 0) + (
            self.hidden_size if self.add_bias_linear else 0
        )
        return self.hidden_size * (qkv + query) + bias

    def mlp_parameters(self, ffn_hidden_size: int | None = None) -> int:
        """Weights and biases of one dense MLP (or of one expert of the given width)."""
        ffn = self.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        first = ffn * (2 if self.gated_linear_unit else 1)
        bias = first + self.hidden_size if self.add_bias_linear else 0
        return self.hidden_size * (first + ffn) + bias

    def norm_parameters(self) -> int:
        """Parameters of one normalisation."""
        return self.hidden_size * (2 if self.normalization == "LayerNorm" else 1)

    def forward_flops_per_token(self, *, moe: bool = False) -> float:
        """Multiply-adds counted as 2, of one layer's forward for one token (causal mask not discounted).

        Narayanan et al. 2021 (PTD-P), appendix: projections 2 per weight, attention scores and context 4*s*a*d.
        """
        latent = self.latent_attention
        heads = self.num_attention_heads
        matrices = latent.weights(self.hidden_size, heads) if latent else self.attention_parameters()
        if moe:
            matrices += self.moe_router_topk * self.mlp_parameters(self.moe_ffn_hidden_size)
            matrices += self.hidden_size * (self.num_experts or 0)
            if self.moe_shared_expert_intermediate_size:
                matrices += self.mlp_parameters(self.moe_shared_expert_intermediate_size)
        else:
            matrices += self.mlp_parameters()
        return 2.0 * matrices + self.core_flops_per_token

    @property
    def core_flops_per_token(self) -> float:
        """The part of `forward_flops_per_token` that is attention scores and context."""
        latent = self.latent_attention
        channels = latent.query_channels + latent.v_head_dim if latent else 2 * self.kv_channels
        return 2.0 * self.seq_length * self.num_attention_heads * channels

    def step_flops(self, global_batch_size: int, *, tp: int) -> float:
        """Model FLOPs of a training step as Megatron-LM counts them (core_v0.16, num_floating_point_operations).

        Each matrix three times, multiply-adds as 2, half of the attention's square behind the causal mask; biases,
        the router and recompute are left out. The output layer has the rows that `tp` pads the vocabulary to. Releases
        before core_v0.16 count the whole square.
        """
        latent, hidden, heads = self.latent_attention, self.hidden_size, self.num_attention_heads
        query, groups = heads * self.kv_channels, self.num_query_groups * self.kv_channels
        # Of the norms Megatron counts those of the latents and of multi-token prediction.
        latent_norms = (latent.q_lora_rank or 0) + latent.kv_lora_rank if latent else 0
        projections = latent.weights(hidden, heads) + latent_norms if latent else 2 * hidden * (query + groups)
        attention = projections + self.core_flops_per_token / 4
        matrices = hidden * (3 if self.gated_linear_unit else 2)
        moe_width = self.moe_router_topk * self.moe_ffn_hidden_size + self.moe_shared_expert_intermediate_size
        moe_layers = sum(self.moe_layer_freq) + self.mtp_num_layers * self.has_expert_prediction
        layers = self.num_layers + self.mtp_num_layers
        mlps = matrices * (moe_layers * moe_width + (layers - moe_layers) * self.ffn_hidden_size)
        predictions = self.mtp_num_layers * (2 * hidden + 3) * hidden
        logits = (1 + self.mtp_num_layers) * hidden * self.padded_vocab_size(tp)
        return 6.0 * global_batch_size * self.seq_length * (layers * attention + mlps + predictions + logits)
