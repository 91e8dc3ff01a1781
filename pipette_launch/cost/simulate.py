"""When each action of a schedule starts and ends, by longest path, and which chain of actions is the critical one."""

# S = stages (model chunks), P = pipeline ranks, A = actions of all ranks, R = pipelines that are priced side by side.
# Durations are laid out as blocks of S: forwards, whole backwards, first forwards and, where the backward is split,
# input gradients and weight gradients. Hops are laid out as S - 1 forward ones, S - 1 backward ones and a 0.

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.dependencies import Dependencies, Ints
from pipette_launch.cost.timeline import Timeline
from pipette_launch.errors import FactError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import FORWARD, INPUT, WEIGHT, Action, Schedule
from pipette_launch.facts.schedules import schedule_of

FEW_PIPELINES = 6
"""Up to so many pipelines, one by one is faster than all as arrays (measured: between 4 and 15, p 4..32, n 16..256)."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch on each stage of one pipeline, and on the way between neighbours."""

    forward_s: tuple[float, ...]
    """One entry for each stage, as in `backward_s`."""
    backward_s: tuple[float, ...]
    """The whole backward."""
    forward_hop_s: tuple[float, ...]
    """From stage s to s + 1: S - 1 entries. Not asked for where both lie on one rank, as at the turn of a V."""
    backward_hop_s: tuple[float, ...]
    """From stage s + 1 to s: S - 1 entries."""
    first_forward_s: tuple[float, ...] = ()
    """The forward of micro-batch 0, where something makes it longer; empty = as the others."""
    input_s: tuple[float, ...] = ()
    """The input's gradient, for a schedule that splits the backward; empty = not known apart."""
    weight_s: tuple[float, ...] = ()
    """The weights' gradients."""
    recompute_s: tuple[float, ...] = ()
    """What is computed again before each backward, once its gradient has arrived; empty = nothing."""

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        hops = {len(self.forward_hop_s), len(self.backward_hop_s)}
        optional = (self.first_forward_s, self.input_s, self.weight_s, self.recompute_s)
        passes = {len(self.backward_s), *(len(times) or stages for times in optional)}
        if stages == 0 or hops != {stages - 1} or passes != {stages}:
            raise FactError(f"stage times: {stages} stages need as many backwards and {stages - 1} hops each way")
        if bool(self.input_s) != bool(self.weight_s):
            raise FactError("stage times: a split backward needs the times of both its halves")
        everything = (self.forward_s, self.backward_s, self.forward_hop_s, self.backward_hop_s, *optional)
        if not all(0 <= seconds < float("inf") for times in everything for seconds in times):
            raise FactError("stage times: seconds are finite and not negative")

    @property
    def durations_s(self) -> list[float]:
        """Forwards, backwards, first forwards; then input and weight gradients, where they are known."""
        again = self.recompute_s or (0.0,) * len(self.forward_s)
        backward_s = [more + seconds for more, seconds in zip(again, self.backward_s, strict=True)]
        input_s = [more + seconds for more, seconds in zip(again, self.input_s, strict=True)] if self.input_s else []
        return [*self.forward_s, *backward_s, *(self.first_forward_s or self.forward_s), *input_s, *self.weight_s]

    @property
    def hops_s(self) -> list[float]:
        """Forward hops, backward hops, and 0 for no hop."""
        return [*self.forward_hop_s, *self.backward_hop_s, 0.0]


class Engine:
    """A schedule made ready for pricing: its actions in an order in which every cause comes before its effect.

    start = max(end of the rank's previous action, end of the cause + its hop) (facts: schedules.md 7.1). Sends do not
    occupy a rank. That order depends on the schedule only, so it is found once, and each pricing is one pass:
    O(pp * vpp * n).
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.dependencies = Dependencies.of(schedule)
        level_A = self.dependencies.level_A
        self._order_A = np.argsort(level_A, kind="stable")
        self._place_A = np.empty(len(level_A) + 1, dtype=np.int64)
        self._place_A[self._order_A] = np.arange(len(level_A))
        self._place_A[-1] = len(level_A)  # one more place, for the action -1: it always ends at 0
        self.table_A = self._columns()
        """(previous, cause, hop, duration) of each action in the engine's own order, as indices."""
        _, stage_A, kind_A, _ = self.dependencies.columns
        ends_A = np.flatnonzero((kind_A != FORWARD) & (kind_A != INPUT))
        last_S = np.zeros(schedule.num_stages, dtype=np.int64)
        np.maximum.at(last_S, stage_A[ends_A], ends_A)
        self._last_backward_S = self._place_A[last_S].tolist()
        self._num_blocks = 5 if (kind_A == WEIGHT).any() else 3

    def drain_s(self, times: StageTimes) -> list[float]:
        """End of each stage's last backward: from then on its gradients can be reduced."""
        ends = self._ends(times)
        return [ends[place] for place in self._last_backward_S]

    def makespan_s(self, times: StageTimes) -> float:
        """End of the last backward of all."""
        return max(self.drain_s(times))

    def drain_s_SR(self, durations_R: Floats, hops_R: Floats) -> Floats:
        """Price several pipelines at once, as `drain_s` does one: the same operations, hence the same digits.

        Args:
            durations_R: `StageTimes.durations_s`, one column for each pipeline.
            hops_R: `StageTimes.hops_s`, one column for each pipeline.

        """
        self._check(len(durations_R))
        if durations_R.shape[1] <= FEW_PIPELINES:
            columns = [
                self._run(durations_R[:, r].tolist(), hops_R[:, r].tolist()) for r in range(durations_R.shape[1])
            ]
            return np.array([[ends[place] for ends in columns] for place in self._last_backward_S])
        drained: Floats = self.ends_AR(durations_R, hops_R)[self._last_backward_S]
        return drained

    def ends_AR(self, durations_R: Floats, hops_R: Floats) -> Floats:
        """Ends of all actions of several pipelines, in the engine's own order, and a row of 0 behind them."""
        ends = np.zeros((len(self._order_A) + 1, durations_R.shape[1]))
        for start, stop, previous, cause, hop, duration in self._levels:
            ready = np.maximum(ends[previous], ends[cause] + hops_R[hop])
            np.add(ready, durations_R[duration], out=ends[start:stop])
        return ends

    def timeline(self, times: StageTimes) -> Timeline:
        """Return every action's start and end, and the critical path."""
        ends = self._ends(times)
        durations = times.durations_s
        end_A = [ends[place] for place in self._place_A[:-1].tolist()]
        duration_A = self._duration_A().tolist()
        start_A = [end - durations[duration] for end, duration in zip(end_A, duration_A, strict=True)]
        return Timeline(
            schedule=self.schedule,
            start_s=self._by_rank(start_A),
            end_s=self._by_rank(end_A),
            critical_path=self._path(ends, times),
        )

    @cached_property
    def _steps(self) -> list[tuple[int, int, int, int]]:
        """(previous, cause, hop, duration) of each action, in the engine's own order."""
        return list(zip(*(column.tolist() for column in self.table_A), strict=True))

    @cached_property
    def _levels(self) -> list[tuple[int, int, Ints, Ints, Ints, Ints]]:
        """The same for actions of equal level as arrays: none of them needs another."""
        bounds = np.cumsum(np.bincount(self.dependencies.level_A)).tolist()
        previous, cause, hop, duration = self.table_A
        return [
            (start, stop, previous[start:stop], cause[start:stop], hop[start:stop], duration[start:stop])
            for start, stop in zip([0, *bounds[:-1]], bounds, strict=True)
        ]

    def _columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        order_A = self._order_A
        graph = self.dependencies
        previous_A, cause_A = (self._place_A[column[order_A]] for column in (graph.previous_A, graph.cause_A))
        return previous_A, cause_A, self._hop_A()[order_A], self._duration_A()[order_A]

    def _duration_A(self) -> Ints:
        """Where each action's time stands in `StageTimes.durations_s`."""
        _, stage_A, kind_A, microbatch_A = self.dependencies.columns
        # F, B, I, W as in `KINDS`; a first forward has a block of its own.
        block_A = np.array([0, 1, 3, 4])[kind_A]
        block_A[(kind_A == FORWARD) & (microbatch_A == 0)] = 2
        return block_A * self.schedule.num_stages + stage_A

    def _hop_A(self) -> Ints:
        """Where the time of each action's incoming hop stands in `StageTimes.hops_s`."""
        _, stage_A, kind_A, _ = self.dependencies.columns
        stages = self.schedule.num_stages
        rank_S = np.array(self.schedule.rank_S)
        none = 2 * (stages - 1)
        crosses_S = rank_S[1:] != rank_S[:-1]
        forward_S = np.concatenate(([none], np.where(crosses_S, np.arange(stages - 1), none)))
        backward_S = np.concatenate((np.where(crosses_S, np.arange(stages - 1, none), none), [none]))
        hop_A = np.where(kind_A == FORWARD, forward_S[stage_A], backward_S[stage_A])
        return np.where(kind_A == WEIGHT, none, hop_A)

    def _check(self, num_durations: int) -> None:
        stages = self.schedule.num_stages
        if num_durations not in (3 * stages, 5 * stages):
            raise FactError(f"times of {num_durations // 3} stages for a schedule of {stages}")
        if num_durations < self._num_blocks * stages:
            raise FactError(f"{self.schedule.name} splits the backward: give input_s and weight_s of each stage")

    def _ends(self, times: StageTimes) -> list[float]:
        if len(times.forward_s) != self.schedule.num_stages:
            raise FactError(f"times of {len(times.forward_s)} stages for a schedule of {self.schedule.num_stages}")
        durations = times.durations_s
        self._check(len(durations))
        return self._run(durations, times.hops_s)

    def _run(self, durations: list[float], hops: list[float]) -> list[float]:
        """Ends in the engine's own order, and a 0 behind them."""
        ends = [0.0] * (len(self._order_A) + 1)
        for place, (previous, cause, hop, duration) in enumerate(self._steps):
            ready = ends[cause] + hops[hop]
            free = ends[previous]
            # A comparison, as max() would double the time of this loop.
            ends[place] = (free if free > ready else ready) + durations[duration]  # noqa: FURB136
        return ends

    def _by_rank(self, values_A: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        bounds = np.cumsum([0, *(len(actions) for actions in self.schedule.ranks)]).tolist()
        return tuple(tuple(values_A[start:stop]) for start, stop in itertools.pairwise(bounds))

    def _path(self, ends: list[float], times: StageTimes) -> tuple[Action, ...]:
        hops = times.hops_s
        nowhere = len(self._steps)
        place = max(range(nowhere), key=lambda index: (ends[index], -index))
        path = []
        while place != nowhere:
            path.append(self.dependencies.actions[self._order_A[place]])
            previous, cause, hop, _ = self._steps[place]
            # The rank itself wins a tie: what it did before is the plainer reason.
            place = cause if ends[cause] + hops[hop] > ends[previous] else previous
        return tuple(reversed(path))


class BusyLinkEngine(Engine):
    """An engine whose transfers over one directed link of two ranks pass one after the other.

    A rank produces what it sends in its own order, so each link's queue is known beforehand:
    arrival = max(end of the sender, arrival of the link's previous transfer) + hop.
    """

    def drain_s_SR(self, durations_R: Floats, hops_R: Floats) -> Floats:
        """Price several pipelines, one by one."""
        self._check(len(durations_R))
        columns = [self._run(durations_R[:, r].tolist(), hops_R[:, r].tolist()) for r in range(durations_R.shape[1])]
        return np.array([[ends[place] for ends in columns] for place in self._last_backward_S])

    @cached_property
    def _transfers(self) -> tuple[list[int], list[int]]:
        """For each action in the engine's order, the transfer before its own on the same link, and its own hop."""
        graph = self.dependencies
        rank_S = np.array(self.schedule.rank_S)
        before_A = self._place_A[graph.previous_transfer_A(rank_S)[self._order_A]]
        stages = self.schedule.num_stages
        _, stage_A, kind_A, _ = graph.columns
        hop_A = np.where(kind_A == FORWARD, stage_A, stages - 2 + stage_A)
        hop_A[graph.target_A(rank_S) == graph.columns.rank_A] = 2 * (stages - 1)
        return before_A.tolist(), hop_A[self._order_A].tolist()

    def _run(self, durations: list[float], hops: list[float]) -> list[float]:
        return self._run_links(durations, hops)[0]

    def _run_links(self, durations: list[float], hops: list[float]) -> tuple[list[float], list[float]]:
        """Ends and arrivals in the engine's own order, and a 0 behind each."""
        ends = [0.0] * (len(self._order_A) + 1)
        arrivals = ends.copy()
        for place, ((previous, cause, _, duration), before, hop) in enumerate(
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
            path.append(self.dependencies.actions[self._order_A[place]])
            previous, cause, _, _ = self._steps[place]
            if arrivals[cause] <= ends[previous]:
                place = previous
                continue
            while arrivals[before[cause]] > ends[cause]:
                cause = before[cause]
            place = cause
        return tuple(reversed(path))


def engine_of(layout: Layout, num_microbatches: int) -> Engine:
    """Return the engine of the schedule that stock Megatron runs for a layout, made once for each shape."""
    return _engine(layout.pp, layout.vpp, layout.microbatch_group_size, num_microbatches)


@lru_cache(maxsize=256)
def _engine(pp: int, vpp: int, group_size: int, num_microbatches: int) -> Engine:
    return Engine(schedule_of(Layout(pp=pp, vpp=vpp, microbatch_group_size=group_size), num_microbatches))


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
