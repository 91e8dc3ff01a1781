"""Count the bytes of CPU tensors as a caching allocator would: each storage once, from creation until release.

torch decides which tensors autograd keeps, which tensors share a buffer, and when a tensor is freed. The meter only
counts bytes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipette_patches.replacements import wrapping

ALIGNMENT_BYTES = 512
"""CUDA's caching allocator allocates multiples of 512 bytes (c10/cuda/CUDACachingAllocator, kMinBlockSize)."""

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

    DEVICE_KIND = "cpu"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.label = "activations"
        self.phase = "setup"
        self.stretches: list[Stretch] = []
        self.by_label: dict[str, int] = {}
        self.total = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self._live: dict[int, tuple[Any, int, str]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. This process compiles nothing, so torch need not switch its compiler off for each operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storages that it made."""
        out = self.operate(func, args, kwargs or {})
        for whole in out if isinstance(out, (tuple, list)) else (out,):
            item = local(whole)
            if isinstance(item, torch.Tensor) and item.device.type == self.DEVICE_KIND:
                self.count(item.untyped_storage())
        return out

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and return its result."""
        return func(*args, **kwargs)

    def count(self, storage: Any) -> None:
        """Count a storage until it is released, unless it is counted already."""
        key = storage._cdata
        if key in self._live:
            return
        size, label = allocated(storage.nbytes()), self.label
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self._live[key] = (reference, size, label)
        self._change(label, size)

    @contextlib.contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Count new storages under a label during the block."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

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
def metered(meter: StorageMeter | None = None) -> Iterator[StorageMeter]:
    """Count every storage that is made during the block, by a new meter if `meter` is None."""
    meter = meter or StorageMeter()
    _meters.append(meter)
    try:
        with meter:
            yield meter
    finally:
        _meters.pop()


def current() -> StorageMeter | None:
    """Return the innermost meter, or None outside of `metered`."""
    return _meters[-1] if _meters else None


def under(label: str, function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function so that new storages of the function count under a label."""

    def run(*args: Any, **kwargs: Any) -> T:
        meter = current()
        with contextlib.nullcontext() if meter is None else meter.labelled(label):
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
