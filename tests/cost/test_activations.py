"""Every saved tensor by hand: s 32, b 1, h 64 in bf16, so that s*b*h is 2,048 and a coefficient of 1 is 2,048 bytes."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.activations import (
    attention_scores_bytes,
    core_attention_bytes,
    embedding_bytes,
    head_bytes,
    kept_bytes,
    layer_activations,
    prediction_bytes,
)
from pipette_launch.facts import Job, Layout, Recompute

LOG_SUM_EXP = 4 * 4 * 32
"""fp32, four heads, 32 tokens."""


def job(**changes: object) -> Job:
    """A bf16 GPT with fused attention."""
    model = {"params_dtype": "bf16", "transformer_impl": "transformer_engine", "attention_backend": "fused"}
    return tiny_job(model=tiny_model(**(model | changes)))


def llama(**changes: object) -> Job:
    """SwiGLU of width 2h and two query groups of four heads: k/a = 1/2, f/h = 2."""
    shape = {"ffn_hidden_size": 128, "num_query_groups": 2, "gated_linear_unit": True}
    return job(**(shape | changes))


def test_llama_with_fused_attention() -> None:
    """12 + 4k/a + 6f/h = 26."""
    assert kept_bytes(llama(), Layout(), moe=False) == 26 * 2048 + LOG_SUM_EXP


def test_llama_with_sequence_parallelism() -> None:
    """(12 + 4k/a + 6f/h) / t = 13."""
    layout = Layout(tp=2, sequence_parallel=True)

    assert kept_bytes(llama(), layout, moe=False) == 13 * 2048 + LOG_SUM_EXP // 2


def test_llama_with_tensor_parallelism_only() -> None:
    """8 + (4 + 4k/a + 6f/h) / t = 17."""
    assert kept_bytes(llama(), Layout(tp=2), moe=False) == 17 * 2048 + LOG_SUM_EXP // 2


def test_gpt_with_dropout() -> None:
    """34 on one rank, 10 + 24/t = 22 on two (Korthikanti et al. 2022)."""
    gpt = job(hidden_dropout=0.1)

    assert kept_bytes(gpt, Layout(), moe=False) == 34 * 2048 + LOG_SUM_EXP
    assert kept_bytes(gpt, Layout(tp=2), moe=False) == 22 * 2048 + LOG_SUM_EXP // 2


def test_no_dropout_keeps_no_masks() -> None:
    """Two masks of one byte an element are gone."""
    assert kept_bytes(job(), Layout(), moe=False) == 32 * 2048 + LOG_SUM_EXP


def test_fp32_doubles_every_tensor() -> None:
    """Sixteen tensors of four bytes; the log-sum-exp is fp32 anyway."""
    assert kept_bytes(job(params_dtype="fp32"), Layout(), moe=False) == 64 * 2048 + LOG_SUM_EXP


def test_unfused_swiglu_keeps_one_more() -> None:
    """8f/h in place of 6f/h (Fujii et al. 2024), and from core_v0.15 on 10f/h, for the offset of the linear half."""
    unfused = tiny_job(model=llama().model, performance_flags=("--no-bias-swiglu-fusion",), megatron_version="0.14.0")

    assert kept_bytes(unfused, Layout(), moe=False) == 30 * 2048 + LOG_SUM_EXP
    assert kept_bytes(replace(unfused, megatron_version="0.16.1"), Layout(), moe=False) == 34 * 2048 + LOG_SUM_EXP


def test_context_parallelism_divides_the_tokens() -> None:
    """Half the tokens, half the bytes."""
    assert kept_bytes(llama(), Layout(cp=2), moe=False) == 13 * 2048 + LOG_SUM_EXP // 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 5as/h = 10 with dropout; probabilities alone are 2as/h = 4, twice that in fp32.
        ({"attention_backend": "unfused", "attention_dropout": 0.1}, 10 * 2048),
        ({"attention_backend": "unfused"}, 4 * 2048),
        ({"transformer_impl": "local", "attention_dropout": 0.1}, 10 * 2048),
        ({"transformer_impl": "local", "attention_dropout": 0.1, "attention_backend": "flash"}, 10 * 2048),
        ({"transformer_impl": "local"}, 4 * 2048),
        ({"transformer_impl": "local", "params_dtype": "fp32"}, 8 * 2048),
        ({"attention_backend": "flash"}, LOG_SUM_EXP),
        ({"attention_backend": "auto"}, LOG_SUM_EXP),
    ],
)
def test_attention_core_by_backend(changes: dict[str, object], expected: int) -> None:
    """What autograd saves in attention decides more than anything else."""
    assert core_attention_bytes(job(**changes).model, Layout()) == expected


def test_local_scores_are_written_to_one_buffer() -> None:
    """2as/h = 4 for all layers together, and nothing with other implementations."""
    assert attention_scores_bytes(job(transformer_impl="local").model, Layout()) == 4 * 2048
    assert attention_scores_bytes(job(transformer_impl="local").model, Layout(tp=2)) == 2 * 2048
    assert attention_scores_bytes(job(attention_backend="unfused").model, Layout()) == 0


def test_the_attention_core_is_split_over_heads() -> None:
    """Two of four heads, half the probabilities."""
    assert core_attention_bytes(job(attention_backend="unfused").model, Layout(tp=2)) == 2 * 2048


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ((), 32 * 2048),
        (("core_attn",), 32 * 2048),
        (("layernorm",), 28 * 2048 + 4 * 2048),
        (("mlp",), 16 * 2048 + 4 * 2048),
        (("mlp", "core_attn"), 16 * 2048),
    ],
)
def test_selective_recompute(modules: tuple[str, ...], expected: int) -> None:
    """Norm outputs are 4, MLP is 16, unfused probabilities are 4; the default is the attention core."""
    layout = Layout(recompute=Recompute(granularity="selective", modules=modules))

    assert kept_bytes(job(attention_backend="unfused"), layout, moe=False) == expected


def test_an_expert_layer() -> None:
    """Attention 16; top 2 of width 2h: inputs 4, first matrix 8, activation and its product with the probability 16.

    A token keeps 12 bytes for each of its experts in the router, 3 for each expert in the dispatch, and there an index
    of 8 and a probability of 2 for each of its experts.
    """
    moe = job(num_experts=4, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128)
    routing = 32 * (2 * 12 + 4 * 3 + 2 * (8 + 2))

    assert kept_bytes(moe, Layout(), moe=True) == (16 + 4 + 8 + 16) * 2048 + routing + LOG_SUM_EXP


def test_experts_on_other_ranks_change_nothing_when_routing_is_balanced() -> None:
    """A rank works on as many tokens as it sends away; alltoall sends no more than it has."""
    moe = job(num_experts=4, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128)
    moe = replace(moe, performance_flags=("--moe-token-dispatcher-type alltoall",))

    assert kept_bytes(moe, Layout(dp=4, ep=4), moe=True) == kept_bytes(moe, Layout(dp=4), moe=True)


def test_moe_recompute_modules() -> None:
    """`moe` drops everything behind the router's input, `moe_act` the activation, `shared_experts` theirs."""
    moe = job(num_experts=4, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128, moe_shared_expert_intermediate_size=64)
    layer = layer_activations(moe, Layout(), moe=True)

    assert layer.recomputed(("moe_act",), moe=True) == 16 * 2048
    assert layer.recomputed(("shared_experts",), moe=True) == 4 * 2048
    assert layer.recomputed(("moe", "moe_act", "shared_experts"), moe=True) == (28 + 4) * 2048 + 32 * 56
    assert layer.recomputed(("mlp",), moe=True) == 0


def test_embedding() -> None:
    """Token ids of 8 bytes, and a mask with dropout."""
    assert embedding_bytes(job(), Layout()) == 8 * 32
    assert embedding_bytes(job(hidden_dropout=0.1), Layout()) == 8 * 32 + 2048


def test_head() -> None:
    """Norm input and output 4*s*b*h, logits and their fp32 copy 6*s*b*V/t; fp32 logits are worked on in place."""
    assert head_bytes(job(), Layout()) == 4 * 2048 + 6 * 32 * 256
    assert head_bytes(job(), Layout(tp=2)) == 4 * 2048 + 3 * 32 * 256
    assert head_bytes(job(params_dtype="fp32"), Layout()) == 8 * 2048 + 4 * 32 * 256


def test_the_heads_of_multi_token_prediction() -> None:
    """One depth doubles the logits and their fp32 copies; a second one adds a copy only."""
    assert head_bytes(job(mtp_num_layers=1), Layout()) == 4 * 2048 + 12 * 32 * 256
    assert head_bytes(job(mtp_num_layers=2), Layout()) == 4 * 2048 + 16 * 32 * 256


def test_the_layers_of_multi_token_prediction() -> None:
    """One depth: a layer, six tensors of 2*s*b*h, and token ids of 8 bytes; full recompute keeps the layer's input."""
    plain = job(mtp_num_layers=1)
    full = Layout(recompute=Recompute(granularity="full", method="uniform", num_layers=1))

    assert prediction_bytes(plain, Layout()) == kept_bytes(plain, Layout(), moe=False) + 12 * 2048 + 8 * 32
    assert prediction_bytes(plain, full) == 2 * 2048 + 12 * 2048 + 8 * 32
    assert prediction_bytes(job(), Layout()) == 0
