"""When each action of a schedule starts and ends, by longest path, and which chain of actions is the critical one."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from pipette_launch.cost.pipeline.engine import Engine, Floats, StageTimes
from pipette_launch.cost.pipeline.steady_state import engine_of
from pipette_launch.cost.pipeline.timeline import Timeline
from pipette_launch.facts.schedule import Action, Schedule

__all__ = [
    "BusyLinkEngine",
    "Engine",
    "StageTimes",
    "engine_of",
    "one_forward_one_backward_s",
    "simulate",
]


class BusyLinkEngine(Engine):
    """An engine whose transfers over one directed link of two ranks pass one after the other.

    A rank produces what it sends in its own order, so each link's queue is known beforehand:
    arrival = max(end of the sender, arrival of the link's previous transfer) + hop.
    """

    def drain_s_SR(self, durations_R: Floats, hops_R: Floats) -> Floats:
        """Price several pipelines, one by one."""
        self._check(len(durations_R))
        columns = [self._run(durations_R[:, r].tolist(), hops_R[:, r].tolist()) for r in range(durations_R.shape[1])]
        return np.array([[ends[place] for ends in columns] for place in self.last_backward_S.tolist()])

    @cached_property
    def _transfers(self) -> tuple[list[int], list[int]]:
        """For each action in the engine's order, the transfer before its own on the same link, and its own hop."""
        rank_S = np.array(self.schedule.rank_S)
        before_A = self.place_A[self.dependencies.previous_transfer_A(rank_S)[self._order_A]]
        return before_A.tolist(), self._sent_hop_A()[self._order_A].tolist()

    def _run(self, durations: list[float], hops: list[float]) -> list[float]:
        return self._run_links(durations, hops)[0]

    def _run_links(self, durations: list[float], hops: list[float]) -> tuple[list[float], list[float]]:
        """Ends and arrivals in the engine's own order, and a 0 behind each."""
        ends = [0.0] * (len(self._order_A) + 1)
        arrivals = ends.copy()
        for place, ((previous, cause, _, _, duration), before, hop) in enumerate(
            zip(self._steps, *self._transfers, strict=True)
        ):
            end = max(ends[previous], arrivals[cause]) + durations[duration]
            ends[place] = end
            arrivals[place] = max(end, arrivals[before]) + hops[hop]
        return ends, arrivals

    def _path(self, ends: list[float], times: StageTimes) -> tuple[Action, ...]:
        """As above; where a link was busy the chain goes on with the sender of what it carried before."""
        _, arrivals = self._run_links(times.durations_s, times.hops_s)
        before, _ = self._transfers
        nowhere = len(self._steps)
        place = max(range(nowhere), key=lambda index: (ends[index], -index))
        path = []
        while place != nowhere:
            path.append(self.dependencies.action(self._order_A[place]))
            previous, cause, *_ = self._steps[place]
            if arrivals[cause] <= ends[previous]:
                place = previous
                continue
            while arrivals[before[cause]] > ends[cause]:
                cause = before[cause]
            place = cause
        return tuple(reversed(path))


def simulate(schedule: Schedule, times: StageTimes, *, busy_links: bool = False) -> Timeline:
    """Price one pipeline, action by action.

    Args:
        schedule: what runs.
        times: of its stages and hops.
        busy_links: whether transfers over one directed link pass one after the other, rather than all at once.

    Raises:
        FactError: the schedule deadlocks, or the times are those of another one.

    """
    return (BusyLinkEngine if busy_links else Engine)(schedule).timeline(times)


def one_forward_one_backward_s(
    *, stages: int, microbatches: int, forward_s: float, backward_s: float, hop_s: float
) -> float:
    """Makespan of 1F1B with equal stages and hops: (n+p-1)(f+b) + 2cK (facts: pipette.md section 2, exact).

    With q, r = divmod(n, p): K = q(p-1) + (p-2) + (0 if r == 0 else max(r-1, 1)), and K = 0 for one stage.
    """
    rounds, rest = divmod(microbatches, stages)
    exposed = rounds * (stages - 1) + (stages - 2) + (max(rest - 1, 1) if rest else 0) if stages > 1 else 0
    return (microbatches + stages - 1) * (forward_s + backward_s) + 2 * hop_s * exposed
