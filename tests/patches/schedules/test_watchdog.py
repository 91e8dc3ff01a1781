"""The watchdog names a rank that does not move, and its pass."""

from __future__ import annotations

from pipette_patches.schedules.patch import Watchdog


def test_what_takes_too_long_is_said_once() -> None:
    """Neither before the patience is over, nor again for the same pass, nor outside a pipeline."""
    now = [0.0]
    watchdog = Watchdog(2, patience_s=10.0, clock=lambda: now[0])
    watchdog.begin("5I1")
    now[0] = 9.0
    early = watchdog.complaint()
    now[0] = 11.0

    assert ["", "pipeline rank 2 has been at 5I1 for 11 s", ""] == [early, watchdog.complaint(), watchdog.complaint()]

    watchdog.begin("5W1")
    now[0] = 20.0
    assert watchdog.complaint() == ""
    watchdog.begin("")
    now[0] = 99.0
    assert watchdog.complaint() == ""
