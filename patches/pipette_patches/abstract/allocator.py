"""Count the bytes of tensors as a caching allocator would: each storage once, from its birth to its death.

Abstract tensors live on torch's `meta` device: they have a shape, a storage with a size, and an autograd graph, and no
data. torch itself decides what autograd keeps, which tensors share a buffer and when a tensor dies; this file counts.
Real tensors of a CPU are counted in the same way.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipette_patches.abstract.shapes import QUICK

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
