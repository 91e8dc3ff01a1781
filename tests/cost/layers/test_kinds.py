"""Layers of hybrid models keep what the parts of a transformer's layer keep."""

from __future__ import annotations

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers import activations, kinds
from pipette_launch.facts import HybridLayers, Job, Layout, Recompute
from pipette_launch.facts.model import LETTERS

SIZES = {"mamba_state_dim": 16, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_num_heads": 16}
EXPERTS = {"num_experts": 4, "moe_layer_freq": (0, 0, 0, 1), "moe_ffn_hidden_size": 128}


def hybrid_job(pattern: str = "M*-E", mtp: str = "", *flags: str, **changes: object) -> Job:
    """A job of four layers, one of each kind, in bf16 by Transformer Engine."""
    fields = {"params_dtype": "bf16", "transformer_impl": "transformer_engine", "mtp_num_layers": 2 * bool(mtp)}
    hybrid = HybridLayers(pattern=pattern, mtp_pattern=mtp, **SIZES)
    model = tiny_model(**{**fields, **EXPERTS, "hybrid": hybrid, **changes})
    return tiny_job(model=model, performance_flags=flags)


def plain_job() -> Job:
    """The same without layers of different kinds."""
    return hybrid_job(hybrid=None)


@pytest.mark.parametrize(("kind", "moe"), [("mlp_layer", False), ("expert_layer", True)])
def test_attention_and_the_rest_make_a_layer(kind: kinds.LayerKind, moe: bool) -> None:
    """Both blocks keep together what a transformer's layer keeps: its two inputs, norms and blocks."""
    job = hybrid_job()
    parts = [kinds.kept_bytes(job, Layout(), part) for part in ("attention_layer", kind)]

    assert activations.kept_bytes(plain_job(), Layout(), moe=moe) == sum(parts)


def test_a_mamba_layer_keeps_input_norm_and_mixer() -> None:
    """Of 32 tokens in 2 bytes: twice the hidden size, 336 projected, three times 128, deviations of 2 groups."""
    job = hybrid_job()

    assert 32 * (2 * (2 * 64 + 336 + 3 * 128) + 4 * 2) == kinds.kept_bytes(job, Layout(), "mamba_layer")
    assert kinds.backward_bytes(job, Layout(), "mamba_layer") > 32 * 2 * 336
    dropout = hybrid_job(hidden_dropout=0.1)
    assert 32 * 64 == kinds.kept_bytes(dropout, Layout(), "mamba_layer") - kinds.kept_bytes(
        job, Layout(), "mamba_layer"
    )


def test_recompute_saves_what_its_modules_are_made_of() -> None:
    """Norms before experts are kernels of their own; those of Mamba lie within its projection."""
    layout = Layout(recompute=Recompute(granularity="selective", modules=("layernorm", "moe")))
    job = hybrid_job()
    routed = kinds.kind_activations(job, layout, "expert_layer")

    assert routed.layer_input == kinds.kept_bytes(job, layout, "expert_layer")
    assert kinds.kept_bytes(job, Layout(), "mamba_layer") == kinds.kept_bytes(job, layout, "mamba_layer")


def test_depths_of_prediction_keep_the_layers_of_their_pattern() -> None:
    """Each of two depths has an attention and experts, and what every depth keeps beside its layers."""
    job = hybrid_job(mtp="*E")
    layers = sum(kinds.kept_bytes(job, Layout(), kind) for kind in ("attention_layer", "expert_layer"))

    assert 2 * (layers + 12 * 32 * 64 + 8 * 32) == kinds.prediction_bytes(job, Layout())
    assert 0 == kinds.prediction_bytes(hybrid_job(), Layout())


def test_every_letter_has_a_price() -> None:
    """No kind is left out."""
    assert all(kinds.kept_bytes(hybrid_job(), Layout(), kind) > 0 for kind in LETTERS.values())
