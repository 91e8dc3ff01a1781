"""Fused kernels of Transformer Engine and Apex as functions that make what the kernels make, and nothing else."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pipette_patches.abstract.errors import NotModelledError


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Write into what was given."""


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
    """Views of one tensor, whose gradients are one tensor again (copied together unless they lie so already)."""

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


def multi_tensor_scale(*_args: Any) -> None:
    """Scale in place."""


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
