"""What libraries keep in torch's allocator on a GPU between two pieces of work, and when they give it back."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from pipette_launch.probe import instruments

MIB = 1 << 20
CUBLAS_BYTES = 32 * MIB
"""cuBLAS gets one workspace for each handle and stream, 32 MiB on Hopper, and torch keeps it until the process ends
(aten/src/ATen/cuda/CublasHandlePool.cpp, getCUDABlasLtWorkspaceSize and cublas_handle_stream_to_workspace)."""
BASE = "transformer_engine.pytorch.module.base"


class Allocator:
    """torch.cuda's counters of one device, and the two libraries that allocate beside the model.

    - The first product allocates cuBLAS' workspace, which stays.
    - A linear of Transformer Engine whose weight gradient goes into `main_grad` returns an empty gradient. That is made
      once for each shape and kept in `_dummy_wgrads`, a dict of the module, which nothing of Transformer Engine empties
      (transformer_engine/pytorch/module/base.py, get_dummy_wgrad, releases 2.2 to 2.18; module/linear.py, backward).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._model_bytes = self._cublas_bytes = self._peak_bytes = 0
        self.dummies: dict[tuple[int, int], int] = {}
        engine = ModuleType(BASE)
        engine._dummy_wgrads = self.dummies  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, BASE, engine)
        monkeypatch.setattr(instruments.torch, "cuda", self)
        monkeypatch.setattr(instruments, "device_used_bytes", lambda _: self.memory_allocated())

    def train(self, model_bytes: int, *shapes: tuple[int, int]) -> None:
        """Make a model of bf16 matrices of these shapes, run it forward and backward, and free it."""
        self._model_bytes, self._cublas_bytes = model_bytes, CUBLAS_BYTES
        self.dummies.update({shape: 2 * shape[0] * shape[1] for shape in shapes})
        self._peak_bytes = max(self._peak_bytes, self.memory_allocated())
        self._model_bytes = 0

    def memory_allocated(self) -> int:
        """Return the bytes of all tensors that live."""
        return self._model_bytes + self._cublas_bytes + sum(self.dummies.values())

    def max_memory_allocated(self) -> int:
        """Return the largest number of bytes since the last reset."""
        return self._peak_bytes

    def reset_peak_memory_stats(self) -> None:
        """Begin to count the peak anew."""
        self._peak_bytes = self.memory_allocated()

    def memory_reserved(self) -> int:
        """Return what the allocator holds: here it gives back at once what is free."""
        return self.memory_allocated()

    max_memory_reserved = max_memory_allocated

    def empty_cache(self) -> None:
        """Give back what is free."""

    def synchronize(self) -> None:
        """Wait for the device."""
