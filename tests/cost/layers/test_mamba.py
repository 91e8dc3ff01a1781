"""Mamba layers: parameters by hand, and what they keep."""

from __future__ import annotations

from facts_for_tests import tiny_model

from pipette_launch.cost.layers.mamba import mamba_activations, mamba_backward_bytes, mamba_parameters
from pipette_launch.facts import HybridLayers, Layout

MAMBA = HybridLayers(pattern="MM*-", mamba_state_dim=16, mamba_head_dim=8, mamba_num_groups=2, mamba_num_heads=16)
"""Of 128 channels, 192 that are convolved and 336 columns of the input projection."""


def test_parameters_are_those_of_the_mixer() -> None:
    """Projections in and out, 4 taps and a bias for each convolved channel, three a head, the gated norm."""
    expected = 64 * 336 + 128 * 64 + 5 * 192 + 3 * 16 + 128

    assert expected == mamba_parameters(tiny_model(), MAMBA, 1)
    assert expected // 2 == mamba_parameters(tiny_model(), MAMBA, 2)


def test_kept_are_the_projection_and_three_times_its_channels() -> None:
    """Per token: gates, convolved channels and time steps, and scan, norm's and projection's inputs behind them."""
    per_token = 4 * (336 + 3 * 128) + 4 * 2

    kept = mamba_activations(tiny_model(), MAMBA, Layout(), narrow=1)

    assert 32 * per_token == kept
    assert kept // 2 == mamba_activations(tiny_model(), MAMBA, Layout(tp=2), narrow=1)
    assert kept // 2 == mamba_activations(tiny_model(), MAMBA, Layout(cp=2), narrow=1)
    assert kept - 32 * 3 * 128 == mamba_activations(tiny_model(), MAMBA, Layout(), narrow=4)


def test_the_backward_holds_gradients_and_states_of_chunks() -> None:
    """States are 4 bytes for each channel and state, once for every 128 tokens, and their gradients as many."""
    long = tiny_model(seq_length=256, max_position_embeddings=256)

    assert 256 * 4 * (336 + 192 + 128) + 2 * 4 * 2 * 128 * 16 == mamba_backward_bytes(long, MAMBA, Layout())
