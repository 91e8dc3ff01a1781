"""A naive simulation of a pipeline that knows nothing of longest paths, and times to try it with."""

import heapq
import itertools
import random

from pipette_launch.cost.pipeline.engine import StageTimes, Timeline
from pipette_launch.facts.schedule import Action, Schedule


def equal_stages(
    stages: int, *, forward_s: float = 1.0, backward_s: float = 2.0, hop_s: float = 0.0, input_share: float = 0.5
) -> StageTimes:
    """The same seconds everywhere."""
    hops = (hop_s,) * (stages - 1)
    return StageTimes(
        forward_s=(forward_s,) * stages,
        backward_s=(backward_s,) * stages,
        input_s=(backward_s * input_share,) * stages,
        weight_s=(backward_s * (1 - input_share),) * stages,
        forward_hop_s=hops,
        backward_hop_s=hops,
    )


def even_stages(
    pp: int, forward_s: float, input_s: float, weight_s: float, hop_s: float, *, vpp: int = 1
) -> StageTimes:
    """Equal chunks; the times belong to a whole rank, and a whole backward is the sum of its halves."""
    whole_s = (input_s + weight_s) / vpp
    return equal_stages(
        pp * vpp, forward_s=forward_s / vpp, backward_s=whole_s, hop_s=hop_s, input_share=input_s / (input_s + weight_s)
    )


def drawn_stages(stages: int, rng: random.Random) -> StageTimes:
    """Other seconds everywhere, in sixteenths so that sums are exact."""

    def draw(count: int, lowest: int) -> tuple[float, ...]:
        return tuple(rng.randint(lowest, 48) / 16 for _ in range(count))

    return StageTimes(
        forward_s=draw(stages, 1),
        backward_s=draw(stages, 1),
        forward_hop_s=draw(stages - 1, 0),
        backward_hop_s=draw(stages - 1, 0),
        first_forward_s=draw(stages, 1) if rng.random() < 0.5 else (),
        input_s=draw(stages, 1),
        weight_s=draw(stages, 1),
    )


def bubble_rate(timeline: Timeline) -> float:
    """Share of the makespan that the mean rank waits."""
    spans = zip(timeline.start_s, timeline.end_s, strict=True)
    busy_s = sum(end - start for starts, ends in spans for start, end in zip(starts, ends, strict=True))
    return 1 - busy_s / (len(timeline.end_s) * timeline.makespan_s)


def one_forward_one_backward_s(
    *, stages: int, microbatches: int, forward_s: float, backward_s: float, hop_s: float
) -> float:
    """Makespan of 1F1B with equal stages and hops: (n+p-1)(f+b) + 2cK.

    With q, r = divmod(n, p): K = q(p-1) + (p-2) + (0 if r == 0 else max(r-1, 1)), and K = 0 for one stage.
    """
    rounds, rest = divmod(microbatches, stages)
    exposed = rounds * (stages - 1) + (stages - 2) + (max(rest - 1, 1) if rest else 0) if stages > 1 else 0
    return (microbatches + stages - 1) * (forward_s + backward_s) + 2 * hop_s * exposed


class EventLoop:
    """A clock, a heap and messages: each rank runs its next action as soon as it is free and the input is there."""

    def __init__(self, schedule: Schedule, times: StageTimes) -> None:
        self.times = times
        self.schedule = schedule
        self.last = schedule.num_stages - 1
        self.queues = [list(actions) for actions in schedule.ranks]
        self.free = [True] * schedule.pp
        self.inputs = {(0, "forward", m) for m in range(schedule.num_microbatches)}
        self.ends: dict[Action, float] = {}
        self.ticket = itertools.count()
        self.events: list[tuple[float, int, object]] = []

    def run(self) -> dict[Action, float]:
        """When each action ends."""
        self.start_what_can(0.0)
        while self.events:
            now, _, subject = heapq.heappop(self.events)
            if isinstance(subject, Action):
                self.ends[subject] = now
                self.free[self.schedule.rank_of(subject.stage)] = True
                self.send(now, subject)
            else:
                self.inputs.add(subject)
            self.start_what_can(now)
        return self.ends

    def start_what_can(self, now: float) -> None:
        """Start the next action of every rank that is free and has its input."""
        for rank, queue in enumerate(self.queues):
            if self.free[rank] and queue and self.needs(queue[0]) in self.inputs:
                action = queue.pop(0)
                self.free[rank] = False
                self.push(now + self.seconds_of(action), action)

    def needs(self, action: Action) -> tuple[int, str, int]:
        """What must be there before the action can start."""
        what = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}[action.kind]
        return action.stage, what, action.microbatch

    def seconds_of(self, action: Action) -> float:
        """How long the action takes."""
        stage, times = action.stage, self.times
        if action.kind == "B":
            return times.backward_s[stage]
        if action.kind == "I":
            return times.input_s[stage]
        if action.kind == "W":
            return times.weight_s[stage]
        first = times.first_forward_s or times.forward_s
        return (times.forward_s if action.microbatch else first)[stage]

    def send(self, now: float, action: Action) -> None:
        """Send the result to whoever needs it."""
        stage, kind, microbatch = action
        if kind == "F" and stage < self.last:
            self.carry(now, stage, stage + 1, (stage + 1, "forward", microbatch))
        elif kind == "F":
            self.inputs.add((stage, "backward", microbatch))
        elif kind in "BI" and stage:
            self.carry(now, stage, stage - 1, (stage - 1, "backward", microbatch))
        if kind == "I":
            self.inputs.add((stage, "weight", microbatch))

    def carry(self, now: float, source: int, target: int, what: tuple[int, str, int]) -> None:
        """Take a result over its link."""
        crosses = self.schedule.rank_of(source) != self.schedule.rank_of(target)
        hops = self.times.forward_hop_s if target > source else self.times.backward_hop_s
        hop_s = hops[min(source, target)] if crosses else 0.0
        self.push(now + hop_s, what)

    def push(self, at: float, subject: object) -> None:
        """Put an event on the heap."""
        heapq.heappush(self.events, (at, next(self.ticket), subject))
