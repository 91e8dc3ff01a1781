"""Kept bytes, offloading and FLOP shares of layers of each kind, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from facts_for_tests import DELTA_NET, changed_job, tiny_job, tiny_model

from pipette_launch.cost.layers import kinds
from pipette_launch.cost.layers.block import Sizes
from pipette_launch.cost.layers.kinds import (
    Offloaded,
    attention_core_share,
    backward_bytes,
    kept_bytes,
    kind_activations,
    offloaded,
    prediction_bytes,
    recompute_share,
)
from pipette_launch.cost.layers.mlp import Experts
from pipette_launch.cost.layers.sparse import Sparse
from pipette_launch.facts import HybridLayers, Job, LatentAttention, Layout, Recompute, SparseAttention
from pipette_launch.facts.model import LETTERS

SIZES = {"mamba_state_dim": 16, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_num_heads": 16}
SPARSE = SparseAttention(dsa_indexer_n_heads=4, dsa_indexer_head_dim=64, dsa_indexer_topk=16)
EXPERT_SIZES = {"num_experts": 4, "moe_layer_freq": (0, 0, 0, 1), "moe_ffn_hidden_size": 128}


def hybrid_job(pattern: str = "M*-E", mtp: str = "", *flags: str, **changes: object) -> Job:
    """A job of four layers, one of each kind, in bf16 by Transformer Engine."""
    fields = {"params_dtype": "bf16", "transformer_impl": "transformer_engine", "mtp_num_layers": 2 * bool(mtp)}
    hybrid = HybridLayers(pattern=pattern, mtp_pattern=mtp, **SIZES)
    model = tiny_model(**{**fields, **EXPERT_SIZES, "hybrid": hybrid, "linear_attention": DELTA_NET, **changes})
    return tiny_job(model=model, performance_flags=flags)


def plain_job() -> Job:
    """The same without layers of different kinds."""
    return hybrid_job(hybrid=None)


@pytest.mark.parametrize(
    ("mixer", "kind", "whole"),
    [
        ("attention_layer", "mlp_layer", "layer"),
        ("attention_layer", "expert_layer", "moe_layer"),
        ("latent_layer", "mlp_layer", "layer"),
        ("delta_layer", "mlp_layer", "delta_mlp_layer"),
        ("delta_layer", "expert_layer", "delta_moe_layer"),
    ],
)
def test_two_layers_of_a_pattern_make_a_layer(
    mixer: kinds.LayerKind, kind: kinds.LayerKind, whole: kinds.LayerKind
) -> None:
    """Two layers of a pattern have the parameters and kept bytes of the transformer's layer of the same blocks."""
    job, layout = hybrid_job(), Layout()

    for count in (kinds.kept_bytes, lambda job, layout, one: kinds.kind_parameters(job, layout, one).count):
        parts = sum(count(job, layout, part) for part in (mixer, kind))
        assert count(plain_job(), layout, whole) == parts


def test_a_mamba_layer_keeps_input_norm_and_mixer() -> None:
    """32 tokens in 2 bytes: twice the hidden size, 336 projected, three times 128, deviations of 2 groups."""
    job = hybrid_job()

    assert 32 * (2 * (2 * 64 + 336 + 3 * 128) + 4 * 2) == kinds.kept_bytes(job, Layout(), "mamba_layer")
    assert kinds.backward_bytes(job, Layout(), "mamba_layer") > 32 * 2 * 336
    dropout = hybrid_job(hidden_dropout=0.1)
    assert 32 * 64 == kinds.kept_bytes(dropout, Layout(), "mamba_layer") - kinds.kept_bytes(
        job, Layout(), "mamba_layer"
    )


def test_recompute_saves_what_its_modules_are_made_of() -> None:
    """Norms before experts are separate kernels; Mamba's norm is part of its projection."""
    layout = Layout(recompute=Recompute(granularity="selective", modules=("layernorm", "moe")))
    job = hybrid_job()
    routed = kinds.kind_activations(job, layout, "expert_layer")

    assert routed.mlp_input == kinds.kept_bytes(job, layout, "expert_layer")
    assert kinds.kept_bytes(job, Layout(), "mamba_layer") == kinds.kept_bytes(job, layout, "mamba_layer")


def test_depths_of_prediction_keep_the_layers_of_their_pattern() -> None:
    """Each of two depths has an attention and experts, and what every depth keeps beside its layers."""
    job = hybrid_job(mtp="*E")
    layers = sum(kinds.kept_bytes(job, Layout(), kind) for kind in ("attention_layer", "expert_layer"))

    assert 2 * (layers + 12 * 32 * 64) == kinds.prediction_bytes(job, Layout())
    assert 0 == kinds.prediction_bytes(hybrid_job(), Layout())


def test_every_letter_has_a_price() -> None:
    """No kind is left out."""
    every = [*LETTERS.values(), "shared_sparse_layer", "sparse_mlp_layer"]
    job = hybrid_job(latent_attention=LATENT, sparse_attention=SPARSE)

    assert all(kinds.kept_bytes(job, Layout(), kind) > 0 for kind in every)
    assert all(kinds.backward_bytes(job, Layout(), kind) > 0 for kind in every)


def test_recompute_of_a_sparse_core_keeps_its_inputs() -> None:
    """Recompute of the core frees scores and indices, but keeps keys, and queries that torch's core has in fp32."""
    job = hybrid_job(latent_attention=LATENT, sparse_attention=SPARSE)
    again = Layout(recompute=Recompute(granularity="selective"))
    block = Sparse(job, Layout())

    saved = kinds.kept_bytes(job, Layout(), "sparse_layer") - kinds.kept_bytes(job, again, "sparse_layer")
    assert block.core_bytes() - block.held_for_recompute_bytes() == saved
    share = job.model.sparse_core_flops(has_indexer=True) / job.model.kind_flops_per_token("sparse_layer")
    assert share == kinds.attention_core_share(job, "sparse_layer")


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
    assert kept_bytes(llama(), Layout(), "layer") == 26 * 2048 + LOG_SUM_EXP


def test_llama_with_sequence_parallelism() -> None:
    """(12 + 4k/a + 6f/h) / t = 13."""
    layout = Layout(tp=2, sequence_parallel=True)

    assert kept_bytes(llama(), layout, "layer") == 13 * 2048 + LOG_SUM_EXP // 2


def test_llama_with_tensor_parallelism_only() -> None:
    """8 + (4 + 4k/a + 6f/h) / t = 17."""
    assert kept_bytes(llama(), Layout(tp=2), "layer") == 17 * 2048 + LOG_SUM_EXP // 2


def test_gpt_with_dropout() -> None:
    """34 on one rank, 10 + 24/t = 22 on two (Korthikanti et al. 2022)."""
    gpt = job(hidden_dropout=0.1)

    assert kept_bytes(gpt, Layout(), "layer") == 34 * 2048 + LOG_SUM_EXP
    assert kept_bytes(gpt, Layout(tp=2), "layer") == 22 * 2048 + LOG_SUM_EXP // 2


def test_no_dropout_keeps_no_masks() -> None:
    """Two masks of one byte an element are gone."""
    assert kept_bytes(job(), Layout(), "layer") == 32 * 2048 + LOG_SUM_EXP


def test_fp32_doubles_every_tensor() -> None:
    """Sixteen tensors of four bytes; the log-sum-exp is fp32 anyway."""
    assert kept_bytes(job(params_dtype="fp32"), Layout(), "layer") == 64 * 2048 + LOG_SUM_EXP


def test_unfused_swiglu_keeps_one_more() -> None:
    """10f/h in place of 6f/h: 8f/h (Fujii et al. 2024), and 2f/h for the offset of the linear half."""
    unfused = tiny_job(model=llama().model, performance_flags=("--no-bias-swiglu-fusion",))

    assert kept_bytes(unfused, Layout(), "layer") == 34 * 2048 + LOG_SUM_EXP


def test_context_parallelism_divides_the_tokens() -> None:
    """Half the tokens, half the bytes."""
    assert kept_bytes(llama(), Layout(cp=2), "layer") == 13 * 2048 + LOG_SUM_EXP // 2


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

    assert kept_bytes(job(attention_backend="unfused"), layout, "layer") == expected


def test_selective_recompute_of_local_layers() -> None:
    """Megatron's own layers have their norms apart: both go with `layernorm`, neither with `mlp`."""
    local = job(transformer_impl="local")

    for modules, expected in ((("layernorm",), 28 * 2048 + 4 * 2048), (("mlp",), 16 * 2048 + 4 * 2048)):
        layout = Layout(recompute=Recompute(granularity="selective", modules=modules))
        assert kept_bytes(local, layout, "layer") == expected


def test_an_expert_layer() -> None:
    """Attention 16; top 2 of width 2h: inputs 4, first matrix 8, activation and its product with the probability 16.

    A token keeps 12 bytes for each of its experts in the router, 3 for each expert in the dispatch, and there an index
    of 8 and a probability of 2 for each of its experts.
    """
    moe = job(num_experts=4, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128)
    routing = 32 * (2 * 12 + 4 * 3 + 2 * (8 + 2))

    assert kept_bytes(moe, Layout(), "moe_layer") == (16 + 4 + 8 + 16) * 2048 + routing + LOG_SUM_EXP


def test_experts_on_other_ranks_change_nothing_when_routing_is_balanced() -> None:
    """A rank works on as many tokens as it sends away; alltoall sends no more than it has."""
    moe = job(num_experts=4, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128)
    moe = changed_job(moe, performance_flags=("--moe-token-dispatcher-type alltoall",))

    assert kept_bytes(moe, Layout(dp=4, ep=4), "moe_layer") == kept_bytes(moe, Layout(dp=4), "moe_layer")


def test_moe_recompute_modules() -> None:
    """`moe` drops everything behind the router's input, `moe_act` the activation, `shared_experts` theirs."""
    moe = job(num_experts=4, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128, moe_shared_expert_intermediate_size=64)
    layer = kind_activations(moe, Layout(), "moe_layer")

    assert layer.recomputed(("moe_act",)) == 16 * 2048
    assert layer.recomputed(("shared_experts",)) == 4 * 2048
    assert layer.recomputed(("moe", "moe_act", "shared_experts")) == (28 + 4) * 2048 + 32 * 56
    assert layer.recomputed(("mlp",)) == 0


def test_fp32_residual_stream() -> None:
    """The inputs of the layer and of its second half double: 4 more."""
    wide = tiny_job(model=job().model, performance_flags=("--fp32-residual-connection",))

    assert kept_bytes(wide, Layout(), "layer") == (32 + 4) * 2048 + LOG_SUM_EXP
    assert Sizes(wide, Layout()).stream_bytes() == 2 * Sizes(wide, Layout()).residual_bytes


def test_fp8_keeps_the_inputs_of_matrices_in_one_byte() -> None:
    """Norm outputs 4 become 2, the activation 8 becomes 4, and the projection has its input apart: 1 more."""
    narrow = tiny_job(model=job().model, performance_flags=("--fp8-format hybrid",))

    assert kept_bytes(narrow, Layout(), "layer") == (32 - 2 - 4 + 1) * 2048 + LOG_SUM_EXP


def test_backward_of_a_layer() -> None:
    """Second matrix: the output's gradient 2 and its input's 8; the activation: 2 and the first matrix's output 8."""
    assert backward_bytes(job(), Layout(), "layer") == 10 * 2048
    # Three times the width in gradients of a gated unit's first matrix: f/h 2, so 2 + 8.
    assert backward_bytes(llama(), Layout(), "layer") == 10 * 2048
    # Sequence parallelism gathers the gradient: 1 + 2 + 4; without it 2 + 4.
    assert backward_bytes(job(), Layout(tp=2, sequence_parallel=True), "layer") == 7 * 2048
    assert backward_bytes(job(), Layout(tp=2), "layer") == 6 * 2048
    # With dropout the gradient is there before and after the mask.
    assert backward_bytes(job(hidden_dropout=0.1), Layout(), "layer") == 12 * 2048


def test_a_matrix_gradient_of_its_own() -> None:
    """Without accumulation into the buffer the second matrix's gradient, 2*h*f, is there for a while."""
    apart = tiny_job(model=job().model, performance_flags=("--no-gradient-accumulation-fusion",))

    assert backward_bytes(apart, Layout(), "layer") == 10 * 2048 + 2 * 64 * 256


def test_backward_of_long_unfused_attention() -> None:
    """Scores outweigh the MLP: gradients 4, of query, key and value 8, of scores 2as/h = 64; 22 of the layer freed."""
    long = job(attention_backend="unfused", seq_length=512, max_position_embeddings=512)
    unit = 16 * 2048

    assert backward_bytes(long, Layout(), "layer") == (4 + 8 + 64 - 20) * unit


def test_the_layers_of_multi_token_prediction() -> None:
    """One depth: a layer, and six tensors of 2*s*b*h; full recompute keeps the layer's input."""
    plain = job(mtp_num_layers=1)
    full = Layout(recompute=Recompute(granularity="full", method="uniform", num_layers=1))

    assert prediction_bytes(plain, Layout()) == kept_bytes(plain, Layout(), "layer") + 12 * 2048
    assert prediction_bytes(plain, full) == 2 * 2048 + 12 * 2048
    # The kept input of a recomputed layer is in fp32 with `--fp32-residual-connection`.
    wide = changed_job(plain, performance_flags=("--fp32-residual-connection",))
    assert prediction_bytes(wide, full) == 4 * 2048 + 12 * 2048
    assert prediction_bytes(job(), Layout()) == 0


def test_the_backward_of_an_expert_layer() -> None:
    """The experts' need, or unfused attention's after the experts' share is freed; with overlap one more layer."""
    moe = job(num_experts=4, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128)
    long = replace(moe, model=replace(moe.model, attention_backend="unfused", seq_length=4096))
    overlapped = changed_job(moe, performance_flags=("--overlap-moe-expert-parallel-comm",))
    plain = backward_bytes(moe, Layout(), "moe_layer")

    assert plain == Experts(moe, Layout()).backward_bytes()
    assert backward_bytes(long, Layout(), "moe_layer") > Experts(long, Layout()).backward_bytes()
    assert backward_bytes(overlapped, Layout(), "moe_layer") == plain + kept_bytes(overlapped, Layout(), "moe_layer")


# Tokens 1024 = n, rows of experts 2048 = M.
LATENT = LatentAttention(q_lora_rank=96, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=24)
HIDDEN = 2 * 1024 * 128
ALL = "attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act"


def offloading_job(modules: str, *flags: str, **changes: Any) -> Job:
    """A bf16 model of experts, 4 heads of 32 channels and 2 query groups, that offloads tensors of any size."""
    shape = {
        "params_dtype": "bf16",
        "transformer_impl": "transformer_engine",
        "attention_backend": "fused",
        "hidden_size": 128,
        "kv_channels": 32,
        "num_query_groups": 2,
        "seq_length": 1024,
        "gated_linear_unit": True,
        "num_experts": 4,
        "moe_layer_freq": (1,) * 4,
        "moe_ffn_hidden_size": 64,
    }
    offloading = ("--fine-grained-activation-offloading", f"--offload-modules {modules}", "--moe-grouped-gemm")
    given = flags or ("--min-offloaded-tensor-size 1",)
    return tiny_job(1, model=tiny_model(**(shape | changes)), performance_flags=(*offloading, *given))


def of(this: Job, *, moe: bool = True, recomputed: tuple[str, ...] = ()) -> Offloaded:
    """Offloaded bytes of a layer without parallelism."""
    layout = Layout()
    if recomputed:
        layout = Layout(recompute=Recompute(granularity="selective", modules=recomputed))
    return offloaded(this, layout, "moe_layer" if moe else "layer")


@pytest.mark.parametrize(
    ("modules", "changes", "expected"),
    [
        # The norm is part of the matrix: its input and its output.
        ("qkv_linear", {}, (2 * HIDDEN, 0, 2 * HIDDEN)),
        # 4 query heads, 2 of key and 2 of value; the output stays for the projection, and is copied all the same.
        ("core_attn", {}, (2 * HIDDEN, 0, 3 * HIDDEN)),
        ("core_attn attn_proj", {}, (3 * HIDDEN, 0, 4 * HIDDEN)),
        # Transformer Engine has no norm of its own there.
        ("attn_norm", {}, (0, 0, 0)),
        ("attn_norm", {"latent_attention": LATENT}, (HIDDEN, 0, HIDDEN)),
        ("mlp_norm", {}, (0, HIDDEN, HIDDEN)),
        # The norm's output, and the latents of query and of key and value.
        ("qkv_linear", {"latent_attention": LATENT}, (HIDDEN + 2 * 1024 * (96 + 80), 0, HIDDEN + 2 * 1024 * (96 + 80))),
        ("core_attn", {"latent_attention": LATENT}, (2 * 1024 * 4 * 120, 0, 2 * 1024 * 4 * 144)),
        ("expert_fc1", {}, (0, 2 * 2048 * 128, 2 * 2048 * 128)),
        ("moe_act", {}, (0, 2 * 2048 * 128, 2 * 2048 * 128)),
        # Input and output of the first matrices, and input of the second matrices, half as wide.
        ("fused_group_mlp", {}, (0, 2 * 2048 * 320, 2 * 2048 * 320)),
    ],
)
def test_what_leaves_by_module(modules: str, changes: dict[str, Any], expected: tuple[int, int, int]) -> None:
    """Bytes that attention and MLP no longer keep, and bytes copied."""
    found = of(offloading_job(modules, **changes))

    assert expected == (found.attention, found.mlp, found.moved)


def test_a_share_of_the_modules_leaves() -> None:
    """With a fraction of 0.25 a layer keeps three quarters of its offloaded bytes, in the mean."""
    flags = ("--min-offloaded-tensor-size 1", "--activation-offload-fraction 0.25")
    all_leave = offloading_job("moe_act")
    offloading = all_leave.performance_flags[:-1]
    some_leave = changed_job(all_leave, megatron_version="0.19.0", performance_flags=(*offloading, *flags))

    kept, kept_more = (kept_bytes(one, Layout(), "moe_layer") for one in (all_leave, some_leave))
    assert kept_more - kept == 3 * of(all_leave).left // 4


def test_small_tensors_stay() -> None:
    """A query of 2^17 elements leaves, keys and values of half as many do not; Megatron's default is 2^20."""
    assert of(offloading_job("core_attn", "--min-offloaded-tensor-size 131072")).attention == HIDDEN
    assert of(offloading_job("core_attn", "--moe-permute-fusion")) == Offloaded()


def test_only_named_modules_of_transformer_engine_leave() -> None:
    """Nothing without the flag, nothing of Megatron's own layers, nothing of a dense MLP."""
    plain = changed_job(
        offloading_job(ALL), performance_flags=("--offload-modules core_attn", "--min-offloaded-tensor-size 1")
    )

    assert of(plain) == Offloaded()
    assert of(offloading_job(ALL, transformer_impl="local")) == Offloaded()
    assert of(offloading_job(ALL), moe=False).mlp == 0


def test_what_runs_again_is_counted_once() -> None:
    """A recomputed activation leaves its input alone, recomputed experts and attention cores leave nothing."""
    unfused = offloading_job("moe_act", "--min-offloaded-tensor-size 1", "--no-bias-swiglu-fusion")

    assert of(unfused).mlp > of(unfused, recomputed=("moe_act",)).mlp == 2 * 2048 * 128
    assert of(offloading_job("core_attn"), recomputed=("core_attn",)) == Offloaded()
    assert of(offloading_job("expert_fc1 moe_act"), recomputed=("moe",)) == Offloaded()


def test_a_layer_keeps_what_does_not_leave() -> None:
    """The bytes that it keeps for one micro-batch are fewer by what left."""
    selective = Layout(recompute=Recompute(granularity="selective", modules=("moe_act",)))
    for layout in (Layout(), selective):
        away, there = (kept_bytes(offloading_job(modules), layout, "moe_layer") for modules in (ALL, "attn_norm"))

        assert there - away == offloaded(offloading_job(ALL), layout, "moe_layer").left


def test_layers_of_hybrid_models_offload_the_parts_that_they_have() -> None:
    """Experts offload theirs; while a Mamba layer runs its backward, the experts below may be back already."""
    words = ("--fine-grained-activation-offloading", "--offload-modules expert_fc1", "--moe-grouped-gemm")
    flags = (*words, "--min-offloaded-tensor-size 1")
    whole, away = hybrid_job("M*-E", "", "--moe-grouped-gemm"), hybrid_job("M*-E", "", *flags)
    moved = offloaded(away, Layout(), "expert_layer").moved

    assert [0, 0, 0] == [
        offloaded(away, Layout(), kind).left for kind in ("mamba_layer", "attention_layer", "mlp_layer")
    ]
    assert moved == kept_bytes(whole, Layout(), "expert_layer") - kept_bytes(away, Layout(), "expert_layer") > 0
    assert moved == backward_bytes(away, Layout(), "mamba_layer") - backward_bytes(whole, Layout(), "mamba_layer")


def test_unfused_cores_bring_their_probabilities_back_twice() -> None:
    """Softmax and product save one tensor without dropout; and a forward beside them makes scores of its own."""
    scores = 2 * 4 * 1024 * 1024
    found = of(offloading_job("core_attn", attention_backend="unfused"))

    assert (2 * HIDDEN + scores, 2 * HIDDEN + 2 * scores) == (found.attention, found.moved)
    assert found.in_forward == found.left + found.moved + scores
    assert (
        of(offloading_job("core_attn", attention_backend="unfused", attention_dropout=0.1)).moved
        == 2 * HIDDEN + 5 * scores // 2
    )


def test_selective_recompute_is_priced_by_flops() -> None:
    """With h 64, f 256, s 32: the attention core is 4*32*64 of 2*matrices + 4*32*64 FLOPs a token."""
    model = tiny_model(add_bias_linear=False)
    core = 4 * 32 * 64
    layer = 2 * (4 * 64 * 64 + 2 * 64 * 256) + core
    core_only = Layout(recompute=Recompute(granularity="selective"))
    with_mlp = Layout(recompute=Recompute(granularity="selective", modules=("core_attn", "mlp", "layernorm")))

    assert recompute_share(tiny_job(model=model), core_only, 0, "layer") == core / layer
    assert recompute_share(tiny_job(model=model), with_mlp, 0, "layer") == (core + 2 * 2 * 64 * 256) / layer
    assert attention_core_share(tiny_job(model=model)) == core / layer


def test_moe_recompute_counts_shared_experts_once() -> None:
    """`moe` holds them already."""
    model = tiny_model(
        num_experts=4, moe_layer_freq=(1,) * 4, moe_shared_expert_intermediate_size=64, add_bias_linear=False
    )
    both = Layout(recompute=Recompute(granularity="selective", modules=("moe", "shared_experts")))
    expected = (2 * 2 * 2 * 64 * 256 + 2 * 2 * 64 * 64) / model.kind_flops_per_token("moe_layer")

    assert recompute_share(tiny_job(model=model), both, 0, "moe_layer") == expected
