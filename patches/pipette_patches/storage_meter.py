"""Count the bytes of tensors as a caching allocator would: each storage once, from creation until release.

Abstract tensors lie on torch's `meta` device: they have a shape, a storage with a size and an autograd graph, but no
data. torch decides which tensors autograd keeps, which tensors share a buffer, and when a tensor is freed. The meter
only counts bytes, in the same way for real CPU tensors and for abstract tensors.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipette_patches.replacements import wrapping

ALIGNMENT_BYTES = 512
"""CUDA's caching allocator allocates multiples of 512 bytes (c10/cuda/CUDACachingAllocator, kMinBlockSize)."""

_WRITES_INTO_PARTS = frozenset({torch.ops.aten.index_put_.default})
"""Operations that torch's inductor cannot fuse with earlier operations, so compiled code first copies their input."""

T = TypeVar("T")


def local(tensor: Any) -> Any:
    """Return this rank's shard of a tensor that FSDP shards. Return any other object unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def allocated(num_bytes: int) -> int:
    """Return the bytes that CUDA's allocator counts for a request of `num_bytes`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Stretch:
    """Live bytes by label at the moment with the most live bytes between two marks."""

    phase: str
    at_peak: dict[str, int]

    @property
    def total(self) -> int:
        """Sum of the live bytes of all labels."""
        return sum(self.at_peak.values())


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every storage that operations make on one kind of device, under the current `label`, while entered."""

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
        """Return False. This process compiles nothing, so torch need not switch its compiler off for each operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storages that it made."""
        kwargs = kwargs or {}
        if self._pending and func in _WRITES_INTO_PARTS:
            self._hold_copy(args[0])
        out = _pointwise(args, kwargs) if func in POINTWISE else None
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
        """Count new storages under a label during the block."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    @contextlib.contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Count only tensors that outlive the block, because a fused kernel keeps its intermediates in registers."""
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
                        self._add(storage)
            self._held.pop()

    def _hold_copy(self, tensor: torch.Tensor) -> None:
        """Count a compiled function's copy of a tensor before a write by index, until the function ends."""
        with self:
            copy = torch.empty_like(tensor)
        storage = copy.untyped_storage()
        # The copy exists while the compiled function runs, so count the copy now.
        self._pending[-1] = [entry for entry in self._pending[-1] if entry[0] != storage._cdata]
        self._add(storage)
        self._held[-1].append(copy)

    def recount(self, storage: Any, label: str | None = None) -> None:
        """Count a storage with its new size, and under a new label if `label` is not None."""
        entry = self._live.get(storage._cdata)
        if entry is not None:
            reference, size, old = entry
            new = allocated(storage.nbytes())
            self._live[storage._cdata] = (reference, new, label or old)
            self._change(old, -size)
            self._change(label or old, new)

    def mark(self, phase: str | None = None) -> None:
        """End the current stretch and begin a new stretch, in a new phase if `phase` is not None."""
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
    """Count every storage that is made during the block; `current` returns the meter."""
    meter = StorageMeter(device_kind)
    _meters.append(meter)
    try:
        with meter:
            yield meter
    finally:
        _meters.pop()


def current() -> StorageMeter | None:
    """Return the innermost meter, or None outside of `metered`."""
    return _meters[-1] if _meters else None


def as_one_kernel(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function that stands for one GPU kernel, so that its intermediate tensors do not count."""
    return _metered_within(function, StorageMeter.one_kernel)


def under(label: str, function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function so that new storages of the function count under a label."""
    return _metered_within(function, lambda meter: meter.labelled(label))


def _metered_within(
    function: Callable[..., T], block: Callable[[StorageMeter], contextlib.AbstractContextManager[None]]
) -> Callable[..., T]:
    def run(*args: Any, **kwargs: Any) -> T:
        meter = current()
        with contextlib.nullcontext() if meter is None else block(meter):
            return function(*args, **kwargs)

    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run


@wrapping
def recounting(original: Callable[..., Any], storage: Any, size: int) -> Any:
    """Resize a storage and let the current meter count its new size."""
    done = original(storage, size)
    if (meter := current()) is not None:
        meter.recount(storage)
    return done


# torch decomposes a pointwise operation on abstract tensors in Python, in 0.25 to 0.5 ms. `_pointwise` is much faster,
# but handles only contiguous tensors of one floating type.

# The C function behind torch.empty. Patches replace torch.empty, but not this function.
_empty: Callable[..., torch.Tensor] = torch._C._VariableFunctions.empty


def _pointwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
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
