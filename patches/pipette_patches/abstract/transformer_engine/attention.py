"""Attention cores by backend: what each keeps for backward, and the copies that it makes on the way.

Read in TransformerEngine 2.8, attention/dot_product_attention/{backends,context_parallel}.py. cuDNN's fused kernel
takes tokens as they come, (s, b, heads, channels); FlashAttention wants (b, s, heads, channels), so that with more
than one sequence in a micro-batch query, key, value and output are copied; the unfused core writes every score. With
context parallelism keys and values travel a ring: one buffer each step forward, two pairs of buffers backward.
"""

from __future__ import annotations

from typing import Any

import torch

from pipette_patches.abstract.transformer_engine.fused_kernels import kernel
from pipette_patches.errors import NotModelledError

SCORES = ("flash", "fused", "unfused")
_backend = ["fused"]


def choose(backend: str) -> None:
    """Let the cores made from now on be of this kind."""
    if backend not in SCORES:
        raise NotModelledError(f"attention backend {backend!r} is not modelled; known are {', '.join(SCORES)}")
    _backend[0] = backend


def _output(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, shaped as the query with the value's channels, and one fp32 number for each query and head."""
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _fused_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    """One fused kernel: keeps query, key, value, output and its statistics, and the state of the random numbers."""
    out, statistics = _output(query, value)
    return out, (query, key, value, out, statistics, query.new_empty(2, dtype=torch.int64))


def _ring_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranks: int, sequence: int) -> Any:
    """Pass keys and values around `ranks` of them; keeps query, the last pair received, output and statistics.

    `sequence` is the dimension of the query that is cut.
    """
    key_shape, value_shape = key.shape, value.shape

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        """Make the output in steps, whose results all wait for their correction."""
        pairs, outs = [key.new_empty(key.numel() + value.numel())], []
        for step in range(ranks):
            if step < ranks - 1:
                pairs.append(torch.empty_like(pairs[0]))
            part = query
            if step:
                # Later steps see half of the queries or of the keys (causal): this rank's queries here.
                part = query.new_empty([size // 2 if at == sequence else size for at, size in enumerate(query.shape)])
                outs.append(part)
            outs += _output(part, value)
        statistics = query.new_empty(query.shape[:-1], dtype=torch.float32)
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        states = [query.new_empty(2, dtype=torch.int64) for _ in range(ranks)]
        return out, (query, pairs[-1], out, statistics, *states)

    def backward(kept: Any, _gradient: torch.Tensor) -> Any:
        """Make the gradients in steps; pairs of key-value and gradient travel in two buffers."""
        query, pair, *_ = kept
        query_gradient = query.new_empty(query.shape)
        buffers = [pair.new_empty((2, *pair.shape)) for _ in range(2)]
        for _ in range(ranks):
            part = query.new_empty(query.shape)
            keys, values, both = pair.new_empty(key_shape), pair.new_empty(value_shape), torch.empty_like(pair)
            del part, keys, values, both
        last = buffers[-1][1]
        del buffers
        split = key_shape.numel()
        return query_gradient, last[:split].view(key_shape), last[split:].view(value_shape)

    return kernel(forward, query, key, value, backward=backward)


def _softmax(scores: torch.Tensor) -> Any:
    """Make the probabilities, which are kept too."""
    out = torch.empty_like(scores)
    return out, (out,)


class DotProductAttention(torch.nn.Module):
    """Transformer Engine's `DotProductAttention` for causal self-attention on (s, b, heads, channels)."""

    def __init__(
        self,
        *,
        attention_dropout: float = 0.0,
        cp_group: Any = None,
        cp_comm_type: str = "p2p",
        **_kernel_options: Any,
    ) -> None:
        super().__init__()
        self.backend = _backend[0]
        self.ring = cp_group.size() if cp_group is not None and not isinstance(cp_group, (list, tuple)) else 1
        self.attention_dropout = attention_dropout
        if cp_group is not None and cp_comm_type != "p2p":
            raise NotModelledError(f"context parallelism by {cp_comm_type} is not modelled, only p2p")

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_mask: Any, **_options: Any
    ) -> torch.Tensor:
        """Attend; returns (s, b, heads * channels)."""
        query, key, value = (one.contiguous() for one in (query, key, value))
        if self.ring == 1 and self.backend == "unfused":
            return unfused(query, key, value, self.attention_dropout)
        # Without a ring there is no unfused core: Transformer Engine has context parallelism for its kernels only.
        batch_first = self.backend == "flash"
        if batch_first:
            query, key, value = (one.transpose(0, 1).contiguous() for one in (query, key, value))
        if self.ring > 1:
            out = _ring_attention(query, key, value, self.ring, 1 if batch_first else 0)
        else:
            out = kernel(_fused_attention, query, key, value)
        flat: torch.Tensor = out.flatten(2)
        return flat.transpose(0, 1).contiguous() if batch_first else flat


def unfused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
    """Transformer Engine's unfused core: scores, probabilities and their dropped copy are all written."""
    (rows, batch, heads, _), columns = query.shape, key.shape[0]
    if key.shape[2] != heads:
        repeats = heads // key.shape[2]
        key, value = (one.repeat_interleave(repeats, dim=2) for one in (key, value))
    flat_query = query.reshape(rows, batch * heads, -1)
    flat_key = key.reshape(columns, batch * heads, -1)
    scores = query.new_empty(batch * heads, rows, columns)
    scores = torch.baddbmm(scores, flat_query.transpose(0, 1), flat_key.permute(1, 2, 0), beta=0.0)
    # The scaled, masked softmax keeps its result, and its backward overwrites the gradient given.
    scores = kernel(_softmax, scores, backward=lambda _kept, gradient: (gradient,))
    scores = torch.nn.functional.dropout(scores, dropout, training=True)
    flat_value = value.reshape(columns, batch * heads, -1)
    out = torch.bmm(scores, flat_value.transpose(0, 1)).view(batch, heads, rows, -1)
    return out.permute(2, 0, 1, 3).contiguous().flatten(2)
