"""The longest path is checked by hand, by the exact 1F1B form, and by an event loop that knows nothing of it."""

import heapq
import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.simulate import (
    FEW_PIPELINES,
    Engine,
    StageTimes,
    engine_of,
    one_forward_one_backward_s,
    simulate,
)
from pipette_launch.errors import FactError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import (
    Action,
    Schedule,
    gpipe,
    interleaved,
    no_pipelining,
    one_forward_one_backward,
    words,
)


def equal_stages(stages: int, *, forward_s: float = 1.0, backward_s: float = 2.0, hop_s: float = 0.0) -> StageTimes:
    """The same seconds everywhere."""
    hops = (hop_s,) * (stages - 1)
    return StageTimes(
        forward_s=(forward_s,) * stages, backward_s=(backward_s,) * stages, forward_hop_s=hops, backward_hop_s=hops
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
    )


class EventLoop:
    """A clock, a heap and messages: each rank runs its next action as soon as it is free and the input is there."""

    def __init__(self, schedule: Schedule, times: StageTimes) -> None:
        self.times = times
        self.last = schedule.num_stages - 1
        self.queues = [list(actions) for actions in schedule.ranks]
        self.free = [True] * schedule.pp
        self.inputs = {Action(0, "F", m) for m in range(schedule.num_microbatches)}
        self.ends: dict[Action, float] = {}
        self.ticket = itertools.count()
        self.events: list[tuple[float, int, str, Action]] = []

    def run(self) -> dict[Action, float]:
        """When each action ends."""
        self.start_what_can(0.0)
        while self.events:
            now, _, what, action = heapq.heappop(self.events)
            if what == "done":
                self.ends[action] = now
                self.free[action.stage % len(self.free)] = True
                self.send(now, action)
            else:
                self.inputs.add(action)
            self.start_what_can(now)
        return self.ends

    def start_what_can(self, now: float) -> None:
        """Start the next action of every rank that is free and has its input."""
        for rank, queue in enumerate(self.queues):
            if self.free[rank] and queue and queue[0] in self.inputs:
                action = queue.pop(0)
                self.free[rank] = False
                self.push(now + self.seconds_of(action), "done", action)

    def seconds_of(self, action: Action) -> float:
        """How long the action takes."""
        if action.kind == "B":
            return self.times.backward_s[action.stage]
        first = self.times.first_forward_s or self.times.forward_s
        return (self.times.forward_s if action.microbatch else first)[action.stage]

    def send(self, now: float, action: Action) -> None:
        """Send the result to whoever needs it."""
        if action.kind == "F" and action.stage == self.last:
            hop_s, receiver = 0.0, action._replace(kind="B")
        elif action.kind == "F":
            hop_s, receiver = self.times.forward_hop_s[action.stage], action._replace(stage=action.stage + 1)
        else:
            hop_s, receiver = (0.0, *self.times.backward_hop_s)[action.stage], action._replace(stage=action.stage - 1)
        self.push(now + hop_s, "arrived", receiver)

    def push(self, at: float, what: str, action: Action) -> None:
        """Put an event on the heap."""
        heapq.heappush(self.events, (at, next(self.ticket), what, action))


def test_two_stages_by_hand() -> None:
    """Two micro-batches through two stages, forward 1 s, backward 2 s, half a second between them."""
    timeline = simulate(one_forward_one_backward(2, 2), equal_stages(2, hop_s=0.5))

    assert timeline.start_s == ((0.0, 1.0, 5.0, 8.0), (1.5, 2.5, 4.5, 5.5))
    assert timeline.end_s == ((1.0, 2.0, 7.0, 10.0), (2.5, 4.5, 5.5, 7.5))
    assert timeline.makespan_s == 10.0
    assert timeline.busy_s_P == (6.0, 6.0)
    assert timeline.idle_s_P == (4.0, 4.0)
    assert words(timeline.critical_path) == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_a_long_first_forward_delays_everything_behind_it() -> None:
    """A first forward that waits for its parameters pushes the whole step back when it is critical."""
    plain = equal_stages(2)
    late = StageTimes(
        forward_s=plain.forward_s,
        backward_s=plain.backward_s,
        forward_hop_s=plain.forward_hop_s,
        backward_hop_s=plain.backward_hop_s,
        first_forward_s=(1.0, 4.0),
    )
    schedule = one_forward_one_backward(2, 2)

    assert simulate(schedule, late).makespan_s == simulate(schedule, plain).makespan_s + 3.0


@pytest.mark.parametrize("stages", range(1, 13))
def test_1f1b_equals_the_exact_form(stages: int) -> None:
    """Equal stages give (n+p-1)(f+b) + 2cK for every number of micro-batches, ratio and hop: 8,640 cases in all."""
    cases = list(itertools.product(((1.0, 2.0), (1.0, 1.0), (2.0, 1.0)), (0.0, 0.125, 0.25, 1.0)))
    for microbatches in range(1, 61):
        engine = Engine(one_forward_one_backward(stages, microbatches))
        for (forward_s, backward_s), hop_s in cases:
            expected = one_forward_one_backward_s(
                stages=stages, microbatches=microbatches, forward_s=forward_s, backward_s=backward_s, hop_s=hop_s
            )
            times = equal_stages(stages, forward_s=forward_s, backward_s=backward_s, hop_s=hop_s)

            assert expected == engine.makespan_s(times), (stages, microbatches, forward_s, backward_s, hop_s)


@pytest.mark.parametrize(
    ("stages", "microbatches", "hop_s", "expected"),
    [(4, 16, 0.1, 59.8), (8, 32, 0.3, 137.4), (16, 64, 0.3, 281.4), (8, 36, 0.1, 136.4)],
)
def test_1f1b_equals_what_was_simulated_elsewhere(
    stages: int, microbatches: int, hop_s: float, expected: float
) -> None:
    """The table of facts/pipette.md section 2 comes out."""
    makespan_s = Engine(one_forward_one_backward(stages, microbatches)).makespan_s(equal_stages(stages, hop_s=hop_s))

    assert makespan_s == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("vpp", "expected"), [(2, 0.099), (4, 0.052)])
def test_interleaving_divides_the_bubble(vpp: int, expected: float) -> None:
    """With p 8, n 32, F = B = W, no hop: the makespan bubbles of facts/schedules.md section 4."""
    times = equal_stages(8 * vpp, forward_s=1.0 / vpp, backward_s=2.0 / vpp)
    makespan_s = Engine(interleaved(8, vpp, 32, 8)).makespan_s(times)

    assert round(1 - 32 * 3 / makespan_s, 3) == expected


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.sampled_from(["1f1b", "gpipe"]), st.randoms())
def test_equals_a_naive_event_loop(pp: int, vpp: int, microbatches: int, kind: str, rng: random.Random) -> None:
    """Whatever the seconds, every action ends when an event loop says."""
    if vpp > 1 and pp > 1:
        schedule = interleaved(pp, vpp, pp * microbatches, pp)
    elif kind == "gpipe":
        schedule = gpipe(pp, microbatches)
    else:
        schedule = one_forward_one_backward(pp, microbatches) if pp > 1 else no_pipelining(microbatches)
    times = drawn_stages(schedule.num_stages, rng)

    timeline = simulate(schedule, times)

    ends = {
        action: end
        for actions, rank_ends in zip(schedule.ranks, timeline.end_s, strict=True)
        for action, end in zip(actions, rank_ends, strict=True)
    }
    assert EventLoop(schedule, times).run() == ends


@given(st.integers(2, 4), st.integers(1, 8), st.randoms())
def test_the_critical_path_is_as_long_as_the_step(stages: int, microbatches: int, rng: random.Random) -> None:
    """Its passes and the hops between its stages add up to the makespan."""
    schedule = one_forward_one_backward(stages, microbatches)
    times = drawn_stages(stages, rng)
    timeline = simulate(schedule, times)
    durations = {
        action: end - start
        for actions, starts, ends in zip(schedule.ranks, timeline.start_s, timeline.end_s, strict=True)
        for action, start, end in zip(actions, starts, ends, strict=True)
    }
    path = timeline.critical_path
    hops = sum(
        times.forward_hop_s[before.stage] if after.kind == "F" else times.backward_hop_s[after.stage]
        for before, after in itertools.pairwise(path)
        if before.stage != after.stage
    )

    assert timeline.makespan_s == sum(durations[action] for action in path) + hops


@pytest.mark.parametrize("count", [1, FEW_PIPELINES, FEW_PIPELINES + 1, 20])
def test_many_pipelines_at_once_give_the_same_digits(count: int) -> None:
    """One by one or as arrays, the answers are equal, not only close."""
    rng = random.Random(count)
    engine = Engine(interleaved(3, 2, 6, 3))
    pipelines = [drawn_stages(6, rng) for _ in range(count)]
    durations_R = np.array([times.durations_s for times in pipelines]).T
    hops_R = np.array([times.hops_s for times in pipelines]).T

    drained_SR = engine.drain_s_SR(durations_R, hops_R)

    assert [engine.drain_s(times) for times in pipelines] == drained_SR.T.tolist()


def test_a_schedule_that_cannot_run_is_named() -> None:
    """A backward before its own forward waits for ever."""
    schedule = Schedule.from_words("1f1b", pp=2, vpp=1, ranks=[["0F0", "0B0"], ["1B0", "1F0"]])

    with pytest.raises(FactError, match="deadlocks"):
        Engine(schedule)


def test_times_of_another_pipeline_are_refused() -> None:
    """Three stages' times do not price two stages."""
    with pytest.raises(FactError, match="3 stages"):
        Engine(one_forward_one_backward(2, 2)).makespan_s(equal_stages(3))


def test_stage_times_check_their_hops() -> None:
    """Two stages have one hop each way."""
    with pytest.raises(FactError, match="1 hops"):
        StageTimes(forward_s=(1.0, 1.0), backward_s=(1.0, 1.0), forward_hop_s=(), backward_hop_s=(0.0,))


def test_an_engine_is_made_once_for_a_shape() -> None:
    """Layouts that differ only in data parallelism share their schedule."""
    assert engine_of(Layout(pp=2, dp=1), 4) is engine_of(Layout(pp=2, dp=8), 4)


def test_a_large_pipeline_is_priced_in_a_third_of_a_second() -> None:
    """32 stages and 256 micro-batches, schedule and all."""

    def seconds() -> float:
        start = time.process_time()
        makespan_s = simulate(one_forward_one_backward.__wrapped__(32, 256), equal_stages(32)).makespan_s
        assert makespan_s == 861.0
        return time.process_time() - start

    # The quickest of five: other processes share the cores.
    assert min(seconds() for _ in range(5)) < 0.3
