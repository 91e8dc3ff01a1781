"""Time on a GPU, by events that the device stamps in the order of its stream."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil
import torch

from pipette_launch.errors import ProbeError
from pipette_launch.probe.health.inventory import device_used_bytes

BUSY_BYTES = 64 << 20
"""Tensor that is written to keep the device busy: one pass takes about 25 us on an H100 and 80 us on a V100."""
FIRST_PASSES, MOST_PASSES = 64, 256
"""CUDA queues about 1,000 launches; beyond that the host waits."""


class CudaStopwatch:
    """Records events in the stream, so that time in which the host only launches kernels does not count."""

    def mark(self) -> Any:
        """Record an event behind all work launched so far."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, before: Any, after: Any) -> float:
        """Wait for the later event, then compare."""
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    def check_speed(self) -> None:
        """Do nothing: no other process uses the GPU, and verdicts compare its clocks."""

    def settle(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize()

    def keep_share(self) -> None:
        """Do nothing: no other process takes a share."""

    def stretch(self) -> float:
        """Return 1: events measure wall time."""
        return 1.0


def await_event(event: Any, timeout_s: float, clock: Callable[[], float]) -> None:
    """Wait for an event; raises TimeoutError at the deadline, where `synchronize` would wait for ever."""
    deadline_s = clock() + timeout_s
    while not event.query():
        if clock() > deadline_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for the device")


def await_device(timeout_s: float, clock: Callable[[], float]) -> None:
    """Wait for all work launched so far; raises TimeoutError at the deadline."""
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    await_event(done, timeout_s, clock)


class QueuedCalls:
    """Times calls that the host queues while the device is busy with earlier work, as in training.

    A single call on an idle device, with a wait for its end, takes 25 to 40 us longer: the launch and the wake-up of
    the host. The device first writes a tensor several times, and the host queues all calls meanwhile.
    """

    def __init__(self, clock: Callable[[], float], keep_busy: Callable[[], object] | None = None) -> None:
        self._clock = clock
        self._keep_busy = keep_busy or torch.zeros(BUSY_BYTES // 4, device="cuda").zero_
        self.passes = FIRST_PASSES
        """Before each measurement. All ranks must have the same number, or transfers that share a wire would begin at
        different times."""
        self.wanted = FIRST_PASSES
        """Passes that this rank needs by its last measurement: more if the device was idle before the host was done."""
        self._watch = CudaStopwatch()

    def seconds(
        self, call: Callable[[], object], number: int, *, timeout_s: float, first: Callable[[], object] | None = None
    ) -> float:
        """Return the device's seconds for one of `number` calls in a row.

        All ranks that take part must give the same number.

        Args:
            call: queues one collective or exchange on the device.
            number: of timed calls.
            timeout_s: raises TimeoutError if the device is not done by then.
            first: an untimed call before, in which the ranks wait for each other; None = `call`.

        """
        for _ in range(self.passes):
            self._keep_busy()
        (first or call)()
        before = self._watch.mark()
        for _ in range(number):
            call()
        after = self._watch.mark()
        # If the event is complete, the device was faster than the host.
        self.wanted = min(2 * self.passes, MOST_PASSES) if before.query() else self.passes
        await_event(after, timeout_s, self._clock)
        return self._watch.seconds(before, after) / number


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
