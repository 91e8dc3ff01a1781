"""Messages between passes: nothing waits in a circle, even where a send ends only when its receive has begun."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
from gpu_rules.nccl import Pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from pipette_launch.cost.pipeline.named_schedules import SCHEDULES, named_schedule
from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts.pipeline.lowering import Message, Program, forward_passes, message_to, programs
from pipette_launch.facts.schedule import Action, PassTimes, Schedule


def drawn_times(num_stages: int, rng: random.Random) -> PassTimes:
    """Times of a few units, so that some are equal, and of very unequal ones."""
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
    """Seconds of each pass or message, drawn when they are first asked for."""
    seconds: dict[tuple[object, ...], float] = {}
    return lambda one: seconds.setdefault(one, rng.choice((0.0, 0.01, 1.0, rng.random())))


def passes_of(program: Program) -> list[Action]:
    """The passes of a rank, in its order."""
    return [step for step in program if isinstance(step, Action)]


@settings(max_examples=500, deadline=None)
@given(
    name=st.sampled_from([name for name, known in SCHEDULES.items() if name != "gpipe"]),
    pp=st.integers(2, 6),
    vpp=st.sampled_from((1, 2, 3)),
    microbatches=st.integers(1, 14),
    group=st.integers(1, 7),
    seed=st.integers(0, 1 << 30),
    one_queue=st.booleans(),
)
def test_every_schedule_runs_over_nccl(
    name: str, pp: int, vpp: int, microbatches: int, group: int, seed: int, one_queue: bool
) -> None:
    """Whatever times its messages were ordered by, and whatever the passes take, with one queue of the device or more.

    The stand-in raises where ranks wait for each other, and where a pass runs before what it needs is there.
    """
    known = SCHEDULES[name]
    chunks = {"one": 1, "two": 2, "several": max(vpp, 2)}[known.chunks]
    try:
        schedule = named_schedule(
            name,
            pp=pp,
            vpp=chunks,
            num_microbatches=microbatches,
            group_size=group if known.has_groups else None,
        )
    except LayoutError:
        return
    rng = random.Random(seed)
    times = drawn_times(schedule.num_stages, rng) if rng.random() < 0.9 else None
    found = programs(schedule.ranks, schedule.rank_S, times)

    Pipeline(found, schedule.rank_S, drawn_seconds(rng), drawn_seconds(rng), one_queue=one_queue).run()

    assert list(map(list, schedule.ranks)) == list(map(passes_of, found))


@settings(max_examples=100, deadline=None)
@given(pp=st.integers(2, 6), microbatches=st.integers(1, 14), seed=st.integers(0, 1 << 30))
def test_both_ends_of_a_way_have_its_messages_in_one_order(pp: int, microbatches: int, seed: int) -> None:
    """NCCL pairs sends and receives by their order alone."""
    schedule = named_schedule("v-half", pp=pp, vpp=2, num_microbatches=microbatches)
    found = programs(schedule.ranks, schedule.rank_S, drawn_times(2 * pp, random.Random(seed)))

    for source, target in permutations(range(pp), 2):
        sent, received = (
            [message for message in messages(found[rank]) if message.way == (source, target)]
            for rank in (source, target)
        )
        assert sent == received


def test_a_receive_is_posted_before_the_pass_that_computes_when_its_message_is_ready() -> None:
    """Rank 0 computes 0F2 for 9 units while rank 1 makes the gradient of micro-batch 0: behind it the receive waits."""
    times = replace(PassTimes.equal(2), forward=(9, 3))
    schedule = named_schedule("eager-1f1b", pp=2, num_microbatches=4)

    program = programs(schedule.ranks, schedule.rank_S, times)[0]

    asked = program.index(Message(1, 0, is_gradient=True, stage=1, microbatch=0))
    assert Action(0, "F", 1) == program[asked + 1]


@settings(max_examples=40, deadline=None)
@given(pp=st.integers(2, 5), vpp=st.integers(1, 3), microbatches=st.integers(1, 12))
def test_an_evaluation_has_any_number_of_micro_batches(pp: int, vpp: int, microbatches: int) -> None:
    """Each goes forward through each stage once, on Megatron's placement and on a V."""
    loop = tuple(stage % pp for stage in range(pp * vpp))
    folded = (*range(pp), *reversed(range(pp)))
    for rank_S in (loop, folded):
        pipeline = Pipeline(programs(forward_passes(rank_S, microbatches), rank_S), rank_S, lambda _: 1, lambda _: 0)
        pipeline.run()

        assert {Action(s, "F", m) for s in range(len(rank_S)) for m in range(microbatches)} == set(pipeline.ends)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Rank 0 wants a gradient before it sends the forward from which rank 1 makes it."""
    first = (Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1))
    second = (Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1))
    schedule = Schedule(name="broken", pp=2, vpp=1, num_microbatches=2, ranks=(first, second))

    with pytest.raises(FactError, match="rank 0 at 0B0, rank 1 at 1F1"):
        programs(schedule.ranks, schedule.rank_S)


def test_a_turn_on_one_rank_sends_nothing() -> None:
    """A V hands over between its two chunks on the last rank."""
    schedule = named_schedule("v-half", pp=2, vpp=2, num_microbatches=2)
    sent = {
        (message.stage, message.is_gradient)
        for program in programs(schedule.ranks, schedule.rank_S)
        for message in program
        if isinstance(message, Message)
    }

    assert {(0, False), (2, False), (3, True), (1, True)} == sent


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "gis"])
def test_receives_over_gloo_come_early_in_the_order_of_their_sends(name: str) -> None:
    """Gloo pairs the messages of two ranks by their order; each is asked for when the pass that makes it starts."""
    chunks = 2 if name in ("v-half", "gis") else 1
    schedule = named_schedule(name, pp=4, vpp=chunks, num_microbatches=8)

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
    """All messages of a rank, in its order."""
    return [step for step in program if isinstance(step, Message)]
