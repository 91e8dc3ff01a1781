"""Tests of parameters and FLOPs of a transformer's parts against published numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from facts_for_tests import LATENT, tiny_model
from published import llama_7b

from pipette_launch.errors import FactError
from pipette_launch.facts.model import GatedDelta, HybridLayers, LatentAttention, SparseAttention


def test_llama_has_as_many_parameters_as_published() -> None:
    """Attention, MLP and norms of all layers, two embeddings and the last norm sum to 6,738,415,616."""
    model = llama_7b().model
    layer = model.attention_parameters() + model.mlp_parameters() + 2 * model.norm_parameters()  # type: ignore[attr-defined]

    assert 6_738_415_616 == 32 * layer + 2 * 32000 * 4096 + 4096


def test_gpt_layer_is_twelve_h_squared() -> None:
    """With f = 4h a layer has 12 h^2 weights, and 13 h biases and norms."""
    model = tiny_model()
    layer = model.attention_parameters() + model.mlp_parameters() + 2 * model.norm_parameters()

    assert 12 * 64**2 + 13 * 64 == layer


def test_flops_are_two_for_each_weight_and_the_scores() -> None:
    """A token costs 2 FLOPs per weight, and 4 s h for scores and context."""
    model = tiny_model(add_bias_linear=False)

    assert 2 * 12 * 64**2 + 4 * 32 * 64 == model.kind_flops_per_token("layer")


def test_latent_attention_has_flops_of_its_own() -> None:
    """DeepSeek-V3: 187.1 million weights in each layer's attention (2412.19437), and scores over 192 + 128 channels."""
    latent = LatentAttention(
        q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128
    )
    model = tiny_model(hidden_size=7168, num_attention_heads=128, latent_attention=latent, add_bias_linear=False)

    assert 187_105_280 == latent.weights(7168, 128)
    assert 2 * 32 * 128 * (192 + 128) == model.core_flops_per_token
    assert 2 * (187_105_280 + model.mlp_parameters()) + model.core_flops_per_token == model.kind_flops_per_token(
        "layer"
    )


@pytest.mark.parametrize(
    ("changes", "flops"),
    [
        ({}, 679_477_248),
        ({"num_query_groups": 2}, 629_145_600),
        ({"gated_linear_unit": True}, 880_803_840),
        (
            {
                "num_layers": 4,
                "num_experts": 8,
                "moe_layer_freq": (0, 1, 1, 1),
                "moe_ffn_hidden_size": 96,
                "moe_shared_expert_intermediate_size": 64,
            },
            679_477_248,
        ),
        ({"num_layers": 4, "mtp_num_layers": 1}, 912_850_944),
    ],
)
def test_a_steps_flops_are_megatrons(changes: dict[str, object], flops: int) -> None:
    """The expected numbers come from core_v0.16's own count for 16 samples and tp 2."""
    assert flops == tiny_model(**changes).step_flops(16, tp=2)


GATED = {"gated_linear_unit": True, "seq_length": 4096}
LLAMA_8B = GATED | {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "vocab_size": 128256,
}
MIXTRAL = LLAMA_8B | {
    "vocab_size": 32001,
    "num_experts": 8,
    "moe_layer_freq": (1,) * 32,
    "moe_ffn_hidden_size": 14336,
}
DEEPSEEK_V3 = GATED | {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "vocab_size": 129281,
    "num_experts": 256,
    "moe_layer_freq": (0,) * 3 + (1,) * 58,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "mtp_num_layers": 1,
    "latent_attention": LatentAttention(
        q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128
    ),
}

SPARSE = SparseAttention(dsa_indexer_n_heads=64, dsa_indexer_head_dim=128, dsa_indexer_topk=2048)
"""DeepSeek-V3.2's indexer, which Megatron's number leaves out."""


QWEN3_NEXT = GATED | {
    "num_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_query_groups": 2,
    "kv_channels": 256,
    "vocab_size": 151936,
    "num_experts": 512,
    "moe_layer_freq": (1,) * 48,
    "moe_router_topk": 10,
    "moe_ffn_hidden_size": 512,
    "moe_shared_expert_intermediate_size": 512,
    "attention_output_gate": True,
    "linear_layers": (1, 1, 1, 0) * 12,
    "linear_attention": GatedDelta(
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    ),
}
LATENTS = QWEN3_NEXT | {"attention_output_gate": False, "moe_latent_size": 1024, "gated_linear_unit": False}
MIXED = LATENTS | {
    "num_layers": 5,
    "linear_layers": (),
    "moe_layer_freq": (0, 0, 1, 0, 1),
    "hybrid": HybridLayers(
        pattern="M*EGE", mamba_state_dim=128, mamba_head_dim=64, mamba_num_groups=8, mamba_num_heads=64
    ),
}


@pytest.mark.parametrize(
    ("tp", "changes", "expected"),
    [
        (4, LLAMA_8B, 48_255_467_520),
        (1, MIXTRAL, 79_709_601_792),
        (1, DEEPSEEK_V3, 260_003_960_832),
        (1, DEEPSEEK_V3 | {"sparse_attention": SPARSE}, 260_003_960_832),
        (1, QWEN3_NEXT, 22_739_681_280),
        (1, LATENTS | {"linear_layers": ()}, 16_966_483_968),
        (1, MIXED, 2_685_075_456),
    ],
    ids=["Llama 8B", "Mixtral", "DeepSeek-V3", "DeepSeek-V3.2", "Qwen3-Next", "experts on latents", "M*EGE"],
)
def test_flops_of_published_models_are_megatrons(tp: int, changes: dict[str, object], expected: int) -> None:
    """The expected numbers come from num_floating_point_operations of core_v0.16.1 and 0.18 to 0.20, for one token."""
    assert expected == tiny_model(**changes).step_flops(1, tp=tp) / 4096


@pytest.mark.parametrize(("tp", "rows"), [(1, 256), (2, 256), (4, 512)])
def test_the_vocabulary_is_padded_for_all_tensor_ranks(tp: int, rows: int) -> None:
    """It is a multiple of make_vocab_size_divisible_by * tp."""
    assert rows == tiny_model(vocab_size=200).padded_vocab_size(tp)


HYBRID = HybridLayers(
    pattern="M*-E",
    mamba_state_dim=16,
    mamba_head_dim=8,
    mamba_num_groups=2,
    mamba_num_heads=16,
    mtp_pattern="*E",
    mtp_use_repeated_layer=True,
)
EXPERTS = {"num_experts": 4, "moe_layer_freq": (0, 0, 0, 1)}


def test_layers_have_kinds() -> None:
    """Kinds follow from experts, in hybrid models from letters. Prediction depths have their own pattern."""
    hybrid = tiny_model(hybrid=HYBRID, mtp_num_layers=2, **EXPERTS)

    assert ("layer", "layer", "layer", "moe_layer") == tiny_model(**EXPERTS).layer_kinds
    assert ("layer",) * 4 == tiny_model().layer_kinds
    assert ("moe_layer",) == tiny_model(mtp_num_layers=1, **EXPERTS).prediction_kinds
    assert hybrid.possible_kinds == hybrid.layer_kinds
    assert ("attention_layer", "expert_layer") == hybrid.prediction_kinds
    assert ("delta_moe_layer", "moe_layer") == tiny_model(**QWEN3_NEXT).layer_kinds[2:4]
    assert ("moe_layer",) == tiny_model(**QWEN3_NEXT | {"mtp_num_layers": 1}).prediction_kinds
    assert (1, 2) == (hybrid.prediction_copies, tiny_model(mtp_num_layers=2).prediction_copies)


def test_layers_of_sparse_attention_share_keys() -> None:
    """After two first layers, every third layer selects keys for itself and the next two; depths select their own."""
    sparse = replace(SPARSE, dsa_indexer_topk_freq=3, dsa_indexer_skip_topk_offset=2)
    model = tiny_model(**DEEPSEEK_V3 | {"sparse_attention": sparse})
    shared = [kind.startswith("shared") for kind in model.layer_kinds]

    assert [False, False, True, True, False, True, True, False] == shared[:8]
    assert [1, 2, 2, 2, 5, 5, 5] == [sparse.source(number) for number in range(1, 8)]
    assert ("shared_sparse_mlp_layer", "shared_sparse_moe_layer") == model.layer_kinds[2:4]
    assert ("sparse_moe_layer",) == model.prediction_kinds
    assert 0 < model.kind_flops_per_token("shared_sparse_layer") < model.kind_flops_per_token("sparse_layer")
    assert SPARSE.selected_keys(8192) == sum(min(2048, token) for token in range(1, 8193)) / 8192


def test_a_letter_without_formula_is_latent_attention() -> None:
    """Layers D of releases before 0.19 count as latent attention."""
    sizes = {"num_layers": 4, "hybrid": replace(HYBRID, pattern="D-D-", mtp_pattern=""), "latent_attention": LATENT}

    assert ("latent_layer", "mlp_layer") == tiny_model(**sizes).possible_kinds
    assert ("sparse_layer", "mlp_layer") == tiny_model(**sizes, sparse_attention=SPARSE).possible_kinds


def test_a_hybrid_layer_has_the_flops_of_its_block() -> None:
    """Attention and MLP sum to a layer. Mamba has two projections and a scan of 7 FLOPs per channel and state."""
    model = tiny_model(hybrid=HYBRID, **EXPERTS)
    one = model.kind_flops_per_token

    assert one("layer") == one("attention_layer") + one("mlp_layer")
    assert one("moe_layer") == one("attention_layer") + one("expert_layer")
    assert 2 * 64 * (336 + 128) + 7 * 128 * 16 == one("mamba_layer")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "MX*-"}, "layers of a hybrid model are G D . M . - E, got X"),
        ({"pattern": ""}, "got none"),
        ({"mamba_num_groups": 3}, "does not divide mamba_num_heads=16"),
        ({"mamba_head_dim": 0}, "mamba_head_dim"),
    ],
)
def test_hybrid_layers_check_themselves(changes: dict[str, Any], message: str) -> None:
    """Letters that no release of Megatron has are refused."""
    with pytest.raises(FactError, match=message):
        replace(HYBRID, **changes)


def test_patterns_fit_their_model() -> None:
    """The pattern has a letter for each layer, and experts need a model with experts."""
    with pytest.raises(FactError, match="4 letters for 3 layers"):
        tiny_model(num_layers=3, hybrid=HYBRID, num_experts=4, moe_layer_freq=(0, 0, 1))
    with pytest.raises(FactError, match="has no experts"):
        tiny_model(hybrid=HYBRID)
    with pytest.raises(FactError, match="no linear_attention"):
        tiny_model(linear_layers=(1, 1, 1, 0))
    with pytest.raises(FactError, match="linear_layers has 2 entries for 4 layers"):
        tiny_model(linear_layers=(1, 0))


def test_windows_leave_a_share_of_the_scores() -> None:
    """The share is counted pair by pair. Megatron's count of a step's FLOPs ignores windows."""
    whole = tiny_model(seq_length=16)
    model = replace(whole, attention_windows=(3, 0) * (whole.num_layers // 2))
    pairs = sum(min(token + 1, 3) for token in range(16))

    assert model.window_share == pytest.approx((pairs / (16 * 17 / 2) + 1) / 2)
    assert model.core_flops_per_token == model.window_share * whole.core_flops_per_token
    assert model.kind_flops_per_token("layer") < whole.kind_flops_per_token("layer")
    assert model.step_flops(8, tp=1) == whole.step_flops(8, tp=1)
    assert replace(whole, attention_windows=(99,) * whole.num_layers).window_share == 1 == whole.window_share


def test_a_model_checks_itself() -> None:
    """Query groups must divide the heads, and sizes must be positive."""
    with pytest.raises(FactError, match="num_query_groups=3 does not divide num_attention_heads=4"):
        tiny_model(num_query_groups=3)
    with pytest.raises(FactError, match="hidden_size must be at least 1, got 0"):
        tiny_model(hidden_size=0)
