"""Clocks and memory meters of a CPU and of a GPU."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil
import torch

from pipette_launch.errors import ProbeError
from pipette_launch.probe.health.inventory import device_used_bytes

BUSY_BYTES = 64 << 20
"""Size of the tensor that is written to keep a GPU busy. One write takes about 25 us on an H100 and 80 us on a V100."""
FIRST_PASSES, MOST_PASSES = 64, 256  # CUDA queues about 1,000 launches before the host must wait
USUAL_CORE_S = 1.5e-3
"""Seconds of the fixed computation of `CoreSpeed` on a reference core, to which times of all slots are converted."""
CHECK_EVERY_S = 0.1
"""Seconds for which a check of the core's speed stays valid."""
CHECK_REPEATS = 3
"""Repeats of the fixed computation in one speed check. The median counts, because the first repeat has cold caches."""
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


class CoreSpeed:
    """Current speed of a core, from the processor time of a fixed computation that is repeated.

    A virtual core shares a real core with other virtual cores, and no counter shows the sharing. In a test one layer
    took 37 ms of processor time, and 58 ms some seconds later. In a test on four hosts, times of a layer scattered by 4
    to 17 % between windows of 0.4 s. After division by the time of the fixed computation, times of a layer scattered by
    3 to 8 % (correlation 0.6 to 0.96).
    """

    def __init__(
        self,
        work: Callable[[], object] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        computed: Callable[[], float] = time.thread_time,
    ) -> None:
        self._work = work or _fixed_work()
        self._clock = clock
        self._computed = computed
        self._checked_s = -CHECK_EVERY_S
        self._checks_s: list[float] = []

    def check(self) -> None:
        """Time the fixed computation, unless the last check is recent."""
        now_s = self._clock()
        if now_s - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = now_s
            times_s = []
            for _ in range(CHECK_REPEATS):
                before_s = self._computed()
                self._work()
                times_s.append(self._computed() - before_s)
            self._checks_s.append(statistics.median(times_s))

    @property
    def now(self) -> float:
        """Time of the last speed check divided by the time on a reference core; 1 before the first check."""
        return self._checks_s[-1] / USUAL_CORE_S if self._checks_s else 1.0

    @property
    def usual(self) -> float:
        """Median time of all speed checks divided by the time on a reference core; 1 before the first check."""
        return statistics.median(self._checks_s) / USUAL_CORE_S if self._checks_s else 1.0


def _fixed_work() -> Callable[[], object]:
    left, right, span = torch.ones(192, 192), torch.ones(192, 192), torch.ones(1 << 19)

    def work() -> None:
        # Compute matrix products, and read and write memory.
        for _ in range(4):
            torch.mm(left, right)
        for _ in range(2):
            span.mul_(0.5).add_(0.5)

    return work


class CpuStopwatch:
    """Counts the processor time of this thread, and the ratio of wall time to processor time.

    A layer of a few milliseconds may be preempted, so wall times of single runs scatter by a time slice. Over many
    runs, other processes take a steady share of the core. After `check_speed`, times are converted to a reference core,
    and `stretch` includes the speed of this core.
    """

    def __init__(self, core_speed: CoreSpeed | None = None) -> None:
        self._core_speed = core_speed or CoreSpeed()
        self._wall_s = 0.0
        self._computed_s = 0.0
        self._kept: float | None = None

    def mark(self) -> tuple[float, float]:
        """Read the wall clock and the processor clock of this thread."""
        return time.perf_counter(), time.thread_time()

    def seconds(self, before: tuple[float, float], after: tuple[float, float]) -> float:
        """Return the processor time between two marks."""
        computed_s = after[1] - before[1]
        self._wall_s += after[0] - before[0]
        self._computed_s += computed_s
        return computed_s / self._core_speed.now

    def check_speed(self) -> None:
        """Check the speed of the core; later times are converted to a reference core by this speed."""
        self._core_speed.check()

    def settle(self) -> None:
        """Do nothing: a CPU has no queued work."""

    def keep_share(self) -> None:
        """Keep the present ratio of wall time to processor time, because later some slots may finish before others."""
        self._kept = self._share()

    def stretch(self) -> float:
        """Return the factor that converts times of `seconds` into wall time while all slots work."""
        return self._core_speed.usual * (self._kept or self._share())

    def _share(self) -> float:
        return max(1.0, self._wall_s / self._computed_s) if self._computed_s else 1.0


class CudaStopwatch:
    """Records events in the stream, so that time in which the host only launches kernels does not count."""

    def mark(self) -> Any:
        """Record an event after all work that was launched so far."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, before: Any, after: Any) -> float:
        """Wait for the later event, and return the seconds between the two events."""
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    def check_speed(self) -> None:
        """Do nothing: no other process uses the GPU, and the health verdicts compare GPU clocks."""

    def settle(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize()

    def keep_share(self) -> None:
        """Do nothing, because no other process takes a share of the GPU."""

    def stretch(self) -> float:
        """Return 1, because CUDA events measure wall time."""
        return 1.0


Stopwatch: TypeAlias = CpuStopwatch | CudaStopwatch


def stopwatch_for(device_kind: str) -> Stopwatch:
    """Return a stopwatch for a device kind."""
    return CudaStopwatch() if device_kind == "cuda" else CpuStopwatch()


def await_device(timeout_s: float, clock: Callable[[], float], event: Any = None) -> None:
    """Wait for an event, or for all work so far; raises TimeoutError at a deadline, which torch's functions lack."""
    if event is None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    deadline_s = clock() + timeout_s
    while not event.query():
        if clock() > deadline_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for the device")


class QueuedCalls:
    """Times calls that the host queues while the device is busy with earlier work, as in training.

    A single call on an idle device takes 25 to 40 us longer, for the launch and the wake-up of the host. So the device
    first writes a tensor several times, and meanwhile the host queues all calls.
    """

    def __init__(self, clock: Callable[[], float], keep_busy: Callable[[], object] | None = None) -> None:
        self._clock = clock
        self._keep_busy = keep_busy or torch.zeros(BUSY_BYTES // 4, device="cuda").zero_
        self.passes = FIRST_PASSES
        """Number of times that a tensor is written before each measurement, to keep the device busy. All ranks need the
        same number of writes, so that transfers over a shared wire begin at the same time."""
        self.wanted = FIRST_PASSES
        """Number of writes that this rank needs to keep its device busy. The number grows if the device had done
        the writes before the host had queued the last calls."""
        self._watch = CudaStopwatch()

    def seconds(
        self, call: Callable[[], object], number: int, *, timeout_s: float, first: Callable[[], object] | None = None
    ) -> float:
        """Return the seconds of the device for one call, as the mean of `number` calls in a row.

        `call` queues one collective or exchange; `number` must be equal on all ranks. `first` is an untimed call in
        which ranks wait for each other; None = `call`. Raises TimeoutError if the device is not done after `timeout_s`.
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
        await_device(timeout_s, self._clock, after)
        return self._watch.seconds(before, after) / number


class Peak(NamedTuple):
    """Peak memory during one run of a function, in bytes."""

    allocator_bytes: int
    """On CUDA, the growth of torch's allocations; on a CPU, the growth of the resident set."""
    device_bytes: int
    """On CUDA, NVML's used bytes without other processes; on a CPU, the resident set."""
    idle_bytes: int = 0
    """On CUDA, torch's allocations before the run: workspaces that libraries keep."""
    reserved_bytes: int = 0
    """On CUDA, the most memory that torch's allocator took from the device."""


class CpuMeter:
    """Reads the resident set of this process; Linux keeps its peak (VmHWM), which a process can reset."""

    def peak(self, work: Callable[[], object]) -> Peak:
        """Run the work and return its peak memory."""
        # Return unused heap to the system first, because unused heap would hide the growth of the resident set.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        try:
            CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        except OSError as error:
            raise ProbeError(f"{CLEAR_REFS} refuses to reset the peak resident set: {error.strerror}") from error
        before = psutil.Process().memory_info().rss
        work()
        for line in STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                peak = int(line.split()[1]) * 1024
                return Peak(max(peak - before, 0), peak)
        raise ProbeError(f"{STATUS} has no VmHWM line; this kernel does not report the peak resident set")

    def overhead_bytes(self) -> int:
        """Return 0: a CPU has no context and no communicators in device memory."""
        return 0

    def workspace_bytes(self) -> int:
        """Return 0, because on a CPU libraries keep their workspaces on the heap."""
        return 0


class CudaMeter:
    """Reads torch's allocator and NVML. Create it before this process uses CUDA, to know what others use."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._others_bytes = device_used_bytes(uuid)

    def peak(self, work: Callable[[], object]) -> Peak:
        """Run the work and return its peak memory. NVML is read after the work, as torch keeps its memory."""
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
        """Return this process's device memory outside the allocator: context, communicators, code of libraries."""
        return max(self._used_bytes() - torch.cuda.memory_reserved(), 0)

    def workspace_bytes(self) -> int:
        """Return the bytes in torch's allocator, which are all workspaces if no model is in memory."""
        gc.collect()
        return int(torch.cuda.memory_allocated())

    def _used_bytes(self) -> int:
        return max(device_used_bytes(self._uuid) - self._others_bytes, 0)


MemoryMeter: TypeAlias = CpuMeter | CudaMeter


def meter(device_kind: str, uuid: str) -> MemoryMeter:
    """Return a memory meter for a device kind."""
    return CudaMeter(uuid) if device_kind == "cuda" else CpuMeter()
