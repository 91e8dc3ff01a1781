"""How many parameters of the model lie on one rank, chunk by chunk, and which group reduces their gradients."""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Parameters on one rank, by who shares them."""

    dense: int
    """Everything but experts: gradients are reduced over dp * cp."""
    expert: int = 0
    """Experts: gradients are reduced over the expert data-parallel group."""

    def __add__(self, other: Parameters) -> Parameters:
        """Add two parts of one rank."""
        return Parameters(dense=self.dense + other.dense, expert=self.expert + other.expert)

    @property
    def count(self) -> int:
        """All of them."""
        return self.dense + self.expert


def expert_dp(layout: Layout) -> int:
    """Ranks that hold the same experts: world / (etp * ep * pp) (megatron.md section 3)."""
    return layout.world_size // (layout.etp * layout.ep * layout.pp)


def layer_parameters(model: ModelSpec, layout: Layout, *, moe: bool) -> Parameters:
    """Count one transformer layer on one rank: attention, MLP or experts, two norms (megatron.md 8.1, memory.md 2).

    Columns (QKV, first MLP matrix) split weight and bias over tp; rows (projection, second matrix) split the weight
    only. Norms and the router are on every rank.
    """
    dense = _attention(model, layout.tp) + 2 * model.norm_parameters()
    if not moe:
        return Parameters(dense=dense + _mlp(model, model.ffn_hidden_size, layout.tp))
    num_experts = model.num_experts or 0
    dense += model.hidden_size * num_experts
    if model.moe_shared_expert_intermediate_size:
        dense += _mlp(model, model.moe_shared_expert_intermediate_size, layout.tp)
    experts = num_experts // layout.ep * _mlp(model, model.moe_ffn_hidden_size, layout.etp)
    return Parameters(dense=dense, expert=experts)


def word_embedding_parameters(model: ModelSpec, layout: Layout) -> int:
    """Rows of the padded vocabulary that one rank holds, times the hidden size."""
    return model.padded_vocab_size(layout.tp) // layout.tp * model.hidden_size


def chunk_parameters(model: ModelSpec, layout: Layout) -> tuple[Parameters, ...]:
    """Count every chunk in model order: embeddings on the first, final norm and head on the last.

    With tied embeddings and more than one pipeline rank the last chunk holds a copy of the word embedding
    (megatron-core, setup_embeddings_and_output_layer).
    """
    chunks = []
    layer = 0
    per_layer = {moe: layer_parameters(model, layout, moe=moe) for moe in (False, True)}
    for chunk, layers in enumerate(layout.chunk_layers(model.num_layers)):
        total = Parameters(dense=0)
        for index in range(layer, layer + layers):
            total += per_layer[model.is_moe_layer(index)]
        layer += layers
        if chunk == 0:
            total += Parameters(dense=_embedding(model, layout))
        if chunk == layout.num_chunks - 1:
            total += Parameters(dense=_head(model, layout))
        chunks.append(total)
    return tuple(chunks)


def stage_parameters(model: ModelSpec, layout: Layout) -> tuple[Parameters, ...]:
    """Count every pipeline rank, all its chunks together."""
    chunks = chunk_parameters(model, layout)
    return tuple(sum(chunks[rank :: layout.pp], Parameters(dense=0)) for rank in range(layout.pp))


def _embedding(model: ModelSpec, layout: Layout) -> int:
    learned = model.position_embedding_type == "learned_absolute"
    positions = model.max_position_embeddings * model.hidden_size if learned else 0
    return word_embedding_parameters(model, layout) + positions


def _head(model: ModelSpec, layout: Layout) -> int:
    has_own = model.untie_embeddings_and_output_weights or layout.pp > 1
    return model.norm_parameters() + (word_embedding_parameters(model, layout) if has_own else 0)


def _attention(model: ModelSpec, tp: int) -> int:
    query = model.num_attention_heads * model.kv_channels // tp
    # With fewer groups than ranks, each rank holds a whole group (megatron-core, attention.py).
    key_value = 2 * max(1, model.num_query_groups // tp) * model.kv_channels
    bias = (query + key_value if model.add_bias_linear or model.add_qkv_bias else 0) + (
        model.hidden_size if model.add_bias_linear else 0
    )
    return model.hidden_size * (query + key_value + query) + bias


def _mlp(model: ModelSpec, ffn_hidden_size: int, tp: int) -> int:
    second = ffn_hidden_size // tp
    first = second * (2 if model.gated_linear_unit else 1)
    bias = first + model.hidden_size if model.add_bias_linear else 0
    return model.hidden_size * (first + second) + bias
