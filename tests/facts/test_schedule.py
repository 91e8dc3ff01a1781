"""Schedules are checked as words, against Megatron's rules and by their live passes."""

import pytest
from schedule_words import from_words, peak_live, to_words

from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import Schedule, rank_of, words
from pipette_launch.facts.schedules import (
    eager_one_forward_one_backward,
    gpipe,
    grouped_split,
    interleaved,
    interleaved_zero_bubble,
    no_pipelining,
    one_forward_one_backward,
    schedule_of,
)


def test_gpipe_runs_all_forwards_first() -> None:
    """GPipe turns around once."""
    assert words(gpipe(2, 2).ranks[0]) == ["0F0", "0F1", "0B0", "0B1"]


def test_one_rank_alternates() -> None:
    """Without a pipeline each backward follows its forward."""
    assert to_words(no_pipelining(2)) == [["0F0", "0B0", "0F1", "0B1"]]


def test_1f1b_of_three_stages() -> None:
    """Rank r runs pp - r - 1 forwards ahead."""
    expected = [
        ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"],
        ["1F0", "1F1", "1B0", "1F2", "1B1", "1F3", "1B2", "1B3"],
        ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3"],
    ]

    assert expected == to_words(one_forward_one_backward(3, 4))


def test_zb_h1_of_three_stages() -> None:
    """Rank r runs its W r passes late, so that the cool-down is a chain of I alone."""
    expected = [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]

    assert expected == [" ".join(rank) for rank in to_words(interleaved_zero_bubble(3, 1, 4))]


@pytest.mark.parametrize(("microbatches", "group_size", "reason"), [(9, 2, "groups of 2"), (8, 0, "must be positive")])
def test_groups_that_would_deadlock_are_refused(microbatches: int, group_size: int, reason: str) -> None:
    """Two groups in a row must reach through the pipeline."""
    with pytest.raises(LayoutError, match=reason):
        grouped_split(8, 2, microbatches, group_size)


def test_eager_runs_no_fewer_ahead() -> None:
    """A negative number of forwards more is nonsense."""
    with pytest.raises(LayoutError, match="-1"):
        eager_one_forward_one_backward(2, 2, -1)


def test_1f1b_with_fewer_microbatches_than_ranks() -> None:
    """The warm-up is capped by the number of micro-batches."""
    assert to_words(one_forward_one_backward(3, 1)) == [["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]]


def test_interleaved_of_two_ranks_and_two_chunks() -> None:
    """Two micro-batches go through chunk 0, then chunk 1; backwards take the chunks the other way (Narayanan 2021)."""
    expected = [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]

    assert expected == [" ".join(rank) for rank in to_words(interleaved(2, 2, 4, 2))]


def test_interleaved_groups_may_be_larger_than_the_pipeline() -> None:
    """With groups of three, three micro-batches pass a chunk before the next one starts."""
    expected = ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2", "0F3", "0F4", "0F5", "2F3", "2F4", "2F5"]

    forwards = [word for word in to_words(interleaved(2, 2, 6, 3))[0] if "F" in word]

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


def test_where_stages_lie() -> None:
    """A loop begins again on rank 0; a V turns round on the last rank."""
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
    """Every rank runs each of its stages forward once, then backward once, whole or split."""
    with pytest.raises(FactError, match="1f1b"):
        from_words("1f1b", pp=2, vpp=1, ranks=ranks)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (one_forward_one_backward(4, 8), [4, 3, 2, 1]),
        (one_forward_one_backward(4, 2), [2, 2, 2, 1]),
        (gpipe(2, 5), [5, 5]),
        (interleaved(2, 2, 4, 2), [5, 3]),
        (eager_one_forward_one_backward(4, 16), [7, 5, 3, 1]),
        (eager_one_forward_one_backward(4, 16, 1), [5, 4, 3, 1]),
        (interleaved_zero_bubble(4, 2, 16), [8, 8, 8, 8]),
        (grouped_split(4, 2, 16, 2), [6, 5, 4, 3]),
    ],
)
def test_live_passes(schedule: Schedule, expected: list[int]) -> None:
    """Warm-up forwards and one more are alive at the peak."""
    assert expected == peak_live(schedule)
