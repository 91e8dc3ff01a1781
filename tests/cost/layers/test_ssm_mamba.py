"""Mamba layers: parameters, kept bytes and work for the device, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.block import residual_bytes
from pipette_launch.cost.layers.kinds import kind_loads
from pipette_launch.cost.layers.loads import PassLoads
from pipette_launch.cost.layers.ssm import Mamba
from pipette_launch.facts import HybridLayers, Job, Layout

SIZES = HybridLayers(pattern="MM*-", mamba_state_dim=16, mamba_head_dim=8, mamba_num_groups=2, mamba_num_heads=16)
"""128 channels, 192 convolved channels, and 336 columns of the input projection."""


def test_parameters_are_those_of_the_mixer() -> None:
    """Projections in and out, 4 taps and a bias for each convolved channel, three a head, the gated norm."""
    expected = 64 * 336 + 128 * 64 + 5 * 192 + 3 * 16 + 128

    assert expected == Mamba(tiny_job(model=tiny_model(hybrid=SIZES)), Layout()).parameters().dense
    assert expected // 2 == Mamba(tiny_job(model=tiny_model(hybrid=SIZES)), Layout(tp=2)).parameters().dense


def mixer_bytes(layout: Layout, *flags: str) -> int:
    """Bytes that the mixer of a layer keeps."""
    this = job(*flags)
    return Mamba(this, layout).activations().attention


def test_kept_are_the_projection_and_three_times_its_channels() -> None:
    """Per token: gates, convolved channels and time steps, and scan, norm's and projection's inputs behind them."""
    per_token = 4 * (336 + 3 * 128) + 4 * 2

    kept = mixer_bytes(Layout())

    assert 32 * per_token == kept
    assert kept // 2 == mixer_bytes(Layout(tp=2))
    assert kept // 2 == mixer_bytes(Layout(cp=2))
    assert kept - 32 * 3 * 128 == mixer_bytes(Layout(), "--fp8-format hybrid")


def test_the_backward_holds_gradients_and_states_of_chunks() -> None:
    """States are 4 bytes for each channel and state, once for every 128 tokens, and their gradients as many."""
    long = tiny_job(model=tiny_model(seq_length=256, max_position_embeddings=256, hybrid=SIZES))
    scan = Mamba(long, Layout()).backward_bytes() - residual_bytes(long, Layout())

    assert 256 * 4 * (336 + 192 + 128) + 2 * 4 * 2 * 128 * 16 == scan


def job(*flags: str) -> Job:
    """A hybrid job of four small layers."""
    return tiny_job(model=tiny_model(hybrid=SIZES, transformer_impl="transformer_engine"), performance_flags=flags)


def loads(layout: Layout) -> PassLoads:
    """Work of one layer for the device."""
    return Mamba(tiny_job(model=tiny_model(hybrid=SIZES)), layout).loads()


def test_products_are_the_two_projections() -> None:
    """Both run narrow with FP8; the scan has no product, and tensor parallelism cuts all."""
    forward = loads(Layout()).forward

    assert [2.0 * 32 * 64 * 336, 2.0 * 32 * 64 * 128] == [each.flops for each in forward.products]
    assert all(each.is_linear for each in forward.products)
    assert loads(Layout(tp=2)).forward.scan_bytes == forward.scan_bytes / 2


def test_the_scan_moves_bytes_by_channels_states_and_scores() -> None:
    """The backward more than twice as many; more than one sample is copied into another order."""
    one, two = loads(Layout()), loads(Layout(micro_batch_size=2))
    expected = 4 * (2 * 192 + 7 * 128 + 4 * 32 + 2 * 16) + 4 * (2 * 16 + 2 * 256)

    assert 32 * expected == one.forward.scan_bytes == two.forward.scan_bytes / 2
    assert one.input_grad.scan_bytes > 2 * one.forward.scan_bytes
    assert 0 == one.forward.moved_bytes
    assert 32 * 2 * 2 * 4 * (336 + 128) == two.forward.moved_bytes


def test_context_parallelism_exchanges_tokens_for_heads() -> None:
    """336 projected channels in five exchanges, and 128 channels back, in 4 bytes for 16 tokens."""
    (found,) = Mamba(tiny_job(model=tiny_model(hybrid=SIZES)), Layout(cp=2)).exchanges(np.array([1]), np.array([1]))

    assert ((6.0,), (12.0,)) == (found.forward, found.backward)
    assert 4 * 16 * (336 + 128) == pytest.approx(6 * found.size_bytes)


def test_the_two_blocks_of_a_layer_ask_for_what_the_layer_asks() -> None:
    """Attention and MLP by themselves add up to a transformer's layer."""
    layout = Layout(tp=2, sequence_parallel=True)
    whole = kind_loads(job(), layout, "layer")
    parts = kind_loads(job(), layout, "attention_layer") + kind_loads(job(), layout, "mlp_layer")

    for name in ("moved_bytes", "kernels", "cast_elements", "attention_flops"):
        found = [getattr(getattr(parts, each), name) for each in ("forward", "input_grad", "weight_grad")]
        expected = [getattr(getattr(whole, each), name) for each in ("forward", "input_grad", "weight_grad")]
        assert found == pytest.approx(expected)


def test_a_graph_of_mamba_launches_all_of_its_kernels() -> None:
    """The host launches a copy of the layer's input and the graph of Mamba; attention is another module."""
    graphs = job("--cuda-graph-impl transformer_engine", "--cuda-graph-scope mamba")

    assert 2 == kind_loads(graphs, Layout(), "mamba_layer").forward.kernels
    assert kind_loads(graphs, Layout(), "attention_layer").forward.kernels > 0
    assert kind_loads(job(), Layout(), "mamba_layer").forward.kernels > 10
