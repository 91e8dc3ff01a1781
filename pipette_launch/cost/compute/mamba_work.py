"""What a Mamba-2 layer asks of a device for one micro-batch: two projections, and a scan that moves bytes.

The scan's products are small against what its kernels read and write, in 16 bits and, for states and scores of chunks,
in 32. Kernel by kernel as mamba-ssm v2.2 launches them (ops/triton/ssd_combined.py: convolution, sums of time steps,
states of chunks, passing of states, scores, scan, gated norm; the backward computes the first five again).
"""

# Elements a token: c convolved, d channels of all heads, g = groups * state, S = d * state / 128 of chunk states,
# 128 scores for each group.

from __future__ import annotations

from pipette_launch.cost.compute.loads import Load, PassLoads, matrix
from pipette_launch.cost.layers import attention
from pipette_launch.cost.layers.mamba import SCAN_CHUNK
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import HybridLayers, ModelSpec

_FP32_BYTES = 4


def mamba_loads(model: ModelSpec, mamba: HybridLayers, layout: Layout) -> PassLoads:
    """Count the projections and the scan of one layer, heads and groups cut over tp."""
    tokens, one = attention.tokens(model, layout), model.dtype_bytes
    projections = matrix(tokens, mamba.mamba_projected / layout.tp, model.hidden_size)
    projections += matrix(tokens, model.hidden_size, mamba.mamba_channels / layout.tp)
    d, c, g = mamba.mamba_channels, mamba.mamba_convolved, mamba.mamba_num_groups * mamba.mamba_state_dim
    states, scores = d * mamba.mamba_state_dim / SCAN_CHUNK, SCAN_CHUNK * mamba.mamba_num_groups
    forward = one * (2 * c + 7 * d + 4 * g + 2 * states) + _FP32_BYTES * (2 * states + 2 * scores)
    backward = one * (5 * c + 20 * d + 11 * g + 6 * states) + _FP32_BYTES * (5 * states + 6 * scores)
    # The kernels want samples in front: with more than one, inputs and outputs are copied into that order.
    turned = 2.0 * one * (mamba.mamba_projected + d) if layout.micro_batch_size > 1 else 0.0
    share = tokens / layout.tp
    return projections + PassLoads(
        forward=Load(scan_bytes=share * forward, moved_bytes=share * turned, kernels=14),
        input_grad=Load(scan_bytes=share * backward, moved_bytes=share * turned, kernels=28),
    )
