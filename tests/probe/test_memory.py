"""Tests of peak memory on the CPU."""

import pytest
import torch

from pipette_launch.errors import ProbeError
from pipette_launch.probe.memory import CpuMeter, peak_resident_bytes

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
    """Context and communicators are a GPU's burden."""
    assert 0 == CpuMeter().overhead_bytes()


def test_the_kernels_own_peak_is_read() -> None:
    """VmHWM is in kB; without it there is no measurement."""
    assert 2048 == peak_resident_bytes("Name:\tx\nVmHWM:\t       2 kB\nVmRSS:\t1 kB\n")
    with pytest.raises(ProbeError, match="no VmHWM"):
        peak_resident_bytes("Name:\tx\n")
