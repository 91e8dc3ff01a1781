"""Schedules are checked as words, against Megatron's rules and by their live passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import (
    Action,
    Schedule,
    gpipe,
    interleaved,
    no_pipelining,
    one_forward_one_backward,
    schedule_of,
    words,
)


def test_gpipe_runs_all_forwards_first() -> None:
    """GPipe turns around once."""
    assert words(gpipe(2, 2).ranks[0]) == ["0F0", "0F1", "0B0", "0B1"]


def test_one_rank_alternates() -> None:
    """Without a pipeline each backward follows its forward."""
    assert no_pipelining(2).words() == [["0F0", "0B0", "0F1", "0B1"]]


def test_1f1b_of_three_stages() -> None:
    """Rank r runs pp - r - 1 forwards ahead."""
    expected = [
        ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"],
        ["1F0", "1F1", "1B0", "1F2", "1B1", "1F3", "1B2", "1B3"],
        ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3"],
    ]

    assert expected == one_forward_one_backward(3, 4).words()


def test_1f1b_with_fewer_microbatches_than_ranks() -> None:
    """The warm-up is capped by the number of micro-batches."""
    assert one_forward_one_backward(3, 1).words() == [["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]]


def test_interleaved_of_two_ranks_and_two_chunks() -> None:
    """Two micro-batches go through chunk 0, then chunk 1; backwards take the chunks the other way (Narayanan 2021)."""
    expected = [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]

    assert expected == [" ".join(rank) for rank in interleaved(2, 2, 4, 2).words()]


def test_interleaved_groups_may_be_larger_than_the_pipeline() -> None:
    """With groups of three, three micro-batches pass a chunk before the next one starts."""
    expected = ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2", "0F3", "0F4", "0F5", "2F3", "2F4", "2F5"]

    forwards = [word for word in interleaved(2, 2, 6, 3).words()[0] if "F" in word]

    assert expected == forwards


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
    """Stock Megatron chooses the schedule by pp and vpp alone."""
    assert schedule_of(layout, 4).name == name


@pytest.mark.parametrize(
    ("microbatches", "group_size", "reason"),
    [(4, 3, "between pp=4"), (4, 5, "between pp=4"), (9, 4, "last group of 1")],
)
def test_what_megatron_refuses_is_refused(microbatches: int, group_size: int, reason: str) -> None:
    """The three rules of the interleaved schedule each have their own words."""
    with pytest.raises(LayoutError, match=reason):
        interleaved(4, 2, microbatches, group_size)


def test_interleaving_needs_a_pipeline() -> None:
    """One chunk for each rank is not interleaved."""
    with pytest.raises(LayoutError, match="vpp=1"):
        interleaved(2, 1, 4, 2)


@given(
    st.integers(2, 5), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2), st.sampled_from(["1f1b", "gpipe", "i"])
)
def test_words_round_trip(pp: int, rounds: int, extra_group: int, rest: int, kind: str) -> None:
    """A schedule read from its words is the same schedule."""
    microbatches = rounds * (pp + extra_group) + (pp + rest if kind == "i" else rest)
    schedule = {
        "1f1b": lambda: one_forward_one_backward(pp, microbatches),
        "gpipe": lambda: gpipe(pp, microbatches),
        "i": lambda: interleaved(pp, 2, rounds * (pp + extra_group), pp + extra_group),
    }[kind]()

    read = Schedule.from_words(schedule.name, pp=pp, vpp=schedule.vpp, ranks=schedule.words())

    assert schedule == read


@pytest.mark.parametrize("word", ["", "F0", "0X1", "0F", "0F1 ", "-1F0"])
def test_a_bad_word_is_refused(word: str) -> None:
    """Only stage, kind and micro-batch make an action."""
    with pytest.raises(FactError, match="not an action"):
        Action.parse(word)


@pytest.mark.parametrize(
    "ranks",
    [
        [["0F0", "0B0"]],
        [["0F0", "0B0"], ["0F0", "0B0"]],
        [["0F0", "0B0"], ["1F0", "1F0"]],
        [["0F0", "0B0"], ["1F0"]],
        [["0F0", "0B0"], ["3F0", "3B0"]],
    ],
)
def test_an_incomplete_schedule_is_refused(ranks: list[list[str]]) -> None:
    """Every rank runs both passes of each of its stages once."""
    with pytest.raises(FactError):
        Schedule.from_words("1f1b", pp=2, vpp=1, ranks=ranks)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (one_forward_one_backward(4, 8), [4, 3, 2, 1]),
        (one_forward_one_backward(4, 2), [2, 2, 2, 1]),
        (gpipe(2, 5), [5, 5]),
        (interleaved(2, 2, 4, 2), [5, 3]),
    ],
)
def test_live_passes(schedule: Schedule, expected: list[int]) -> None:
    """Warm-up forwards and one more are alive at the peak (megatron.md 8.3)."""
    assert expected == [schedule.peak_live(rank) for rank in range(schedule.pp)]
