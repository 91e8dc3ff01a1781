"""Shapes of common operations on abstract tensors, found without torch's own way, which is slow.

torch finds a shape by running each operation's decomposition in Python: a quarter to half a millisecond. Here the
common case is answered at once (contiguous tensors of one floating type); everything else is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch

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


def _stays(tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether an abstract tensor's successor is abstract too."""
    device = kwargs.get("device")
    return tensor.device.type == "meta" and (device is None or torch.device(device).type == "meta")


def _new(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _made(args[1], kwargs.get("dtype") or args[0].dtype) if _stays(args[0], kwargs) else None


def _like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_contiguous = kwargs.get("memory_format") is torch.contiguous_format or args[0].is_contiguous()
    if not is_contiguous or not _stays(args[0], kwargs):
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
    # What the product is added to comes first.
    first, second = args[-2:]
    if first.device.type != "meta" or first.dtype is not second.dtype:
        return None
    return _made((*first.shape[:-1], second.shape[-1]), first.dtype)


_OF_ONE_TENSOR = ("neg", "exp", "sigmoid", "silu", "tanh", "gelu", "cos", "sin", "reciprocal", "sqrt")
_QUICK: dict[str, Quick] = {
    **dict.fromkeys((f"{name}.Tensor" for name in ("add", "sub", "mul", "div")), _pointwise),
    **dict.fromkeys((f"{name}.Scalar" for name in ("add", "mul", "rsub")), _pointwise),
    **dict.fromkeys((f"{name}.default" for name in _OF_ONE_TENSOR), _pointwise),
    **dict.fromkeys(
        (f"{name}.{kind}" for name in ("lt", "le", "gt", "ge", "eq", "ne") for kind in ("Tensor", "Scalar")),
        _comparison,
    ),
    **dict.fromkeys((f"{name}_.Tensor" for name in ("add", "sub", "mul", "div")), _in_place),
    **dict.fromkeys((f"{name}_.Scalar" for name in ("mul", "fill", "masked_fill")), _in_place),
    **dict.fromkeys((f"{name}_.default" for name in ("copy", "zero", "normal", "uniform")), _in_place),
    **dict.fromkeys((f"{name}.default" for name in ("new_empty", "new_zeros")), _new),
    **dict.fromkeys((f"{name}_like.default" for name in ("empty", "zeros", "ones")), _like),
    **dict.fromkeys((f"{name}.default" for name in ("clone", "_to_copy")), _like),
    "cat.default": _joined,
    "mm.default": _product,
    "bmm.default": _product,
    "addmm.default": _product,
    "baddbmm.default": _product,
}


QUICK: dict[Any, Quick] = {attrgetter(name)(torch.ops.aten): quick for name, quick in _QUICK.items()}
"""What is answered here, by operation."""
