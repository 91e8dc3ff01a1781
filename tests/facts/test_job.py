"""Performance options and the flags that set them."""

import pytest

from pipette_launch.errors import FactError
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
    """An option's flag is its name with dashes, or the one that its field names."""
    assert flag_of(option) == flag


def test_an_unknown_option_is_refused() -> None:
    """A name that is no option's cannot end in a sentence to the user."""
    with pytest.raises(FactError, match="no_such"):
        flag_of("no_such")
