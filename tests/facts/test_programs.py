"""Tests of programs: the order of messages between the passes of a schedule."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
from gpu_rules.nccl import Pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from pipette_launch.cost.pipeline.zero_bubble import SCHEDULES, named_schedule
from pipette_launch.errors import FactError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.programs import Message, Program, forward_passes, message_to, programs
from pipette_launch.facts.schedule import (
    Action,
    ExpectedTimes,
    Schedule,
    action_of,
    schedule_of,
)


def drawn_times(num_stages: int, rng: random.Random) -> ExpectedTimes:
    """Draw short times, some of them equal, or very different times."""
    most = rng.choice((2, 5, 1000))
    forward, input_, weight = ([rng.randint(1, most) for _ in range(num_stages)] for _ in range(3))
    hops = [[rng.randint(0, most) for _ in range(num_stages - 1)] for _ in range(2)]
    backward = [one + other for one, other in zip(input_, weight, strict=True)]
    return ExpectedTimes(
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
    times = replace(ExpectedTimes.equal(2), forward=(9, 3))
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
