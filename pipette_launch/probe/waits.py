"""Waits of warm-up workers for each other: one formula of ranks and remaining time."""

from __future__ import annotations

LEAST_S = 60.0
RANKS_PER_S = 20.0
"""Number of ranks that lengthen every wait by one second: a cold file system serves them one after the other."""
START_S = 120.0
"""Time for imports, compilation and the first lap of a worker, which the budget does not cover."""


def wait_s(num_ranks: int, left_s: float = 0.0, *, least_s: float = LEAST_S) -> float:
    """Return the longest wait for another worker, in seconds.

    Args:
        num_ranks: number of workers.
        left_s: time that the phase of the other worker may still take; below 0 counts as 0.
        least_s: wait for a worker of a small job whose phase is over.

    """
    return least_s + num_ranks / RANKS_PER_S + max(left_s, 0.0)
