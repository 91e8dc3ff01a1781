"""How long a layer takes on each slot while all slots work, and once more where that differs from its peers.

On a CPU a slot is slowed by what takes its core away: a quota, a neighbour, a signal that stops it. Its own clock of
computing does not see that; the layers that it gets done in a second on the wall do. But workers that share cores never
share them evenly, so a second in which one got less says little. Whoever differs works again at another moment, beside
a few that do not, as many as have a core each, and then a third time; chance does not favour the same slot thrice.
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
"""All work for so long; a CPU deals out its time in pieces of a few milliseconds."""
RETESTS = 2
SCHEDULE = Path("/proc/thread-self/schedstat")


@dataclass(kw_only=True)
class PaceTest:
    """One slot's part in it."""

    options: ProbeOptions
    slot: int
    clock: Callable[[], float] = time.perf_counter
    paces: list[Pace] = field(default_factory=list)

    def first(self, work: Callable[[], None] | None, lockstep: Lockstep, extra_s: float) -> None:
        """Meet all others, then work beside them; a slot without work leaves its core to the others."""
        late_s = self._meet(lockstep, extra_s)
        if work is not None:
            self._work(work, late_s, turn=0)

    def again(self, work: Callable[[], None] | None, lockstep: Lockstep, extra_s: float) -> None:
        """Repeat it for whoever rank 0 finds odd, beside a few others, until nobody is or it was repeated enough."""
        everyone: list[tuple[Pace, ...]] = [()] * self.options.num_slots
        for turn in range(1, RETESTS + 1):
            last = next((repr(pace.seconds) for pace in self.paces if pace.turn == turn - 1), "")
            texts = lockstep.gather(last, extra_s)
            if texts is not None:
                everyone = [
                    (*before, Pace(turn=turn - 1, seconds=float(text))) if text else before
                    for before, text in zip(everyone, texts, strict=True)
                ]
            told = lockstep.broadcast(" ".join(map(str, to_measure(self.options, everyone))), extra_s)
            if not told:
                return
            late_s = self._meet(lockstep, extra_s)
            if work is not None and str(self.slot) in told.split():
                self._work(work, late_s, turn=turn)
        # Whoever was done with it would disturb the last of the others.
        lockstep.barrier(extra_s)

    def _meet(self, lockstep: Lockstep, extra_s: float) -> float:
        """Return how long this worker waited for a core meanwhile: so much later than the others does it begin."""
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
    """How long this thread has been ready to run without a core, in its life; 0 where the kernel does not tell."""
    try:
        return int(SCHEDULE.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
