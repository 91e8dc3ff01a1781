"""The estimator of Fujii et al.: the published check, terms by hand, and the 80 % rule."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from published import LLAMA_LAYOUT, llama_7b

from benchmarks.estimators import fujii
from pipette_launch.errors import FactError, LayoutError, PlanError
from pipette_launch.facts import Job, LatentAttention, Layout
from pipette_launch.text import MIB


def job(**changes: object) -> Job:
    """Four layers of hidden size 64, FFN 256, four heads, sequence 32, 256 tokens."""
    return replace(tiny_job(4), **changes)  # type: ignore[arg-type]


def test_the_published_check_on_7b() -> None:
    """Stage 0 comes to 39,229 MiB."""
    stages = fujii.estimate(llama_7b(), LLAMA_LAYOUT)

    assert 39229 == round(stages[0].total / MIB)
    assert stages[1] == stages[2]
    assert stages[0].model_states == stages[3].model_states - 4096 * 12


def test_model_states_by_hand() -> None:
    """4h^2 + 3hf + 2h a layer, h*V and a final norm, over tp, at 18 bytes; at 16 when reduced in bf16."""
    parameters = (4 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) + 64 * 256 + 64) / 2

    assert 18 * parameters == fujii.estimate(job(), Layout(tp=2))[0].model_states
    assert 16 * parameters == fujii.estimate(job(grad_reduce_in_bf16=True), Layout(tp=2))[0].model_states


def test_the_optimizer_is_sharded_over_dp_alone() -> None:
    """6 + 12/2 bytes with dp 2, and context parallelism makes no difference to it."""
    sharded = Layout(dp=2, use_distributed_optimizer=True)
    states = fujii.estimate(job(), sharded)[0].model_states

    assert 12 / 18 == pytest.approx(states / fujii.estimate(job(), Layout())[0].model_states)
    assert states == fujii.estimate(job(), replace(sharded, cp=2))[0].model_states


def test_activations_by_hand() -> None:
    """s*b*h*(12 + 4/2 + 8*4)/(t*c) = 2048 * 46 / 4 for each of four layers; p micro-batches of L/p with a pipeline."""
    grouped = job(model=tiny_model(num_query_groups=2))

    assert 4 * 2048 * 46 / 4 == fujii.estimate(grouped, Layout(tp=2, cp=2))[0].activations
    for stage in fujii.estimate(grouped, Layout(pp=4)):
        assert 4 * 2048 * 46 == stage.activations


def test_interleaving_is_under_counted_as_in_the_script() -> None:
    """One chunk's layers p times: half of what 1F1B holds with v = 2."""
    plain, interleaved = (fujii.estimate(job(), Layout(pp=2, vpp=vpp))[0] for vpp in (1, 2))

    assert plain.activations / 2 == interleaved.activations
    assert plain.model_states == interleaved.model_states


def test_experts_by_hand() -> None:
    """Experts, shared expert and router over t*ep as a whole; topk widths of activation."""
    moe = job(
        model=tiny_model(
            num_experts=4,
            moe_layer_freq=(1, 1, 1, 1),
            moe_ffn_hidden_size=128,
            moe_shared_expert_intermediate_size=32,
        )
    )
    mlp = 3 * 64 * (4 * 128 + 32) + 64 * 4
    attention = 4 * 64 * 64 + 2 * 64
    parameters = 4 * (attention + mlp / 2) + 64 * 256 + 64
    estimate = fujii.estimate(moe, Layout(dp=2, ep=2))[0]

    assert 18 * parameters == estimate.model_states
    assert 4 * 2048 * (12 + 4 + 8 * 2 * 128 / 64) == estimate.activations


def test_the_rule_leaves_a_fifth_free() -> None:
    """An estimate of exactly 80 % does not fit, one byte of capacity more does."""
    needed = fujii.estimate_bytes(job(), Layout())

    assert not fujii.fits(job(), Layout(), needed / 0.8)
    assert fujii.fits(job(), Layout(), needed / 0.8 + 2)


@pytest.mark.parametrize("capacity", [0.0, -1.0, float("nan")])
def test_an_impossible_capacity_is_refused(capacity: float) -> None:
    """A GPU has memory."""
    with pytest.raises(FactError, match="capacity_bytes must be positive"):
        fujii.fits(job(), Layout(), capacity)


def test_models_that_it_does_not_know_are_refused() -> None:
    """Published before multi-latent attention and multi-token prediction were common."""
    latent = LatentAttention(q_lora_rank=None, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6)

    with pytest.raises(PlanError, match="no multi-latent attention"):
        fujii.estimate(job(model=tiny_model(latent_attention=latent)), Layout())
    with pytest.raises(PlanError, match="no multi-token prediction"):
        fujii.estimate(job(model=tiny_model(mtp_num_layers=1)), Layout())


def test_layers_that_do_not_divide_are_refused() -> None:
    """Four layers make no three stages."""
    with pytest.raises(LayoutError, match="do not divide"):
        fujii.estimate(job(), Layout(pp=3))


def test_overheads_are_stated_apart() -> None:
    """Half a GB for each kind of group, half a GB of context."""
    assert 500_000_000 == fujii.overhead_bytes(Layout())
    assert 1_500_000_000 == fujii.overhead_bytes(Layout(tp=2, dp=2))


@given(st.integers(1, 8), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_a_larger_micro_batch_never_needs_less(size: int, tp: int, pp: int) -> None:
    """The estimate grows with the micro-batch, whatever the layout."""
    small = fujii.estimate_bytes(job(), Layout(tp=tp, pp=pp, micro_batch_size=size))

    assert small < fujii.estimate_bytes(job(), Layout(tp=tp, pp=pp, micro_batch_size=size + 1))
