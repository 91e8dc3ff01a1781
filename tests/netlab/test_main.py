"""The words typed behind `python -m benchmarks.netlab`."""

from __future__ import annotations

import pytest

from benchmarks.netlab.__main__ import main, parsed


@pytest.mark.parametrize("words", ["compare a.toml --pairs 5", "compare --pairs 5 a.toml"])
def test_flags_may_stand_on_both_sides_of_the_file(words: str) -> None:
    """Up to the first `--` a flag is the laboratory's own; all behind it is the command, a second `--` included."""
    found = parsed([*words.split(), "--", "script.py", "--pairs", "7", "--", "x"])

    assert (5, "a.toml") == (found.pairs, str(found.topology))
    assert ["script.py", "--pairs", "7", "--", "x"] == found.command


def test_a_command_without_dashes_before_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """What stands before `--` is read as the laboratory's own, and named where it is not."""
    with pytest.raises(SystemExit):
        main(["run", "a.toml", "echo"])

    assert "unrecognized arguments: echo" in capsys.readouterr().err
