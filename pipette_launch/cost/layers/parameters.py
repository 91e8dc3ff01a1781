"""How many parameters of the model lie on one rank, chunk by chunk, and which group reduces their gradients."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.layers import experts, latent_attention
from pipette_launch.cost.layers.mamba import mamba_parameters
from pipette_launch.facts.layout import Ints, Layout, LayoutColumns
from pipette_launch.facts.model import KINDS_WITH_EXPERTS, TRANSFORMER_KINDS, LayerKind, ModelSpec


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


@overload
def expert_dp(layout: Layout) -> int: ...
@overload
def expert_dp(layout: LayoutColumns) -> Ints: ...
def expert_dp(layout: Layout | LayoutColumns) -> int | Ints:
    """Ranks that hold the same experts: world / (etp * ep * pp)."""
    return layout.tp * layout.cp * layout.dp * layout.pp // (layout.etp * layout.ep * layout.pp)


@overload
def experts_lie_in_stages(layout: Layout) -> bool: ...
@overload
def experts_lie_in_stages(layout: LayoutColumns) -> NDArray[np.bool_]: ...
def experts_lie_in_stages(layout: Layout | LayoutColumns) -> bool | NDArray[np.bool_]:
    """Whether each expert group lies in one pipeline stage; in the rank order tp-pp-dp it may not."""
    return (layout.use_tp_pp_dp_mapping == 0) | (layout.ep * layout.etp == layout.tp * layout.cp)


def layer_parameters(model: ModelSpec, layout: Layout, *, moe: bool) -> Parameters:
    """Count one transformer layer on one rank: attention, MLP or experts, two norms.

    Columns (QKV, first MLP matrix) split weight and bias over tp; rows (projection, second matrix) split the weight
    only. Norms and the router are on every rank.
    """
    dense = _attention(model, layout.tp) + 2 * model.norm_parameters()
    if not moe:
        return Parameters(dense=dense + _mlp(model, model.ffn_hidden_size, layout.tp))
    dense += experts.router_parameters(model)
    if model.moe_shared_expert_intermediate_size:
        dense += _mlp(model, model.moe_shared_expert_intermediate_size, layout.tp)
    local_experts = (model.num_experts or 0) // layout.ep
    return Parameters(dense=dense, expert=local_experts * _mlp(model, model.moe_ffn_hidden_size, layout.etp))


def kind_parameters(model: ModelSpec, layout: Layout, kind: LayerKind) -> Parameters:
    """Count one layer of any kind on one rank; those of hybrid models have one norm and one block."""
    norm, has_experts = model.norm_parameters(), kind in KINDS_WITH_EXPERTS
    if has_experts and not model.num_experts:
        return Parameters(dense=0)
    if kind in TRANSFORMER_KINDS:
        return layer_parameters(model, layout, moe=has_experts)
    if kind == "mamba_layer":
        assert model.hybrid is not None
        return Parameters(dense=mamba_parameters(model, model.hybrid, layout.tp) + norm)
    block = _attention(model, layout.tp)
    if kind == "attention_layer":
        return Parameters(dense=block + norm)
    whole = layer_parameters(model, layout, moe=has_experts)
    return Parameters(dense=whole.dense - block - norm, expert=whole.expert)


def word_embedding_parameters(model: ModelSpec, tp: int) -> int:
    """Rows of the padded vocabulary that one rank holds, times the hidden size."""
    return model.padded_vocab_size(tp) // tp * model.hidden_size


def has_two_embeddings(model: ModelSpec) -> bool:
    """Return whether a second stage holds the word embedding too, so that gradients are summed over both.

    A tied head needs it, and so does multi-token prediction (megatron-core, finalize_model_grads.py:146).
    """
    return model.mtp_num_layers > 0 or not model.untie_embeddings_and_output_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitParameters:
    """Parameters of what chunks are made of, on one rank."""

    layers: dict[LayerKind, Parameters]
    """Of every kind that the model may have; nothing for kinds with experts where it has none."""
    embedding: Parameters
    """What the first chunk has besides its layers."""
    head: Parameters
    """Final norm and head, on the last chunk."""
    prediction: Parameters
    """All depths of multi-token prediction, with their copy of the embedding if there are several stages."""


def unit_parameters(model: ModelSpec, layout: Layout) -> UnitParameters:
    """Return what `chunk_parameters` adds up; of the layout only tp, ep, etp and whether pp is above 1 matter.

    With tied embeddings and more than one pipeline rank the last chunk holds a copy of the word embedding
    (megatron-core, setup_embeddings_and_output_layer).
    """
    layers = {kind: kind_parameters(model, layout, kind) for kind in model.possible_kinds}
    words = word_embedding_parameters(model, layout.tp)
    learned = model.position_embedding_type == "learned_absolute"
    embedding = words + (model.max_position_embeddings * model.hidden_size if learned else 0)
    has_own_words = model.untie_embeddings_and_output_weights or layout.pp > 1
    head = Parameters(dense=model.norm_parameters() + (words if has_own_words else 0))
    prediction = Parameters(dense=0)
    if model.mtp_num_layers:
        # Each depth of multi-token prediction has a layer, and a chunk that is not the first embeddings to look up,
        # beside the head's copy of a tied embedding (megatron-core, gpt_model.py:149-157, 240-254).
        depth = sum((layers[kind] for kind in model.prediction_kinds), Parameters(dense=0))
        own, copies = latent_attention.prediction_parameters(model, layout), model.prediction_copies
        copied = embedding if layout.pp > 1 else 0
        prediction = Parameters(dense=copies * (depth.dense + own) + copied, expert=copies * depth.expert)
    return UnitParameters(layers=layers, embedding=Parameters(dense=embedding), head=head, prediction=prediction)


def chunk_parameters(model: ModelSpec, layout: Layout) -> tuple[Parameters, ...]:
    """Count every chunk in model order: embeddings on the first, final norm and head on the last.

    If the first of several chunks has the depths of multi-token prediction, they look up its own embedding.
    """
    unit = unit_parameters(model, layout)
    kinds = [kinds for kinds, _ in chunk_kinds(model, layout)]
    counted = {each: Counter(each) for each in set(kinds)}
    of_kinds = {
        each: Parameters(
            dense=sum(unit.layers[kind].dense * count for kind, count in counts.items()),
            expert=sum(unit.layers[kind].expert * count for kind, count in counts.items()),
        )
        for each, counts in counted.items()
    }
    chunks = [of_kinds[each] for each in kinds]
    if layout.pp == 1 or layout.mtp_chunk or not model.mtp_num_layers:
        chunks[0] += unit.embedding
    chunks[-1] += unit.head
    chunks[layout.mtp_chunk] += unit.prediction
    return tuple(chunks)


def chunk_kinds(model: ModelSpec, layout: Layout) -> list[tuple[tuple[LayerKind, ...], int]]:
    """Return the kinds of each chunk's layers in model order, and how many of the first full recompute runs again."""
    kinds, recompute, chunks, first = model.layer_kinds, layout.recompute, [], 0
    for layers in layout.chunk_layers(model.num_layers):
        again = layers if recompute.method == "uniform" else min(recompute.num_layers, layers)
        chunks.append((kinds[first : first + layers], again if recompute.granularity == "full" else 0))
        first += layers
    return chunks


def stage_parameters(model: ModelSpec, layout: Layout) -> tuple[Parameters, ...]:
    """Count every pipeline rank, all its chunks together."""
    return by_rank(chunk_parameters(model, layout), layout.pp)


def by_rank(chunks: tuple[Parameters, ...], pp: int) -> tuple[Parameters, ...]:
    """Add up the chunks of each pipeline rank."""
    return tuple(sum(chunks[rank::pp], Parameters(dense=0)) for rank in range(pp))


def _attention(model: ModelSpec, tp: int) -> int:
    if model.latent_attention:
        return latent_attention.attention_parameters(model, model.latent_attention, tp)
    query = model.num_attention_heads * model.kv_channels // tp
    # With fewer groups than ranks, each rank holds a whole group (megatron-core, attention.py).
    key_value = 2 * max(1, model.num_query_groups // tp) * model.kv_channels
    bias = (query + key_value if model.add_bias_linear or model.add_qkv_bias else 0) + (
        model.hidden_size if model.add_bias_linear else 0
    )
    # Norms of one head's query and key (megatron-core, attention.py, q_layernorm and k_layernorm).
    norms = 2 * model.kv_channels * (2 if model.normalization == "LayerNorm" else 1) if model.qk_layernorm else 0
    return model.hidden_size * (query + key_value + query) + bias + norms


def _mlp(model: ModelSpec, ffn_hidden_size: int, tp: int) -> int:
    second = ffn_hidden_size // tp
    first = second * (2 if model.gated_linear_unit else 1)
    bias = first + model.hidden_size if model.add_bias_linear else 0
    return model.hidden_size * (first + second) + bias
