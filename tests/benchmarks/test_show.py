"""The table comes out whole in every form."""

from __future__ import annotations

import json

import pytest

from benchmarks.validation.lines import Line, Section, counted
from benchmarks.validation.scores import errors
from benchmarks.validation.show import Report, as_json, markdown, print_report

LINE = Line(data="d", group="a|b", method="m", quantity="peak", scored=2, skipped=1, errors=errors([1, 3], [1, 2]))
SECTION = Section(
    data="d", source="file (digest)", lines=(LINE,), skipped=(("why", "row 1"), ("why", "row 2")), notes=("so",),
    details=("one",),
)  # fmt: skip
REPORT = Report(conditions={"date": "today"}, sections=(SECTION,))


def test_the_terminal_shows_lines_reasons_and_with_verbose_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Reasons are counted; rows and predictions only on request."""
    print_report(REPORT, verbose=False)
    brief = capsys.readouterr().out
    print_report(REPORT, verbose=True)
    full = capsys.readouterr().out

    assert all(
        words in brief for words in ("date: today", "file (digest)", "25.00%", "note: so", "not scored: 2 x why")
    )
    assert "row 1: why" not in brief
    assert all(words in full for words in ("row 1: why", "row 2: why", "one"))


def test_markdown_and_json_hold_the_same_line() -> None:
    """A bar in a name does not break a Markdown row."""
    text, record = markdown(REPORT, title="Title"), json.loads(as_json(REPORT))

    assert "| a\\|b | m | peak | 2 | 1 | 25.00% | 25.00% | 50.00% | +25.00% | 1.000 |  |" in text
    assert "- not scored: 2 x why" in text
    (line,) = record["lines"]
    assert ("a|b", 0.25, 2, 1) == tuple(line[name] for name in ("group", "mean", "scored", "skipped"))
    assert {"why": 2} == record["sections"]["d"]["not scored"]


def test_notes_are_counted() -> None:
    """Most frequent first."""
    assert ("2 x b", "1 x a") == counted(["a", "b", "b"])
