"""One GPU with one stream, its events, and a host that launches work and waits for it; time is simulated."""

from __future__ import annotations

import pytest
import torch


class SimulatedDevice:
    """Host clock and stream of one device.

    Rules, with their sources:

    - A launch returns before the device has done the work (CUDA C++ Programming Guide, "Asynchronous Concurrent
      Execution"); work of one stream runs in the order of its launches (same guide, "Streams").
    - An event gets its time when the stream reaches it (CUDA Runtime API, cudaEventRecord: it "captures" the work
      before it in the stream), and the time between two events is the device's (cudaEventElapsedTime).
    - cudaEventQuery returns at once. cudaEventSynchronize and cudaDeviceSynchronize block the host until the device is
      done (CUDA Runtime API); then the host thread has to wake up.
    """

    def __init__(self, *, launch_s: float = 0.0, wake_s: float = 0.0, look_s: float = 1e-6) -> None:
        self.launch_s = launch_s
        """Host time of one launch."""
        self.wake_s = wake_s
        """Host time from the end of the device's work until a blocked host continues."""
        self.look_s = look_s
        """Host time of a query, or of recording an event."""
        self.host_s = 0.0
        self.free_s = 0.0
        """Time at which the stream will have done all that was launched."""

    def launch(self, seconds: float) -> None:
        """Queue work that takes the device so many seconds; infinite = it waits for a peer that hangs."""
        self.host_s += self.launch_s
        self.free_s = max(self.free_s, self.host_s) + seconds

    def clock(self) -> float:
        """Read the host's clock."""
        return self.host_s

    def block(self, until_s: float) -> None:
        """Block the host until the device gets there."""
        self.host_s = max(self.host_s, until_s) + self.wake_s

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let torch use this device's events and waits."""
        device = self

        class Event:
            def __init__(self, *, enable_timing: bool = False) -> None:
                self._is_timed = enable_timing
                self._at_s: float | None = None

            def record(self) -> None:
                device.host_s += device.look_s
                self._at_s = max(device.free_s, device.host_s)

            def query(self) -> bool:
                device.host_s += device.look_s
                return self._at_s is None or device.host_s >= self._at_s

            def synchronize(self) -> None:
                if self._at_s is not None:
                    device.block(self._at_s)

            def elapsed_time(self, end: Event) -> float:
                # cudaErrorInvalidResourceHandle without timing or record, cudaErrorNotReady before the end.
                assert self._is_timed, "an event without timing has no time"
                assert end._is_timed, "an event without timing has no time"
                assert self._at_s is not None, "the event was not recorded"
                assert end._at_s is not None, "the event was not recorded"
                assert device.host_s >= max(self._at_s, end._at_s), "the event is not complete"
                return (end._at_s - self._at_s) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: device.block(device.free_s))
