"""Tests that text of others cannot control the terminal on any screen or line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import screens
from facts_for_tests import tiny_cluster, tiny_measurements
from fuzz.readers import DOCUMENTS
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cli import pipette
from pipette_launch.errors import FileFormatError
from pipette_launch.facts import files
from pipette_launch.report.measured import checkup_screen, measured_screen
from pipette_launch.report.plan import plan_file_screen
from pipette_launch.report.prediction import prediction_screen
from pipette_launch.text import counted, escape_log_lines, listed, numbered, printable

HOSTILE = "a\x1b]0;mine\x07\x9b31m\x7f\r\u202eb\ud800"


def test_nouns_follow_their_number() -> None:
    """One thing is singular, and any other number of things is plural."""
    assert ["0 hosts", "1 host", "2 hosts"] == [counted(number, "host") for number in range(3)]
    assert ["stage 3", "stages 1, 2"] == [numbered("stage", numbers) for numbers in ((3,), (1, 2))]


@given(st.text())
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    """Unprintable characters of any text are escaped. Printable text is not changed."""
    shown = printable(text)

    assert shown.isprintable()
    assert shown == text or not text.isprintable()


def test_escapes_are_those_of_python() -> None:
    """C0, C1, DEL, a bidi override and half of a surrogate pair are escaped; line ends stay if requested."""
    assert r"a\x1b]0;mine\x07\x9b31m\x7f\r\u202eb\ud800" == printable(HOSTILE)
    assert "a\nb\\t" == printable("a\nb\t", keep="\n")


def hostile(value: Any) -> Any:
    """Return the document with hostile text appended to each free text."""
    if isinstance(value, dict):
        return {name: hostile(item) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return value + HOSTILE if isinstance(value, str) else value


def changed(document: Any) -> Any:
    """Return the document with as many hostile texts as its reader accepts."""
    plain = json.loads(files.dumps(document))
    for name, value in list(plain.items()):
        if name not in ("kind", "schema_version"):
            tried = {**plain, name: hostile(value)}
            try:
                files.loads(type(document), json.dumps(tried), "here")
            except FileFormatError:
                continue
            plain = tried
    return files.loads(type(document), json.dumps(plain), "here")


@pytest.mark.parametrize(
    ("document", "screen"),
    [
        (DOCUMENTS["plan"][0], lambda made: plan_file_screen(made, title=HOSTILE, saved_to=Path(HOSTILE))),
        (
            tiny_measurements(tiny_cluster()),
            lambda made: measured_screen(made, title=HOSTILE, saved_to=Path(HOSTILE)),
        ),
        (screens.prediction(), prediction_screen),
        (DOCUMENTS["checkup"][0], checkup_screen),
    ],
    ids=["plan", "measured", "prediction", "checkup"],
)
def test_screens_escape_what_they_quote(document: Any, screen: Any) -> None:
    """Names, reasons, notes and titles are escaped."""
    shown = screen(changed(document))

    assert all(line.isprintable() for line in shown.splitlines())
    assert "x1b" in shown


def test_an_error_quotes_a_file_without_its_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kind of the document contains a sequence that would change the terminal's title."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"kind": HOSTILE}))

    with pytest.raises(SystemExit):
        pipette.main(["report", str(path)])

    told = capsys.readouterr().err
    assert told.endswith("\n")
    assert told[:-1].isprintable()


def test_log_lines_are_escaped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's default log lines are escaped."""
    assert logging.lastResort is not None
    monkeypatch.setattr(logging.lastResort, "formatter", None)
    escape_log_lines()

    record = logging.LogRecord("x", logging.WARNING, "", 0, "cannot read %s", (HOSTILE,), None)
    assert logging.lastResort.format(record).isprintable()


def test_a_long_list_names_its_first_words_and_counts_the_rest() -> None:
    """A list of up to `most` words is complete."""
    assert ["a and 2 more", "a, b and 1 more", "a, b, c", "a, b, c"] == [listed("abc", most) for most in (1, 2, 3, 4)]
