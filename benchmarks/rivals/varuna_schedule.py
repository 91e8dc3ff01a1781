"""Varuna's pipeline schedule and its simulator: what each stage does in which order, and when the last pass ends.

Re-derived from tools/simulator of microsoft/varuna@a2145cc (generate_schedule.cc, simulate-varuna.cc). A list for each
stage is made in equal units of time: backward (two units) before recompute before forward; a stage recomputes once the
next one has begun its backward. In real time the list is followed but for one rule: where the next recompute has no
gradient yet, the next forward of the list is pulled ahead.
"""

# P = stages.

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from pipette_launch.errors import FactError

Task = tuple[str, int]
"""Forward, recompute or backward (F, R, B) of a micro-batch."""

_MOST_SENDS = 4
"""Number of sends that one stage has under way at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTimes:
    """Seconds of one micro-batch on each stage, and on the way between neighbours, the same both ways."""

    forward_s: tuple[float, ...]
    """Also the seconds of a recompute."""
    backward_s: tuple[float, ...]
    hop_s: tuple[float, ...]

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        if stages == 0 or len(self.backward_s) != stages or len(self.hop_s) != stages - 1:
            raise FactError(f"{stages} stages need as many backwards and {stages - 1} hops")


@lru_cache(maxsize=64)
def task_lists(stages: int, microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """List what each stage does, by greed in equal units of time.

    Raises:
        FactError: no stages or no micro-batches.

    """
    if stages < 1 or microbatches < 1:
        raise FactError(f"a schedule needs stages and micro-batches, got {stages} and {microbatches}")
    # Second half of a backward, backward, recompute, forward: the order of service.
    queues = [{kind: deque[int]() for kind in "WBRF"} for _ in range(stages)]
    queues[0]["F"].extend(range(microbatches))
    lists: list[list[Task]] = [[] for _ in range(stages)]
    while True:
        picked = [next(((kind, queue.popleft()) for kind, queue in stage.items() if queue), None) for stage in queues]
        if not any(picked):
            return tuple(tuple(tasks) for tasks in lists)
        for stage, task in enumerate(picked):
            if task is not None:
                _unlock(queues, stage, *task)
                if task[0] != "W":
                    lists[stage].append(task)


def _unlock(queues: list[dict[str, deque[int]]], stage: int, kind: str, microbatch: int) -> None:
    """Queue tasks that a finished task makes possible in the next unit of time."""
    if kind == "F" and stage < len(queues) - 1:
        queues[stage + 1]["F"].append(microbatch)
    elif kind in "FR":
        queues[stage]["B"].append(microbatch)
    elif kind == "B":
        queues[stage]["W"].append(microbatch)
        if stage:
            queues[stage - 1]["R"].append(microbatch)


def makespan_s(times: PipelineTimes, microbatches: int) -> float:
    """Simulate one pipeline: seconds from the first forward to the last backward."""
    return _Simulation(times, microbatches).run()


class _Stage:
    """The tasks of one stage that are left, and what has arrived for them."""

    def __init__(self, tasks: tuple[Task, ...]) -> None:
        self.tasks = list(tasks)
        self.next = 0
        self.is_busy = False
        self.inputs: set[int] = set()
        self.gradients: set[int] = set()
        self.ports = [0.0] * _MOST_SENDS

    def pick(self) -> Task | None:
        """Take the next task if it can start, with the one exception to the list."""
        if self.is_busy or self.next == len(self.tasks):
            return None
        kind, microbatch = self.tasks[self.next]
        if kind == "R" and microbatch not in self.gradients:
            self._pull_forward()
            kind, microbatch = self.tasks[self.next]
        # A backward follows its own recompute, or on the last stage its own forward.
        if kind != "B" and microbatch not in (self.inputs if kind == "F" else self.gradients):
            return None
        self.next += 1
        self.is_busy = True
        return kind, microbatch

    def _pull_forward(self) -> None:
        for at in range(self.next + 1, len(self.tasks)):
            if self.tasks[at][0] == "F":
                self.tasks.insert(self.next, self.tasks.pop(at))
                return

    def send_start_s(self, now: float) -> float:
        """When the next send can leave."""
        return max(now, self.ports[0])


class _Simulation:
    """Events of one pipeline in time: a pass ends, or something arrives."""

    def __init__(self, times: PipelineTimes, microbatches: int) -> None:
        self._times = times
        self._stages = [_Stage(tasks) for tasks in task_lists(len(times.forward_s), microbatches)]
        self._stages[0].inputs.update(range(microbatches))
        self._events: list[tuple[float, int, int, str, int]] = []
        self._count = 0

    def run(self) -> float:
        """Return when the last event but the arrivals happened."""
        now = 0.0
        self._start(0, now)
        while self._events:
            now, _, number, what, microbatch = heapq.heappop(self._events)
            stage = self._stages[number]
            if what == "input":
                stage.inputs.add(microbatch)
            elif what == "gradient":
                stage.gradients.add(microbatch)
            else:
                stage.is_busy = False
                self._send(number, what, microbatch, now)
            self._start(number, now)
        return now

    def _start(self, number: int, now: float) -> None:
        task = self._stages[number].pick()
        if task is not None:
            kind, microbatch = task
            seconds = self._times.backward_s[number] if kind == "B" else self._times.forward_s[number]
            self._add(now + seconds, number, kind, microbatch)

    def _send(self, number: int, kind: str, microbatch: int, now: float) -> None:
        if kind == "F" and number < len(self._stages) - 1:
            target, what, hop_s = number + 1, "input", self._times.hop_s[number]
        elif kind == "B" and number:
            target, what, hop_s = number - 1, "gradient", self._times.hop_s[number - 1]
        else:
            return
        stage = self._stages[number]
        arrival = stage.send_start_s(now) + hop_s
        heapq.heapreplace(stage.ports, arrival)
        self._add(arrival, target, what, microbatch)

    def _add(self, time: float, number: int, what: str, microbatch: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, number, what, microbatch))
