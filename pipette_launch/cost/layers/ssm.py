"""Parameters, bytes, work and exchanges of Megatron's state-space mixers: Mamba-2 and gated delta networks.

Tensor parallelism splits the heads (and groups) of a mixer over tp ranks. Context parallelism splits heads instead of
tokens between the input projection and the output projection.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipette_launch.cost.layers.block import FP32_BYTES, Activations, Block, Parameters, as_matrix_input
from pipette_launch.cost.layers.loads import Exchange, Load, PassLoads, matrix
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Ints, Layout

_CONVOLUTION = 4
"""Number of taps of the convolution, which no flag changes."""
_SCAN_CHUNK = 128
"""Number of tokens in one chunk of the scan, which no flag changes."""
_EXCHANGES = 6
"""Number of all-to-alls of context parallelism in one pass of a layer."""
_PER_HEAD = 3
"""Number of parameters of a head: bias of the time step, decay, and skip connection."""
_CHUNK = 64
"""Number of tokens in one chunk of the gated delta rule (FLA ops/gated_delta_rule/chunk.py)."""
_FIRST_VIEW = (0, 18)
"""First release with FLA's convolution, which keeps a view of the whole output of the input projection.

Earlier releases copy the convolved channels, and the convolution keeps the copy.
"""
_FIRST_WHOLE_EXCHANGE = (0, 19)


class Mamba(Block):
    """Mamba-2 mixer.

    Source: megatron/core/ssm/mamba_mixer.py of core_v0.17.1 with its memory-efficient path, whose kernel is
    `mamba_split_conv1d_scan_combined` of mamba-ssm v2.2. Symbols in formulas: T = tokens of one micro-batch on a rank,
    d = channels of all heads, H = heads, c = convolved channels.
    """

    graph_parts = ("mamba",)

    def __init__(self, job: Job, layout: Layout, domain: int = 1) -> None:
        super().__init__(job, layout, domain)
        model = self.model
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

    def activations(self) -> Activations:
        """Count the kept bytes of the norm's output, and of T*(2d + c + H) and 3*T*d further elements.

        The T*(2d + c + H) elements are the input projection's output. The 3*T*d elements are the scan's output before
        its gate, the gated norm's input, and the output projection's input. The backward computes the states of chunks
        again, so the forward does not keep these states. Context parallelism does not change the number of elements.
        """
        latent, mixer, tp = self.model.latent_attention, self.mixer, self.layout.tp
        element = self.model.dtype_bytes * self.tokens
        kept = element * (mixer.mamba_projected + 2 * mixer.mamba_channels) // tp
        kept += as_matrix_input(self.job, element * mixer.mamba_channels // tp)
        # The gated norm keeps one reciprocal deviation for each group.
        kept += FP32_BYTES * self.tokens * mixer.mamba_num_groups // tp
        return Activations(
            layer_input=self.stream_bytes(),
            attention_norm=self.residual_bytes if latent else as_matrix_input(self.job, self.residual_bytes),
            attention=kept,
            dropout_masks=self.dropout_mask_bytes,
            fuses_attention_norm=self.uses_te and not latent,
        )

    def backward_bytes(self) -> int:
        """Count the bytes that the scan's backward holds, and the bytes of one gradient of the residual stream.

        The scan's backward holds the gradients of all its inputs, the convolved inputs again, the gradient of the
        scan's output and, for each chunk, states and their gradients.
        """
        mixer, element = self.mixer, self.model.dtype_bytes * self.tokens
        held = element * (mixer.mamba_projected + mixer.mamba_convolved + mixer.mamba_channels)
        states = self.tokens // _SCAN_CHUNK * mixer.mamba_channels * mixer.mamba_state_dim
        return (held + 2 * FP32_BYTES * states) // self.layout.tp + self.residual_bytes

    def loads(self) -> PassLoads:
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

    def exchanges(self, once_S: Ints, again_S: Ints) -> Iterator[Exchange]:
        """Yield the all-to-alls from split tokens to split heads before the scan, and back after the scan.

        Gates, inputs, B, C, time steps and outputs have separate exchanges, which count as six equal exchanges
        (mamba_context_parallel.py of core_v0.17.1).
        """
        if self.layout.cp > 1:
            turned = self.mixer.mamba_projected + self.mixer.mamba_channels
            sent = self.model.dtype_bytes * self.tokens * turned / self.layout.tp
            counts = (_EXCHANGES * once_S, _EXCHANGES * (once_S + again_S))
            yield Exchange.of("all_to_all", "cp", sent / _EXCHANGES, *counts)


class Delta(Block):
    """Gated delta network, the linear attention of Qwen3-Next and Qwen3.5.

    Source: megatron/core/ssm/gated_delta_net/gdn.py and common.py of core_v0.19.0. The kernels of
    flash-linear-attention 0.6 (FLA) compute the gated delta rule. Symbols in formulas: v = channels of all values,
    q = channels of the keys after each value head has a copy of its key, d = channels of a value head.
    """

    graph_parts = ("attn",)

    def __init__(self, job: Job, layout: Layout, domain: int = 1) -> None:
        super().__init__(job, layout, domain)
        model = self.model
        assert model.linear_attention is not None
        self.net = model.linear_attention
        self.heads = self.net.linear_num_value_heads // layout.tp
        self.keys, self.values = self.net.keys // layout.tp, self.net.values // layout.tp
        self.copied = self.heads * self.net.linear_key_head_dim
        """Number of key channels after each value head has a copy of its key."""

    def parameters(self) -> Parameters:
        """Count projections and convolution without biases, two numbers a value head, and the norm of one head."""
        net, tp = self.net, self.layout.tp
        norm = net.linear_value_head_dim * (2 if self.model.normalization == "LayerNorm" else 1)
        convolution = net.linear_conv_kernel_dim * net.convolved // tp
        return Parameters(dense=self.matrices() + convolution + 2 * self.heads + norm)

    def matrices(self) -> int:
        """Count the parameters of both projections."""
        return self.net.weights(self.model.hidden_size) // self.layout.tp

    def activations(self) -> Activations:
        """Count the kept bytes of the norm's output, of the input projection's output, and of the tensors behind it.

        The convolution keeps its input. The normed queries and keys, their copies (2q) and the values (v) are kept. The
        rule also keeps decays, write strengths and 64 scores for each value head, but no states. Behind the rule, gate,
        output, normed output and the input of the output projection are kept (4v). Recompute of `gdn_norm_out` does not
        keep the last two.
        """
        net, tp, element = self.net, self.layout.tp, self.model.dtype_bytes * self.tokens
        projected = (net.projected if self.job.release >= _FIRST_VIEW else net.convolved) // tp
        kept = element * (projected + 2 * self.keys + 2 * self.copied + 3 * self.values + (_CHUNK + 3) * self.heads)
        if self.options.deterministic_mode:
            kept = self._native_bytes()
        statistics = 2 * self.heads + 2 * net.linear_num_key_heads // tp
        return Activations(
            layer_input=self.stream_bytes(),
            attention_norm=as_matrix_input(self.job, self.residual_bytes),
            attention=kept + FP32_BYTES * self.tokens * statistics,
            delta_norm=element * self.values + as_matrix_input(self.job, element * self.values),
            dropout_masks=self.dropout_mask_bytes,
            fuses_attention_norm=self.uses_te,
        )

    def _native_bytes(self) -> int:
        """Count the kept bytes of PyTorch's convolution and rule, which run with `--deterministic-mode`.

        The convolution keeps input and output. The rule (`torch_chunk_gated_delta_rule`) keeps 7q + 3v and 5 numbers a
        head in fp32, and for each chunk a state, 6 squares of 64 x 64, and copies of their first i rows and columns.
        """
        around = 2 * (self.net.convolved // self.layout.tp + self.keys + self.values)
        squares = 6 * _CHUNK + sum(row * row + row for row in range(_CHUNK)) // _CHUNK
        state = self.copied * self.net.linear_value_head_dim // _CHUNK
        rule = 7 * self.copied + 3 * self.values + state + (squares + 5) * self.heads
        return self.tokens * (self.model.dtype_bytes * around + FP32_BYTES * rule)

    def backward_bytes(self) -> int:
        """Count the bytes that the rule's backward holds: 6q + 5v elements a token, states and their gradients.

        The backward computes the states of all chunks again (FLA chunk_gated_delta_rule_bwd).
        """
        states = self.copied * self.net.linear_value_head_dim // _CHUNK
        held = 6 * self.copied + 5 * self.values + 2 * states
        return self.model.dtype_bytes * self.tokens * held + self.residual_bytes

    def loads(self) -> PassLoads:
        """Return the work of both projections, and the bytes that the other kernels read and write.

        The kernels of convolution and rule count as scans, which devices move at the rate of Mamba's scan. The rule
        launches three kernels in the forward: chunks, states, outputs. The backward launches the first two again, and
        four kernels of gradients. Copies and norms count as moved bytes. FLA's similar kernels without a gate reached
        83 % of an H100's memory bandwidth in the forward, and 55 % in the backward (a benchmark of Helion).
        """
        net, one, rows, tp = self.net, self.model.dtype_bytes, self.tokens, self.layout.tp
        projections = matrix(rows, net.projected / tp, self.model.hidden_size)
        projections += matrix(rows, self.model.hidden_size, self.values)
        q, v, keys, convolved, scores = self.copied, self.values, self.keys, net.convolved / tp, _CHUNK * self.heads
        states = q * net.linear_value_head_dim / _CHUNK
        share = rows * one
        return projections + PassLoads(
            forward=Load(
                scan_bytes=share * (2 * convolved + 6 * q + 6 * v + 2 * states + scores),
                moved_bytes=share * (10 * keys + 2 * q + 9 * v),
                kernels=18,
            ),
            input_grad=Load(
                scan_bytes=share * (3 * convolved + 21 * q + 15 * v + 4 * states + 2 * scores),
                moved_bytes=share * (12 * keys + 2 * q + 12 * v + 2 * net.projected / tp),
                kernels=34,
            ),
        )

    def column_flops(self) -> float:
        """Return the FLOPs per token of the input projection."""
        return 2.0 * self.model.hidden_size * self.net.projected

    def exchanges(self, once_S: Ints, again_S: Ints) -> Iterator[Exchange]:
        """Yield the all-to-alls from split tokens to split heads before the convolution, and back after the norm.

        Before 0.19 each of the six sections of projected channels has its own exchange.
        """
        if self.layout.cp > 1:
            row, sections = self.model.dtype_bytes * self.tokens, 6 if self.job.release < _FIRST_WHOLE_EXCHANGE else 1
            for width, times in ((self.net.projected // self.layout.tp, sections), (self.values, 1)):
                counts = (times * once_S, times * (once_S + again_S))
                yield Exchange.of("all_to_all", "cp", row * width / times, *counts)
