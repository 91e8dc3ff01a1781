"""A meter of abstract tensors, which lie on torch's `meta` device.

An abstract tensor has a shape, a storage with a size and an autograd graph, but no data.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

import torch

from pipette_patches.storage_meter import StorageMeter, current

T = TypeVar("T")
_WRITES_INTO_PARTS = frozenset({torch.ops.aten.index_put_.default})
"""Operations that torch's inductor cannot fuse with earlier operations, so compiled code first copies their input."""


class AbstractMeter(StorageMeter):
    """Counts abstract tensors. Fused kernels keep their intermediate tensors in registers, so these do not count."""

    DEVICE_KIND = "meta"

    def __init__(self) -> None:
        super().__init__()
        self._pending: list[list[tuple[int, Any]]] = []
        self._held: list[list[torch.Tensor]] = []

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; a pointwise operation only makes its result."""
        if self._pending and func in _WRITES_INTO_PARTS:
            self._hold_copy(args[0])
        out = pointwise(args, kwargs) if func in POINTWISE else None
        return func(*args, **kwargs) if out is None else out

    def count(self, storage: Any) -> None:
        """Count a storage now, or at the end of the fused kernel that runs."""
        if not self._pending:
            super().count(storage)
        elif storage._cdata not in self._live:
            self._pending[-1].append((storage._cdata, weakref.ref(storage)))

    @contextlib.contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Count only tensors that outlive the block."""
        self._pending.append([])
        self._held.append([])
        try:
            yield
        finally:
            made = self._pending.pop()
            if self._pending:
                # This kernel is part of a larger kernel. The end of the larger kernel decides which tensors count.
                self._pending[-1] += made
            else:
                for _, reference in made:
                    storage = reference()
                    if storage is not None:
                        super().count(storage)
            self._held.pop()

    def _hold_copy(self, tensor: torch.Tensor) -> None:
        """Count a compiled function's copy of a tensor before a write by index, until the function ends."""
        with self:
            copy = torch.empty_like(tensor)
        storage = copy.untyped_storage()
        # The copy exists while the compiled function runs, so count the copy now.
        self._pending[-1] = [entry for entry in self._pending[-1] if entry[0] != storage._cdata]
        super().count(storage)
        self._held[-1].append(copy)


def as_one_kernel(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function that stands for one GPU kernel, so that its intermediate tensors do not count."""

    def run(*args: Any, **kwargs: Any) -> T:
        meter = current()
        with meter.one_kernel() if isinstance(meter, AbstractMeter) else contextlib.nullcontext():
            return function(*args, **kwargs)

    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run


# torch decomposes a pointwise operation on abstract tensors in Python, in 0.25 to 0.5 ms. `pointwise` is much faster,
# but handles only contiguous tensors of one floating type.

# The C function behind torch.empty. Patches replace torch.empty, but not this function.
_empty: Callable[..., torch.Tensor] = torch._C._VariableFunctions.empty


def pointwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Make the result of a pointwise operation; None if torch must run the operation."""
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    dtype = tensors[0].dtype
    if kwargs or not dtype.is_floating_point or not isinstance(args[0], torch.Tensor):
        return None
    if not all(each.device.type == "meta" and each.dtype is dtype and each.is_contiguous() for each in tensors):
        return None
    shape = tensors[0].shape
    if any(each.shape != shape for each in tensors):
        shape = torch.broadcast_shapes(*(each.shape for each in tensors))  # type: ignore[no-untyped-call]
    return _empty(shape, dtype=dtype, device="meta")


def _operations(names: str, kind: str) -> list[Any]:
    return [attrgetter(f"{name}.{kind}")(torch.ops.aten) for name in names.split()]


POINTWISE = frozenset(
    [
        *_operations("add sub mul div", "Tensor"),
        *_operations("add mul rsub", "Scalar"),
        *_operations("neg exp sigmoid silu tanh gelu cos sin reciprocal sqrt", "default"),
    ]
)
"""Operations whose result has the broadcast shape of the operands."""
