"""Shapes of common operations on abstract tensors, found without torch's own way, which is slow.

torch finds a shape by running each operation's decomposition in Python: a quarter to half a millisecond. Here the
common case is answered at once (contiguous tensors of one floating type); everything else is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

aten: Any = torch.ops.aten
# The factory itself, whatever a patch puts in the place of its public name.
_empty: Callable[..., torch.Tensor] = torch._C._VariableFunctions.empty
Quick = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""From an operation's arguments to its result, or None where torch has to be asked."""


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "meta" and tensor.is_contiguous()


def _in_order(tensor: Any) -> bool:
    """Whether a result of the tensor's shape is contiguous: no dimension was permuted or expanded."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
        return False
    if tensor.is_contiguous():
        return True
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return strides[-1] > 0 and all(before >= after for before, after in pairwise(strides))


def _made(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return _empty(shape, dtype=dtype, device="meta")


def _pointwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    if "out" in kwargs or not _in_order(first) or not first.dtype.is_floating_point:
        return None
    shape = first.shape
    for other in args[1:]:
        if isinstance(other, torch.Tensor):
            if other.dtype is not first.dtype or not _in_order(other):
                return None
            if other.shape != shape:
                shape = torch.broadcast_shapes(shape, other.shape)  # type: ignore[no-untyped-call]
        elif not isinstance(other, (int, float)):
            return None
    return _made(shape, first.dtype)


def _comparison(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    others = [other for other in args[1:] if isinstance(other, torch.Tensor)]
    if kwargs or not _is_plain(first) or any(not _is_plain(other) or other.shape != first.shape for other in others):
        return None
    return _made(first.shape, torch.bool)


def _in_place(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return args[0] if isinstance(args[0], torch.Tensor) and args[0].device.type == "meta" else None


def _new(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    if args[0].device.type != "meta" or (device is not None and torch.device(device).type != "meta"):
        return None
    return _made(args[1], kwargs.get("dtype") or args[0].dtype)


def _like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device, layout = kwargs.get("device"), kwargs.get("memory_format")
    if args[0].device.type != "meta" or (device is not None and torch.device(device).type != "meta"):
        return None
    if layout is not torch.contiguous_format and not args[0].is_contiguous():
        return None
    return _made(args[0].shape, kwargs.get("dtype") or args[0].dtype)


def _joined(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    tensors, dimension = args[0], args[1] if len(args) > 1 else 0
    if any(not _is_plain(tensor) or tensor.dtype is not tensors[0].dtype for tensor in tensors):
        return None
    shape = list(tensors[0].shape)
    if any(len(tensor.shape) != len(shape) for tensor in tensors):
        return None
    shape[dimension] = sum(tensor.shape[dimension] for tensor in tensors)
    return _made(shape, tensors[0].dtype)


def _product(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    first, second = args[-2:]
    if first.device.type != "meta" or first.dtype is not second.dtype:
        return None
    return _made((*first.shape[:-1], second.shape[-1]), first.dtype)


def _product_added(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _product(args[:3], kwargs)


_QUICK: dict[str, Quick] = {
    **dict.fromkeys(
        (
            "add.Tensor",
            "add.Scalar",
            "sub.Tensor",
            "mul.Tensor",
            "mul.Scalar",
            "div.Tensor",
            "rsub.Scalar",
            "neg.default",
            "exp.default",
            "sigmoid.default",
            "silu.default",
            "tanh.default",
            "gelu.default",
            "cos.default",
            "sin.default",
            "reciprocal.default",
            "sqrt.default",
        ),
        _pointwise,
    ),
    **dict.fromkeys(
        (f"{name}.{kind}" for name in ("lt", "le", "gt", "ge", "eq", "ne") for kind in ("Tensor", "Scalar")),
        _comparison,
    ),
    **dict.fromkeys(
        (
            "add_.Tensor",
            "sub_.Tensor",
            "mul_.Tensor",
            "mul_.Scalar",
            "div_.Tensor",
            "copy_.default",
            "fill_.Scalar",
            "zero_.default",
            "masked_fill_.Scalar",
            "normal_.default",
            "uniform_.default",
        ),
        _in_place,
    ),
    "new_empty.default": _new,
    "new_zeros.default": _new,
    "empty_like.default": _like,
    "zeros_like.default": _like,
    "ones_like.default": _like,
    "clone.default": _like,
    "_to_copy.default": _like,
    "cat.default": _joined,
    "mm.default": _product,
    "bmm.default": _product,
    "addmm.default": _product_added,
    "baddbmm.default": _product_added,
}


def _overload(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


QUICK: dict[Any, Quick] = {_overload(name): quick for name, quick in _QUICK.items()}
"""What is answered here, by operation."""
