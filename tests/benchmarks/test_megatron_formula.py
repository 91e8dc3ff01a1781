"""Megatron's formula gives what Megatron printed, and the terms by hand."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from published import GPT_65B_LAYOUT, LLAMA_LAYOUT, gpt_65b, llama_7b

from benchmarks.estimators.megatron_formula import megatron_formula, megatron_formula_bytes
from pipette_launch.errors import LayoutError
from pipette_launch.facts import Batch, Job, LatentAttention, Layout, Recompute
from pipette_launch.text import MIB

SELECTIVE = Recompute(granularity="selective")
MOE = {"num_experts": 4, "moe_layer_freq": (0, 1, 1, 1), "moe_ffn_hidden_size": 128}


def job(**changes: object) -> Job:
    """Four layers of hidden size 64, one sample a step on each replica."""
    return replace(tiny_job(4), batch=Batch(global_batch_size=4), **changes)  # type: ignore[arg-type]


def test_what_megatron_printed_for_65b_is_reproduced() -> None:
    """35695 MB of states, 86554 MB of activations, 122250 MB in all, at 8,192 tokens (see test_published)."""
    printed = megatron_formula(gpt_65b(), replace(GPT_65B_LAYOUT, micro_batch_size=2), before_v18=True)

    assert 35695 == round(printed.weights_and_optimizer / MIB)
    assert 86554 == round(printed.activations / MIB)
    assert 122250 == round(printed.total / MIB)
    half = megatron_formula(gpt_65b(), GPT_65B_LAYOUT, before_v18=True).activations
    assert printed.activations == pytest.approx(2 * half)


def test_what_megatron_printed_for_7b_is_reproduced() -> None:
    """20029.52 MB; core_r0.10 counted two vectors for a norm whatever its kind, so RMSNorm comes to 20028.76."""
    llama = llama_7b()
    as_then = replace(llama, model=replace(llama.model, normalization="LayerNorm"))

    assert 20029.52 == round(megatron_formula(as_then, LLAMA_LAYOUT).weights_and_optimizer / MIB, 2)
    assert 20028.76 == round(megatron_formula(llama, LLAMA_LAYOUT).weights_and_optimizer / MIB, 2)


def test_activations_with_sequence_parallelism_by_hand() -> None:
    """(2048 * 34 * 4 + 32 * 72 + 4 * 32 * 320) / 2 bytes."""
    layout = Layout(tp=2, dp=2, sequence_parallel=True, recompute=SELECTIVE)

    assert 160896 == megatron_formula(job(), layout).activations


def test_activations_without_sequence_parallelism_by_hand() -> None:
    """(2048 * 22 * 4 + 32 * 72 + 2 * 32 * (128 + 64)) * 1.05 bytes; full recompute makes no difference."""
    full = Recompute(granularity="full", method="uniform", num_layers=1)

    for layout in (Layout(tp=2, dp=2), Layout(tp=2, dp=2, recompute=full)):
        assert megatron_formula(job(), layout).activations == pytest.approx(204556.8)


def test_few_micro_batches_lower_and_interleaving_raises_what_is_in_flight() -> None:
    """Of two stages one micro-batch fills half; with v = 2 the first holds 1 + 1/4."""
    sizes = [
        megatron_formula(job(), layout).activations
        for layout in (Layout(pp=2, dp=2), Layout(pp=2, dp=2, micro_batch_size=2), Layout(pp=2, dp=2, vpp=2))
    ]

    assert sizes[1] == sizes[0]  # twice the tokens, half the share
    assert sizes[2] == pytest.approx(1.25 * sizes[0])


def test_states_by_hand() -> None:
    """One layer in two stages and the embedding over tp; norms on every rank; 18 bytes, or 6 + 12/2."""
    split = 4 * (4 * 64 * 64 + 2 * 64 * 256)
    shard = (split / 2 + 64 * 256) / 2 + 9 * 128 / 2

    assert 18 * shard == megatron_formula(job(), Layout(tp=2, pp=2)).weights_and_optimizer
    sharded = Layout(tp=1, pp=2, dp=2, use_distributed_optimizer=True)
    shard = split / 2 + 64 * 256 + 9 * 128 / 2
    assert 12 * shard == megatron_formula(job(), sharded).weights_and_optimizer


def test_experts_by_hand() -> None:
    """Three layers of four experts over etp * ep, sharded over their own replicas; before v18 over tp alone."""
    moe = job(model=tiny_model(**MOE))
    layout = Layout(dp=4, ep=2, use_distributed_optimizer=True)
    split = 4 * 4 * 64 * 64 + 2 * 64 * 256
    router = 3 * (64 * 4 + 4)
    expert = 3 * 4 * 2 * 64 * 128
    dense = split + 64 * 256 + 9 * 128

    assert (dense + router) * 9 + expert / 2 * 12 == megatron_formula(moe, layout).weights_and_optimizer
    assert (dense + expert) * 9 == megatron_formula(moe, layout, before_v18=True).weights_and_optimizer


def test_latent_attention_by_hand() -> None:
    """Query 16*(64 + 4*12 + 1), kv 8*(64 + 4*(8 + 6) + 1) + 64*4, out 4*6*64; without a query latent 64*4*12."""
    latent = LatentAttention(q_lora_rank=16, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6)
    rest = 4 * 2 * 64 * 256 + 64 * 256 + 9 * 64
    for rank, query in ((16, 16 * 113), (None, 3072)):
        model = tiny_model(latent_attention=replace(latent, q_lora_rank=rank), normalization="RMSNorm")
        attention = query + 8 * 121 + 64 * 4 + 4 * 6 * 64

        assert 18 * (4 * attention + rest) == megatron_formula(job(model=model), Layout()).weights_and_optimizer


def test_multi_token_prediction_is_one_layer_more_on_the_fullest_shard() -> None:
    """Of the kind of the last layer, whole on one rank whatever pp is."""
    states = [
        megatron_formula(job(model=tiny_model(mtp_num_layers=depths)), Layout(pp=2)).weights_and_optimizer
        for depths in (0, 1)
    ]

    assert 18 * (4 * 64 * 64 + 2 * 64 * 256 + 4 * 64) == states[1] - states[0]


def test_the_gaps_are_kept() -> None:
    """Context parallelism and attention dropout change nothing, as in Megatron's own."""
    plain = megatron_formula_bytes(job(), Layout(dp=2))

    assert plain == megatron_formula_bytes(job(), Layout(dp=2, cp=2))
    assert plain == megatron_formula_bytes(job(model=tiny_model(attention_dropout=0.1)), Layout(dp=2))


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_more_ranks_never_need_more(tp: int, pp: int) -> None:
    """States fall with tp and pp."""
    states = megatron_formula(job(), Layout(tp=tp, pp=pp)).weights_and_optimizer

    assert states <= megatron_formula(job(), Layout()).weights_and_optimizer


def test_a_batch_that_does_not_divide_is_refused() -> None:
    """Four samples cannot make micro-batches of three."""
    with pytest.raises(LayoutError, match="not divisible"):
        megatron_formula(job(), Layout(micro_batch_size=3))
