"""What the validation's command line refuses."""

from __future__ import annotations

import pytest

from benchmarks.validation.options import parse
from pipette_launch.errors import UsageError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--only logs --golden g.csv --args g.jsonl", "--only logs leaves out the file of --golden"),
        ("--golden g.csv", "--golden and --args belong together"),
        ("--vtrain-fraction 7", "--vtrain-fraction 7.0: must be between 0 and 1"),
    ],
)
def test_flags_that_would_score_something_else_are_refused(words: str, message: str) -> None:
    """A named file that --only leaves out, half of a pair and a share above 1 are usage errors."""
    with pytest.raises(UsageError, match=message):
        parse(words.split())


def test_only_may_name_what_a_file_is_given_for() -> None:
    """With --only golden the golden file that was named is scored, and nothing else."""
    found = parse("--only golden --golden g.csv --args g.jsonl".split())

    assert {"golden": "g.csv"} == {name: str(file) for name, file in found.files.items()}
