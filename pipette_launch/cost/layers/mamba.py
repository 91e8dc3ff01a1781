"""The Mamba-2 block of hybrid models.

Source: megatron/core/ssm/mamba_mixer.py of core_v0.17.1 with its memory-efficient path, whose kernel is
`mamba_split_conv1d_scan_combined` of mamba-ssm v2.2. Tensor parallelism cuts heads and groups.
"""

# T = tokens of one micro-batch on a rank, d = channels of all heads, H = heads, c = convolved channels.

from __future__ import annotations

from collections.abc import Iterator

from pipette_launch.cost.layers.attention import norm_bytes
from pipette_launch.cost.layers.block import (
    FP32_BYTES,
    Activations,
    Block,
    Exchange,
    Load,
    Parameters,
    PassLoads,
    computes_in_fp8,
    dropout_mask_bytes,
    matrix,
    residual_bytes,
    stream_bytes,
    tokens,
)
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Ints, Layout
from pipette_launch.facts.model import HybridLayers, ModelSpec

_CONVOLUTION = 4
"""Number of taps of the convolution, which no flag changes."""
_SCAN_CHUNK = 128
"""Number of tokens in one chunk of the scan, which no flag changes."""
_PER_HEAD = 3
"""Number of parameters of a head: bias of the time step, decay and skip."""


class Mamba(Block):
    """Mamba-2 mixer."""

    graph_module = "mamba"

    def parameters(self, model: ModelSpec, layout: Layout) -> Parameters:
        """Count parameters of projections, convolution with bias, heads (3 numbers a head), and gated norm."""
        mamba = _sizes(model)
        count = mamba.mamba_matrices(model.hidden_size) // layout.tp
        count += (_CONVOLUTION + 1) * mamba.mamba_convolved // layout.tp
        return Parameters(dense=count + (_PER_HEAD * mamba.mamba_num_heads + mamba.mamba_channels) // layout.tp)

    def matrices(self, model: ModelSpec, layout: Layout) -> int:
        """Count the parameters of both projections."""
        return _sizes(model).mamba_matrices(model.hidden_size) // layout.tp

    def shapes(self, model: ModelSpec, layout: Layout) -> set[tuple[int, int]]:
        """Return (outputs, inputs) of both projections."""
        mamba, hidden = _sizes(model), model.hidden_size
        return {(mamba.mamba_projected // layout.tp, hidden), (hidden, mamba.mamba_channels // layout.tp)}

    def activations(self, job: Job, layout: Layout) -> Activations:
        """Count the activations of norm and mixer."""
        model = job.model
        return Activations(
            layer_input=stream_bytes(job, layout),
            attention_norm=norm_bytes(job, layout),
            attention=mixer_bytes(model, layout, narrow=model.dtype_bytes if computes_in_fp8(job) else 1),
            dropout_masks=dropout_mask_bytes(model, layout),
            fuses_attention_norm=model.transformer_impl == "transformer_engine" and model.latent_attention is None,
        )

    def backward_bytes(self, job: Job, layout: Layout) -> int:
        """Count the bytes that the scan's backward holds, and a gradient of the stream.

        The scan's backward holds the gradients of all its inputs, the convolved inputs again, the gradient of the
        scan's output and, for each chunk, states and their gradients.
        """
        model, mamba = job.model, _sizes(job.model)
        element = model.dtype_bytes * tokens(model, layout)
        held = element * (mamba.mamba_projected + mamba.mamba_convolved + mamba.mamba_channels)
        states = tokens(model, layout) // _SCAN_CHUNK * mamba.mamba_channels * mamba.mamba_state_dim
        return (held + 2 * FP32_BYTES * states) // layout.tp + residual_bytes(model, layout)

    def loads(self, job: Job, layout: Layout) -> PassLoads:
        """Return the work of both projections and of the scan.

        The scan's products are small compared with what its kernels read and write, in 16 bits and, for states and
        scores of chunks, in 32. mamba-ssm v2.2 launches these kernels (ops/triton/ssd_combined.py): convolution, sums
        of time steps, states of chunks, passing of states, scores, scan, gated norm. The backward computes the first
        five of these again. A token has c convolved elements, d channels, g = groups * state, d * state / 128 elements
        of chunk states, and 128 scores for each group.
        """
        model, mamba, one = job.model, _sizes(job.model), job.model.dtype_bytes
        rows = tokens(model, layout)
        projections = matrix(rows, mamba.mamba_projected / layout.tp, model.hidden_size)
        projections += matrix(rows, model.hidden_size, mamba.mamba_channels / layout.tp)
        d, c, g = mamba.mamba_channels, mamba.mamba_convolved, mamba.mamba_num_groups * mamba.mamba_state_dim
        states, scores = d * mamba.mamba_state_dim / _SCAN_CHUNK, _SCAN_CHUNK * mamba.mamba_num_groups
        forward = one * (2 * c + 7 * d + 4 * g + 2 * states) + FP32_BYTES * (2 * states + 2 * scores)
        backward = one * (5 * c + 20 * d + 11 * g + 6 * states) + FP32_BYTES * (5 * states + 6 * scores)
        # The kernels need the batch dimension first, so with more than one sample inputs and outputs are copied.
        turned = 2.0 * one * (mamba.mamba_projected + d) if layout.micro_batch_size > 1 else 0.0
        share = rows / layout.tp
        return projections + PassLoads(
            forward=Load(scan_bytes=share * forward, moved_bytes=share * turned, kernels=14),
            input_grad=Load(scan_bytes=share * backward, moved_bytes=share * turned, kernels=28),
        )

    def column_flops(self, model: ModelSpec) -> float:
        """Return the FLOPs per token of the input projection."""
        return 2.0 * model.hidden_size * _sizes(model).mamba_projected

    def exchanges(
        self,
        job: Job,
        layout: Layout,
        once_S: Ints,
        again_S: Ints,
        domain: int,  # noqa: ARG002
    ) -> Iterator[Exchange]:
        """Yield the all-to-alls from split tokens to split heads before the scan, and back after the scan.

        Source: mamba_context_parallel.py of core_v0.17.1.
        """
        if layout.cp > 1 and job.model.hybrid:
            turned = job.model.hybrid.mamba_projected + job.model.hybrid.mamba_channels
            sent = job.model.dtype_bytes * tokens(job.model, layout) * turned / layout.tp
            yield Exchange.of("all_to_all", "cp", sent, once_S, once_S + again_S)


MAMBA = Mamba()


def mixer_bytes(model: ModelSpec, layout: Layout, *, narrow: int) -> int:
    """Count the bytes that the mixer keeps: T*(2d + c + H) elements of the projection, and 3*T*d behind it.

    The 3*T*d elements are the scan's output before its gate, the gated norm's input, and the output projection's input.
    States of chunks are computed again in the backward. Between the projections context parallelism cuts heads instead
    of tokens, so the number of elements is the same. `narrow` is the element size divided by the size of a kept matrix
    input, above 1 in FP8.
    """
    mamba = _sizes(model)
    element = model.dtype_bytes * tokens(model, layout)
    kept = element * (mamba.mamba_projected + 2 * mamba.mamba_channels) // layout.tp
    # The gated norm keeps one deviation for each group.
    statistics = FP32_BYTES * tokens(model, layout) * mamba.mamba_num_groups // layout.tp
    return kept + element * mamba.mamba_channels // layout.tp // narrow + statistics


def _sizes(model: ModelSpec) -> HybridLayers:
    assert model.hybrid is not None
    return model.hybrid
