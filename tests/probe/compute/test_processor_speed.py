"""How fast a core is, by a computation whose time the test sets."""

from __future__ import annotations

import pytest

from pipette_launch.probe.compute.processor_speed import EVERY_S, REPEATS, YARD_S, Yardstick


class Core:
    """Takes the next of these times for all computations of a look, and waits on request."""

    def __init__(self, *looks_s: float, first_s: float = 0.0) -> None:
        self.times_s = iter(
            [first_s or look_s if not turn else look_s for look_s in looks_s for turn in range(REPEATS)]
        )
        self.computed_s = self.now_s = 0.0
        self.yardstick = Yardstick(self.work, clock=lambda: self.now_s, computed=lambda: self.computed_s)

    def work(self) -> None:
        """Compute."""
        self.computed_s += next(self.times_s)


def test_a_look_is_the_median_of_a_few() -> None:
    """The first finds cold caches."""
    core = Core(2 * YARD_S, first_s=9.0)
    assert 1.0 == core.yardstick.now == core.yardstick.usual
    core.yardstick.look()

    assert pytest.approx(2.0) == core.yardstick.now


def test_a_look_holds_for_a_while() -> None:
    """Looking costs time, so what was seen just now counts; the usual pace is the median of all looks."""
    core = Core(YARD_S, 3 * YARD_S, 2 * YARD_S)
    for now_s in (0.0, EVERY_S / 2, EVERY_S, 1.5 * EVERY_S):
        core.now_s = now_s
        core.yardstick.look()
    assert pytest.approx(3.0) == core.yardstick.now
    core.now_s = 2 * EVERY_S
    core.yardstick.look()

    assert pytest.approx(2.0) == core.yardstick.now
    assert pytest.approx(2.0) == core.yardstick.usual


def test_a_real_core_takes_some_milliseconds() -> None:
    """Neither nothing nor a tenth of a second, whatever else runs."""
    yardstick = Yardstick()
    yardstick.look()

    assert 0.05 < yardstick.now < 60
