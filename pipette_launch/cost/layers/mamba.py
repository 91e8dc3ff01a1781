"""Mamba-2 layers of hybrid models: their parameters on one rank, and what autograd keeps of them.

Source: megatron/core/ssm/mamba_mixer.py of core_v0.17.1 with its memory-efficient path, whose kernel is
`mamba_split_conv1d_scan_combined` of mamba-ssm v2.2. Tensor parallelism cuts heads and groups.
"""

# T = tokens of one micro-batch on a rank, d = channels of all heads, H = heads, c = channels that are convolved.

from __future__ import annotations

from pipette_launch.cost.layers.attention import tokens
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import HybridLayers, ModelSpec

CONVOLUTION = 4
"""Taps of the convolution, which no flag changes."""
SCAN_CHUNK = 128
"""Tokens of one chunk of the scan, which no flag changes."""
_PER_HEAD = 3
"""Bias of the time step, decay, and skip of each head."""
_FP32_BYTES = 4


def mamba_parameters(model: ModelSpec, mamba: HybridLayers, tp: int) -> int:
    """Count one layer's mixer: both projections, the convolution with its bias, three a head, the gated norm."""
    count = mamba.mamba_matrices(model.hidden_size) // tp
    count += (CONVOLUTION + 1) * mamba.mamba_convolved // tp
    return count + (_PER_HEAD * mamba.mamba_num_heads + mamba.mamba_channels) // tp


def mamba_activations(model: ModelSpec, mamba: HybridLayers, layout: Layout, *, narrow: int) -> int:
    """Count what the mixer keeps for one micro-batch: T*(2d + c + H) elements of the projection, and 3*T*d behind it.

    Those three are the scan's output before its gate, the gated norm's input, and the output projection's. States of
    chunks are computed again in the backward. Context parallelism cuts heads instead of tokens between the
    projections, which leaves as many elements.

    Args:
        model: for the element's type.
        mamba: sizes of the layer.
        layout: tensor and context parallelism cut it.
        narrow: times that the input of a matrix is narrower than an element, as in FP8.

    """
    element = model.dtype_bytes * tokens(model, layout)
    kept = element * (mamba.mamba_projected + 2 * mamba.mamba_channels) // layout.tp
    # Of the gated norm, the deviation of each group.
    statistics = _FP32_BYTES * tokens(model, layout) * mamba.mamba_num_groups // layout.tp
    return kept + element * mamba.mamba_channels // layout.tp // narrow + statistics


def mamba_backward_bytes(model: ModelSpec, mamba: HybridLayers, layout: Layout) -> int:
    """Count what the scan's backward holds for a while: gradients of all it was given, and the convolved inputs again.

    Between them lie the gradient of the scan's output and, for each chunk of 128 tokens, states and their gradients.
    """
    element = model.dtype_bytes * tokens(model, layout)
    held = element * (mamba.mamba_projected + mamba.mamba_convolved + mamba.mamba_channels)
    states = tokens(model, layout) // SCAN_CHUNK * mamba.mamba_channels * mamba.mamba_state_dim
    return (held + 2 * _FP32_BYTES * states) // layout.tp
