"""What a layer costs more after a wait, on a clock that layer and sleep move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from probe.compute.test_timing import FakeClock

from pipette_launch.probe.compute.cold_start import time_wake

FORWARD_S, BACKWARD_S = 1.0, 2.0


@dataclass
class Layer:
    """Takes exact times, each direction `cold_s` more after a wait, and `entry_s` to enter a row of layers."""

    clock: FakeClock
    cold_s: float
    entry_s: float = 0.0
    has_slept: bool = False

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.clock.now_s += seconds
        self.has_slept = True

    def forward(self, times: int) -> int:
        """Run a row of layers."""
        self._take(times * FORWARD_S + self.entry_s)
        return times

    def backward(self, times: int) -> None:
        """Run it backward."""
        self._take(times * BACKWARD_S)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add up no gradients."""
        yield

    def _take(self, seconds: float) -> None:
        self.clock.now_s += seconds + (self.cold_s if self.has_slept else 0.0)
        self.has_slept = False


def wake_s(cold_s: float, entry_s: float = 0.0) -> float:
    """What is found."""
    layer = Layer(FakeClock(), cold_s, entry_s)
    return time_wake(layer, layer.clock, layer.sleep)  # type: ignore[arg-type]


def test_both_directions_wake_and_sleep_is_nobodys() -> None:
    """Beside a layer behind another, so that what entering costs is in it too."""
    assert pytest.approx(0.25) == wake_s(0.125)
    assert pytest.approx(0.5) == wake_s(0.125, entry_s=0.25)


def test_noise_does_not_make_it_negative() -> None:
    """A layer that is faster after waits costs nothing for them."""
    assert 0.0 == wake_s(-0.5)
