"""Tests of how the survey of links is kept."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from pipette_launch.errors import FactError, FileFormatError
from pipette_launch.facts import files
from pipette_launch.facts.machines.link_survey import LinkSurvey, RailRates


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A document that is only a survey."""

    KIND: ClassVar[str] = "paper"
    SCHEMA_VERSION: ClassVar[int] = 1
    survey: LinkSurvey | None


def survey() -> LinkSurvey:
    """Three hosts: one link measured again, one estimated, one cached."""
    return LinkSurvey(
        spread_HH=np.array([[0, 0.01, 0.2], [0.02, 0, 0], [0.3, 0.04, 0]]),
        origin_HH=("-am", "m-e", "mc-"),
        rails=(RailRates(source=0, target=1, bytes_per_s=(1e9, 2e9)),),
        rounds=3,
        rounds_again=1,
    )


def test_a_survey_survives_its_file() -> None:
    """Written and read it is the same, and hashes alike."""
    read = files.loads(Paper, files.dumps(Paper(survey=survey())), "here").survey

    assert survey() == read
    assert hash(survey()) == hash(read)
    assert survey() != LinkSurvey(spread_HH=np.zeros((1, 1)), origin_HH=("-",))


def test_origins_have_names() -> None:
    """Letters in the file, words for the reader."""
    assert ["again", "measured", "estimated", "cached"] == [
        survey().origin(*pair) for pair in ((0, 1), (0, 2), (1, 2), (2, 1))
    ]


def test_nobody_can_change_it() -> None:
    """Its array is a copy, and read-only."""
    with pytest.raises(ValueError, match="read-only"):
        survey().spread_HH[0, 1] = 1


@pytest.mark.parametrize(
    ("spread", "origin", "message"),
    [
        (np.zeros((2, 2)), ("-m", "x-"), r"origin_HH\[1\] must be 2 letters.*got 'x-'"),
        (np.zeros((2, 2)), ("mm", "m-"), r"origin_HH\[0\]"),
        (np.zeros((2, 2)), ("-m", "m"), r"origin_HH\[1\]"),
        (np.zeros((3, 3)), ("-m", "m-"), "2 x 2"),
        (-np.ones((2, 2)), ("-m", "m-"), "none below 0"),
    ],
)
def test_a_bad_survey_is_refused(spread: np.ndarray, origin: tuple[str, ...], message: str) -> None:
    """The message names the row."""
    with pytest.raises(FactError, match=message):
        LinkSurvey(spread_HH=spread, origin_HH=origin)


def test_a_bad_file_is_named() -> None:
    """By document and field."""
    text = files.dumps(Paper(survey=survey())).replace('"-am"', '"-zz"')

    with pytest.raises(FileFormatError, match=r"here: survey.*-zz"):
        files.loads(Paper, text, "here")
