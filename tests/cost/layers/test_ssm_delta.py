"""Gated delta networks: parameters, kept bytes, work and exchanges, by hand."""

from __future__ import annotations

import numpy as np
from facts_for_tests import DELTA_NET, tiny_job, tiny_model

from pipette_launch.cost.layers.block import residual_bytes
from pipette_launch.cost.layers.kinds import kept_bytes
from pipette_launch.cost.layers.ssm import Delta
from pipette_launch.facts import Job, Layout, Recompute


def job(*flags: str, version: str = "0.19.0") -> Job:
    """A bf16 job of four layers, of which the last has attention."""
    sizes = {"linear_attention": DELTA_NET, "linear_layers": (1, 1, 1, 0), "transformer_impl": "transformer_engine"}
    model = tiny_model(params_dtype="bf16", normalization="RMSNorm", **sizes)
    return tiny_job(model=model, performance_flags=flags, megatron_version=version)


def test_parameters_are_those_of_the_network() -> None:
    """Two projections, 4 taps for each convolved channel, two numbers a value head, and one head's norm."""
    cut = 64 * (168 + 64) + 4 * 96 + 2 * 4

    assert (168, 96) == (DELTA_NET.projected, DELTA_NET.convolved)
    assert cut + 16 == Delta(job(), Layout()).parameters().dense
    assert cut // 2 + 16 == Delta(job(), Layout(tp=2)).parameters().dense
    assert 64 * (168 + 64) == Delta(job(), Layout()).matrices()


def test_kept_are_the_tensors_around_the_rule() -> None:
    """Projected channels, keys before and after their copies, five times the values, 64 scores and 3 numbers a head."""
    per_token = 2 * (168 + 2 * 16 + 2 * 32 + 5 * 64 + (64 + 3) * 4) + 4 * (2 * 4 + 2 * 2)

    def kept(layout: Layout, *flags: str, version: str = "0.19.0") -> int:
        work = job(*flags, version=version)
        found = Delta(work, layout).activations()
        return found.attention + found.delta_norm

    assert 32 * per_token == kept(Layout())
    assert 16 * per_token == kept(Layout(tp=2)) == kept(Layout(cp=2))
    assert 32 * (per_token - 64) == kept(Layout(), "--fp8-format hybrid")
    assert 32 * (per_token - 2 * (168 - 96)) == kept(Layout(), version="0.16.1")


def test_recompute_of_the_gated_norm_drops_its_output_twice() -> None:
    """The normed values and the input of the output projection, 64 channels each."""
    layout = Layout(recompute=Recompute(granularity="selective", modules=("gdn_norm_out",)))
    kept = [kept_bytes(job(), each, "delta_mlp_layer") for each in (Layout(), layout)]

    assert 32 * 2 * 2 * 64 == kept[0] - kept[1]
    assert kept_bytes(job(), Layout(), "layer") == kept_bytes(job(), layout, "layer")


def test_the_backward_holds_gradients_and_states_of_chunks() -> None:
    """6 times the copied keys, 5 times the values, and states of 16 x 8 a head for every 64 tokens, twice."""
    held = 2 * 32 * (6 * 32 + 5 * 64 + 2 * 32 * 16 // 64)

    assert held == Delta(job(), Layout()).backward_bytes() - residual_bytes(job(), Layout())


def test_the_deterministic_rule_keeps_squares_in_fp32() -> None:
    """For each head and chunk of 64 tokens: 6 squares, and 1 + 1, 2 + 4, .., 63 + 63 * 63 numbers of the loop."""
    plain, deterministic = (Delta(each, Layout()).activations() for each in (job(), job("--deterministic-mode")))
    around = 2 * (2 * 96 + 2 * 16 + 2 * 64) + 4 * (2 * 4 + 2 * 2)
    rule = 4 * (7 * 32 + 3 * 64 + 32 * 16 // 64 + 4 * (5 + 6 * 64 + 1365))

    assert 32 * (around + rule) == deterministic.attention
    assert plain.delta_norm == deterministic.delta_norm


def test_products_are_the_two_projections() -> None:
    """The backward of the rule moves more than twice the bytes, and tensor parallelism cuts all work."""
    loads = Delta(job(), Layout()).loads()

    assert [2.0 * 32 * 64 * 168, 2.0 * 32 * 64 * 64] == [each.flops for each in loads.forward.products]
    assert 2 * 32 * (2 * 96 + 6 * 32 + 6 * 64 + 2 * 32 * 16 / 64 + 64 * 4) == loads.forward.scan_bytes
    assert loads.input_grad.scan_bytes > 2 * loads.forward.scan_bytes
    assert Delta(job(), Layout(tp=2)).loads().forward.scan_bytes == loads.forward.scan_bytes / 2


def test_context_parallelism_exchanges_tokens_for_heads() -> None:
    """All projected channels before the convolution, and the values after the norm."""
    once_S, again_S = np.array([3]), np.array([1])
    net, older = (Delta(each, Layout(tp=2, cp=2)) for each in (job(), job(version="0.18.0")))
    found = [(each.size_bytes, each.forward, each.backward) for each in net.exchanges(once_S, again_S)]
    first = next(iter(older.exchanges(once_S, again_S)))

    assert [(2 * 16 * 84, (3.0,), (4.0,)), (2 * 16 * 32, (3.0,), (4.0,))] == found
    assert (2 * 16 * 14, (18.0,), "all_to_all", "cp") == (first.size_bytes, first.forward, first.kind, first.group)
    assert [] == list(Delta(job(), Layout()).exchanges(once_S, again_S))
