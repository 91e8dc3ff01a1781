"""Processor time that others took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from benchmarks import stolen
from benchmarks.stolen import ProcessorTime, processor_time


class Times(NamedTuple):
    """What psutil tells on Linux."""

    user: float = 40
    nice: float = 0
    system: float = 20
    idle: float = 30
    iowait: float = 0
    irq: float = 0
    softirq: float = 0
    steal: float = 10
    guest: float = 7
    guest_nice: float = 7


def test_stolen_time_is_a_share_of_all_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guests' time, which user's holds already, does not count twice."""
    monkeypatch.setattr(stolen, "psutil", SimpleNamespace(cpu_times=Times))

    assert ProcessorTime(total_s=100, stolen_s=10) == processor_time()
    assert 0.25 == ProcessorTime(total_s=300, stolen_s=60).stolen_since(processor_time())
    assert 0.0 == processor_time().stolen_since(processor_time())


def test_this_machine_tells_it() -> None:
    """The names are psutil's own."""
    assert 0 <= processor_time().stolen_s <= processor_time().total_s
