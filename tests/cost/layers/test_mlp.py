"""An MoE layer by hand: 32 tokens, h 64, four experts of width 96, the best two of each token, bf16."""

import numpy as np
import pytest
from facts_for_tests import changed_job, tiny_job, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.layers.block import Sizes
from pipette_launch.cost.layers.kinds import kind_loads
from pipette_launch.cost.layers.loads import PassLoads
from pipette_launch.cost.layers.mlp import (
    BIASED_TOUCHES,
    PREPARE_KERNELS,
    ROUTER_KERNELS,
    ExpertActivations,
    Experts,
)
from pipette_launch.facts import Job, Layout

ALLTOALL = "--moe-token-dispatcher-type alltoall"
ROW = 2 * 64
"""Bytes of one row of h in bf16."""
PADDED = ("--moe-expert-capacity-factor 1.25", "--moe-pad-expert-input-to-capacity")


def job(*flags: str, **changes: object) -> Job:
    """A bf16 job with Transformer Engine and without biases."""
    shape = {
        "params_dtype": "bf16",
        "transformer_impl": "transformer_engine",
        "add_bias_linear": False,
        "num_experts": 4,
        "moe_layer_freq": (1,) * 4,
        "moe_ffn_hidden_size": 96,
    }
    return tiny_job(model=tiny_model(**(shape | changes)), performance_flags=flags)


def rows(work: Job, layout: Layout) -> int:
    """Rows that the experts of one rank work on."""
    return Experts(work, layout).rows()


def kept(work: Job, layout: Layout) -> ExpertActivations:
    """Bytes that router and experts keep."""
    return Experts(work, layout).kept()


def router(*flags: str) -> int:
    """Bytes that the router keeps."""
    return kept(job(*flags), Layout()).router


def test_defaults_are_megatrons() -> None:
    """All-gather, no losses, no capacity, probabilities in the type of the model."""
    assert kept(job(), Layout()).dispatch == 32 * 4 * (1 + 2) + 64 * (8 + 2)
    assert Experts(job(), Layout()).capacity() is None
    assert router() == router("--moe-aux-loss-coeff 0")
    gathers = job("--moe-token-dispatcher-type allgather")
    assert (
        Experts(job(), Layout(ep=2, dp=2)).gather_buffer_bytes()
        == Experts(gathers, Layout(ep=2, dp=2)).gather_buffer_bytes()
        > 0
    )


def test_flags_are_read() -> None:
    """Losses of weight 0 do not count, sinkhorn does; a negative capacity means no limit."""
    kinds = "--moe-router-load-balancing-type aux_loss seq_aux_loss"

    assert router("--moe-aux-loss-coeff 0 1e-2", kinds) == router("--moe-aux-loss-coeff 1e-2") > router()
    assert router("--moe-aux-loss-coeff 0 0", kinds) == router()
    assert router("--moe-router-load-balancing-type sinkhorn") == 32 * 4 * (4 + 1)
    assert rows(job("--moe-expert-capacity-factor -1"), Layout()) == 64
    assert kept(job("--moe-router-dtype fp64"), Layout()).dispatch == 32 * 4 * (1 + 8) + 64 * (8 + 8)


def test_rows_of_a_rank() -> None:
    """Two rows for each token; expert tensor parallelism gathers the rows of its ranks."""
    assert rows(job(), Layout()) == 64
    assert rows(job(), Layout(tp=2, etp=2, sequence_parallel=True)) == 64
    assert rows(job(), Layout(tp=2, sequence_parallel=True)) == 32
    assert rows(job(), Layout(cp=2)) == 32


def test_a_capacity_drops_rows_or_pads_them() -> None:
    """16 rows for each expert: half as many, not more than there are, or padded by a quarter."""
    assert rows(job("--moe-expert-capacity-factor 0.5"), Layout()) == 32
    assert rows(job("--moe-expert-capacity-factor 2"), Layout()) == 64
    assert rows(job(*PADDED), Layout()) == 80


def test_a_capacity_of_the_rank_sizes_its_buffers() -> None:
    """Half as many rows more than under balanced routing; a paged stash keeps a tenth more."""
    sized = changed_job(job("--moe-expert-rank-capacity-factor 1.5"), megatron_version="0.20.0")
    stashed = changed_job(sized, performance_flags=(*sized.performance_flags, "--moe-paged-stash"))

    assert rows(sized, Layout()) == 96
    assert rows(stashed, Layout()) == round(1.1 * 64)


def test_quantised_matrices_have_whole_blocks_of_rows() -> None:
    """3 tokens on each of 4 experts become 16."""
    small = job("--moe-router-padding-for-fp8", seq_length=6)

    assert rows(small, Layout()) == 4 * 16


def test_fused_swiglu_keeps_input_and_output() -> None:
    """Three widths; unfused its output before the probability and both factors are three more."""
    fused = kept(job(gated_linear_unit=True), Layout())
    unfused = kept(job("--no-bias-swiglu-fusion", gated_linear_unit=True), Layout())
    width = 2 * 64 * 96

    assert (64 * ROW, 2 * width, width) == (fused.inputs, fused.outputs, fused.activation)
    assert 4 * width == unfused.activation


def test_gelu_keeps_what_the_probability_multiplies() -> None:
    """First matrix's output, activation, and its product."""
    found = kept(job(), Layout())

    assert (2 * 64 * 96, 2 * 2 * 64 * 96) == (found.outputs, found.activation)


@pytest.mark.parametrize("flag", ["--moe-use-legacy-grouped-gemm", "--use-fused-weighted-squared-relu"])
def test_fused_kernels_compute_the_activation_again(flag: str) -> None:
    """The backward computes the activation again, so only the product with the probability is kept."""
    assert kept(job(flag), Layout()).activation == 2 * 64 * 96


def test_fp8_keeps_narrow_inputs_of_a_shared_expert() -> None:
    """Hidden size 64, width 32: the first output has 2 bytes an element, and both inputs have 1 byte."""
    plain, narrow = (
        kept(job(*flags, moe_shared_expert_intermediate_size=32), Layout()).shared
        for flags in ((), ("--fp8-format hybrid",))
    )
    tokens = plain // (2 * 2 * 32)

    assert narrow == tokens * (2 * 32 + 32 + 64)


def test_fused_squared_relu_keeps_its_input_and_the_second_matrix_its_own() -> None:
    """The flag fuses units without a gate, and a gated unit follows the flag of SwiGLU."""
    fused = kept(job("--use-fused-weighted-squared-relu"), Layout())
    gated = kept(job("--use-fused-weighted-squared-relu", "--no-bias-swiglu-fusion", gated_linear_unit=True), Layout())

    assert (2 * 64 * 96, 4 * 2 * 64 * 96) == (fused.activation, gated.activation)


def test_only_delayed_scaling_keeps_a_narrow_copy_of_a_shared_experts_input() -> None:
    """Other formats keep the norm's output, which the router keeps too."""
    flags = ("--fp8-format hybrid", "--fp8-recipe tensorwise")
    wide, narrow = (
        kept(job(*words, moe_shared_expert_intermediate_size=128), Layout()).shared for words in ((), flags)
    )
    delayed = kept(job("--fp8-format hybrid", moe_shared_expert_intermediate_size=128), Layout()).shared

    assert 4 * narrow == 3 * wide > 0
    assert delayed > narrow


def test_fp8_halves_the_inputs_of_matrices() -> None:
    """Rows and second matrices' inputs in one byte; the first matrices' outputs stay in bf16."""
    wide = kept(job(gated_linear_unit=True), Layout())
    narrow = kept(job("--fp8-format hybrid", gated_linear_unit=True), Layout())

    assert (wide.inputs, wide.activation) == (2 * narrow.inputs, 2 * narrow.activation)
    assert (wide.outputs, wide.router, wide.dispatch) == (narrow.outputs, narrow.router, narrow.dispatch)


def test_fused_permutation_keeps_a_map() -> None:
    """Nine 4-byte entries a token for four experts, and a probability for each of its rows."""
    assert kept(job(ALLTOALL, "--moe-permute-fusion"), Layout()).dispatch == 4 * 9 * 32 + 2 * 64


def test_the_shared_expert_is_split_over_tp() -> None:
    """Two widths of 2 bytes; overlapped with the dispatcher it gathers its own input."""
    work = job(moe_shared_expert_intermediate_size=48)
    layout = Layout(tp=2, sequence_parallel=True)
    overlapped = job("--moe-shared-expert-overlap", moe_shared_expert_intermediate_size=48)
    gated = job(moe_shared_expert_intermediate_size=48, moe_shared_expert_gate=True)

    assert kept(work, layout).shared == 2 * 2 * 32 * 24
    assert kept(overlapped, layout).shared == 2 * 2 * 32 * 24 + 32 * ROW
    assert kept(gated, layout).shared == 2 * 2 * 32 * 24 + 16 * (ROW + 2)
    assert kept(job(), layout).shared == 0


def test_experts_on_latents_get_narrow_rows() -> None:
    """Rows have 16 of 64 channels; projections of 64 x 16 on each rank keep the latents of 32 tokens."""
    work, narrow = job("--moe-grouped-gemm", ALLTOALL), job("--moe-grouped-gemm", ALLTOALL, moe_latent_size=16)
    layout = Layout(dp=2, ep=2)
    experts, latents = (Experts(each, layout) for each in (work, narrow))
    sent = [next(iter(each.exchanges(np.ones(1), np.zeros(1)))).size_bytes for each in (experts, latents)]

    assert latents.parameters().dense - experts.parameters().dense == 2 * 64 * 16
    assert 4 * latents.parameters().expert == experts.parameters().expert
    assert kept(narrow, layout).inputs * 4 == kept(work, layout).inputs
    assert latents.activations().mlp == sum(kept(narrow, layout)[:4]) + 32 * 16 * 2
    assert sent[0] == 4 * sent[1]
    assert {2.0 * 32 * 64 * 16} == {each.flops for each in latents.loads().forward.products[-2:]}


def test_the_all_gather_dispatcher_gathers_into_the_global_buffer() -> None:
    """All tokens of the group; nothing for one rank or another dispatcher."""
    layout = Layout(dp=4, ep=4)

    assert Experts(job(), layout).gather_buffer_bytes() == 4 * 32 * ROW
    assert Experts(job(), Layout()).gather_buffer_bytes() == 0
    assert Experts(job(ALLTOALL), layout).gather_buffer_bytes() == 0
    assert Experts(tiny_job(), Layout(dp=4)).gather_buffer_bytes() == 0


def test_the_backward_of_one_layer() -> None:
    """One expert at a time: the output's gradient, two widths of 16 rows, and two copies of the rank's own tokens.

    Grouped: all experts' widths at once. With narrow experts two copies of the rows are more.
    """
    assert Experts(job(), Layout()).backward_bytes() == 2 * (2 * 64 * 64 + 2 * 32 * 64)
    assert Experts(job("--moe-grouped-gemm"), Layout()).backward_bytes() == 2 * (64 * 64 + 64 * 96 * 2 + 2 * 32 * 64)


def test_wide_probabilities_widen_the_backward() -> None:
    """Three gradients of 4 bytes less the 2 that are freed, in place of two of 2; fused ones never leave the kernel."""
    plain, wide = job("--moe-grouped-gemm"), job("--moe-grouped-gemm", "--moe-router-dtype fp32")
    fused = job("--moe-grouped-gemm", "--moe-router-dtype fp32", gated_linear_unit=True)

    assert Experts(wide, Layout()).backward_bytes() - Experts(plain, Layout()).backward_bytes() == 64 * 96 * (10 - 4)
    assert Experts(fused, Layout()).backward_bytes() == 2 * (64 * 64 + 64 * 96 * 3 + 2 * 32 * 64)


def test_a_router_has_a_bias_where_the_model_has() -> None:
    """One row of h for each expert, and one more number with biases."""
    assert (4 * 64, 4 * 65) == tuple(
        Experts(job(add_bias_linear=bias), Layout()).router_parameters() for bias in (False, True)
    )


@given(ep=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4]), has_etp=st.booleans())
def test_balanced_experts_keep_the_same_wherever_they_are(ep: int, tp: int, has_etp: bool) -> None:
    """Kept bytes of experts depend on the tokens of a rank, not on the rank that computes them."""
    layout = Layout(tp=tp, dp=4, ep=ep, etp=tp if has_etp else 1, sequence_parallel=tp > 1)
    found = kept(job(ALLTOALL), layout)
    tokens = Sizes(job(), layout).local_tokens

    assert found.outputs + found.activation == 3 * 2 * 2 * tokens * 96
    assert found.inputs == layout.etp * 2 * tokens * ROW


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--moe-router-load-balancing-type sinkhorn",), 32 * 4 * (4 + 1)),
        (("--moe-router-fusion",), 32 * 4 * 5),
        (("--moe-router-pre-softmax",), 32 * (4 * 4 + 2 * 8)),
        (("--moe-router-score-function sigmoid",), 32 * (4 * 4 + 2 * (8 + 2) + 2)),
        (("--moe-aux-loss-coeff 1",), 32 * (2 * 12 + 4 * 4 + 2 * 8)),
        (("--moe-z-loss-coeff 1",), 32 * (2 * 12 + (4 + 1) * 2)),
        (PADDED, 32 * (2 * 12 + 4) + 4 * 20 * 8),
    ],
)
def test_the_router(flags: tuple[str, ...], expected: int) -> None:
    """Scores of 4 bytes, indices of 8, masks of 1, for four experts or the best two."""
    assert kept(job(*flags), Layout()).router == expected


TOKENS, HIDDEN, FFN = 32, 64, 256


def moe_job(*flags: str, add_bias_linear: bool = False) -> Job:
    """Four layers of eight experts, top 2, in two bytes an element."""
    model = tiny_model(
        params_dtype="bf16",
        transformer_impl="transformer_engine",
        num_experts=8,
        moe_layer_freq=(1,) * 4,
        add_bias_linear=add_bias_linear,
    )
    return tiny_job(model=model, performance_flags=flags)


def kernels(loads: PassLoads) -> float:
    """Kernels of all passes."""
    return sum(load.kernels for load in (loads.forward, loads.input_grad, loads.weight_grad))


def test_grouped_products_are_of_each_experts_own_tokens() -> None:
    """Two copies of 32 tokens over four local experts of two ranks: 32 rows each; the router sees every token once."""
    router, first, second = Experts(moe_job(), Layout(dp=2, ep=2)).loads().forward.products

    assert (TOKENS, 8, HIDDEN, False, 1.0) == (router.m, router.n, router.k, router.is_linear, router.half)
    assert (2 * TOKENS * 2 / 8, FFN, HIDDEN, 4) == (first.m, first.n, first.k, first.count)
    assert (2 * TOKENS * 2 / 8, HIDDEN, FFN, 4) == (second.m, second.n, second.k, second.count)
    assert first.is_linear
    assert first.half > 1


@pytest.mark.parametrize(
    ("flags", "touches"),
    [
        (("--moe-token-dispatcher-type alltoall",), 8),
        (("--moe-token-dispatcher-type flex",), 6),
        (("--moe-token-dispatcher-type flex", "--cuda-graph-impl local", "--cuda-graph-scope full_iteration"), 2),
    ],
)
def test_dispatchers_differ_in_how_often_they_touch_a_copy(flags: tuple[str, ...], touches: int) -> None:
    """The dispatcher touches two copies of 32 tokens; the activation reads and writes the experts' width."""
    moved = Experts(moe_job(*flags), Layout()).loads().forward.moved_bytes

    assert touches * 2 * TOKENS * HIDDEN * 2 + 2 * (2 * TOKENS * FFN * 2) == moved


def test_biases_of_experts_are_kernels_of_their_own() -> None:
    """They cost memory passes over what both matrices give."""
    plain, biased = (Experts(moe_job(add_bias_linear=bias), Layout()).loads().forward for bias in (False, True))

    assert BIASED_TOUCHES * 2 * TOKENS * (FFN + HIDDEN) * 2 == biased.moved_bytes - plain.moved_bytes


def test_graphs_take_launches_off() -> None:
    """A graph launches attention, the router, or all kernels; the products do not change."""
    graph = ("--cuda-graph-impl transformer_engine",)
    none, router, prepared, attention = (
        kind_loads(moe_job(*flags), Layout(), "moe_layer")
        for flags in (
            (),
            (*graph, "--cuda-graph-scope moe_router"),
            (*graph, "--cuda-graph-scope moe_router moe_preprocess"),
            (*graph, "--cuda-graph-scope attn"),
        )
    )
    whole = kind_loads(moe_job("--cuda-graph-impl local", "--cuda-graph-scope full_iteration"), Layout(), "moe_layer")

    # The router's product has 1.5, 1.5 and 2 launches, its norm 1 and 2, and the graph 2 in each pass.
    assert 1.8 * (ROUTER_KERNELS - PREPARE_KERNELS) + 5 + 3 - 4 == pytest.approx(kernels(none) - kernels(router))
    assert 1.8 * PREPARE_KERNELS == pytest.approx(kernels(router) - kernels(prepared))
    assert kernels(none) > kernels(attention) > 0
    assert 0 == kernels(whole)
    assert none.forward.products == whole.forward.products


def test_experts_without_grouped_products_launch_their_kernels_one_by_one() -> None:
    """Each further expert of a rank launches two products and an activation: 5 kernels forward and 9 backward."""
    alone, grouped = (Experts(moe_job(*flags), Layout()) for flags in ((), ("--moe-grouped-gemm",)))
    each = [kernels(one.loads()) for one, flags in ((alone, ()), (grouped, ("--moe-grouped-gemm",)))]

    assert (alone.local_experts - 1) * (5 + 9) == pytest.approx(each[0] - each[1])


def test_fused_routers_launch_fewer_kernels() -> None:
    """A fused router launches fewer kernels, and fewer still with a flex dispatcher."""
    alltoall, flex = "--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type flex"
    unfused, fused, prepared = (
        kernels(Experts(moe_job(*flags), Layout()).loads())
        for flags in ((flex,), (alltoall, "--moe-router-fusion"), (flex, "--moe-router-fusion"))
    )

    assert unfused > fused > prepared


def test_groups_of_experts_limit_the_domains_of_a_token() -> None:
    """A router that takes a token's experts from 1 of 2 groups sends each token to 1 of 2 domains."""
    flags = ("--moe-token-dispatcher-type flex", "--moe-router-num-groups 2", "--moe-router-group-topk 1")
    once_S = np.ones(1, dtype=np.int64)
    free, grouped = (
        next(Experts(job, Layout(dp=4, ep=4), 2).exchanges(once_S, 0 * once_S))
        for job in (moe_job(flags[0]), moe_job(*flags))
    )

    assert 1.5 == free.size_bytes / grouped.size_bytes
