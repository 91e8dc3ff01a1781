"""Layers and sizes of a model, with Megatron's names, and the parameters and FLOPs of each layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias, cast

from pipette_launch.errors import FactError
from pipette_launch.facts.files import check_numbers

BlockKind: TypeAlias = Literal["attention", "delta", "sparse", "shared_sparse", "mamba", "mlp", "experts"]
_Sparse: TypeAlias = Literal["sparse_layer", "sparse_mlp_layer", "sparse_moe_layer"]
_Shared: TypeAlias = Literal["shared_sparse_layer", "shared_sparse_mlp_layer", "shared_sparse_moe_layer"]
_Transformer: TypeAlias = Literal["delta_mlp_layer", "delta_moe_layer", "layer", "moe_layer"]
_Single: TypeAlias = Literal["mamba_layer", "attention_layer", "mlp_layer", "expert_layer", "delta_layer"]
LayerKind: TypeAlias = Literal[_Transformer, _Single, _Sparse, _Shared, "latent_layer"]
BLOCKS: dict[LayerKind, tuple[BlockKind, ...]] = {
    "delta_mlp_layer": ("delta", "mlp"),
    "delta_moe_layer": ("delta", "experts"),
    "layer": ("attention", "mlp"),
    "moe_layer": ("attention", "experts"),
    "sparse_mlp_layer": ("sparse", "mlp"),
    "sparse_moe_layer": ("sparse", "experts"),
    "shared_sparse_mlp_layer": ("shared_sparse", "mlp"),
    "shared_sparse_moe_layer": ("shared_sparse", "experts"),
    "delta_layer": ("delta",),
    "sparse_layer": ("sparse",),
    "shared_sparse_layer": ("shared_sparse",),
    "latent_layer": ("attention",),
    "mamba_layer": ("mamba",),
    "attention_layer": ("attention",),
    "mlp_layer": ("mlp",),
    "expert_layer": ("experts",),
}
"""Blocks of each kind of layer, in order. Only hybrid models have layers with a single block."""
LETTERS: dict[str, LayerKind] = {
    "G": "delta_layer",
    "D": "sparse_layer",
    "+": "latent_layer",
    "M": "mamba_layer",
    "*": "attention_layer",
    "-": "mlp_layer",
    "E": "expert_layer",
}
"""Letters of the layer kinds in Megatron's patterns of hybrid models. Attention has latents in layers `D` and `+`."""
TRANSFORMER_KINDS = tuple(kind for kind, blocks in BLOCKS.items() if len(blocks) == 2)
_KIND_OF = {blocks: kind for kind, blocks in BLOCKS.items()}
_FEED_FORWARDS: tuple[BlockKind, ...] = ("mlp", "experts")
KINDS_WITH_EXPERTS, KINDS_WITH_ATTENTION, _KINDS_WITH_MLP = (
    tuple(kind for kind, blocks in BLOCKS.items() if block in blocks) for block in ("experts", "attention", "mlp")
)


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
        if self.has_mamba and heads % groups:
            raise FactError(f"mamba_num_groups={groups} does not divide mamba_num_heads={heads}")

    @property
    def has_mamba(self) -> bool:
        """True if any layer is a Mamba layer."""
        return "M" in self.pattern + self.mtp_pattern

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


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta:
    """Gated delta network (arXiv 2412.06464), whose field names are Megatron's.

    Each value head has a state of one key by one value. Sources: megatron/core/ssm/gated_delta_net of core_v0.19, and
    `num_floating_point_operations` of megatron/training/training.py.
    """

    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int

    def __post_init__(self) -> None:
        check_numbers(self, *self.__slots__)
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise FactError(f"linear_num_key_heads={keys} does not divide linear_num_value_heads={values}")

    @property
    def keys(self) -> int:
        """Number of channels of all keys, and of all queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def values(self) -> int:
        """Number of channels of all values, and of their gates."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def convolved(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Number of columns of the input projection: convolved channels, gates, and two numbers for each value head."""
        return self.convolved + self.values + 2 * self.linear_num_value_heads

    def weights(self, hidden_size: int) -> int:
        """Return the number of weights in the input and output projections of one layer."""
        return hidden_size * (self.projected + self.values)

    def flops_per_token(self, hidden_size: int) -> float:
        """Return the FLOPs of one forward for one token: projections, convolution, and four products with the state."""
        state = self.values * self.linear_value_head_dim
        return 2.0 * (self.weights(hidden_size) + self.linear_conv_kernel_dim * self.convolved + 4 * state)


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
class SparseAttention:
    """Sparse attention (DeepSeek-V3.2, arXiv 2512.02556), whose indexer selects the keys that each token attends to.

    Field names are Megatron's.
    """

    dsa_indexer_n_heads: int
    dsa_indexer_head_dim: int
    dsa_indexer_topk: int
    """Number of keys that the indexer selects for a token."""
    dsa_indexer_topk_freq: int = 1
    """Number of layers that share the keys selected by one layer."""
    dsa_indexer_skip_topk_offset: int = 0
    """Number of first layers that do not share selected keys."""
    dsa_indexer_loss_coeff: float = 0.0
    """Weight of the loss that trains the indexer. 0 = the indexer is not trained."""
    dsa_indexer_use_sparse_loss: bool = False
    """True if the loss compares scores of selected keys, not of all keys."""
    dsa_kernel_backend: Literal["none", "tilelang", "cudnn"] = "none"
    """Library of the kernels. With `none`, torch computes all scores in fp32."""
    sft: bool = False
    """True if batches pack several samples. Kernels then score keys under context parallelism too."""

    def __post_init__(self) -> None:
        check_numbers(self, "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_topk_freq")
        check_numbers(self, "dsa_indexer_skip_topk_offset", limit=0)

    def source(self, number: int) -> int:
        """Return the number of the layer that selects the keys of layer `number`; numbers count from 1.

        Layers with another source have no indexer (dsa.py, source_dsa_compute_layer of core_v0.19).
        """
        return number - max(number - max(self.dsa_indexer_skip_topk_offset, 1), 0) % self.dsa_indexer_topk_freq

    def selected_keys(self, seq_length: int) -> float:
        """Return the mean number of keys that a token attends to. The first tokens have fewer earlier tokens."""
        most = min(self.dsa_indexer_topk, seq_length)
        return most - most * (most - 1) / (2 * seq_length)

    def weights(self, hidden_size: int, latent_size: int) -> int:
        """Return the number of parameters of an indexer with `latent_size` channels in the input of its queries."""
        heads, size = self.dsa_indexer_n_heads, self.dsa_indexer_head_dim
        return heads * size * latent_size + (heads + size) * hidden_size + 2 * size


@lru_cache(maxsize=64)
def _kinds(
    pattern: str, linear: tuple[int, ...], experts: tuple[int, ...], sparse: SparseAttention | None
) -> tuple[LayerKind, ...]:
    """Return the kinds of layers, by the letters of a pattern, or if it is empty by the entries of each layer."""
    mixers: tuple[BlockKind, ...] = ("sparse" if sparse else "attention", "delta")
    pairs = () if pattern else zip(linear, experts, strict=True)
    kinds = [LETTERS[letter] for letter in pattern] + [_KIND_OF[mixers[of], _FEED_FORWARDS[to]] for of, to in pairs]
    if sparse is None:
        # Before 0.19 sparse attention has no formula, and counts as latent attention.
        return tuple("latent_layer" if kind == "sparse_layer" else kind for kind in kinds)
    shared = ("sparse" in kind and sparse.source(number) < number for number, kind in enumerate(kinds, 1))
    return tuple(cast("LayerKind", "shared_" * each + kind) for each, kind in zip(shared, kinds, strict=True))


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
    latent_attention: LatentAttention | None = None
    """Multi-latent attention. With latent attention, `num_query_groups` and `kv_channels` have no meaning."""
    sparse_attention: SparseAttention | None = None
    """Selection of keys in sparse attention, which is latent attention too."""
    mtp_num_layers: int = 0
    """Number of depths of multi-token prediction. Each depth has a transformer layer on the last pipeline rank."""
    qk_layernorm: bool = False
    """True if a norm follows query and key, or the latents of query and key under latent attention."""
    hybrid: HybridLayers | None = None
    """Layers of a hybrid model, whose `moe_layer_freq` is 1 for layers of experts and 0 for all other layers."""
    attention_windows: tuple[int, ...] = ()
    """Number of tokens that a token sees in each layer, with itself.

    0 = all earlier tokens. The list is empty if no layer has a window.
    """
    linear_attention: GatedDelta | None = None
    """Sizes of gated delta networks, which replace attention in `linear_layers` or in layers G of a hybrid model."""
    linear_layers: tuple[int, ...] = ()
    """One entry for each layer: 1 has a gated delta network, 0 has attention. The list is empty without `1`."""
    attention_output_gate: bool = False
    """True if gates as wide as the query multiply the output of attention."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Sink of attention. A learnable sink has one parameter for each head."""
    moe_latent_size: int = 0
    """Width of the tokens that routed experts receive. 0 = the hidden size."""
    moe_shared_expert_gate: bool = False
    foreign: str = ""
    """Name of the script's kind of model, such as `bert`, if no formula describes the model. Empty = decoder-only."""

    def __post_init__(self) -> None:
        check_numbers(self, "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
        check_numbers(self, "kv_channels", "seq_length", "vocab_size", "make_vocab_size_divisible_by")
        check_numbers(self, "mtp_num_layers", "moe_latent_size", limit=0)
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads % groups:
            raise FactError(f"num_query_groups={groups} does not divide num_attention_heads={heads}")
        if len(self.moe_layer_freq) != (self.num_layers if self.num_experts else 0):
            raise FactError(f"moe_layer_freq has {len(self.moe_layer_freq)} entries for {self.num_layers} layers")
        if len(self.attention_windows) not in (0, self.num_layers) or min(self.attention_windows, default=0) < 0:
            raise FactError(f"attention_windows needs {self.num_layers} numbers from 0 on, one for each layer")
        if len(self.linear_layers) not in (0, self.num_layers):
            raise FactError(f"linear_layers has {len(self.linear_layers)} entries for {self.num_layers} layers")
        if self.linear_attention is None and any("delta" in BLOCKS[kind] for kind in self.possible_kinds):
            raise FactError("the model has layers of gated delta networks, but no linear_attention")
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
        if self.hybrid:
            return tuple(kind for kind in BLOCKS if kind in (*self.layer_kinds, *self.prediction_kinds))
        return tuple(dict.fromkeys(("layer", "moe_layer", *self.layer_kinds)))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer of the model."""
        nothing, pattern = (0,) * self.num_layers, self.hybrid.pattern if self.hybrid else ""
        return _kinds(pattern, self.linear_layers or nothing, self.moe_layer_freq or nothing, self.sparse_attention)

    @property
    def prediction_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of the layers in one depth of multi-token prediction; as the last layer if not hybrid."""
        if not self.mtp_num_layers:
            return ()
        if self.hybrid:
            return _kinds(self.hybrid.mtp_pattern, (), (), self.sparse_attention)
        mixer, feed_forward = BLOCKS[self.layer_kinds[-1]]
        # Depths count their layers from 1, so they have indexers (core_v0.20, multi_token_prediction.py:1224).
        return (_KIND_OF["sparse" if self.sparse_attention else mixer, feed_forward],)

    @property
    def has_dense_mlps(self) -> bool:
        """True if any layer has an MLP of width `ffn_hidden_size`, including layers of multi-token prediction."""
        return not {*self.layer_kinds, *self.prediction_kinds}.isdisjoint(_KINDS_WITH_MLP)

    @property
    def prediction_copies(self) -> int:
        """Number of depths of multi-token prediction that have weights of their own."""
        shares = self.hybrid is not None and self.hybrid.mtp_use_repeated_layer
        return min(self.mtp_num_layers, 1) if shares else self.mtp_num_layers

    def padded_vocab_size(self, tp: int) -> int:
        """Return the vocabulary size padded to a multiple of `make_vocab_size_divisible_by * tp`."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def attention_parameters(self) -> int:
        """Return the number of weights and biases in one layer's attention. Biases of latent attention are left out."""
        if self.latent_attention:
            return self.latent_attention.weights(self.hidden_size, self.num_attention_heads)
        query = self.kv_channels * self.num_attention_heads
        qkv = (1 + self.attention_output_gate) * query + 2 * self.kv_channels * self.num_query_groups
        qkv_bias = qkv if self.add_bias_linear or self.add_qkv_bias else 0
        return self.hidden_size * (qkv + query) + qkv_bias + (self.hidden_size if self.add_bias_linear else 0)

    def mlp_parameters(self, ffn_hidden_size: int | None = None, hidden_size: int | None = None) -> int:
        """Return the number of weights and biases of one dense MLP, or of an MLP of the given widths."""
        ffn, hidden = ffn_hidden_size or self.ffn_hidden_size, hidden_size or self.hidden_size
        first = ffn * (2 if self.gated_linear_unit else 1)
        return hidden * (first + ffn) + (first + hidden if self.add_bias_linear else 0)

    def expert_parameters(self) -> int:
        """Return the number of weights and biases of one routed expert."""
        return self.mlp_parameters(self.moe_ffn_hidden_size, self.moe_latent_size)

    def norm_parameters(self) -> int:
        """Return the number of parameters of one norm."""
        return self.hidden_size * (2 if self.normalization == "LayerNorm" else 1)

    def kind_flops_per_token(self, kind: LayerKind) -> float:
        """Return the FLOPs of one layer's forward for one token. The count ignores the causal mask."""
        return sum(map(self.block_flops_per_token, BLOCKS[kind]))

    def block_flops_per_token(self, block: BlockKind) -> float:
        """Return the FLOPs of one block's forward for one token. The count ignores the causal mask.

        A multiply-add counts as 2 FLOPs, so projections take 2 FLOPs per weight. Attention scores and context take
        4*s*a*d for s tokens and a heads of d channels (Narayanan et al. 2021, appendix). Mamba scans and gated delta
        rules count as in Megatron-LM.
        """
        hidden = self.hidden_size
        if block == "mamba":
            assert self.hybrid is not None
            scan = 7.0 * self.hybrid.mamba_channels * self.hybrid.mamba_state_dim
            return 2.0 * self.hybrid.mamba_matrices(hidden) + scan
        if block == "delta":
            assert self.linear_attention is not None
            return self.linear_attention.flops_per_token(hidden)
        if block == "attention":
            return 2.0 * self.attention_parameters() + self.core_flops_per_token
        if block in ("sparse", "shared_sparse"):
            return 2.0 * self.attention_parameters() + self.sparse_core_flops(has_indexer=block == "sparse")
        if block == "mlp":
            return 2.0 * self.mlp_parameters()
        matrices = self.moe_router_topk * self.expert_parameters() + hidden * (self.num_experts or 0)
        if self.moe_shared_expert_intermediate_size:
            matrices += self.mlp_parameters(self.moe_shared_expert_intermediate_size)
        return 2.0 * (matrices + 2 * hidden * self.moe_latent_size)

    def sparse_core_flops(self, *, has_indexer: bool) -> float:
        """Return the FLOPs of one token's selected scores and context, and of the indexer's scores of earlier keys."""
        latent, sparse = self.latent_attention, self.sparse_attention
        assert latent is not None
        assert sparse is not None
        channels = self.num_attention_heads * (2 * latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
        indexed = has_indexer * self.seq_length * sparse.dsa_indexer_n_heads * sparse.dsa_indexer_head_dim
        return 2.0 * sparse.selected_keys(self.seq_length) * channels + indexed

    @property
    def core_flops_per_token(self) -> float:
        """FLOPs of one token's attention scores and context, for the tokens inside the attention windows."""
        latent = self.latent_attention
        channels = latent.query_channels + latent.v_head_dim if latent else 2 * self.kv_channels
        return 2.0 * self.seq_length * self.num_attention_heads * channels * self.window_share

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
        core_v0.16 ignore the causal mask, and all releases ignore attention windows, and indexers and their selection.
        In hybrid models Megatron also leaves out output gates, latent attention, and the projections of multi-token
        prediction. A depth after a gated delta network counts as one, although Megatron counts by the place in the
        pattern.
        """
        latent, hidden, depths = self.latent_attention, self.hidden_size, self.mtp_num_layers
        counted = replace(self, add_bias_linear=False, add_qkv_bias=False, attention_windows=())
        # Megatron counts only the norms of the latents and of multi-token prediction.
        latent_norms = (latent.q_lora_rank or 0) + latent.kv_lora_rank if latent else 0
        left_out: dict[BlockKind, float] = {
            "attention": counted.core_flops_per_token / 2 - 2 * latent_norms,
            "experts": 2 * hidden * (self.num_experts or 0),
        }
        kinds = (*self.layer_kinds, *depths * self.prediction_kinds)
        every = (block for kind in kinds for block in BLOCKS[kind])
        blocks = Counter[BlockKind]("attention" if "sparse" in block else block for block in every)
        layers = sum(
            count * (counted.block_flops_per_token(block) - left_out.get(block, 0)) for block, count in blocks.items()
        )
        predictions = depths * (2 * hidden + 3) * hidden
        logits = (1 + depths) * hidden * self.padded_vocab_size(tp)
        return 3.0 * global_batch_size * self.seq_length * (layers + 2 * (predictions + logits))
