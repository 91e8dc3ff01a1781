"""How much processor time other virtual machines took from this one: what makes a quiet machine noisy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
STEAL = 7
"""Of the first line's figures, which are ticks since the start (proc(5)); guests' ticks are in user's already."""
COUNTED = 8


@dataclass(frozen=True, kw_only=True)
class Ticks:
    """Processor time so far, all processors together."""

    total: int
    stolen: int

    def stolen_since(self, before: Ticks) -> float:
        """Share of the time since then that was stolen; 0 where no tick has passed."""
        total = self.total - before.total
        return (self.stolen - before.stolen) / total if total else 0.0


def ticks(stat: Path = STAT) -> Ticks:
    """Read them now."""
    found = [int(word) for word in stat.read_text().splitlines()[0].split()[1 : 1 + COUNTED]]
    return Ticks(total=sum(found), stolen=found[STEAL])
