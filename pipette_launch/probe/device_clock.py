"""Time on a GPU, by events that the device stamps in the order of its stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
