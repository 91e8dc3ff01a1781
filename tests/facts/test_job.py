"""Tests of performance options and their flags."""

import pytest

from pipette_launch.facts.job import flag_of


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ("tp_comm_overlap", "--tp-comm-overlap"),
        ("fp8", "--fp8-format"),
        ("overlap_p2p_comm", "--no-overlap-p2p-communication"),
    ],
)
def test_flag_of_an_option(option: str, flag: str) -> None:
    """The flag is the option's name with dashes, or the flag in its field."""
    assert flag_of(option) == flag


def test_an_unknown_option_is_refused() -> None:
    """An unknown option raises an error instead of appearing in a message."""
    with pytest.raises(KeyError, match="no_such"):
        flag_of("no_such")
