"""What a layer of any kind keeps for one micro-batch: a hybrid model's is a part of a transformer's, or Mamba."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipette_launch.cost.layers import activations, attention, ends
from pipette_launch.cost.layers.activations import LayerActivations, recompute_modules
from pipette_launch.cost.layers.mamba import mamba_activations, mamba_backward_bytes
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import KINDS_WITH_EXPERTS, TRANSFORMER_KINDS, LayerKind

_MLP_PARTS = ("mlp_norm", "mlp_input", "mlp", "mlp_activation", "shared_experts")
_ATTENTION_PARTS = ("attention_norm", "mlp_input", "attention", "latent_projections", "core_attention")


def kind_activations(job: Job, layout: Layout, kind: LayerKind) -> LayerActivations:
    """Count what one layer keeps for one micro-batch, by who can recompute it."""
    whole = activations.layer_activations(job, layout, moe=kind in KINDS_WITH_EXPERTS)
    if kind in TRANSFORMER_KINDS:
        return whole
    # One block and one residual in place of two.
    has_attention = kind in ("attention_layer", "mamba_layer")
    absent: dict[str, Any] = dict.fromkeys(_MLP_PARTS if has_attention else _ATTENTION_PARTS, 0)
    part = replace(whole, dropout_masks=whole.dropout_masks // 2, **absent)
    if kind != "mamba_layer":
        return part
    model, hybrid = job.model, job.model.hybrid
    assert hybrid is not None
    narrow = model.dtype_bytes if activations.computes_in_fp8(job) else 1
    mixer = mamba_activations(model, hybrid, layout, narrow=narrow)
    return replace(part, attention=mixer, latent_projections=0, core_attention=0)


def kept_bytes(job: Job, layout: Layout, kind: LayerKind) -> int:
    """What a layer keeps for one micro-batch when it is not fully recomputed."""
    if kind in TRANSFORMER_KINDS:
        return activations.kept_bytes(job, layout, moe=kind == "moe_layer")
    found, modules = kind_activations(job, layout, kind), recompute_modules(layout)
    held = 0
    if kind == "attention_layer" and "core_attn" in modules:
        held = attention.held_for_recompute_bytes(job.model, layout)
    return found.total - found.recomputed(modules, moe=kind == "expert_layer") + held


def backward_bytes(job: Job, layout: Layout, kind: LayerKind) -> int:
    """What the backward of one layer needs for a while; an upper bound for layers of one block."""
    if kind != "mamba_layer":
        return activations.backward_bytes(job, layout, moe=kind in KINDS_WITH_EXPERTS)
    hybrid = job.model.hybrid
    assert hybrid is not None
    return mamba_backward_bytes(job.model, hybrid, layout) + activations.residual_bytes(job.model, layout)


def prediction_bytes(job: Job, layout: Layout) -> int:
    """Count what the depths of multi-token prediction keep for one micro-batch, their layers' recompute included."""
    model = job.model
    if not model.hybrid or not model.mtp_num_layers:
        return activations.prediction_bytes(job, layout)
    if layout.recompute.granularity == "full":
        layers = activations.residual_bytes(model, layout) * len(model.prediction_kinds)
    else:
        layers = sum(kept_bytes(job, layout, kind) for kind in model.prediction_kinds)
    own = attention.prediction_activations(model, layout) + ends.embedding_bytes(job, layout)
    return model.mtp_num_layers * (layers + own)
