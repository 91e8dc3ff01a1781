"""Processor time that other virtual machines took from this machine."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True)
class ProcessorTime:
    """Processor time so far, all processors together, in seconds."""

    total_s: float
    stolen_s: float

    def stolen_since(self, before: ProcessorTime) -> float:
        """Share of the time since then that was stolen; 0 where none has passed."""
        total_s = self.total_s - before.total_s
        return (self.stolen_s - before.stolen_s) / total_s if total_s else 0.0


def processor_time() -> ProcessorTime:
    """Read it now."""
    times = psutil.cpu_times()
    # Guests' time is in user's already.
    return ProcessorTime(total_s=sum(times) - times.guest - times.guest_nice, stolen_s=times.steal)
