"""A schedule goes through its file unchanged, and a file that holds none is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.schedule_file import ScheduleFile, action_of
from pipette_launch.facts.schedules import interleaved_zero_bubble


def test_a_schedule_comes_back_from_its_file() -> None:
    """Every action of every rank, and the shape."""
    schedule = interleaved_zero_bubble(3, 2, 6)
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
