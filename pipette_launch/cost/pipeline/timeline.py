"""One pipeline's step, action by action: spans, bubbles, memory over time, and the chain that no rank could shorten."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from pipette_launch.facts.schedule import Action, Schedule, words


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One pipeline's step, action by action."""

    schedule: Schedule
    start_s: tuple[tuple[float, ...], ...]
    """For each rank, the start of each of its actions."""
    end_s: tuple[tuple[float, ...], ...]
    critical_path: tuple[Action, ...]
    """The chain of actions, first to last, that no link or rank could start earlier."""

    @property
    def makespan_s(self) -> float:
        """From the first forward to the last backward."""
        return max(ends[-1] for ends in self.end_s)

    @property
    def span_s_P(self) -> tuple[float, ...]:
        """From each rank's own first start to its last end."""
        return tuple(ends[-1] - starts[0] for starts, ends in zip(self.start_s, self.end_s, strict=True))

    @property
    def busy_s_P(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.start_s, self.end_s, strict=True)
        )

    @property
    def idle_s_P(self) -> tuple[float, ...]:
        """Seconds of the makespan that each rank waits."""
        return tuple(self.makespan_s - busy for busy in self.busy_s_P)

    @property
    def bubble_rate(self) -> float:
        """Share of the makespan that the mean rank waits: what counts where the optimizer waits for every rank."""
        return self._rate(self.makespan_s)

    @property
    def span_bubble_rate(self) -> float:
        """The same against the longest span of one rank: 2401.10241's rate, true only with its post-validation.

        A step then begins on each rank as soon as that rank is done with the one before (facts: schedules.md 1.3).
        """
        return self._rate(max(self.span_s_P))

    @property
    def critical_words(self) -> list[str]:
        """The critical path as words."""
        return words(self.critical_path)

    @property
    def critical_hops(self) -> Counter[tuple[int, int]]:
        """How often the critical path crosses from one pipeline rank to another."""
        ranks = [self.schedule.rank_of(action.stage) for action in self.critical_path]
        return Counter((before, after) for before, after in itertools.pairwise(ranks) if before != after)

    def _rate(self, whole_s: float) -> float:
        return 1 - sum(self.busy_s_P) / (self.schedule.pp * whole_s) if whole_s else 0.0
