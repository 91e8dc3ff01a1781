"""Parts of a layer's FLOPs, by hand."""

from facts_for_tests import tiny_model

from pipette_launch.cost.compute.flop_shares import attention_core_share, recompute_share
from pipette_launch.facts import Layout, Recompute


def test_selective_recompute_is_priced_by_flops() -> None:
    """With h 64, f 256, s 32: the attention core is 4*32*64 of 2*matrices + 4*32*64 FLOPs a token."""
    model = tiny_model(add_bias_linear=False)
    core = 4 * 32 * 64
    layer = 2 * (4 * 64 * 64 + 2 * 64 * 256) + core
    core_only = Layout(recompute=Recompute(granularity="selective"))
    with_mlp = Layout(recompute=Recompute(granularity="selective", modules=("core_attn", "mlp", "layernorm")))

    assert recompute_share(model, core_only, 0, "layer") == core / layer
    assert recompute_share(model, with_mlp, 0, "layer") == (core + 2 * 2 * 64 * 256) / layer
    assert attention_core_share(model) == core / layer


def test_moe_recompute_counts_shared_experts_once() -> None:
    """`moe` holds them already."""
    model = tiny_model(
        num_experts=4, moe_layer_freq=(1,) * 4, moe_shared_expert_intermediate_size=64, add_bias_linear=False
    )
    both = Layout(recompute=Recompute(granularity="selective", modules=("moe", "shared_experts")))
    expected = (2 * 2 * 2 * 64 * 256 + 2 * 2 * 64 * 64) / model.kind_flops_per_token("moe_layer")

    assert recompute_share(model, both, 0, "moe_layer") == expected
