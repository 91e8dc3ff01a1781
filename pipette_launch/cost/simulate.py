"""When each action of a schedule starts and ends, by longest path, and which chain of actions is the critical one."""

# S = stages (model chunks), P = pipeline ranks, A = actions of all ranks, R = pipelines that are priced side by side.
# Durations are laid out as three blocks of S (forwards, backwards, first forwards), hops as S - 1 forward ones, S - 1
# backward ones and a 0.

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import FactError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import Action, Schedule, schedule_of

FEW_PIPELINES = 6
"""Up to so many pipelines, one by one is faster than all as arrays (measured: between 4 and 15, p 4..32, n 16..256)."""

_NO_ACTION = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch on each stage of one pipeline, and on the way between neighbours."""

    forward_s: tuple[float, ...]
    """One entry for each stage, as in `backward_s`."""
    backward_s: tuple[float, ...]
    forward_hop_s: tuple[float, ...]
    """From stage s to s + 1: S - 1 entries."""
    backward_hop_s: tuple[float, ...]
    """From stage s + 1 to s: S - 1 entries."""
    first_forward_s: tuple[float, ...] = ()
    """The forward of micro-batch 0, where something makes it longer; empty = as the others."""

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        hops = {len(self.forward_hop_s), len(self.backward_hop_s)}
        passes = {len(self.backward_s), len(self.first_forward_s) or stages}
        if stages == 0 or hops != {stages - 1} or passes != {stages}:
            raise FactError(f"stage times: {stages} stages need as many backwards and {stages - 1} hops each way")

    @property
    def durations_s(self) -> list[float]:
        """Forwards, backwards, first forwards."""
        return [*self.forward_s, *self.backward_s, *(self.first_forward_s or self.forward_s)]

    @property
    def hops_s(self) -> list[float]:
        """Forward hops, backward hops, and 0 for no hop."""
        return [*self.forward_hop_s, *self.backward_hop_s, 0.0]


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


class Engine:
    """A schedule made ready for pricing: its actions in an order in which every cause comes before its effect.

    start = max(end of the rank's previous action, end of the cause + its hop); the cause of F(s) is F(s - 1), that of
    B(s) is B(s + 1), that of the last stage's B is its own F (facts: schedules.md 7.1). Sends do not occupy a rank.
    That order depends on the schedule only, so it is found once and each pricing is one pass: O(pp * vpp * n).
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._actions = [action for rank in schedule.ranks for action in rank]
        previous, cause = _graph(schedule)
        level = _levels(previous, cause, self._actions)
        order = sorted(range(len(level)), key=level.__getitem__)
        place = {action: index for index, action in enumerate(order)}
        place[_NO_ACTION] = len(order)  # one more place, which always ends at 0
        stages = schedule.num_stages
        self._steps = [
            (place[previous[a]], place[cause[a]], _hop(self._actions[a], stages), _duration(self._actions[a], stages))
            for a in order
        ]
        self._place_A = [place[action] for action in range(len(order))]
        self._order = order
        self._levels = _slices([level[a] for a in order], self._steps)
        last = {action.stage: index for index, action in enumerate(self._actions) if action.kind == "B"}
        self._last_backward_S = [self._place_A[last[stage]] for stage in range(stages)]

    def drain_s(self, times: StageTimes) -> list[float]:
        """End of each stage's last backward: from then on its gradients can be reduced."""
        ends = self._ends(times)
        return [ends[place] for place in self._last_backward_S]

    def makespan_s(self, times: StageTimes) -> float:
        """End of the last backward of all."""
        return max(self.drain_s(times))

    def drain_s_SR(self, durations_R: NDArray[np.float64], hops_R: NDArray[np.float64]) -> NDArray[np.float64]:
        """Price several pipelines at once, as `drain_s` does one: the same operations, hence the same digits.

        Args:
            durations_R: `StageTimes.durations_s`, one column for each pipeline.
            hops_R: `StageTimes.hops_s`, one column for each pipeline.

        """
        if durations_R.shape[1] <= FEW_PIPELINES:
            columns = [
                self._run(durations_R[:, r].tolist(), hops_R[:, r].tolist()) for r in range(durations_R.shape[1])
            ]
            return np.array([[ends[place] for ends in columns] for place in self._last_backward_S])
        ends = np.zeros((len(self._steps) + 1, durations_R.shape[1]))
        for start, stop, previous, cause, hop, duration in self._levels:
            ready = np.maximum(ends[previous], ends[cause] + hops_R[hop])
            np.add(ready, durations_R[duration], out=ends[start:stop])
        drained: NDArray[np.float64] = ends[self._last_backward_S]
        return drained

    def timeline(self, times: StageTimes) -> Timeline:
        """Return every action's start and end, and the critical path."""
        ends = self._ends(times)
        durations = times.durations_s
        end_A = [ends[place] for place in self._place_A]
        start_A = [
            end - durations[_duration(action, self.schedule.num_stages)]
            for end, action in zip(end_A, self._actions, strict=True)
        ]
        return Timeline(
            schedule=self.schedule,
            start_s=self._by_rank(start_A),
            end_s=self._by_rank(end_A),
            critical_path=self._critical_path(ends, times),
        )

    def _ends(self, times: StageTimes) -> list[float]:
        if len(times.forward_s) != self.schedule.num_stages:
            raise FactError(f"times of {len(times.forward_s)} stages for a schedule of {self.schedule.num_stages}")
        return self._run(times.durations_s, times.hops_s)

    def _run(self, durations: list[float], hops: list[float]) -> list[float]:
        """Ends in the engine's own order, and a 0 behind them."""
        ends = [0.0] * (len(self._steps) + 1)
        for place, (previous, cause, hop, duration) in enumerate(self._steps):
            ready = ends[cause] + hops[hop]
            free = ends[previous]
            # A comparison, as max() would double the time of this loop.
            ends[place] = (free if free > ready else ready) + durations[duration]  # noqa: FURB136
        return ends

    def _by_rank(self, values_A: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        per_rank = len(self._actions) // self.schedule.pp
        return tuple(tuple(values_A[at : at + per_rank]) for at in range(0, len(values_A), per_rank))

    def _critical_path(self, ends: list[float], times: StageTimes) -> tuple[Action, ...]:
        hops = times.hops_s
        nowhere = len(self._steps)
        place = max(range(nowhere), key=lambda index: (ends[index], -index))
        path = []
        while place != nowhere:
            path.append(self._actions[self._order[place]])
            previous, cause, hop, _ = self._steps[place]
            # The rank itself wins a tie: what it did before is the plainer reason.
            place = cause if ends[cause] + hops[hop] > ends[previous] else previous
        return tuple(reversed(path))


def engine_of(layout: Layout, num_microbatches: int) -> Engine:
    """Return the engine of the schedule that stock Megatron runs for a layout, made once for each shape."""
    return _engine(layout.pp, layout.vpp, layout.microbatch_group_size, num_microbatches)


@lru_cache(maxsize=256)
def _engine(pp: int, vpp: int, group_size: int, num_microbatches: int) -> Engine:
    return Engine(schedule_of(Layout(pp=pp, vpp=vpp, microbatch_group_size=group_size), num_microbatches))


def simulate(schedule: Schedule, times: StageTimes) -> Timeline:
    """Price one pipeline, action by action."""
    return Engine(schedule).timeline(times)


def one_forward_one_backward_s(
    *, stages: int, microbatches: int, forward_s: float, backward_s: float, hop_s: float
) -> float:
    """Makespan of 1F1B with equal stages and hops: (n+p-1)(f+b) + 2cK (facts: pipette.md section 2, exact).

    With q, r = divmod(n, p): K = q(p-1) + (p-2) + (0 if r == 0 else max(r-1, 1)), and K = 0 for one stage.
    """
    rounds, rest = divmod(microbatches, stages)
    exposed = rounds * (stages - 1) + (stages - 2) + (max(rest - 1, 1) if rest else 0) if stages > 1 else 0
    return (microbatches + stages - 1) * (forward_s + backward_s) + 2 * hop_s * exposed


def _graph(schedule: Schedule) -> tuple[list[int], list[int]]:
    """For each action, the rank's action before it and the action whose result it needs."""
    actions = [action for rank in schedule.ranks for action in rank]
    n, last_stage = schedule.num_microbatches, schedule.num_stages - 1
    # Where each action stands, by (stage, kind, micro-batch) as one number: forwards of a stage, then its backwards.
    position = [_NO_ACTION] * (2 * n * schedule.num_stages)
    for number, (stage, kind, microbatch) in enumerate(actions):
        position[(2 * stage + (kind == "B")) * n + microbatch] = number
    per_rank = len(actions) // schedule.pp
    previous = [number - 1 if number % per_rank else _NO_ACTION for number in range(len(actions))]
    cause = []
    for stage, kind, microbatch in actions:
        if kind == "F":
            cause.append(position[2 * (stage - 1) * n + microbatch] if stage else _NO_ACTION)
        else:
            needed = 2 * stage if stage == last_stage else 2 * stage + 3
            cause.append(position[needed * n + microbatch])
    return previous, cause


def _levels(previous: list[int], cause: list[int], actions: list[Action]) -> list[int]:
    """Longest chain of causes in front of each action; raises FactError where the order can never run."""
    effects: list[list[int]] = [[] for _ in actions]
    waiting = [0] * len(actions)
    for action in range(len(actions)):
        for before in (previous[action], cause[action]):
            if before != _NO_ACTION:
                effects[before].append(action)
                waiting[action] += 1
    ready = [action for action, count in enumerate(waiting) if count == 0]
    level = [0] * len(actions)
    for action in ready:
        for effect in effects[action]:
            level[effect] = max(level[effect], level[action] + 1)
            waiting[effect] -= 1
            if waiting[effect] == 0:
                ready.append(effect)
    if len(ready) != len(actions):
        stuck = next(action for action, count in enumerate(waiting) if count)
        raise FactError(f"this schedule deadlocks: {actions[stuck].word} waits for what can never run before it")
    return level


def _duration(action: Action, stages: int) -> int:
    """Where an action's time stands in `StageTimes.durations_s`."""
    if action.kind == "B":
        return stages + action.stage
    return action.stage if action.microbatch else 2 * stages + action.stage


def _hop(action: Action, stages: int) -> int:
    """Where the time of an action's incoming hop stands in `StageTimes.hops_s`."""
    if action.kind == "F":
        return action.stage - 1 if action.stage else 2 * (stages - 1)
    return stages - 1 + action.stage  # the last stage's own forward lands on the 0


def _slices(
    levels: list[int], steps: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Actions of equal level as arrays: none of them needs another."""
    table = np.array(steps, dtype=np.int64)
    bounds = [0, *(i for i in range(1, len(levels)) if levels[i] != levels[i - 1]), len(levels)]
    return [
        (start, stop, table[start:stop, 0], table[start:stop, 1], table[start:stop, 2], table[start:stop, 3])
        for start, stop in itertools.pairwise(bounds)
    ]
