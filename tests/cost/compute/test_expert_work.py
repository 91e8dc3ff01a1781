"""What experts ask of a device: counted by hand, and what dispatchers and CUDA graphs change of it."""

from __future__ import annotations

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.compute.device_work import layer_loads
from pipette_launch.cost.compute.expert_work import BIASED_TOUCHES, ROUTED_KERNELS, expert_loads
from pipette_launch.cost.compute.loads import PassLoads
from pipette_launch.facts import Job, Layout

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
    """Of all passes."""
    return sum(load.kernels for load in (loads.forward, loads.input_grad, loads.weight_grad))


def test_grouped_products_are_of_each_experts_own_tokens() -> None:
    """Two copies of 32 tokens over four local experts of two ranks: 32 rows each; the router sees every token once."""
    router, first, second = expert_loads(moe_job(), Layout(dp=2, ep=2)).forward.products

    assert (TOKENS, 8, HIDDEN, False, 1.0) == (router.m, router.n, router.k, router.is_linear, router.rate)
    assert (2 * TOKENS * 2 / 8, FFN, HIDDEN, 4) == (first.m, first.n, first.k, first.count)
    assert (2 * TOKENS * 2 / 8, HIDDEN, FFN, 4) == (second.m, second.n, second.k, second.count)
    assert first.is_linear
    assert first.rate < 1


@pytest.mark.parametrize(
    ("flags", "touches"),
    [
        (("--moe-token-dispatcher-type alltoall",), 8),
        (("--moe-token-dispatcher-type flex",), 6),
        (("--moe-token-dispatcher-type flex", "--cuda-graph-impl local", "--cuda-graph-scope full_iteration"), 2),
    ],
)
def test_dispatchers_differ_in_how_often_they_touch_a_copy(flags: tuple[str, ...], touches: int) -> None:
    """Of two copies of 32 tokens, beside the activation: one read and one write of the experts' width."""
    moved = expert_loads(moe_job(*flags), Layout()).forward.moved_bytes

    assert touches * 2 * TOKENS * HIDDEN * 2 + 2 * (2 * TOKENS * FFN * 2) == moved


def test_biases_of_experts_are_kernels_of_their_own() -> None:
    """They cost memory passes over what both matrices give."""
    plain, biased = (expert_loads(moe_job(add_bias_linear=bias), Layout()).forward for bias in (False, True))

    assert BIASED_TOUCHES * 2 * TOKENS * (FFN + HIDDEN) * 2 == biased.moved_bytes - plain.moved_bytes


def test_graphs_take_launches_off() -> None:
    """Of attention, of half of what routes, or of all; what the device does stays."""
    graph = ("--cuda-graph-impl transformer_engine",)
    none, router, attention = (
        layer_loads(moe_job(*flags), Layout(), moe=True)
        for flags in ((), (*graph, "--cuda-graph-scope moe_router"), (*graph, "--cuda-graph-scope attn"))
    )
    whole = layer_loads(moe_job("--cuda-graph-impl local", "--cuda-graph-scope full_iteration"), Layout(), moe=True)

    assert kernels(none) > kernels(router) > kernels(none) - 2 * ROUTED_KERNELS
    assert kernels(none) > kernels(attention) > 0
    assert 0 == kernels(whole)
    assert none.forward.products == whole.forward.products
