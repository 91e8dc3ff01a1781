"""Tests of schedules, their files, and the order of their messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from gpu_rules.nccl import Pipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_words import from_words, peak_live, to_words

from pipette_launch.cost.pipeline.zero_bubble import SCHEDULES, named_schedule
from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts import files
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import (
    Action,
    Message,
    PassTimes,
    Program,
    Schedule,
    ScheduleFile,
    StockSchedule,
    action_of,
    forward_passes,
    message_to,
    programs,
    rank_of,
    schedule_of,
)


def test_one_rank_alternates() -> None:
    """Without a pipeline each backward follows its forward."""
    assert to_words(schedule_of(Layout(), 2)) == [["0F0", "0B0", "0F1", "0B1"]]


def test_1f1b_of_three_stages() -> None:
    """Rank r runs pp - r - 1 forwards ahead."""
    expected = [
        ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"],
        ["1F0", "1F1", "1B0", "1F2", "1B1", "1F3", "1B2", "1B3"],
        ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3"],
    ]

    assert expected == to_words(schedule_of(Layout(pp=3), 4))


def test_1f1b_with_fewer_microbatches_than_ranks() -> None:
    """The number of micro-batches limits the warm-up."""
    assert to_words(schedule_of(Layout(pp=3), 1)) == [["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]]


def test_interleaved_of_two_ranks_and_two_chunks() -> None:
    """Two micro-batches go through chunk 0, then chunk 1; backwards take the chunks in reverse (Narayanan 2021)."""
    expected = [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]

    assert expected == [" ".join(rank) for rank in to_words(schedule_of(Layout(pp=2, vpp=2), 4))]


def test_interleaved_groups_may_be_larger_than_the_pipeline() -> None:
    """With groups of three, three micro-batches go through a chunk before the next chunk."""
    expected = ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2", "0F3", "0F4", "0F5", "2F3", "2F4", "2F5"]

    passes, _ = to_words(schedule_of(Layout(pp=2, vpp=2, microbatch_group_size=3), 6))

    assert expected == [word for word in passes if "F" in word]


@st.composite
def stock_schedules(draw: st.DrawFn) -> StockSchedule:
    """Draw up to five ranks, with up to three chunks and groups wider than the pipeline."""
    pp, vpp = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    if pp == 1 or vpp == 1:
        return StockSchedule(pp=pp, vpp=1, group_size=1, num_microbatches=draw(st.integers(1, 60)))
    group = draw(st.integers(pp, pp + 2))
    last = draw(st.integers(0, group - 1))
    number = group * draw(st.integers(1, 12)) + last * (last >= pp)
    return StockSchedule(pp=pp, vpp=vpp, group_size=group, num_microbatches=number)


@given(stock_schedules())
def test_every_rank_runs_its_forwards_ahead_and_then_alternates(stock: StockSchedule) -> None:
    """The passes are those of a naive loop over the groups of micro-batches and the chunks of each rank."""
    pp, vpp, microbatches, group_size = stock.pp, stock.vpp, stock.num_microbatches, stock.group_size
    turns = [
        (chunk, microbatch)
        for first in range(0, microbatches, group_size)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + group_size, microbatches))
    ]
    for rank in range(pp):
        forwards = [Action(chunk * pp + rank, "F", microbatch) for chunk, microbatch in turns]
        backwards = [Action((vpp - 1 - chunk) * pp + rank, "B", microbatch) for chunk, microbatch in turns]
        ahead = 2 * (pp - rank - 1) + (vpp - 1) * group_size if vpp > 1 else pp - rank - 1
        expected, forwards = forwards[:ahead], forwards[ahead:]
        for backward in backwards:
            expected += forwards[:1]
            forwards = forwards[1:]
            expected.append(backward)

        assert expected == [stock.columns.action(index) for index in np.flatnonzero(stock.columns.rank_A == rank)]


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(dp=2), "no-pipelining"),
        (Layout(pp=2), "1f1b"),
        (Layout(pp=2, vpp=2), "interleaved-1f1b"),
        (Layout(pp=2, vpp=2, microbatch_group_size=4), "interleaved-1f1b"),
    ],
)
def test_a_layout_has_its_schedule(layout: Layout, name: str) -> None:
    """Stock Megatron chooses the schedule by pp and vpp."""
    assert schedule_of(layout, 4).name == name


@pytest.mark.parametrize(
    ("microbatches", "group_size", "reason"),
    [(4, 3, "between pp=4"), (4, 5, "between pp=4"), (9, 4, "last group of 1")],
)
def test_what_megatron_refuses_is_refused(microbatches: int, group_size: int, reason: str) -> None:
    """Each of the three rules of the interleaved schedule has its own message."""
    with pytest.raises(LayoutError, match=reason):
        schedule_of(Layout(pp=4, vpp=2, microbatch_group_size=group_size), microbatches)


def test_interleaving_needs_a_pipeline() -> None:
    """One rank cannot interleave its chunks with those of other ranks."""
    with pytest.raises(LayoutError, match="vpp=2"):
        StockSchedule(pp=1, vpp=2, group_size=1, num_microbatches=4)


def test_where_stages_lie() -> None:
    """`loop` begins again on rank 0; `v` turns around on the last rank."""
    assert [rank_of(stage, pp=3, placement="loop") for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [rank_of(stage, pp=3, placement="v") for stage in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    "ranks",
    [
        [["0F0", "0B0"]],
        [["0F0", "0B0"], ["0F0", "0B0"]],
        [["0F0", "0B0"], ["1F0", "1F0"]],
        [["0F0", "0B0"], ["1F0"]],
        [["0F0", "0B0"], ["3F0", "3B0"]],
        [["0F0", "0I0"], ["1F0", "1B0"]],
        [["0F0", "0B0", "0W0"], ["1F0", "1B0"]],
        [["0F0", "0B0", "0I0", "0W0"], ["1F0", "1B0"]],
        [["0F0", "0B0"], ["1B0", "1F0"]],
        [["0F0", "0W0", "0I0"], ["1F0", "1B0"]],
        [[], []],
    ],
)
def test_an_incomplete_schedule_is_refused(ranks: list[list[str]]) -> None:
    """Each rank runs each of its stages forward once, then backward once, whole or split."""
    with pytest.raises(FactError, match="1f1b"):
        from_words("1f1b", pp=2, vpp=1, ranks=ranks)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (schedule_of(Layout(pp=4), 8), [4, 3, 2, 1]),
        (schedule_of(Layout(pp=4), 2), [2, 2, 2, 1]),
        (schedule_of(Layout(pp=2, vpp=2), 4), [5, 3]),
    ],
)
def test_live_passes(schedule: Schedule, expected: list[int]) -> None:
    """At the peak, the warm-up forwards and one more are in flight."""
    assert expected == peak_live(schedule)


@pytest.mark.parametrize("times", [None, replace(PassTimes.equal(6), forward=(3, 1, 4, 1, 5, 9))])
def test_a_schedule_comes_back_from_its_file(times: PassTimes | None) -> None:
    """All actions, the shape and the times survive."""
    schedule = replace(named_schedule("v-half", pp=3, num_microbatches=6), times=times)
    text = files.dumps(ScheduleFile.of(schedule))

    assert schedule == files.loads(ScheduleFile, text, "here").schedule()


@pytest.mark.parametrize("word", ["", "2B", "B1", "2X1", "2B1 "])
def test_a_word_that_is_no_action_is_refused(word: str) -> None:
    """The message shows a correct action."""
    with pytest.raises(FactError, match="2B1"):
        action_of(word)


def test_actions_that_are_no_schedule_are_refused() -> None:
    """A rank without its last backward is refused."""
    found = ScheduleFile.of(named_schedule("zb-1p", pp=2, num_microbatches=2))
    short = replace(found, ranks=(found.ranks[0].rsplit(" ", 1)[0], *found.ranks[1:]))

    with pytest.raises(FactError, match="it needs one F, and one B or one I and one W"):
        short.schedule()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": (1, 1)}, "3 stages need 3 times of each pass and 2 hops each way"),
        ({"backward_hop": ()}, "3 stages need 3 times"),
        ({"forward": ()}, "0 stages need"),
        ({"input": (1, 0, 1)}, "at least 1 ns"),
        ({"forward_hop": (0, -1)}, "each hop at least 0 ns"),
    ],
)
def test_times_that_are_not_those_of_one_pipeline_are_refused(changes: dict[str, tuple[int, ...]], words: str) -> None:
    """The message names the needed number or the lower limit."""
    with pytest.raises(FactError, match=words):
        replace(PassTimes.equal(3), **changes)


def test_times_of_another_pipeline_are_refused() -> None:
    """A schedule of four stages needs four times of each pass."""
    with pytest.raises(FactError, match="times of 3 stages for 4"):
        replace(schedule_of(Layout(pp=2, vpp=2), 4), times=PassTimes.equal(3))


def drawn_times(num_stages: int, rng: random.Random) -> PassTimes:
    """Draw short times, some of them equal, or very different times."""
    most = rng.choice((2, 5, 1000))
    forward, input_, weight = ([rng.randint(1, most) for _ in range(num_stages)] for _ in range(3))
    hops = [[rng.randint(0, most) for _ in range(num_stages - 1)] for _ in range(2)]
    backward = [one + other for one, other in zip(input_, weight, strict=True)]
    return PassTimes(
        forward=tuple(forward),
        backward=tuple(backward),
        input=tuple(input_),
        weight=tuple(weight),
        forward_hop=tuple(hops[0]),
        backward_hop=tuple(hops[1]),
    )


def drawn_seconds(rng: random.Random) -> Callable[[tuple[object, ...]], float]:
    """Draw the seconds of each pass or message at its first use."""
    seconds: dict[tuple[object, ...], float] = {}
    return lambda one: seconds.setdefault(one, rng.choice((0.0, 0.01, 1.0, rng.random())))


def passes_of(program: Program) -> list[Action]:
    """Return the passes of a rank in its order."""
    return [step for step in program if isinstance(step, Action)]


@settings(max_examples=500, deadline=None)
@given(
    name=st.sampled_from(("1f1b", "interleaved-1f1b", *SCHEDULES)),
    pp=st.integers(2, 6),
    groups=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
    one_queue=st.booleans(),
)
def test_every_schedule_runs_over_nccl(name: str, pp: int, groups: int, seed: int, one_queue: bool) -> None:
    """Schedules run with any expected times, any real times, and any number of device queues.

    The stand-in for NCCL raises an error if ranks wait for each other, or if a pass runs too early.
    """
    microbatches = groups * pp
    if name in SCHEDULES:
        schedule = named_schedule(name, pp=pp, num_microbatches=microbatches)
    else:
        schedule = schedule_of(Layout(pp=pp, vpp=1 if name == "1f1b" else 2), microbatches)
    rng = random.Random(seed)
    times = drawn_times(schedule.num_stages, rng) if rng.random() < 0.9 else None
    found = programs(schedule.ranks, schedule.rank_S, times)

    Pipeline(found, schedule.rank_S, drawn_seconds(rng), drawn_seconds(rng), one_queue=one_queue).run()

    assert list(map(list, schedule.ranks)) == list(map(passes_of, found))


@settings(max_examples=100, deadline=None)
@given(pp=st.integers(2, 6), microbatches=st.integers(1, 14), seed=st.integers(0, 1 << 30))
def test_both_ends_of_a_way_have_its_messages_in_one_order(pp: int, microbatches: int, seed: int) -> None:
    """NCCL pairs sends and receives by their order."""
    schedule = named_schedule("v-half", pp=pp, num_microbatches=microbatches)
    found = programs(schedule.ranks, schedule.rank_S, drawn_times(2 * pp, random.Random(seed)))

    for source, target in permutations(range(pp), 2):
        sent, received = (
            [message for message in messages(found[rank]) if message.way == (source, target)]
            for rank in (source, target)
        )
        assert sent == received


def test_a_receive_is_posted_before_the_pass_that_computes_when_its_message_is_ready() -> None:
    """Rank 0 computes 0F2 while rank 1 makes the gradient of micro-batch 0. After 0F2 the receive is late."""
    times = replace(PassTimes.equal(2), forward=(9, 3))
    first = tuple(map(action_of, "0F0 0F1 0F2 0B0 0B1 0B2".split()))
    second = tuple(map(action_of, "1F0 1B0 1F1 1B1 1F2 1B2".split()))

    program = programs((first, second), (0, 1), times)[0]

    asked = program.index(Message(1, 0, is_gradient=True, stage=1, microbatch=0))
    assert Action(0, "F", 1) == program[asked + 1]


@settings(max_examples=40, deadline=None)
@given(pp=st.integers(2, 5), vpp=st.integers(1, 3), microbatches=st.integers(1, 12))
def test_an_evaluation_has_any_number_of_micro_batches(pp: int, vpp: int, microbatches: int) -> None:
    """Each goes forward through each stage once, for both placements."""
    loop = tuple(stage % pp for stage in range(pp * vpp))
    folded = (*range(pp), *reversed(range(pp)))
    for rank_S in (loop, folded):
        pipeline = Pipeline(programs(forward_passes(rank_S, microbatches), rank_S), rank_S, lambda _: 1, lambda _: 0)
        pipeline.run()

        assert {Action(s, "F", m) for s in range(len(rank_S)) for m in range(microbatches)} == set(pipeline.ends)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Rank 0 waits for a gradient before it sends the forward that rank 1 needs for it."""
    first = (Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1))
    second = (Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1))
    schedule = Schedule(name="broken", pp=2, vpp=1, num_microbatches=2, ranks=(first, second))

    with pytest.raises(FactError, match="rank 0 at 0B0, rank 1 at 1F1"):
        programs(schedule.ranks, schedule.rank_S)


def test_a_turn_on_one_rank_sends_nothing() -> None:
    """In a `v`, the last rank has two successive stages, so no message is sent between them."""
    schedule = named_schedule("v-half", pp=2, num_microbatches=2)
    sent = {
        (message.stage, message.is_gradient)
        for program in programs(schedule.ranks, schedule.rank_S)
        for message in program
        if isinstance(message, Message)
    }

    assert {(0, False), (2, False), (3, True), (1, True)} == sent


@pytest.mark.parametrize("name", ["zb-1p", "v-half"])
def test_receives_over_gloo_come_early_in_the_order_of_their_sends(name: str) -> None:
    """Gloo pairs messages by order. Each receive is posted when the pass that makes the message starts."""
    schedule = named_schedule(name, pp=4, num_microbatches=8)

    early = programs(schedule.ranks, schedule.rank_S, in_streams=False)

    for source, target in permutations(range(4), 2):
        sent, received = (
            [message for message in messages(early[rank]) if message.way == (source, target)]
            for rank in (source, target)
        )
        assert sent == received
    for program in early:
        needed = [(step, message_to(step, schedule.rank_S)) for step in passes_of(program)]
        assert all(message is None or message in program[: program.index(step)] for step, message in needed)


def messages(program: Program) -> list[Message]:
    """Return all messages of a rank in its order."""
    return [step for step in program if isinstance(step, Message)]
