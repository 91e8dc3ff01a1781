"""Which part of a layer's FLOPs one of its modules or matrices has, and so of the seconds that a layer was timed at."""

from __future__ import annotations

from pipette_launch.cost.layers.activations import recompute_modules
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import KINDS_WITH_ATTENTION, KINDS_WITH_EXPERTS, LayerKind, ModelSpec


def recompute_share(model: ModelSpec, layout: Layout, index_in_chunk: int, kind: LayerKind) -> float:
    """Part of a layer's forward that its backward runs again.

    Full recompute runs the whole layer again: all with method uniform, the first `num_layers` of each chunk with block
    (transformer_block.py). Selective recompute runs its modules, priced by their share of the layer's FLOPs; norms and
    activation functions count as nothing.
    """
    recompute = layout.recompute
    if recompute.granularity == "full":
        return 1.0 if recompute.method == "uniform" or index_in_chunk < recompute.num_layers else 0.0
    if recompute.granularity == "none":
        return 0.0
    flops = _module_flops(model, kind)
    names = set(recompute_modules(layout))
    names -= {"shared_experts"} if "moe" in names else set()
    return sum(flops.get(name, 0.0) for name in names) / model.kind_flops_per_token(kind)


def column_share(model: ModelSpec, kind: LayerKind) -> float:
    """Part of a layer's FLOPs in one column-parallel matrix: the mean of those it has, 0 where it has none.

    Behind the input gradient of such a matrix its input is gathered again, behind its weight gradient the input's
    gradients are summed (layers.py, LinearWithGradAccumulationAndAsyncCommunication).
    """
    heads = model.num_attention_heads + 2 * model.num_query_groups
    columns = []
    if kind == "mamba_layer" and model.hybrid:
        columns.append(2.0 * model.hidden_size * model.hybrid.mamba_projected)
    elif kind in KINDS_WITH_ATTENTION and model.latent_attention:
        # Two of them: up to the queries, and up to keys and values.
        columns.append(1.0 * model.latent_attention.up_weights(model.num_attention_heads))
    elif kind in KINDS_WITH_ATTENTION:
        columns.append(2.0 * model.hidden_size * heads * model.kv_channels)
    if kind in ("layer", "mlp_layer"):
        columns.append(2.0 * model.hidden_size * model.ffn_hidden_size * (2 if model.gated_linear_unit else 1))
    return sum(columns) / max(len(columns), 1) / model.kind_flops_per_token(kind)


def attention_core_share(model: ModelSpec, kind: LayerKind = "layer") -> float:
    """Part of a layer's FLOPs that is attention scores and context."""
    return _module_flops(model, kind).get("core_attn", 0.0) / model.kind_flops_per_token(kind)


def _module_flops(model: ModelSpec, kind: LayerKind) -> dict[str, float]:
    """Forward FLOPs for each token, 2 for each weight (Narayanan et al. 2021, appendix)."""
    found = {}
    if kind in KINDS_WITH_ATTENTION:
        found["core_attn"] = model.core_flops_per_token
        if model.latent_attention:
            found["mla_up_proj"] = 2.0 * model.latent_attention.up_weights(model.num_attention_heads)
    if kind in ("layer", "mlp_layer"):
        found["mlp"] = 2.0 * model.mlp_parameters()
    if kind in KINDS_WITH_EXPERTS:
        shared_width = model.moe_shared_expert_intermediate_size
        shared = 2.0 * model.mlp_parameters(shared_width) if shared_width else 0.0
        routed = 2.0 * model.moe_router_topk * model.mlp_parameters(model.moe_ffn_hidden_size)
        found |= {"moe": routed + shared, "shared_experts": shared}
    return found
