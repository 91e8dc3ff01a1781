"""Who counts as hung, by a clock that the test turns; the processes are real."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from pipette_launch.agent.worker_health import WorkerHealth
from pipette_launch.probe.messages import Sign


class World:
    """A clock, and what the one worker last said."""

    now_s = 0.0
    sign: Sign | None = Sign(phase="links", at_s=0.0, limit_s=60.0)

    def watch(self, process: subprocess.Popen[bytes]) -> WorkerHealth:
        """Watch the worker from now on."""
        return WorkerHealth({0: process}, look_up=lambda _: (self.sign, ""), clock=lambda: self.now_s)

    def hung_after(self, vitals: WorkerHealth, *, until_s: float, step_s: float = 1.0) -> float | None:
        """When it was found, looking so often."""
        while self.now_s < until_s:
            self.now_s += step_s
            vitals.sample()
            if vitals.is_hung:
                return self.now_s
        return None


@pytest.fixture
def asleep() -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes nothing."""
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        yield process
        process.kill()


def test_one_that_neither_speaks_nor_computes_is_hung(asleep: subprocess.Popen[bytes]) -> None:
    """Once the next sign is overdue, and no second before."""
    world = World()

    assert 60 < (world.hung_after(world.watch(asleep), until_s=100) or 0) <= 62


def test_one_that_says_that_it_waits_is_not(asleep: subprocess.Popen[bytes]) -> None:
    """Nor one that has not said anything yet, nor one that has ended."""
    for sign in (Sign(phase="links", at_s=0.0, limit_s=60.0, waits_for="the others"), None):
        world = World()
        world.sign = sign
        assert world.hung_after(world.watch(asleep), until_s=200) is None
    asleep.kill()
    asleep.wait()
    world = World()
    assert world.hung_after(world.watch(asleep), until_s=200) is None


def test_an_agent_that_was_away_accuses_nobody_of_that(asleep: subprocess.Popen[bytes]) -> None:
    """A node that was suspended for an hour comes back, and its workers get their time anew."""
    world = World()
    vitals = world.watch(asleep)
    world.hung_after(vitals, until_s=50)
    world.now_s += 3600
    vitals.sample()

    assert not vitals.is_hung
    assert 3650 < (world.hung_after(vitals, until_s=3700) or 0) <= 3662


def test_one_that_computes_is_slow() -> None:
    """However long it says nothing."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        world = World()
        vitals = world.watch(process)
        of_process = psutil.Process(process.pid)
        while of_process.cpu_times().user < 0.5:
            time.sleep(0.01)
        world.now_s += 4.0
        vitals.sample()
        assert 0.0 == vitals.states(host="a", first_slot=0)[0].idle_s
        process.kill()
