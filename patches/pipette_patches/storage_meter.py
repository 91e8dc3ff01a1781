"""Shapes of common operations on abstract tensors, found without torch's own way, which is slow.

torch finds a shape by running each operation's decomposition in Python: a quarter to half a millisecond. Here the
common case is answered at once (contiguous tensors of one floating type); everything else is left to torch.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


ALIGNMENT_BYTES = 512
"""CUDA's caching allocator allocates multiples of this (c10/cuda/CUDACachingAllocator, kMinBlockSize)."""

WRITES_INTO_PARTS = frozenset({torch.ops.aten.index_put_.default})
"""Operations that a compiled function cannot fuse with what comes before: it copies, then writes (torch's inductor)."""

T = TypeVar("T")


def local(tensor: Any) -> Any:
    """Give of a tensor that FSDP shards this rank's own part, which alone has memory; any other object is itself."""
    return getattr(tensor, "_local_tensor", tensor)


def allocated(num_bytes: int) -> int:
    """Bytes that the allocator counts for a request."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Stretch:
    """What was live, by label, when most was live between two marks."""

    phase: str
    at_peak: dict[str, int]

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.at_peak.values())


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that operations make on one kind of device while it is entered.

    `label` says to what the next ones belong.
    """

    def __init__(self, device_kind: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_kind = device_kind
        self.label = "activations"
        self.phase = "setup"
        self.stretches: list[Stretch] = []
        self.by_label: dict[str, int] = {}
        self.total = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self._live: dict[int, tuple[Any, int, str]] = {}
        self._pending: list[list[tuple[int, Any]]] = []
        self._held: list[list[torch.Tensor]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from disabling its compiler around each operation: nothing is compiled in this process."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and take note of the storages that it made."""
        kwargs = kwargs or {}
        if self._pending and func in WRITES_INTO_PARTS:
            self._hold_copy(args[0])
        quick = QUICK.get(func)
        out = None if quick is None else quick(args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        for whole in out if isinstance(out, (tuple, list)) else (out,):
            item = local(whole)
            if isinstance(item, torch.Tensor) and item.device.type == self._device_kind:
                storage = item.untyped_storage()
                if not self._pending:
                    self._add(storage)
                elif storage._cdata not in self._live:
                    self._pending[-1].append((storage._cdata, weakref.ref(storage)))
        return out

    @contextlib.contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Count what is made within the block under a label."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    @contextlib.contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Count only tensors that outlive the block: one fused kernel holds its intermediates in registers."""
        self._pending.append([])
        self._held.append([])
        try:
            yield
        finally:
            made = self._pending.pop()
            if self._pending:
                # Part of a larger kernel, whose end decides.
                self._pending[-1] += made
            else:
                for _, reference in made:
                    storage = reference()
                    if storage is not None:
                        self._add(storage)
            self._held.pop()

    def _hold_copy(self, tensor: torch.Tensor) -> None:
        """Count the copy that a compiled function makes of what it writes into by index, until the function ends."""
        with self:
            copy = torch.empty_like(tensor)
        storage = copy.untyped_storage()
        # Not pending: it is there while the function runs.
        self._pending[-1] = [entry for entry in self._pending[-1] if entry[0] != storage._cdata]
        self._add(storage)
        self._held[-1].append(copy)

    def recount(self, storage: Any, label: str | None = None) -> None:
        """Count a storage as it is now, after a change of its size, and under another label if one is given."""
        entry = self._live.get(storage._cdata)
        if entry is not None:
            reference, size, old = entry
            new = allocated(storage.nbytes())
            self._live[storage._cdata] = (reference, new, label or old)
            self._change(old, -size)
            self._change(label or old, new)

    def mark(self, phase: str | None = None) -> None:
        """End a stretch of the run: keep its peak, and let the next, of this phase, begin at what is live now."""
        self.stretches.append(Stretch(phase=self.phase, at_peak=self.at_peak))
        self.phase = phase or self.phase
        self.peak, self.at_peak = self.total, self.by_label.copy()

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._live:
            return
        size, label = allocated(storage.nbytes()), self.label
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self._live[key] = (reference, size, label)
        self._change(label, size)

    def _remove(self, key: int) -> None:
        _, size, label = self._live.pop(key)
        self._change(label, -size)

    def _change(self, label: str, by: int) -> None:
        self.by_label[label] = self.by_label.get(label, 0) + by
        self.total += by
        if self.total > self.peak:
            self.peak = self.total
            self.at_peak = self.by_label.copy()


_meters: list[StorageMeter] = []


@contextlib.contextmanager
def metered(device_kind: str = "meta") -> Iterator[StorageMeter]:
    """Count everything made within the block; `current` finds the meter."""
    meter = StorageMeter(device_kind)
    _meters.append(meter)
    try:
        with meter:
            yield meter
    finally:
        _meters.pop()


def current() -> StorageMeter | None:
    """Return the meter in force, if any."""
    return _meters[-1] if _meters else None


def as_one_kernel(function: Callable[..., T]) -> Callable[..., T]:
    """Make a function hold no intermediates, as the compiled or hand-written kernel in whose place it stands."""
    return _metered_within(function, StorageMeter.one_kernel)


def under(label: str, function: Callable[..., T]) -> Callable[..., T]:
    """Count what a function makes under a label."""
    return _metered_within(function, lambda meter: meter.labelled(label))


def _metered_within(
    function: Callable[..., T], block: Callable[[StorageMeter], contextlib.AbstractContextManager[None]]
) -> Callable[..., T]:
    """Run a function within a block of the meter in force, if there is one."""

    def run(*args: Any, **kwargs: Any) -> T:
        meter = current()
        with contextlib.nullcontext() if meter is None else block(meter):
            return function(*args, **kwargs)

    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run


def recounting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Resize a storage, and let the meter in force count it as it is then."""

    @functools.wraps(original)
    def resize(storage: Any, size: int) -> Any:
        done = original(storage, size)
        meter = current()
        if meter is not None:
            meter.recount(storage)
        return done

    return resize
