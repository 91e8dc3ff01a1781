"""Tests of clocks and memory meters, on a simulated GPU and on the CPU."""

import math
from collections import deque
from pathlib import Path

import pytest
import torch
from gpu_rules.events import SimulatedDevice
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.errors import ProbeError
from pipette_launch.probe import instruments
from pipette_launch.probe.instruments import (
    FIRST_PASSES,
    CpuMeter,
    CudaStopwatch,
    Peak,
    QueuedCalls,
    await_device,
)

LAUNCH_S, WAKE_S = 20e-6, 10e-6
CALL_S = 12e-6
"""Shorter than its launch, as a small collective inside a host is."""
PASS_S = 50e-6


def queued_on(device: SimulatedDevice) -> QueuedCalls:
    """Return the product's queued calls; one pass keeps the device busy for 50 us."""
    return QueuedCalls(device.clock, keep_busy=lambda: device.launch(PASS_S))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """Return a device whose launches take longer than its calls."""
    device = SimulatedDevice(launch_s=LAUNCH_S, wake_s=WAKE_S)
    device.install(monkeypatch)
    return device


def test_calls_in_a_row_take_the_devices_time_and_not_the_hosts(device: SimulatedDevice) -> None:
    """Calls of 12 us with launches of 20 us and a wake-up of 10 us are timed as 12 us."""
    found_s = queued_on(device).seconds(lambda: device.launch(CALL_S), 16, timeout_s=1.0)

    assert CALL_S == pytest.approx(found_s)


def test_one_call_at_a_time_would_count_launch_and_wake_up(device: SimulatedDevice) -> None:
    """A single call on an idle device takes 42 us on the host: the simulation shows the difference."""
    before_s = device.clock()
    device.launch(CALL_S)
    torch.cuda.synchronize()

    assert LAUNCH_S + CALL_S + WAKE_S == pytest.approx(device.clock() - before_s)


def test_a_device_that_was_idle_too_early_should_be_busy_for_longer(device: SimulatedDevice) -> None:
    """64 passes are too few for 256 calls, so launches count; the wanted 128 passes are enough."""
    queued = queued_on(device)
    first_s = queued.seconds(lambda: device.launch(1e-6), 256, timeout_s=1.0)
    wanted = queued.wanted
    queued.passes = 256
    later_s = queued.seconds(lambda: device.launch(1e-6), 256, timeout_s=1.0)

    assert (64, 128, 256) == (FIRST_PASSES, wanted, queued.wanted)
    assert first_s > 10e-6
    assert 1e-6 == pytest.approx(later_s)


def test_the_ranks_meet_before_the_first_timed_call(device: SimulatedDevice) -> None:
    """A first call that waits 3 ms for a peer does not count."""
    found_s = queued_on(device).seconds(
        lambda: device.launch(CALL_S), 8, timeout_s=1.0, first=lambda: device.launch(3e-3)
    )

    assert CALL_S == pytest.approx(found_s)


def test_a_peer_that_hangs_ends_the_wait(device: SimulatedDevice) -> None:
    """Work that never ends raises TimeoutError after the time limit."""
    with pytest.raises(TimeoutError, match="waited 2 s for the device"):
        queued_on(device).seconds(lambda: device.launch(math.inf), 8, timeout_s=2.0)

    assert device.clock() < 3.0


def test_a_wait_for_the_device_ends_with_its_work(device: SimulatedDevice) -> None:
    """All work launched before counts: 5 ms."""
    device.launch(5e-3)
    await_device(1.0, device.clock)

    assert 5e-3 == pytest.approx(device.clock(), rel=0.01)


@given(launch_s=st.floats(0, 100e-6), wake_s=st.floats(0, 100e-6), work_s=st.floats(1e-6, 1.0))
def test_events_do_not_depend_on_the_host(launch_s: float, wake_s: float, work_s: float) -> None:
    """Work between two events takes the same time with any launch and wake-up times."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = SimulatedDevice(launch_s=launch_s, wake_s=wake_s)
        device.install(monkeypatch)
        watch = CudaStopwatch()
        device.launch(1e-3)
        before = watch.mark()
        device.launch(work_s)
        found_s = watch.seconds(before, watch.mark())

    assert work_s == pytest.approx(found_s)


MIB = 1 << 20


def test_the_peak_counts_what_was_freed_again() -> None:
    """64 MiB that live only during the work are in the peak, and little else is."""

    def work() -> None:
        torch.ones(64 * MIB // 4).sum()

    peak = CpuMeter().peak(work)

    assert 63 * MIB <= peak.allocator_bytes <= 80 * MIB
    assert peak.allocator_bytes < peak.device_bytes


def test_idle_work_has_no_peak() -> None:
    """Idle work grows nothing, although this process once held more."""
    torch.ones(64 * MIB // 4).sum()

    assert CpuMeter().peak(lambda: None).allocator_bytes < MIB


def test_a_host_has_no_overhead() -> None:
    """Only a GPU has context, communicators and workspaces."""
    assert 0 == CpuMeter().overhead_bytes() == CpuMeter().workspace_bytes()


def test_the_kernels_own_peak_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VmHWM is in kB; without it there is no measurement."""
    status = tmp_path / "status"
    monkeypatch.setattr(instruments, "STATUS", status)
    status.write_text("Name:\tx\nVmHWM:\t       2 kB\nVmRSS:\t1 kB\n")
    assert 2048 == CpuMeter().peak(lambda: None).device_bytes
    status.write_text("Name:\tx\n")
    with pytest.raises(ProbeError, match="no VmHWM"):
        CpuMeter().peak(lambda: None)


class FakeCuda:
    """torch.cuda of a device whose allocator holds 5 bytes, 7 at the peak, and reserves 8."""

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
        """Return the bytes in use."""
        return self.allocated

    def max_memory_allocated(self) -> int:
        """Return the peak."""
        return self.peak

    def memory_reserved(self) -> int:
        """Return the reserved bytes."""
        return 8

    def max_memory_reserved(self) -> int:
        """Return the largest reserve."""
        return 9


def test_a_gpus_overhead_is_what_nvml_sees_beyond_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """120 bytes in use, 100 by others and 8 by the allocator: 12 are overhead."""
    used = deque([100, 120, 120])
    cuda = FakeCuda()
    monkeypatch.setattr(instruments, "device_used_bytes", lambda uuid: used.popleft())
    monkeypatch.setattr(instruments.torch, "cuda", cuda)
    meter = instruments.CudaMeter("GPU-1")

    assert Peak(2, 20, idle_bytes=5, reserved_bytes=9) == meter.peak(cuda.work)
    assert 12 == meter.overhead_bytes()
    assert 5 == meter.workspace_bytes()
