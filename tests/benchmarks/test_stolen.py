"""Processor time that others took."""

from __future__ import annotations

from pathlib import Path

from benchmarks.stolen import Ticks, ticks


def test_stolen_time_is_a_share_of_all_time(tmp_path: Path) -> None:
    """The eighth figure over the first eight; guests' time, which user's holds already, does not count twice."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  40 0 20 30 0 0 0 10 7 7\ncpu0 1 2 3\n")

    assert Ticks(total=100, stolen=10) == ticks(stat)
    assert Ticks(total=300, stolen=60).stolen_since(ticks(stat)) == 0.25
    assert ticks(stat).stolen_since(ticks(stat)) == 0.0
