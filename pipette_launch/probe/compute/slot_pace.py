"""Times a layer on each slot while all slots work, and again where that differs from its peers.

On a CPU a quota, another process or a stop signal takes the core away from a slot. The processor time of a layer does
not show that, but its wall time does. Workers that share cores never share them evenly, so one window in which a slot
got less says little. A slot that differs works again at another moment, beside a few that do not, as many as have a
core each, and then a third time: chance does not slow the same slot three times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipette_launch.probe.compute.slot_speeds import to_measure
from pipette_launch.probe.harness import Lockstep
from pipette_launch.probe.options import Pace, ProbeOptions

WINDOW_S = {"cpu": 0.5, "cuda": 0.3}
"""Length of a window, in seconds; a CPU deals out its time in slices of a few milliseconds."""
RETESTS = 2
SCHEDULE = Path("/proc/thread-self/schedstat")


@dataclass(kw_only=True)
class PaceTest:
    """The part of one slot in the test."""

    options: ProbeOptions
    slot: int
    clock: Callable[[], float] = time.perf_counter
    paces: list[Pace] = field(default_factory=list)

    def first(self, work: Callable[[], None] | None, lockstep: Lockstep, extra_s: float) -> None:
        """Work for a window while all others do; a slot without work (None) leaves its core to the others."""
        late_s = self._meet(lockstep, extra_s)
        if work is not None:
            self._work(work, late_s, turn=0)

    def again(self, work: Callable[[], None] | None, lockstep: Lockstep, extra_s: float) -> None:
        """Repeat it for the slots that differ, beside a few others, until none differs or it was repeated enough.

        Args:
            work: one layer of each kind, forward and backward; None where this slot cannot run it.
            lockstep: keeps the ranks in step.
            extra_s: seconds that another rank may be late beyond the usual deadline.

        """
        everyone: list[tuple[Pace, ...]] = [()] * self.options.num_slots
        for turn in range(1, RETESTS + 1):
            last = next((repr(pace.seconds) for pace in self.paces if pace.turn == turn - 1), "")
            texts = lockstep.gather(last, extra_s)
            if texts is not None:
                everyone = [
                    (*before, Pace(turn=turn - 1, seconds=float(text))) if text else before
                    for before, text in zip(everyone, texts, strict=True)
                ]
            chosen = lockstep.broadcast(" ".join(map(str, to_measure(self.options, everyone))), extra_s)
            if not chosen:
                return
            late_s = self._meet(lockstep, extra_s)
            if work is not None and str(self.slot) in chosen.split():
                self._work(work, late_s, turn=turn)
        # A slot that went on already would disturb those that still work.
        lockstep.barrier(extra_s)

    def _meet(self, lockstep: Lockstep, extra_s: float) -> float:
        """Wait for all ranks; returns how long this one waited for a core meanwhile, and so begins too late."""
        before_s = queued_s()
        lockstep.barrier(extra_s)
        return queued_s() - before_s

    def _work(self, work: Callable[[], None], late_s: float, *, turn: int) -> None:
        window_s = WINDOW_S[self.options.device_kind]
        began_s = self.clock() - late_s
        count, taken_s = 0, 0.0
        while not count or taken_s < window_s:
            work()
            count += 1
            taken_s = self.clock() - began_s
        self.paces.append(Pace(turn=turn, seconds=taken_s / count))


def queued_s() -> float:
    """Seconds that this thread has waited for a core in its life; 0 where the kernel does not count them."""
    try:
        return int(SCHEDULE.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
