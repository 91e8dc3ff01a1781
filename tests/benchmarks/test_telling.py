"""Lines of a report are seen when they come, and all of them are kept."""

from collections.abc import Iterator

import pytest

from benchmarks.telling import shown


def test_lines_are_shown_before_the_next_is_worked_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever watches a long benchmark sees each row; the file gets the same text."""

    def lines() -> Iterator[str]:
        yield "one"
        assert "one\n" == capsys.readouterr().out
        yield "two"

    assert "one\ntwo\n" == shown(lines())
    assert "two\n" == capsys.readouterr().out
