"""A schedule goes through its file unchanged, and a file that holds none is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.schedule import PassTimes
from pipette_launch.facts.schedule_file import ScheduleFile, action_of
from pipette_launch.facts.schedules import interleaved_zero_bubble


@pytest.mark.parametrize("times", [None, replace(PassTimes.equal(6), forward=(3, 1, 4, 1, 5, 9))])
def test_a_schedule_comes_back_from_its_file(times: PassTimes | None) -> None:
    """Every action of every rank, the shape, and the times by which its messages are ordered."""
    schedule = replace(interleaved_zero_bubble(3, 2, 6), times=times)
    text = files.dumps(ScheduleFile.of(schedule))

    assert schedule == files.loads(ScheduleFile, text, "here").schedule()


@pytest.mark.parametrize("word", ["", "2B", "B1", "2X1", "2B1 "])
def test_a_word_that_is_no_action_is_refused(word: str) -> None:
    """The message shows one that is."""
    with pytest.raises(FactError, match="2B1"):
        action_of(word)


def test_actions_that_are_no_schedule_are_refused() -> None:
    """A rank that leaves out its last backward."""
    found = ScheduleFile.of(interleaved_zero_bubble(2, 1, 2))
    short = replace(found, ranks=(found.ranks[0].rsplit(" ", 1)[0], *found.ranks[1:]))

    with pytest.raises(FactError, match="it needs one F, and one B or one I and one W"):
        short.schedule()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": (1, 1)}, "3 stages need 3 times of each pass and 2 hops each way"),
        ({"backward_hop": ()}, "3 stages need 3 times"),
        ({"forward": ()}, "0 stages need"),
        ({"input": (1, 0, 1)}, "one nanosecond or more"),
        ({"forward_hop": (0, -1)}, "each hop 0 or more"),
    ],
)
def test_times_that_are_not_those_of_one_pipeline_are_refused(changes: dict[str, tuple[int, ...]], words: str) -> None:
    """The message says how many there must be, or how small they may be."""
    with pytest.raises(FactError, match=words):
        replace(PassTimes.equal(3), **changes)


def test_times_of_another_pipeline_are_refused() -> None:
    """A schedule of four stages takes four of each."""
    with pytest.raises(FactError, match="times of 3 stages for 4"):
        replace(interleaved_zero_bubble(2, 2, 4), times=PassTimes.equal(3))
