"""What a Mamba layer asks of a device: projections by products, the scan by bytes."""

from __future__ import annotations

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.compute.device_work import kind_loads, layer_loads
from pipette_launch.cost.compute.loads import PassLoads
from pipette_launch.cost.compute.mamba_work import mamba_loads
from pipette_launch.facts import HybridLayers, Job, Layout

MAMBA = HybridLayers(pattern="MM*-", mamba_state_dim=16, mamba_head_dim=8, mamba_num_groups=2, mamba_num_heads=16)


def job(*flags: str) -> Job:
    """A hybrid job of four small layers."""
    return tiny_job(model=tiny_model(hybrid=MAMBA, transformer_impl="transformer_engine"), performance_flags=flags)


def loads(layout: Layout) -> PassLoads:
    """Those of one layer."""
    return mamba_loads(tiny_model(), MAMBA, layout)


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


def test_the_two_blocks_of_a_layer_ask_for_what_the_layer_asks() -> None:
    """Attention and MLP by themselves add up to a transformer's layer."""
    layout = Layout(tp=2, sequence_parallel=True)
    whole = layer_loads(job(), layout, moe=False)
    parts = kind_loads(job(), layout, "attention_layer") + kind_loads(job(), layout, "mlp_layer")

    for name in ("moved_bytes", "kernels", "cast_elements", "attention_flops"):
        found = [getattr(getattr(parts, each), name) for each in ("forward", "input_grad", "weight_grad")]
        expected = [getattr(getattr(whole, each), name) for each in ("forward", "input_grad", "weight_grad")]
        assert found == pytest.approx(expected)


def test_a_graph_of_mamba_launches_all_of_its_kernels() -> None:
    """By the module's name in Megatron's scope; attention is another module."""
    graphs = job("--cuda-graph-impl transformer_engine", "--cuda-graph-scope mamba")

    assert 0 == kind_loads(graphs, Layout(), "mamba_layer").forward.kernels
    assert kind_loads(graphs, Layout(), "attention_layer").forward.kernels > 0
    assert kind_loads(job(), Layout(), "mamba_layer").forward.kernels > 10
