"""Layers and sizes of a model, with Megatron's names, and the parameters and FLOPs of each layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pipette_launch.errors import FactError
from pipette_launch.facts.files import ADDED_LATER, check_numbers

_Modelled: TypeAlias = Literal["layer", "moe_layer", "mamba_layer", "attention_layer", "mlp_layer", "expert_layer"]
LayerKind: TypeAlias = Literal[_Modelled, "delta_layer", "sparse_layer", "latent_layer"]
"""`layer` and `moe_layer` are transformer layers without and with experts.

The other kinds occur only in hybrid models.
"""
TRANSFORMER_KINDS: tuple[LayerKind, ...] = ("layer", "moe_layer")
UNMODELLED: dict[str, LayerKind] = {"G": "delta_layer", "D": "sparse_layer", "+": "latent_layer"}
"""Letters of layers that only the job's own script builds. Formulas treat these layers as attention layers."""
LETTERS = UNMODELLED | {"M": "mamba_layer", "*": "attention_layer", "-": "mlp_layer", "E": "expert_layer"}
"""Letters of the layer kinds in Megatron's patterns of hybrid models."""
KINDS_WITH_EXPERTS: tuple[LayerKind, ...] = ("moe_layer", "expert_layer")
KINDS_WITH_ATTENTION: tuple[LayerKind, ...] = (*TRANSFORMER_KINDS, "attention_layer", *UNMODELLED.values())
_DENSE: tuple[LayerKind, ...] = ("layer", "mlp_layer")


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridLayers:
    """Layers of a hybrid model.

    Each layer of a hybrid model has a norm, one block and a residual (Nemotron-H, arXiv 2504.03624). The fields
    `mamba_*` are Megatron's flags `--mamba-*` for Mamba-2 layers (arXiv 2405.21060).
    """

    pattern: str
    """Layers of the model, as one letter of `LETTERS` for each layer."""
    mamba_state_dim: int
    mamba_head_dim: int
    mamba_num_groups: int
    mamba_num_heads: int
    mtp_pattern: str = ""
    """One letter for each layer in one depth of multi-token prediction."""
    mtp_use_repeated_layer: bool = False
    """True if all depths of multi-token prediction share one set of weights."""

    def __post_init__(self) -> None:
        check_numbers(self, "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
        strange = sorted(set(self.pattern + self.mtp_pattern) - set(LETTERS))
        if strange or not self.pattern:
            raise FactError(f"layers of a hybrid model are {' '.join(LETTERS)}, got {' '.join(strange) or 'none'}")
        heads, groups = self.mamba_num_heads, self.mamba_num_groups
        if "M" in self.pattern + self.mtp_pattern and heads % groups:
            raise FactError(f"mamba_num_groups={groups} does not divide mamba_num_heads={heads}")

    @property
    def mamba_channels(self) -> int:
        """Number of channels that the scan processes, over all heads."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def mamba_convolved(self) -> int:
        """Number of channels of the convolution: inputs, and the matrices B and C of each group."""
        return self.mamba_channels + 2 * self.mamba_num_groups * self.mamba_state_dim

    @property
    def mamba_projected(self) -> int:
        """Number of columns of the input projection: gates, convolved channels, and one time step for each head."""
        return self.mamba_channels + self.mamba_convolved + self.mamba_num_heads

    def mamba_matrices(self, hidden_size: int) -> int:
        """Return the number of weights in the input and output projections of one Mamba layer."""
        return hidden_size * (self.mamba_projected + self.mamba_channels)

    @property
    def mamba_scan_flops_per_token(self) -> float:
        """FLOPs of one layer's scan for one token, by Megatron-LM's formula (mamba_layer_flops of core_v0.17)."""
        return 7.0 * self.mamba_channels * self.mamba_state_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434), which computes queries, keys and values from latents.

    Field names are Megatron's. `qk_head_dim` counts the channels of a head without position encoding.
    """

    q_lora_rank: int | None
    """Channels of the query's latent. With None, one matrix computes the queries from the hidden state."""
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    """Channels of one head with rotary position encoding. In the key, all heads share these channels."""
    v_head_dim: int

    def __post_init__(self) -> None:
        check_numbers(self, "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")

    @property
    def query_channels(self) -> int:
        """Number of channels of the query of one head. The key of a head has the same number of channels."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    def up_weights(self, heads: int) -> int:
        """Return the number of weights in projections from latents to heads (recompute module `mla_up_proj`)."""
        query = (self.q_lora_rank or 0) * heads * self.query_channels
        return query + self.kv_lora_rank * heads * (self.qk_head_dim + self.v_head_dim)

    def weights(self, hidden_size: int, heads: int) -> int:
        """Return the number of weights in one layer's attention: projections to latents, heads and output."""
        query = self.q_lora_rank or heads * self.query_channels
        down = hidden_size * (query + self.kv_lora_rank + self.qk_pos_emb_head_dim)
        return down + self.up_weights(heads) + heads * self.v_head_dim * hidden_size


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Field names are Megatron's. Sizes are sizes of the whole model, not of one rank."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Number of key-value heads, equal to `num_attention_heads` if queries are not grouped."""
    kv_channels: int
    """Channels of one attention head."""
    seq_length: int
    max_position_embeddings: int
    vocab_size: int
    """Number of tokens of the tokenizer, without padding."""
    make_vocab_size_divisible_by: int
    gated_linear_unit: bool
    """True for SwiGLU and similar activations, for which the first MLP matrix is twice as wide."""
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
    """One entry for each layer: 1 has experts, 0 is dense. The list is empty for a model without experts."""
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_shared_expert_intermediate_size: int
    """MLP width of the shared expert. 0 = no shared expert."""
    latent_attention: LatentAttention | None = field(default=None, metadata=ADDED_LATER)
    """Multi-latent attention. With latent attention, `num_query_groups` and `kv_channels` have no meaning."""
    mtp_num_layers: int = field(default=0, metadata=ADDED_LATER)
    """Number of depths of multi-token prediction. Each depth has a transformer layer on the last pipeline rank."""
    qk_layernorm: bool = field(default=False, metadata=ADDED_LATER)
    """True if a norm follows query and key, or the latents of query and key under latent attention."""
    hybrid: HybridLayers | None = field(default=None, metadata=ADDED_LATER)
    """Layers of a hybrid model, whose `moe_layer_freq` is 1 for layers of experts and 0 for all other layers."""
    attention_windows: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    """Number of tokens that a token sees in each layer, with itself.

    0 = all earlier tokens. The list is empty if no layer has a window.
    """
    foreign: str = field(default="", metadata=ADDED_LATER)
    """Name of the script's kind of model, such as `bert`, if no formula describes the model. Empty = decoder-only."""

    def __post_init__(self) -> None:
        check_numbers(self, "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
        check_numbers(self, "kv_channels", "seq_length", "vocab_size", "make_vocab_size_divisible_by")
        check_numbers(self, "mtp_num_layers", limit=0)
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads % groups:
            raise FactError(f"num_query_groups={groups} does not divide num_attention_heads={heads}")
        if len(self.moe_layer_freq) != (self.num_layers if self.num_experts else 0):
            raise FactError(f"moe_layer_freq has {len(self.moe_layer_freq)} entries for {self.num_layers} layers")
        if len(self.attention_windows) not in (0, self.num_layers) or min(self.attention_windows, default=0) < 0:
            raise FactError(f"attention_windows needs {self.num_layers} numbers from 0 on, one for each layer")
        if self.hybrid and len(self.hybrid.pattern) != self.num_layers:
            raise FactError(f"the pattern has {len(self.hybrid.pattern)} letters for {self.num_layers} layers")
        if self.hybrid and "E" in self.hybrid.pattern + self.hybrid.mtp_pattern and not self.num_experts:
            raise FactError("the pattern has layers of experts (E), but the model has no experts")

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one parameter or activation element."""
        return 4 if self.params_dtype == "fp32" else 2

    @property
    def possible_kinds(self) -> tuple[LayerKind, ...]:
        """All kinds of layers of a hybrid model, and all kinds of other models."""
        letters = self.hybrid.pattern + self.hybrid.mtp_pattern if self.hybrid else ""
        return tuple(kind for letter, kind in LETTERS.items() if letter in letters) or TRANSFORMER_KINDS

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer of the model."""
        if self.hybrid:
            return tuple(LETTERS[letter] for letter in self.hybrid.pattern)
        kinds = tuple(TRANSFORMER_KINDS[moe] for moe in self.moe_layer_freq)
        return kinds or TRANSFORMER_KINDS[:1] * self.num_layers

    @property
    def prediction_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of the layers in one depth of multi-token prediction."""
        if not self.mtp_num_layers:
            return ()
        if self.hybrid:
            return tuple(LETTERS[letter] for letter in self.hybrid.mtp_pattern)
        return (TRANSFORMER_KINDS[self.has_expert_prediction],)

    @property
    def has_dense_mlps(self) -> bool:
        """True if any layer has an MLP of width `ffn_hidden_size`, including layers of multi-token prediction."""
        return not {*self.layer_kinds, *self.prediction_kinds}.isdisjoint(_DENSE)

    @property
    def prediction_copies(self) -> int:
        """Number of depths of multi-token prediction that have weights of their own."""
        shares = self.hybrid is not None and self.hybrid.mtp_use_repeated_layer
        return min(self.mtp_num_layers, 1) if shares else self.mtp_num_layers

    @property
    def has_expert_prediction(self) -> bool:
        """True if the layers of multi-token prediction have experts, as the last layer of the model then has."""
        return bool(self.mtp_num_layers and self.moe_layer_freq and self.moe_layer_freq[-1])

    def padded_vocab_size(self, tp: int) -> int:
        """Return the vocabulary size padded to a multiple of `make_vocab_size_divisible_by * tp`."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def attention_parameters(self) -> int:
        """Return the number of weights and biases in one layer's attention. Biases of latent attention are left out."""
        if self.latent_attention:
            return self.latent_attention.weights(self.hidden_size, self.num_attention_heads)
        query = self.kv_channels * self.num_attention_heads
        qkv = query + 2 * self.kv_channels * self.num_query_groups
        qkv_bias = qkv if self.add_bias_linear or self.add_qkv_bias else 0
        return self.hidden_size * (qkv + query) + qkv_bias + (self.hidden_size if self.add_bias_linear else 0)

    def mlp_parameters(self, ffn_hidden_size: int | None = None) -> int:
        """Return the number of weights and biases of one dense MLP, or of one expert of the given width."""
        ffn = self.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        first = ffn * (2 if self.gated_linear_unit else 1)
        bias = first + self.hidden_size if self.add_bias_linear else 0
        return self.hidden_size * (first + ffn) + bias

    def norm_parameters(self) -> int:
        """Return the number of parameters of one norm."""
        return self.hidden_size * (2 if self.normalization == "LayerNorm" else 1)

    def kind_flops_per_token(self, kind: LayerKind) -> float:
        """Return the FLOPs of one layer's forward for one token. The count ignores the causal mask.

        A multiply-add counts as 2 FLOPs, so projections take 2 FLOPs per weight. Attention scores and context take
        4*s*a*d for s tokens and a heads of d channels (Narayanan et al. 2021, appendix). Mamba scans count as in
        Megatron-LM.
        """
        if kind == "mamba_layer":
            assert self.hybrid is not None
            return 2.0 * self.hybrid.mamba_matrices(self.hidden_size) + self.hybrid.mamba_scan_flops_per_token
        matrices, core = 0, 0.0
        if kind in KINDS_WITH_ATTENTION:
            matrices += self.attention_parameters()
            core = self.core_flops_per_token
        if kind in KINDS_WITH_EXPERTS:
            matrices += self.moe_router_topk * self.mlp_parameters(self.moe_ffn_hidden_size)
            matrices += self.hidden_size * (self.num_experts or 0)
            if self.moe_shared_expert_intermediate_size:
                matrices += self.mlp_parameters(self.moe_shared_expert_intermediate_size)
        elif kind in _DENSE:
            matrices += self.mlp_parameters()
        return 2.0 * matrices + core

    @property
    def core_flops_per_token(self) -> float:
        """FLOPs of one token's attention scores and context, for the tokens inside the attention windows."""
        return self._unwindowed_core_flops_per_token * self.window_share

    @property
    def _unwindowed_core_flops_per_token(self) -> float:
        latent = self.latent_attention
        channels = latent.query_channels + latent.v_head_dim if latent else 2 * self.kv_channels
        return 2.0 * self.seq_length * self.num_attention_heads * channels

    @property
    def has_window(self) -> list[int]:
        """Megatron's list for `--window-attn-skip-freq`: 1 for each layer with a window, then for each prediction."""
        has_window = [int(window > 0) for window in self.attention_windows]
        return has_window + has_window[-1:] * self.mtp_num_layers

    @property
    def window_share(self) -> float:
        """Share of the causal scores that attention windows leave, averaged over all layers with attention."""
        one = self.seq_length
        pairs = zip(self.attention_windows, self.layer_kinds, strict=False)
        seen = [min(window or one, one) for window, kind in pairs if kind in KINDS_WITH_ATTENTION]
        # Tokens near the beginning have fewer earlier tokens than the window allows.
        scores = sum(window * one - window * (window - 1) / 2 for window in seen)
        return scores / (len(seen) * one * (one + 1) / 2) if seen else 1.0

    def step_flops(self, global_batch_size: int, *, tp: int) -> float:
        """Return the model's FLOPs in one step by Megatron-LM's num_floating_point_operations (core_v0.16).

        Each matrix product counts three times (forward and backward), and a multiply-add counts as 2 FLOPs. The causal
        mask halves attention's FLOPs. Biases, the router and recompute are left out. Megatron releases before
        core_v0.16 ignore the causal mask, and all releases ignore attention windows.
        """
        latent, hidden, heads = self.latent_attention, self.hidden_size, self.num_attention_heads
        query, groups = heads * self.kv_channels, self.num_query_groups * self.kv_channels
        # Megatron counts only the norms of the latents and of multi-token prediction.
        latent_norms = (latent.q_lora_rank or 0) + latent.kv_lora_rank if latent else 0
        projections = latent.weights(hidden, heads) + latent_norms if latent else 2 * hidden * (query + groups)
        attention = projections + self._unwindowed_core_flops_per_token / 4
        matrices = hidden * (3 if self.gated_linear_unit else 2)
        moe_width = self.moe_router_topk * self.moe_ffn_hidden_size + self.moe_shared_expert_intermediate_size
        kinds = Counter((*self.layer_kinds, *self.mtp_num_layers * self.prediction_kinds))
        groups_of_kinds = (KINDS_WITH_EXPERTS, _DENSE, KINDS_WITH_ATTENTION)
        moe_layers, dense, layers = (sum(kinds[kind] for kind in group) for group in groups_of_kinds)
        mlps: float = matrices * (moe_layers * moe_width + dense * self.ffn_hidden_size)
        if self.hybrid:
            scan = self.hybrid.mamba_scan_flops_per_token / 2
            mlps += kinds["mamba_layer"] * (self.hybrid.mamba_matrices(hidden) + scan)
        predictions = self.mtp_num_layers * (2 * hidden + 3) * hidden
        logits = (1 + self.mtp_num_layers) * hidden * self.padded_vocab_size(tp)
        return 6.0 * global_batch_size * self.seq_length * (layers * attention + mlps + predictions + logits)
