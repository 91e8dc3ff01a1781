"""CUDA graphs of a device whose operations run at once: what a capture forbids, and what a replay does not do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


class CaptureError(RuntimeError):
    """cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing."""


class Graphs:
    """The CUDA graphs of one device.

    Rules, with their sources:

    - While a stream captures, the host must not wait for a stream, an event or the device, and one capture cannot begin
      in another (CUDA C++ Programming Guide, "Prohibited and Unhandled Operations"; CUDA Runtime API, cudaErrorStream-
      CaptureUnsupported).
    - A capture with an error leaves no graph (same guide, "Invalidation"); only a captured graph can be replayed.
    - A replay runs the captured kernels on the same memory, and no Python of the model (PyTorch, "CUDA semantics",
      CUDA graphs: constraints). Here a replay leaves the values of the capture.
    - A read of a tensor's value by the host waits for the device (PyTorch, same section: no `.item()`).
    """

    def __init__(self) -> None:
        self.capturing = False
        self.captured = 0
        self.replays = 0

    def wait(self, *_: object) -> None:
        """Let the host wait for the device."""
        if self.capturing:
            raise CaptureError("operation not permitted when stream is capturing")

    @contextlib.contextmanager
    def capture(self, graph: Any, **_options: object) -> Iterator[None]:
        """Stand in for `torch.cuda.graph`."""
        self.wait()
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False
        graph.is_captured = True
        self.captured += 1

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let torch use this device's graphs; `cpu_backend` must be applied."""
        device, item = self, torch.Tensor.item

        class CUDAGraph:
            is_captured = False

            def register_generator_state(self, _state: object) -> None:
                device.wait()

            def replay(self) -> None:
                assert self.is_captured, "the graph was not captured"
                assert not device.capturing
                device.replays += 1

        def read(tensor: torch.Tensor) -> Any:
            device.wait()
            return item(tensor)

        generator = SimpleNamespace(get_state=torch.default_generator.get_state, set_state=lambda _: None)
        stats = {"allocated_bytes.all.current": 0, "reserved_bytes.all.current": 0}
        changes = {
            "CUDAGraph": CUDAGraph,
            "graph": self.capture,
            "graph_pool_handle": lambda: (0, 1),
            "memory_stats": lambda *_: stats,
            "default_generators": (generator,),
            "device_count": lambda: 1,
            "synchronize": self.wait,
            "is_initialized": lambda: True,
            "default_stream": lambda *_: None,
        }
        pools = dict.fromkeys(
            ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"), lambda *_: None
        )
        with (
            mock.patch.multiple(torch.cuda, create=True, **changes),
            mock.patch.multiple(torch._C, create=True, **pools),
            mock.patch.object(torch.Tensor, "item", read),
        ):
            yield
