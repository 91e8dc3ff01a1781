"""Experts, latent attention and token prediction run without a GPU, and hold the bytes of the formulas."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from facts_for_tests import tiny_job, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from oracle.executor import Executor
from oracle.kernels import Routing, balanced

from pipette_launch.cost.layers.kinds import kept_bytes
from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Batch, Job, LatentAttention, Layout, ModelSpec, Recompute

ALLTOALL = "--moe-token-dispatcher-type alltoall"
FLEX = "--moe-token-dispatcher-type flex"
GROUPED = "--moe-grouped-gemm"
FUSED = "--moe-permute-fusion"
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_layer_freq": (1, 1), "moe_ffn_hidden_size": 1024}
LATENT = {
    "latent_attention": LatentAttention(
        q_lora_rank=384, kv_lora_rank=256, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128
    ),
    "qk_layernorm": True,
    "position_embedding_type": "rope",
}
SHARED = {"moe_shared_expert_intermediate_size": 512, "gated_linear_unit": True}


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """One worker for all tests here."""
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    with Executor() as started:
        yield started


def small(**changes: object) -> ModelSpec:
    """A bf16 model without biases, whose rounding to 512 bytes does not count and whose peak is at the head."""
    shape = {
        "num_layers": 2,
        "params_dtype": "bf16",
        "transformer_impl": "transformer_engine",
        "attention_backend": "fused",
        "hidden_size": 512,
        "ffn_hidden_size": 2048,
        "kv_channels": 128,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "vocab_size": 2048,
        "add_bias_linear": False,
        "position_embedding_type": "none",
    }
    return tiny_model(**(shape | changes))


def job_of(layout: Layout, *flags: str, **changes: object) -> Job:
    """A job of two micro-batches."""
    batch = Batch(global_batch_size=2 * layout.dp * layout.micro_batch_size)
    job = tiny_job(layout.world_size, model=small(**changes), own=layout, batch=batch, performance_flags=flags)
    return replace(job, optimizer="adam")


@pytest.mark.parametrize(
    ("layout", "flags", "changes"),
    [
        (Layout(dp=2, ep=2), (), EXPERTS),
        (Layout(dp=2, ep=2), (ALLTOALL,), EXPERTS),
        (Layout(dp=2, ep=2), (ALLTOALL, GROUPED), EXPERTS),
        (Layout(dp=2, ep=2), (ALLTOALL, GROUPED, FUSED), EXPERTS),
        (Layout(dp=2, ep=2), (FLEX, GROUPED), EXPERTS),
        (Layout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True), (ALLTOALL, GROUPED), EXPERTS),
        (Layout(tp=2, dp=2, ep=4, sequence_parallel=True), (GROUPED,), EXPERTS),
        (Layout(), (ALLTOALL,), EXPERTS | SHARED),
        (Layout(tp=2, dp=2, ep=2, sequence_parallel=True), (ALLTOALL, "--moe-shared-expert-overlap"), EXPERTS | SHARED),
        (Layout(), ("--moe-router-load-balancing-type sinkhorn",), EXPERTS | {"moe_router_topk": 1}),
        (Layout(), (ALLTOALL, "--moe-aux-loss-coeff 1e-2", "--moe-router-dtype fp32"), EXPERTS),
        (
            Layout(),
            (ALLTOALL, "--moe-expert-capacity-factor 1.25", "--moe-pad-expert-input-to-capacity"),
            EXPERTS,
        ),
        (Layout(), ("--no-rope-fusion",), LATENT),
        (Layout(tp=2, sequence_parallel=True), (), LATENT),
    ],
)
def test_activations_are_those_of_the_closed_form(
    executor: Executor, layout: Layout, flags: tuple[str, ...], changes: dict[str, Any]
) -> None:
    """Two layers agree within 5 %: the formula leaves out norms' statistics and rounding."""
    job = job_of(layout, *flags, **changes)
    found = executor.execute(job, layout, (0,))[0]

    assert pytest.approx(peak_memory_bytes(job, layout)[0].activations, rel=0.05) == found.parts.activations


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(cp=8), Layout(tp=2, cp=4, sequence_parallel=True)])
def test_a_ring_keeps_keys_and_values_that_no_recompute_frees(executor: Executor, layout: Layout) -> None:
    """They lie in a buffer of the ring; without one, recompute of the projections frees them. Peaks within 3 %."""
    asked = replace(layout, recompute=Recompute(granularity="selective", modules=("mla_up_proj",)))
    shape = {"num_layers": 8, "num_attention_heads": 8, "num_query_groups": 8, "seq_length": 4096}
    job = job_of(asked, "--no-create-attention-mask-in-dataloader", **LATENT, **shape)
    found = executor.execute(job, asked, (0,))[0]

    assert pytest.approx(found.peak, rel=0.03) == peak_memory_bytes(job, asked)[0].total


def test_overlapped_exchanges_keep_one_more_layer(executor: Executor) -> None:
    """The next micro-batch's forward has begun when a backward begins: a layer more, within 5 %."""
    layout = Layout(dp=2, ep=2)
    job = job_of(layout, ALLTOALL, GROUPED, "--overlap-moe-expert-parallel-comm", **EXPERTS)
    found = executor.execute(job, layout, (0,))[0]
    expected = peak_memory_bytes(job, layout)[0]

    assert expected.backward > kept_bytes(job, layout, "moe_layer")
    assert (
        pytest.approx(expected.activations + kept_bytes(job, layout, "moe_layer"), rel=0.05) == found.parts.activations
    )


def test_uneven_chunks_with_token_prediction(executor: Executor) -> None:
    """The layout names them, the prediction with the head."""
    layout = Layout(pp=2, layers_per_chunk=(3, 1))
    job = job_of(layout, num_layers=4, mtp_num_layers=1)
    expected = [2 * parameters.count for parameters in stage_parameters(job, layout)]

    assert pytest.approx(expected, rel=0.01) == [found.weights for found in executor.execute(job, layout, range(2))]


@pytest.mark.parametrize(
    ("pp", "cut", "after"),
    [
        (4, (2, 2, 0, 0), 1),
        (4, (2, 1, 1, 0), 1),
        (4, (2, 1, 1, 0), 0),
        (2, (4, 0), 1),
        (2, (1, 2, 1, 0), 1),
        (2, (1, 1, 1, 1), 0),
        (2, (1, 1, 1, 1, 0, 0), 1),
    ],
)
@pytest.mark.parametrize("depths", [1, 2])
def test_token_prediction_lies_where_the_layout_puts_it(
    executor: Executor, pp: int, cut: tuple[int, ...], after: int, depths: int
) -> None:
    """Weights within 1 %, and peaks within 5 % or four messages, of every stage, with the head alone too."""
    layout = Layout(pp=pp, vpp=len(cut) // pp, layers_per_chunk=cut, chunks_after_mtp=after)
    job = job_of(layout, num_layers=4, mtp_num_layers=depths, untie_embeddings_and_output_weights=True)
    expected, found = peak_memory_bytes(job, layout), executor.execute(job, layout, range(pp))
    messages = 4 * (1 + depths) * 2048 * 512 * 2

    assert pytest.approx([one.weights for one in expected], rel=0.01) == [one.weights for one in found]
    assert pytest.approx([one.total for one in expected], rel=0.05, abs=messages) == [one.peak for one in found]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(dp=4, ep=2, use_distributed_optimizer=True), EXPERTS),
        (Layout(tp=2, etp=2, sequence_parallel=True), EXPERTS | SHARED),
        (Layout(tp=2, sequence_parallel=True), LATENT),
        (Layout(pp=2), {"mtp_num_layers": 1}),
        (Layout(pp=2), {"mtp_num_layers": 1, "untie_embeddings_and_output_weights": True}),
        (Layout(pp=2), EXPERTS | {"mtp_num_layers": 2, "moe_layer_freq": (0, 1)}),
    ],
)
def test_weights_are_those_of_the_closed_form(executor: Executor, layout: Layout, changes: dict[str, Any]) -> None:
    """2 bytes for each parameter of every stage, within 1 %."""
    job = job_of(layout, ALLTOALL, **changes)
    expected = [2 * parameters.count for parameters in stage_parameters(job, layout)]

    assert pytest.approx(expected, rel=0.01) == [
        found.weights for found in executor.execute(job, layout, range(layout.pp))
    ]


@given(st.integers(0, 10_000), st.integers(1, 100))
def test_balanced_parts_are_the_whole(rows: int, parts: int) -> None:
    """They add up, and differ by one at most."""
    found = balanced(rows, parts)

    assert (rows, parts) == (sum(found), len(found))
    assert max(found) - min(found) <= 1


def test_rows_of_experts() -> None:
    """Two for each of 32 tokens, over four experts; half of them for two; a capacity cuts, FP8 rounds up."""
    assert Routing(num_experts=4, topk=2).rows(32, 4) == 64
    assert Routing(num_experts=4, topk=2).rows(32, 2) == 32
    assert Routing(num_experts=4, topk=2, capacity_factor=0.5).rows(32, 4) == 32
    assert Routing(num_experts=4, topk=2, pads_for_fp8=True).rows(6, 4) == 64
