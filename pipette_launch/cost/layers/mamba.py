"""Parameters, bytes, work and exchanges of the Mamba-2 block of hybrid models.

Source: megatron/core/ssm/mamba_mixer.py of core_v0.17.1 with its memory-efficient path, whose kernel is
`mamba_split_conv1d_scan_combined` of mamba-ssm v2.2. Tensor parallelism splits the mixer's heads and groups over tp
ranks.
"""

# Symbols in formulas: T = tokens of one micro-batch on a rank, d = channels of all heads, H = heads, c = convolved
# channels.

from __future__ import annotations

from collections.abc import Iterator

from pipette_launch.cost.layers.block import FP32_BYTES, Activations, Block, Parameters, as_matrix_input
from pipette_launch.cost.layers.passes import Exchange, Load, PassLoads, matrix
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Ints, Layout
from pipette_launch.facts.model import ModelSpec

_CONVOLUTION = 4
"""Number of taps of the convolution, which no flag changes."""
_SCAN_CHUNK = 128
"""Number of tokens in one chunk of the scan, which no flag changes."""
_EXCHANGES = 6
"""Number of all-to-alls of context parallelism in one pass of a layer."""
_PER_HEAD = 3
"""Number of parameters of a head: bias of the time step, decay, and skip connection."""


class Mamba(Block):
    """Mamba-2 mixer."""

    graph_module = "mamba"

    def __init__(self, model: ModelSpec, layout: Layout) -> None:
        super().__init__(model, layout)
        assert model.hybrid is not None
        self.mixer = model.hybrid

    def parameters(self) -> Parameters:
        """Count parameters of projections, convolution with bias, heads (3 numbers a head), and gated norm."""
        mixer, tp = self.mixer, self.layout.tp
        count = self.matrices() + (_CONVOLUTION + 1) * mixer.mamba_convolved // tp
        return Parameters(dense=count + (_PER_HEAD * mixer.mamba_num_heads + mixer.mamba_channels) // tp)

    def matrices(self) -> int:
        """Count the parameters of both projections."""
        return self.mixer.mamba_matrices(self.model.hidden_size) // self.layout.tp

    def activations(self, job: Job) -> Activations:
        """Count the kept bytes of the norm's output, and of T*(2d + c + H) and 3*T*d further elements.

        The T*(2d + c + H) elements are the input projection's output. The 3*T*d elements are the scan's output before
        its gate, the gated norm's input, and the output projection's input. The backward computes the states of chunks
        again, so the forward does not keep these states. Between the two projections, context parallelism splits heads
        instead of tokens, so the number of elements does not change.
        """
        latent, mixer, tp = self.model.latent_attention, self.mixer, self.layout.tp
        element = self.model.dtype_bytes * self.tokens
        kept = element * (mixer.mamba_projected + 2 * mixer.mamba_channels) // tp
        kept += as_matrix_input(job, element * mixer.mamba_channels // tp)
        # The gated norm keeps one reciprocal deviation for each group.
        kept += FP32_BYTES * self.tokens * mixer.mamba_num_groups // tp
        return Activations(
            layer_input=self.stream_bytes(job),
            attention_norm=self.residual_bytes if latent else as_matrix_input(job, self.residual_bytes),
            attention=kept,
            dropout_masks=self.dropout_mask_bytes,
            fuses_attention_norm=self.uses_te and not latent,
        )

    def backward_bytes(self, _job: Job) -> int:
        """Count the bytes that the scan's backward holds, and the bytes of one gradient of the residual stream.

        The scan's backward holds the gradients of all its inputs, the convolved inputs again, the gradient of the
        scan's output and, for each chunk, states and their gradients.
        """
        mixer, element = self.mixer, self.model.dtype_bytes * self.tokens
        held = element * (mixer.mamba_projected + mixer.mamba_convolved + mixer.mamba_channels)
        states = self.tokens // _SCAN_CHUNK * mixer.mamba_channels * mixer.mamba_state_dim
        return (held + 2 * FP32_BYTES * states) // self.layout.tp + self.residual_bytes

    def loads(self, _job: Job) -> PassLoads:
        """Return the work of both projections and of the scan.

        The scan's products are small compared with what its kernels read and write, in 16 bits and, for states and
        scores of chunks, in 32. mamba-ssm v2.2 launches these kernels (ops/triton/ssd_combined.py): convolution, sums
        of time steps, states of chunks, passing of states, scores, scan, gated norm. The backward launches the kernels
        from the convolution to the scores again. A token has c convolved elements, d channels, g = groups * state, d *
        state / 128 elements of chunk states, and 128 scores for each group.
        """
        mixer, one, rows, tp = self.mixer, self.model.dtype_bytes, self.tokens, self.layout.tp
        projections = matrix(rows, mixer.mamba_projected / tp, self.model.hidden_size)
        projections += matrix(rows, self.model.hidden_size, mixer.mamba_channels / tp)
        d, c, g = mixer.mamba_channels, mixer.mamba_convolved, mixer.mamba_num_groups * mixer.mamba_state_dim
        states, scores = d * mixer.mamba_state_dim / _SCAN_CHUNK, _SCAN_CHUNK * mixer.mamba_num_groups
        forward = one * (2 * c + 7 * d + 4 * g + 2 * states) + FP32_BYTES * (2 * states + 2 * scores)
        backward = one * (5 * c + 20 * d + 11 * g + 6 * states) + FP32_BYTES * (5 * states + 6 * scores)
        # The Mamba kernels need the batch as first dimension, so with several samples their inputs and outputs are
        # copied.
        turned = 2.0 * one * (mixer.mamba_projected + d) if self.layout.micro_batch_size > 1 else 0.0
        share = rows / tp
        return projections + PassLoads(
            forward=Load(scan_bytes=share * forward, moved_bytes=share * turned, kernels=14),
            input_grad=Load(scan_bytes=share * backward, moved_bytes=share * turned, kernels=28),
        )

    def column_flops(self) -> float:
        """Return the FLOPs per token of the input projection."""
        return 2.0 * self.model.hidden_size * self.mixer.mamba_projected

    def exchanges(self, _job: Job, once_S: Ints, again_S: Ints, _domain: int) -> Iterator[Exchange]:
        """Yield the all-to-alls from split tokens to split heads before the scan, and back after the scan.

        Gates, inputs, B, C, time steps and outputs have separate exchanges, which count as six equal exchanges
        (mamba_context_parallel.py of core_v0.17.1).
        """
        if self.layout.cp > 1:
            turned = self.mixer.mamba_projected + self.mixer.mamba_channels
            sent = self.model.dtype_bytes * self.tokens * turned / self.layout.tp
            counts = (_EXCHANGES * once_S, _EXCHANGES * (once_S + again_S))
            yield Exchange.of("all_to_all", "cp", sent / _EXCHANGES, *counts)
