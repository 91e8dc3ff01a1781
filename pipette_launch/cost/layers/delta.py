"""Parameters, bytes, work and exchanges of gated delta networks, the linear attention of Qwen3-Next and Qwen3.5.

GDN = megatron/core/ssm/gated_delta_net/gdn.py and common.py of core_v0.19.0; FLA = flash-linear-attention 0.6, whose
kernels compute the gated delta rule. Tensor parallelism splits the heads over tp ranks.
"""

# Symbols in formulas: T = tokens of one micro-batch on a rank, v = channels of all values, q = channels of the keys
# after each value head has a copy of its key, s = q * d / 64 elements of states, d = channels of a value head.

from __future__ import annotations

from collections.abc import Iterator

from pipette_launch.cost.layers.block import FP32_BYTES, Activations, Block, Parameters, as_matrix_input
from pipette_launch.cost.layers.passes import Exchange, Load, PassLoads, matrix
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Ints, Layout
from pipette_launch.facts.model import ModelSpec
from pipette_launch.megatron.performance import performance_options

_CHUNK = 64
"""Number of tokens in one chunk of the gated delta rule (FLA ops/gated_delta_rule/chunk.py)."""
_FIRST_VIEW = (0, 18)
"""First release with FLA's convolution, which keeps a view of the whole output of the input projection.

Earlier releases copy the convolved channels, and the convolution keeps the copy.
"""
_FIRST_WHOLE_EXCHANGE = (0, 19)


class Delta(Block):
    """Gated delta network."""

    graph_module = "attn"

    def __init__(self, model: ModelSpec, layout: Layout) -> None:
        super().__init__(model, layout)
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

    def activations(self, job: Job) -> Activations:
        """Count the kept bytes of the norm's output, of the input projection's output, and of the tensors behind it.

        The convolution keeps its input. The normed queries and keys, their copies (2q) and the values (v) are kept. The
        rule also keeps decays, write strengths and 64 scores for each value head, but no states. Behind the rule, gate,
        output, normed output and the input of the output projection are kept (4v). Recompute of `gdn_norm_out` does not
        keep the last two. Between both projections, context parallelism splits heads instead of tokens.
        """
        net, tp, element = self.net, self.layout.tp, self.model.dtype_bytes * self.tokens
        projected = (net.projected if job.release >= _FIRST_VIEW else net.convolved) // tp
        kept = element * (projected + 2 * self.keys + 2 * self.copied + 3 * self.values + (_CHUNK + 3) * self.heads)
        if performance_options(job).deterministic_mode:
            kept = self._native_bytes()
        statistics = 2 * self.heads + 2 * net.linear_num_key_heads // tp
        return Activations(
            layer_input=self.stream_bytes(job),
            attention_norm=as_matrix_input(job, self.residual_bytes),
            attention=kept + FP32_BYTES * self.tokens * statistics,
            delta_norm=element * self.values + as_matrix_input(job, element * self.values),
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

    def backward_bytes(self, _job: Job) -> int:
        """Count the bytes that the rule's backward holds: 6q + 5v elements a token, states and their gradients.

        The backward computes the states of all chunks again (FLA chunk_gated_delta_rule_bwd).
        """
        states = self.copied * self.net.linear_value_head_dim // _CHUNK
        held = 6 * self.copied + 5 * self.values + 2 * states
        return self.model.dtype_bytes * self.tokens * held + self.residual_bytes

    def loads(self, _job: Job) -> PassLoads:
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

    def exchanges(self, job: Job, once_S: Ints, again_S: Ints, _domain: int) -> Iterator[Exchange]:
        """Yield the all-to-alls from split tokens to split heads before the convolution, and back after the norm.

        Before 0.19 each of the six sections of projected channels has its own exchange.
        """
        if self.layout.cp > 1:
            row, sections = self.model.dtype_bytes * self.tokens, 6 if job.release < _FIRST_WHOLE_EXCHANGE else 1
            for width, times in ((self.net.projected // self.layout.tp, sections), (self.values, 1)):
                counts = (times * once_S, times * (once_S + again_S))
                yield Exchange.of("all_to_all", "cp", row * width / times, *counts)
