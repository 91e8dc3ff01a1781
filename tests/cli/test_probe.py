"""`pipette probe` passes its words to `pipette-launch`."""

import os
import sys

import pytest

from pipette_launch.cli.pipette import main


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        ("--nnodes 2 train.py --lr 1", "--pipette-probe cluster.json --nnodes 2 train.py --lr 1"),
        ("--out a.json train.py --out b", "--pipette-probe a.json train.py --out b"),
        ("--out=a.json --standalone train.py", "--pipette-probe a.json --standalone train.py"),
    ],
)
def test_words_are_passed_on(typed: str, passed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--out comes first; all other words go to pipette-launch."""
    heard: list[str] = []
    monkeypatch.setattr(os, "execv", lambda _, words: heard.extend(words))

    with pytest.raises(SystemExit) as end:
        main(["probe", *typed.split()])

    assert 0 == end.value.code
    assert [sys.executable, "-m", "pipette_launch", *passed.split()] == heard


def test_help_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """The help text names the file and the words of pipette-launch."""
    with pytest.raises(SystemExit) as end:
        main(["probe", "--help"])

    assert 0 == end.value.code
    assert "pipette probe [--out FILE] [FLAGS OF pipette-launch] SCRIPT" in capsys.readouterr().out


def test_a_file_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(["probe", "--out"])

    assert 2 == end.value.code
    assert "pipette probe: error: --out needs a file\n" == capsys.readouterr().err
