"""Fused kernels of Transformer Engine and Apex as functions that make what the kernels make, and nothing else.

The permutation of tokens for experts was read in TransformerEngine 2.8, permutation.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pipette_patches.abstract import moe
from pipette_patches.errors import NotModelledError

_ROW_MAP_DTYPE = torch.int32


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing: the kernel writes into tensors that it was given."""


class RotaryFunction(torch.autograd.Function):
    """Rotary embedding in one kernel: a new tensor, and nothing kept but the angles."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Make the rotated tensor."""
        ctx.save_for_backward(angles)
        return torch.empty_like(given, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> Any:
        """Rotate the gradient back."""
        return torch.empty_like(gradients[0], memory_format=torch.contiguous_format), None


def apply_rotary_pos_emb(given: torch.Tensor, angles: torch.Tensor, **_options: Any) -> Any:
    """Rotate queries or keys."""
    return RotaryFunction.apply(given, angles)  # type: ignore[no-untyped-call]


def apply_fused_qkv_rotary_pos_emb(*_args: Any, **_kwargs: Any) -> Any:
    """Refuse: rotation before the split of queries, keys and values is an option that is not modelled."""
    raise NotModelledError("--fused-single-qkv-rope is not modelled")


class SplitAlongDim(torch.autograd.Function):
    """Split a tensor into views; the backward copies their gradients into one tensor."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, dim: int, sections: Any, _squeeze: bool = False) -> Any:
        """Split."""
        ctx.dim = dim
        return torch.split(given, sections, dim=dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Join the gradients."""
        return torch.cat(gradients, dim=ctx.dim), None, None, None


class CrossEntropyFunction(torch.autograd.Function):
    """Transformer Engine's cross entropy: the gradient is written over the logits, in their own type."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        """Make one loss for each token."""
        loss = logits.new_empty(logits.shape[:2], dtype=torch.float32)
        logits.new_empty((logits.shape[0] * logits.shape[1] * 3,), dtype=torch.float32)
        ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        """Scale in place."""
        (logits,) = ctx.saved_tensors
        return logits, None


def parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, *_options: Any) -> Any:
    """Losses of a vocabulary that is cut over tensor-parallel ranks."""
    return CrossEntropyFunction.apply(logits, labels)  # type: ignore[no-untyped-call]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """Recompute a function in backward; keeps its tensor arguments."""
    del distribute_saved_activations, get_rng_state_tracker, tp_group
    import torch.utils.checkpoint as torch_checkpoint

    return torch_checkpoint.checkpoint(function, *args, use_reentrant=True, **kwargs)


class NoQuantization:
    """FP8 is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Nothing is kept in 8 bits."""
        return False

    @staticmethod
    def reset() -> None:
        """Nothing is to be forgotten."""


@contextlib.contextmanager
def no_quantization(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """Leave everything in its own type."""
    yield


def multi_tensor_applier(operation: Any, overflow: Any, lists: Any, *args: Any) -> Any:
    """Apply one kernel to lists of tensors."""
    return operation(2048 * 32, overflow, lists, *args)


def multi_tensor_l2norm(_chunk: int, _overflow: Any, lists: Any, per_tensor: bool = False) -> Any:
    """Make one norm (or one for each tensor)."""
    count = len(lists[0]) if per_tensor else 0
    return lists[0][0].new_empty(1, dtype=torch.float32), lists[0][0].new_empty(count, dtype=torch.float32)


def get_batch_per_block(_rows: int, columns: int, _batch: int, _heads: int) -> int:
    """Rows of scores that one block of the softmax kernel takes (fused_kernels/scaled_masked_softmax.h)."""
    power = 1 << math.ceil(math.log2(columns))
    return (128 // min(power, 32)) * (2 if power <= 128 else 1)


def softmax_forward(scores: torch.Tensor, *_args: Any) -> torch.Tensor:
    """Make the probabilities."""
    return torch.empty_like(scores)


def softmax_backward(gradient: torch.Tensor, *_args: Any) -> torch.Tensor:
    """Overwrite the gradient."""
    return gradient


class PermuteFunction(torch.autograd.Function):
    """Put rows of tokens into the order of experts; keeps a map of 2 * experts + 1 entries for each token."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, routing_map: torch.Tensor, probabilities: Any) -> Any:
        """Make permuted tokens, the map, and permuted probabilities."""
        num_tokens, experts = routing_map.shape
        rows = moe.routing().rows(num_tokens, experts)
        row_map = routing_map.new_empty((num_tokens, 2 * experts + 1), dtype=_ROW_MAP_DTYPE)
        ctx.save_for_backward(row_map)
        ctx.mark_non_differentiable(row_map)
        permuted = None if probabilities is None else probabilities.new_empty(rows)
        ctx.probabilities = None if probabilities is None else (probabilities.shape, probabilities.dtype)
        ctx.shapes = (tokens.shape, tokens.dtype)
        return tokens.new_empty((rows, tokens.shape[1])), row_map, permuted

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Add the gradients of a token's rows up."""
        shape, dtype = ctx.shapes
        back = None
        if ctx.probabilities is not None:
            back = gradients[0].new_empty(ctx.probabilities[0], dtype=ctx.probabilities[1])
        return gradients[0].new_empty(shape, dtype=dtype), None, back


class ReorderFunction(torch.autograd.Function):
    """Put rows into another order, or add them up into fewer; keeps a map."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, row_map: torch.Tensor, shape: Any) -> torch.Tensor:
        """Make the rows."""
        ctx.save_for_backward(row_map)
        ctx.shape = given.shape
        return given.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Put the gradients back in the order they came from."""
        return gradients[0].new_empty(ctx.shape), None, None


def moe_permute(tokens: torch.Tensor, routing_map: torch.Tensor, **_options: Any) -> Any:
    """Permute tokens: returns them and the map for the way back."""
    permuted, row_map, _ = PermuteFunction.apply(tokens, routing_map, None)  # type: ignore[no-untyped-call]
    return permuted, row_map


def moe_permute_with_probs(
    tokens: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, **_options: Any
) -> Any:
    """Permute tokens and their probabilities."""
    permuted, row_map, probabilities = PermuteFunction.apply(tokens, routing_map, probs)  # type: ignore[no-untyped-call]
    return permuted, probabilities, row_map


def moe_unpermute(
    permuted: torch.Tensor, row_map: torch.Tensor, *_probs: Any, restore_shape: Any, **_options: Any
) -> Any:
    """Add each token's rows up."""
    return ReorderFunction.apply(permuted, row_map, tuple(restore_shape))  # type: ignore[no-untyped-call]


def moe_sort_chunks_by_index(rows: torch.Tensor, _sizes: Any, _order: Any) -> Any:
    """Sort chunks of rows."""
    return ReorderFunction.apply(rows, rows.new_empty(rows.shape[0], dtype=_ROW_MAP_DTYPE), rows.shape)  # type: ignore[no-untyped-call]


def moe_sort_chunks_by_index_with_probs(rows: torch.Tensor, probs: torch.Tensor, _sizes: Any, _order: Any) -> Any:
    """Sort chunks of rows and of their probabilities."""
    row_map = rows.new_empty(rows.shape[0], dtype=_ROW_MAP_DTYPE)
    sorted_rows = ReorderFunction.apply(rows, row_map, rows.shape)  # type: ignore[no-untyped-call]
    return sorted_rows, ReorderFunction.apply(probs, row_map, probs.shape)  # type: ignore[no-untyped-call]
