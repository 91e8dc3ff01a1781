"""Measures the peak memory of a piece of work: by allocator and NVML on CUDA, by resident set on CPU.

Linux keeps the peak of the resident set (VmHWM) and lets a process reset its own through /proc/self/clear_refs.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import psutil
import torch

from pipette_launch.errors import ProbeError
from pipette_launch.probe.health.inventory import device_used_bytes

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


class Peak(NamedTuple):
    """The largest memory of one run of a piece of work, in bytes."""

    allocator_bytes: int
    """Growth of torch's allocations on CUDA, of the resident set on CPU."""
    device_bytes: int
    """NVML's used bytes on CUDA, less those of other processes; the resident set on CPU."""
    idle_bytes: int = 0
    """On CUDA, torch's allocations before the run: workspaces that libraries keep."""
    reserved_bytes: int = 0
    """On CUDA, the largest memory that torch's allocator took from the device."""


class CpuMeter:
    """Reads the resident set."""

    def peak(self, work: Callable[[], None]) -> Peak:
        """Run the work and return its peak."""
        # Unused heap goes back to the system first, or it would hide the growth.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        try:
            CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        except OSError as error:
            raise ProbeError(f"{CLEAR_REFS} refuses to reset the peak resident set: {error.strerror}") from error
        before = psutil.Process().memory_info().rss
        work()
        peak = peak_resident_bytes(STATUS.read_text(encoding="ascii"))
        return Peak(max(peak - before, 0), peak)

    def overhead_bytes(self) -> int:
        """Return 0: a host has no context and no communicators on a device."""
        return 0

    def workspace_bytes(self) -> int:
        """Return 0: a host's libraries keep their workspaces on the heap."""
        return 0


class CudaMeter:
    """Reads torch's allocator and NVML.

    Made before this process uses CUDA, so that the memory of other processes on the device is known.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._others_bytes = device_used_bytes(uuid)

    def peak(self, work: Callable[[], None]) -> Peak:
        """Run the work and return its peak; the allocator keeps what it reserved, so NVML's count afterwards is it."""
        before = self.workspace_bytes()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return Peak(
            torch.cuda.max_memory_allocated() - before,
            self._used_bytes(),
            idle_bytes=before,
            reserved_bytes=torch.cuda.max_memory_reserved(),
        )

    def overhead_bytes(self) -> int:
        """Device memory of this process outside the allocator, now: context, communicators, libraries' code."""
        return max(self._used_bytes() - torch.cuda.memory_reserved(), 0)

    def workspace_bytes(self) -> int:
        """Bytes inside the allocator, now; while nothing of the model is there, those are workspaces."""
        gc.collect()
        return int(torch.cuda.memory_allocated())

    def _used_bytes(self) -> int:
        return max(device_used_bytes(self._uuid) - self._others_bytes, 0)


def peak_resident_bytes(status: str) -> int:
    """Read VmHWM from the text of /proc/self/status."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ProbeError(f"{STATUS} has no VmHWM line; this kernel does not tell the peak resident set")


MemoryMeter: TypeAlias = CpuMeter | CudaMeter


def meter(device_kind: str, uuid: str) -> MemoryMeter:
    """The meter for a device kind."""
    return CudaMeter(uuid) if device_kind == "cuda" else CpuMeter()
