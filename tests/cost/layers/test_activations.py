"""Every saved tensor by hand: s 32, b 1, h 64 in bf16, so that s*b*h is 2,048 and a coefficient of 1 is 2,048 bytes."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.activations import (
    backward_bytes,
    kept_bytes,
    layer_activations,
    prediction_bytes,
    residual_bytes,
    stream_bytes,
)
from pipette_launch.cost.layers.experts import exchange_bytes
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
    ("modules", "expected"),
    [
        ((), 32 * 2048),
        (("core_attn",), 32 * 2048),
        # Norms are part of the matrices: nothing to gain alone, 2 more with the MLP.
        (("layernorm",), 32 * 2048 + 4 * 2048),
        (("mlp",), 14 * 2048 + 4 * 2048),
        (("mlp", "core_attn"), 14 * 2048),
    ],
)
def test_selective_recompute(modules: tuple[str, ...], expected: int) -> None:
    """Norm outputs are 4, MLP is 16, unfused probabilities are 4; the default is the attention core."""
    layout = Layout(recompute=Recompute(granularity="selective", modules=modules))

    assert kept_bytes(job(attention_backend="unfused"), layout, moe=False) == expected


def test_selective_recompute_of_local_layers() -> None:
    """Megatron's own layers have their norms apart: both go with `layernorm`, neither with `mlp`."""
    local = job(transformer_impl="local")

    for modules, expected in ((("layernorm",), 28 * 2048 + 4 * 2048), (("mlp",), 16 * 2048 + 4 * 2048)):
        layout = Layout(recompute=Recompute(granularity="selective", modules=modules))
        assert kept_bytes(local, layout, moe=False) == expected


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


def test_fp32_residual_stream() -> None:
    """The inputs of the layer and of its second half double: 4 more."""
    wide = tiny_job(model=job().model, performance_flags=("--fp32-residual-connection",))

    assert kept_bytes(wide, Layout(), moe=False) == (32 + 4) * 2048 + LOG_SUM_EXP
    assert stream_bytes(wide, Layout()) == 2 * residual_bytes(wide.model, Layout())


def test_fp8_keeps_the_inputs_of_matrices_in_one_byte() -> None:
    """Norm outputs 4 become 2, the activation 8 becomes 4, and the projection has its input apart: 1 more."""
    narrow = tiny_job(model=job().model, performance_flags=("--fp8-format hybrid",))

    assert kept_bytes(narrow, Layout(), moe=False) == (32 - 2 - 4 + 1) * 2048 + LOG_SUM_EXP


def test_backward_of_a_layer() -> None:
    """Second matrix: the output's gradient 2 and its input's 8; the activation: 2 and the first matrix's output 8."""
    assert backward_bytes(job(), Layout(), moe=False) == 10 * 2048
    # Three times the width in gradients of a gated unit's first matrix: f/h 2, so 2 + 8.
    assert backward_bytes(llama(), Layout(), moe=False) == 10 * 2048
    # Sequence parallelism gathers the gradient: 1 + 2 + 4; without it 2 + 4.
    assert backward_bytes(job(), Layout(tp=2, sequence_parallel=True), moe=False) == 7 * 2048
    assert backward_bytes(job(), Layout(tp=2), moe=False) == 6 * 2048
    # With dropout the gradient is there before and after the mask.
    assert backward_bytes(job(hidden_dropout=0.1), Layout(), moe=False) == 12 * 2048


def test_a_matrix_gradient_of_its_own() -> None:
    """Without accumulation into the buffer the second matrix's gradient, 2*h*f, is there for a while."""
    apart = tiny_job(model=job().model, performance_flags=("--no-gradient-accumulation-fusion",))

    assert backward_bytes(apart, Layout(), moe=False) == 10 * 2048 + 2 * 64 * 256


def test_backward_of_long_unfused_attention() -> None:
    """Scores outweigh the MLP: gradients 4, of query, key and value 8, of scores 2as/h = 64; 22 of the layer freed."""
    long = job(attention_backend="unfused", seq_length=512, max_position_embeddings=512)
    unit = 16 * 2048

    assert backward_bytes(long, Layout(), moe=False) == (4 + 8 + 64 - 20) * unit


def test_the_layers_of_multi_token_prediction() -> None:
    """One depth: a layer, six tensors of 2*s*b*h, and token ids of 8 bytes; full recompute keeps the layer's input."""
    plain = job(mtp_num_layers=1)
    full = Layout(recompute=Recompute(granularity="full", method="uniform", num_layers=1))

    assert prediction_bytes(plain, Layout()) == kept_bytes(plain, Layout(), moe=False) + 12 * 2048 + 8 * 32
    assert prediction_bytes(plain, full) == 2 * 2048 + 12 * 2048 + 8 * 32
    assert prediction_bytes(job(), Layout()) == 0


def test_the_backward_of_an_expert_layer() -> None:
    """The experts' own, or that of unfused attention once the experts' share is freed; overlapped, a layer more."""
    moe = job(num_experts=4, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128)
    long = replace(moe, model=replace(moe.model, attention_backend="unfused", seq_length=4096))
    overlapped = replace(moe, performance_flags=("--overlap-moe-expert-parallel-comm",))
    plain = backward_bytes(moe, Layout(), moe=True)

    assert plain == exchange_bytes(moe, Layout())
    assert backward_bytes(long, Layout(), moe=True) > exchange_bytes(long, Layout())
    assert backward_bytes(overlapped, Layout(), moe=True) == plain + kept_bytes(overlapped, Layout(), moe=True)
