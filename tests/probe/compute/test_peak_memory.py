"""Tests of peak memory on the CPU."""

from collections import deque

import pytest
import torch

from pipette_launch.errors import ProbeError
from pipette_launch.probe.compute import peak_memory
from pipette_launch.probe.compute.peak_memory import CpuMeter, Peak, peak_resident_bytes

MIB = 1 << 20


def test_the_peak_counts_what_was_freed_again() -> None:
    """64 MiB that live only during the work are seen, and little else is."""

    def work() -> None:
        torch.ones(64 * MIB // 4).sum()

    peak = CpuMeter().peak(work)

    assert 63 * MIB <= peak.allocator_bytes <= 80 * MIB
    assert peak.allocator_bytes < peak.device_bytes


def test_idle_work_has_no_peak() -> None:
    """Doing nothing grows nothing, though this process once held more."""
    torch.ones(64 * MIB // 4).sum()

    assert CpuMeter().peak(lambda: None).allocator_bytes < MIB


def test_a_host_has_no_overhead() -> None:
    """Context, communicators and workspaces are a GPU's burden."""
    assert 0 == CpuMeter().overhead_bytes() == CpuMeter().workspace_bytes()


def test_the_kernels_own_peak_is_read() -> None:
    """VmHWM is in kB; without it there is no measurement."""
    assert 2048 == peak_resident_bytes("Name:\tx\nVmHWM:\t       2 kB\nVmRSS:\t1 kB\n")
    with pytest.raises(ProbeError, match="no VmHWM"):
        peak_resident_bytes("Name:\tx\n")


class FakeCuda:
    """torch.cuda of a device whose allocator holds 5 bytes, 7 while working, of a reserve of 8."""

    allocated = 5

    def work(self) -> None:
        """Need two more for a while."""
        self.peak = max(self.peak, self.allocated + 2)

    def empty_cache(self) -> None:
        """Nothing to give back."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def reset_peak_memory_stats(self) -> None:
        """Forget the peak."""
        self.peak = self.allocated

    def memory_allocated(self) -> int:
        """What is in use."""
        return self.allocated

    def max_memory_allocated(self) -> int:
        """What was in use at most."""
        return self.peak

    def memory_reserved(self) -> int:
        """What the allocator has taken."""
        return 8

    def max_memory_reserved(self) -> int:
        """What it took at most."""
        return 9


def test_a_gpus_overhead_is_what_nvml_sees_beyond_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others held 100 bytes before; now 120 are in use, 8 of them the allocator's: 12 are overhead."""
    used = deque([100, 120, 120])
    cuda = FakeCuda()
    monkeypatch.setattr(peak_memory, "device_used_bytes", lambda uuid: used.popleft())
    monkeypatch.setattr(peak_memory.torch, "cuda", cuda)
    meter = peak_memory.CudaMeter("GPU-1")

    assert Peak(2, 20, idle_bytes=5, reserved_bytes=9) == meter.peak(cuda.work)
    assert 12 == meter.overhead_bytes()
    assert 5 == meter.workspace_bytes()
