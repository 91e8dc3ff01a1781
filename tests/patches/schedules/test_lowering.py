"""Messages between passes: nothing waits in a circle, even where a send ends only when its receive has begun."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipette_launch.cost.pipeline.named_schedules import SCHEDULES, named_schedule
from pipette_launch.errors import LayoutError
from pipette_launch.facts.schedule import Action, Schedule
from pipette_patches.errors import PatchError
from pipette_patches.schedules.lowering import Message, Program, forward_passes, programs


def run(ranks: Sequence[Program], rank_S: Sequence[int]) -> set[Action]:
    """Run programs in which a batch ends only when all its peers have come to it; returns the passes that ran.

    Every message must be sent after the pass that makes it and received before the pass that needs it.
    """
    at = [0] * len(ranks)
    done: set[Action] = set()
    there: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(ranks):
            while at[rank] < len(program):
                step = program[at[rank]]
                if isinstance(step, Action):
                    assert has_what_it_needs(step, rank_S, done, there)
                    done.add(step)
                else:
                    met = [message for message in step if is_met(message, rank, ranks, at)]
                    assert all(made(message, done) for message in met)
                    there.update(met)
                    if not set(step) <= there:
                        break
                at[rank] += 1
                moved = True
    assert [len(program) for program in ranks] == at
    return done


def is_met(message: Message, rank: int, ranks: Sequence[Program], at: Sequence[int]) -> bool:
    """Whether the other end of a message has come to the batch that holds it."""
    peer = message.target if message.source == rank else message.source
    step = ranks[peer][at[peer]] if at[peer] < len(ranks[peer]) else ()
    return not isinstance(step, Action) and message in step


def made(message: Message, done: set[Action]) -> bool:
    """Whether the pass that makes a message's tensor has run."""
    kinds = "BI" if message.is_gradient else "F"
    return any(Action(message.stage, kind, message.microbatch) in done for kind in kinds)  # type: ignore[arg-type]


def has_what_it_needs(action: Action, rank_S: Sequence[int], done: set[Action], there: set[Message]) -> bool:
    """Whether what a pass needs is on its rank: made there, or received."""
    stage, kind, microbatch = action
    if kind == "W":
        return Action(stage, "I", microbatch) in done
    is_gradient = kind != "F"
    giver = stage + (1 if is_gradient else -1)
    if not 0 <= giver < len(rank_S):
        return True
    needed = Message(rank_S[giver], rank_S[stage], is_gradient, giver, microbatch)
    return made(needed, done) if needed.source == needed.target else needed in there


@settings(max_examples=1000, deadline=None)
@given(
    name=st.sampled_from([name for name, known in SCHEDULES.items() if name != "gpipe"]),
    pp=st.integers(2, 6),
    vpp=st.sampled_from((1, 2, 3)),
    microbatches=st.integers(1, 14),
    group=st.integers(1, 7),
)
def test_every_schedule_runs_under_rendezvous(name: str, pp: int, vpp: int, microbatches: int, group: int) -> None:
    """Its passes are all there, each behind what it needs, whatever the numbers that the schedule allows."""
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

    done = run(programs(schedule.ranks, schedule.rank_S), schedule.rank_S)

    assert {action for actions in schedule.ranks for action in actions} == done


@settings(max_examples=40, deadline=None)
@given(pp=st.integers(2, 5), vpp=st.integers(1, 3), microbatches=st.integers(1, 12))
def test_an_evaluation_has_any_number_of_micro_batches(pp: int, vpp: int, microbatches: int) -> None:
    """Each goes forward through each stage once, on Megatron's placement and on a V."""
    loop = tuple(stage % pp for stage in range(pp * vpp))
    folded = (*range(pp), *reversed(range(pp)))
    for rank_S in (loop, folded):
        done = run(programs(forward_passes(rank_S, microbatches), rank_S), rank_S)

        assert {Action(s, "F", m) for s in range(len(rank_S)) for m in range(microbatches)} == done


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Rank 0 wants a gradient before it sends the forward from which rank 1 makes it."""
    first = (Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1))
    second = (Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1))
    schedule = Schedule(name="broken", pp=2, vpp=1, num_microbatches=2, ranks=(first, second))

    with pytest.raises(PatchError, match="rank 0 at 0B0, rank 1 at 1F1"):
        programs(schedule.ranks, schedule.rank_S)


def test_a_turn_on_one_rank_sends_nothing() -> None:
    """A V hands over between its two chunks on the last rank."""
    schedule = named_schedule("v-half", pp=2, vpp=2, num_microbatches=2)
    sent = {
        (message.stage, message.is_gradient)
        for program in programs(schedule.ranks, schedule.rank_S)
        for step in program
        if not isinstance(step, Action)
        for message in step
    }

    assert {(0, False), (2, False), (3, True), (1, True)} == sent


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "gis"])
def test_receives_come_early_in_the_order_of_their_sends(name: str) -> None:
    """Gloo pairs the messages of two ranks by their order; none is asked for later than its pass needs it."""
    chunks = 2 if name in ("v-half", "gis") else 1
    schedule = named_schedule(name, pp=4, vpp=chunks, num_microbatches=8)

    early = programs(schedule.ranks, schedule.rank_S, ahead=2)

    for source, target in permutations(range(4), 2):
        sent, received = (
            [message for message in messages(early[rank]) if (message.source, message.target) == (source, target)]
            for rank in (source, target)
        )
        assert sent == received
    assert any(
        position(one, message) < position(other, message)
        for one, other in zip(early, programs(schedule.ranks, schedule.rank_S), strict=True)
        for message in messages(one)
    )
    for rank, program in enumerate(early):
        asked = set()
        for step in program:
            if not isinstance(step, Action):
                asked.update(message for message in step if message.target == rank)
            elif step.kind != "W":
                # What it takes from another rank has been asked for.
                giver = step.stage + (1 if step.kind != "F" else -1)
                if 0 <= giver < schedule.num_stages and schedule.rank_S[giver] != rank:
                    needed = Message(schedule.rank_S[giver], rank, step.kind != "F", giver, step.microbatch)
                    assert needed in asked


def messages(program: Program) -> list[Message]:
    """All messages of a rank, in its order."""
    return [message for step in program if not isinstance(step, Action) for message in step]


def position(program: Program, message: Message) -> int:
    """Behind how many passes a message stands."""
    at = next(index for index, step in enumerate(program) if not isinstance(step, Action) and message in step)
    return sum(isinstance(step, Action) for step in program[:at])
