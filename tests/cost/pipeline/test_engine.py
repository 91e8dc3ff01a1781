"""The longest path is checked by hand, by the exact 1F1B form, and by an event loop that knows nothing of it."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from c_for_tests import in_c
from event_loop import EventLoop, drawn_stages, equal_stages, one_forward_one_backward_s
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_words import from_words

from pipette_launch.cost.pipeline import engine
from pipette_launch.cost.pipeline.engine import Engine, StageTimes, critical_counts, engine_of, simulate
from pipette_launch.cost.pipeline.zero_bubble import named_schedule
from pipette_launch.errors import FactError
from pipette_launch.facts import Layout
from pipette_launch.facts.schedule import (
    Schedule,
    StockSchedule,
    schedule_of,
)


@st.composite
def stock_engines(draw: st.DrawFn) -> Callable[[], Engine]:
    """Pipelines of up to five ranks, with up to three chunks, groups wider than the pipeline, and all waits."""
    pp, vpp, rendezvous = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.booleans())
    if pp == 1 or vpp == 1:
        layout, number, blocking = Layout(pp=pp), draw(st.integers(1, 60)), False
    else:
        group = draw(st.integers(pp, pp + 2))
        last = draw(st.integers(0, group - 1))
        number = group * draw(st.integers(1, 12)) + last * (last >= pp)
        layout, blocking = Layout(pp=pp, vpp=vpp, microbatch_group_size=group), not rendezvous and draw(st.booleans())
    schedule = StockSchedule.of(layout, number)
    return partial(Engine, schedule, rendezvous=rendezvous, blocking_ends=blocking)


def test_two_stages_by_hand() -> None:
    """Two micro-batches through two stages, forward 1 s, backward 2 s, half a second between them."""
    timeline = simulate(schedule_of(Layout(pp=2), 2), equal_stages(2, hop_s=0.5))

    assert timeline.start_s == ((0.0, 1.0, 5.0, 8.0), (1.5, 2.5, 4.5, 5.5))
    assert timeline.end_s == ((1.0, 2.0, 7.0, 10.0), (2.5, 4.5, 5.5, 7.5))
    assert timeline.makespan_s == 10.0


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
    schedule = schedule_of(Layout(pp=2), 2)

    assert simulate(schedule, late).makespan_s == simulate(schedule, plain).makespan_s + 3.0


@pytest.mark.parametrize("stages", range(1, 13))
def test_1f1b_equals_the_exact_form(stages: int) -> None:
    """Equal stages give (n+p-1)(f+b) + 2cK for every number of micro-batches, ratio and hop: 8,640 cases in all."""
    cases = list(itertools.product(((1.0, 2.0), (1.0, 1.0), (2.0, 1.0)), (0.0, 0.125, 0.25, 1.0)))
    for microbatches in range(1, 61):
        engine = Engine(schedule_of(Layout(pp=stages), microbatches))
        for (forward_s, backward_s), hop_s in cases:
            expected = one_forward_one_backward_s(
                stages=stages, microbatches=microbatches, forward_s=forward_s, backward_s=backward_s, hop_s=hop_s
            )
            times = equal_stages(stages, forward_s=forward_s, backward_s=backward_s, hop_s=hop_s)

            assert expected == engine.timeline(times).makespan_s, (stages, microbatches, forward_s, backward_s, hop_s)


@pytest.mark.parametrize(
    ("stages", "microbatches", "hop_s", "expected"),
    [(4, 16, 0.1, 59.8), (8, 32, 0.3, 137.4), (16, 64, 0.3, 281.4), (8, 36, 0.1, 136.4)],
)
def test_1f1b_equals_what_was_simulated_elsewhere(
    stages: int, microbatches: int, hop_s: float, expected: float
) -> None:
    """The makespans of an independent simulation come out."""
    timeline = simulate(schedule_of(Layout(pp=stages), microbatches), equal_stages(stages, hop_s=hop_s))

    assert timeline.makespan_s == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("vpp", "expected"), [(2, 0.099), (4, 0.052)])
def test_interleaving_divides_the_bubble(vpp: int, expected: float) -> None:
    """With p 8, n 32, F = B = W, no hop: the bubbles of an independent simulation."""
    times = equal_stages(8 * vpp, forward_s=1.0 / vpp, backward_s=2.0 / vpp)
    makespan_s = Engine(schedule_of(Layout(pp=8, vpp=vpp), 32)).timeline(times).makespan_s

    assert round(1 - 32 * 3 / makespan_s, 3) == expected


def small_schedule(kind: str, pp: int, vpp: int, microbatches: int) -> Schedule:
    """One of the schedules that need no times."""
    if pp == 1:
        return schedule_of(Layout(), microbatches)
    make = {
        "1f1b": lambda: schedule_of(Layout(pp=pp), microbatches),
        "interleaved": lambda: schedule_of(Layout(pp=pp, vpp=vpp + 1), pp * microbatches),
        "zb": lambda: named_schedule("zb-1p", pp=pp, num_microbatches=microbatches),
        "v": lambda: v_of_one_by_one(pp, microbatches),
    }
    return make[kind]()


def v_of_one_by_one(pp: int, microbatches: int) -> Schedule:
    """One micro-batch after the other down and up the V and back."""
    ranks = [
        [f"{stage}{kind}{microbatch}" for microbatch in range(microbatches) for kind, stage in passes]
        for passes in (
            [("F", rank), ("F", 2 * pp - 1 - rank), *((k, s) for s in (2 * pp - 1 - rank, rank) for k in "IW")]
            for rank in range(pp)
        )
    ]
    return from_words("v-one-by-one", pp=pp, vpp=2, ranks=ranks, placement="v")


KINDS_OF_SCHEDULE = ("1f1b", "interleaved", "zb", "v")


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from(KINDS_OF_SCHEDULE),
    st.randoms(),
)
def test_equals_a_naive_event_loop(pp: int, vpp: int, microbatches: int, kind: str, rng: random.Random) -> None:
    """For all seconds, every action ends as in an event loop."""
    schedule = small_schedule(kind, pp, vpp, microbatches)
    times = drawn_stages(schedule.num_stages, rng)

    timeline = simulate(schedule, times)

    ends = {
        action: end
        for actions, rank_ends in zip(schedule.ranks, timeline.end_s, strict=True)
        for action, end in zip(actions, rank_ends, strict=True)
    }
    assert EventLoop(schedule, times).run() == ends


def test_the_turn_of_a_v_is_free() -> None:
    """Both stages are on one rank: no message is sent, for any time of the hop."""
    schedule = v_of_one_by_one(2, 1)
    turn = dataclasses.replace(equal_stages(4), forward_hop_s=(0.0, 9.0, 0.0), backward_hop_s=(0.0, 9.0, 0.0))

    assert simulate(schedule, equal_stages(4)).makespan_s == simulate(schedule, turn).makespan_s


def test_a_split_needs_its_times() -> None:
    """A whole backward's time does not say how long its halves take."""
    whole = StageTimes(forward_s=(1.0,), backward_s=(2.0,), forward_hop_s=(), backward_hop_s=())

    with pytest.raises(FactError, match="splits the backward"):
        simulate(named_schedule("zb-1p", pp=1, num_microbatches=2), whole)


@pytest.mark.parametrize("count", [1, 7, 16, 40])
def test_many_pipelines_at_once_give_the_same_digits(count: int) -> None:
    """One by one or as arrays, the answers are equal, not only close."""
    rng = random.Random(count)
    engine = Engine(schedule_of(Layout(pp=3, vpp=2), 6))
    pipelines = [drawn_stages(6, rng) for _ in range(count)]
    durations_R = np.array([times.durations_s for times in pipelines]).T
    hops_R = np.array([times.hops_s for times in pipelines]).T

    drained_SR = engine.drain_s_SR(durations_R, hops_R)

    alone = [engine.drain_s_SR(durations_R[:, [one]], hops_R[:, [one]])[:, 0].tolist() for one in range(count)]
    assert alone == drained_SR.T.tolist()


def test_a_schedule_that_cannot_run_is_named() -> None:
    """The error names two ranks that wait for each other, and the actions they wait for."""
    schedule = from_words("mine", pp=2, vpp=1, ranks=[["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])

    with pytest.raises(FactError, match="mine deadlocks: 0B0 waits for 1B0, which never runs"):
        Engine(schedule)


def test_times_of_another_pipeline_are_refused() -> None:
    """Three stages' times do not price two stages."""
    with pytest.raises(FactError, match="3 stages"):
        Engine(schedule_of(Layout(pp=2), 2)).timeline(equal_stages(3))


def test_an_engine_is_made_once_for_a_shape() -> None:
    """Layouts that differ only in data parallelism share their schedule."""
    assert engine_of(Layout(pp=2, dp=1), 4) is engine_of(Layout(pp=2, dp=8), 4)


def test_a_large_pipeline_is_priced_in_a_third_of_a_second() -> None:
    """32 stages and 256 micro-batches, schedule and all."""

    def seconds() -> float:
        start = time.process_time()
        makespan_s = simulate(schedule_of(Layout(pp=32), 256), equal_stages(32)).makespan_s
        assert makespan_s == 861.0
        return time.process_time() - start

    # The quickest of five: other processes share the cores.
    assert min(seconds() for _ in range(5)) < 0.3


@given(st.integers(2, 5), st.integers(1, 12), st.integers(0, 1000))
def test_a_message_that_meets_its_receiver_is_a_part_of_the_pass_behind_it(
    stages: int, microbatches: int, seed: int
) -> None:
    """Priced with hops that begin when both ends are there, and with passes that are longer by their hop."""
    rng = np.random.default_rng(seed)
    forward_s, backward_s = rng.random(stages), rng.random(stages)
    forward_hop_s, backward_hop_s = rng.random(stages - 1), rng.random(stages - 1)
    layout = Layout(pp=stages)
    meeting = StageTimes(
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        forward_hop_s=tuple(forward_hop_s),
        backward_hop_s=tuple(backward_hop_s),
    )
    longer = StageTimes(
        forward_s=tuple(np.add(forward_s, (0.0, *forward_hop_s))),
        backward_s=tuple(np.add(backward_s, (*backward_hop_s, 0.0))),
        forward_hop_s=(0.0,) * (stages - 1),
        backward_hop_s=(0.0,) * (stages - 1),
    )

    timeline = engine_of(layout, microbatches, rendezvous=True).timeline(meeting)

    schedule = schedule_of(layout, microbatches)
    assert simulate(schedule, longer).makespan_s == pytest.approx(timeline.makespan_s)
    assert simulate(schedule, meeting).makespan_s <= timeline.makespan_s * (1 + 1e-12)


def chunked(group_size: int, microbatches: int, *, blocking_ends: bool) -> Engine:
    """Two ranks of two chunks."""
    return engine_of(Layout(pp=2, vpp=2, microbatch_group_size=group_size), microbatches, blocking_ends=blocking_ends)


def test_blocking_ends_put_a_hop_before_each_pass_of_the_warm_up_and_the_cool_down() -> None:
    """Rank 0 sends its second micro-batch a hop after the first; its first forward behind the warm-up waits too."""
    times = equal_stages(4, forward_s=1.0, backward_s=2.0, hop_s=0.25)

    timeline = chunked(2, 4, blocking_ends=True).timeline(times)

    assert (0.0, 1.25, 2.5, 3.75, 5.0) == timeline.start_s[0][:5]
    # The first gradient of the cool-down that is waited for comes late, the last two a hop after the backward before.
    ends, starts = timeline.end_s[0][-4:-1], timeline.start_s[0][-3:]
    assert [1.0, 0.25, 0.25] == [start - end for end, start in zip(ends, starts, strict=True)]


@given(st.integers(2, 4), st.integers(1, 4))
def test_what_blocking_ends_cost_depends_on_the_group_and_not_on_the_number_of_micro_batches(
    group_size: int, groups: int
) -> None:
    """The steady part overlaps its messages; the wider the groups are, the more passes are outside of it."""
    times = equal_stages(4, forward_s=1.0, backward_s=2.0, hop_s=0.125)

    def more_s(size: int, microbatches: int) -> float:
        """Increase of the step."""
        longer, shorter = (
            chunked(size, microbatches, blocking_ends=blocking).timeline(times).makespan_s for blocking in (True, False)
        )
        return longer - shorter

    assert more_s(group_size, 3 * group_size) == more_s(group_size, (3 + groups) * group_size)
    assert more_s(group_size, 3 * group_size) < more_s(group_size + 1, 3 * (group_size + 1))


ENGINES = [
    engine_of(Layout(pp=pp, vpp=vpp), num, rendezvous=rendezvous)
    for pp, vpp, num in ((1, 1, 3), (2, 1, 4), (4, 1, 6), (2, 2, 4))
    for rendezvous in (False, True)
] + [engine_of(Layout(pp=2, vpp=2, microbatch_group_size=size), 6, blocking_ends=True) for size in (2, 3)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(ENGINES), st.integers(0, 1000), st.integers(1, 9))
def test_counts_are_a_subgradient(engine: Engine, seed: int, pipelines: int) -> None:
    """The counts give each makespan exactly, and bound every other pipeline's makespan from below."""
    stages = len(engine.last_backward_S)
    rng = np.random.default_rng(seed)
    durations, hops = rng.random((3 * stages, pipelines)), rng.random((2 * stages - 1, pipelines))
    hops[-1] = 0
    makespan = engine.drain_s_SR(durations, hops).max(axis=0)

    of_durations, of_hops = critical_counts(engine, durations, hops)
    said = of_durations.T @ durations + of_hops.T @ hops

    np.testing.assert_allclose(np.diag(said), makespan, rtol=1e-12)
    assert (said <= makespan * (1 + 1e-12)).all()


def test_counts_by_hand() -> None:
    """Two equal stages, two micro-batches, 1F1B: the path is F F B B on the last stage, and one pass before and after.

    0F0 -> 1F0 1B0 1F1 1B1 -> 0B1, with a hop to the last stage and one back.
    """
    engine = engine_of(Layout(pp=2), 2)
    durations = np.array([[1.0], [1.0], [2.0], [2.0], [1.0], [1.0]])

    of_durations, of_hops = critical_counts(engine, durations, np.array([[0.5], [0.5], [0.0]]))

    assert [0.0, 1.0, 1.0, 2.0, 1.0, 1.0] == of_durations[:, 0].tolist()
    assert [1.0, 1.0, 0.0] == of_hops[:, 0].tolist()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stock_engines(), st.integers(0, 10**6), st.integers(1, 6), st.booleans())
def test_ends_and_counts_are_those_of_numpy(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Engine], seed: int, pipelines: int, are_whole: bool
) -> None:
    """To the last digit, for schedules of every kind; whole numbers make ties, which both settle alike."""
    rng = np.random.default_rng(seed)
    stages = len(make().last_backward_S)
    durations_R = rng.uniform(0.5, 2.0, (3 * stages, pipelines))
    hops_R = rng.uniform(0.0, 0.5, (2 * stages - 1, pipelines))
    if are_whole:
        durations_R, hops_R = durations_R.round(), hops_R.round()
    hops_R[-1] = 0.0
    found = []
    for module in (None, in_c("cost.pipeline._longest_path")):
        monkeypatch.setattr(engine, "_IN_C", module)
        made = make()
        found.append(
            (
                made.ends_AR(durations_R, hops_R),
                made.drain_s_SR(durations_R, hops_R),
                *critical_counts(made, durations_R, hops_R),
            )
        )

    for in_numpy, in_c_code in zip(*found, strict=True):
        assert in_numpy.tolist() == in_c_code.tolist()
