"""Tests of schedules and their files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_words import from_words, peak_live, to_words

from pipette_launch.cost.pipeline.zero_bubble import named_schedule
from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts import files
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import (
    Action,
    ExpectedTimes,
    Schedule,
    ScheduleFile,
    StockSchedule,
    action_of,
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


@pytest.mark.parametrize("times", [None, replace(ExpectedTimes.equal(6), forward=(3, 1, 4, 1, 5, 9))])
def test_a_schedule_comes_back_from_its_file(times: ExpectedTimes | None) -> None:
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
        replace(ExpectedTimes.equal(3), **changes)


def test_times_of_another_pipeline_are_refused() -> None:
    """A schedule of four stages needs four times of each pass."""
    with pytest.raises(FactError, match="times of 3 stages for 4"):
        replace(schedule_of(Layout(pp=2, vpp=2), 4), times=ExpectedTimes.equal(3))
