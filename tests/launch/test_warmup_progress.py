"""What the screen shows of a warm-up while it runs."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from pipette_launch.launch.warmup_progress import CLEAR, ProgressLine, parts_words
from pipette_launch.probe.progress import PhaseEnd, Sign

STARTED = PhaseEnd(phase="start", seconds=3.14, words="")
COMPUTED = PhaseEnd(phase="compute", seconds=9.86, words="3 shapes")


def sign(phase: str, done: int = 0, total: int = 0, *ended: PhaseEnd) -> Sign:
    """A sign of life."""
    return Sign(phase=phase, at_s=0.0, limit_s=60.0, done=done, total=total, ended=ended)


def seconds() -> Callable[[], float]:
    """A clock that goes on a second whenever it is read."""
    times = iter(range(100))
    return lambda: float(next(times))


SIGNS = [
    None,
    sign("start"),
    sign("compute", 1, 4, STARTED),
    sign("compute", 2, 4, STARTED),
    sign("links", 0, 7, STARTED, COMPUTED),
]


def test_a_log_gets_a_line_for_each_phase_that_ends() -> None:
    """With what it took and what came of it; no line comes twice, and what ended last is told in the end."""
    stream = io.StringIO()
    ticker = ProgressLine(stream, budget_s=60.0, clock=seconds(), is_terminal=False)
    for one in SIGNS:
        ticker.show(one)
    assert "pipette-launch: start 3.1 s\npipette-launch: compute 9.9 s: 3 shapes\n" == stream.getvalue()

    ticker.close(sign("report", 0, 0, STARTED, COMPUTED, PhaseEnd(phase="links", seconds=4.2, words="8 hosts")))
    assert "pipette-launch: links 4.2 s: 8 hosts" == stream.getvalue().splitlines()[-1]


def test_a_terminal_has_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never wraps and never ends, and in the end nothing is left of it."""
    monkeypatch.setenv("COLUMNS", "70")
    stream = io.StringIO()
    ticker = ProgressLine(stream, budget_s=60.0, clock=seconds(), is_terminal=True)
    for one in SIGNS:
        ticker.show(one)
    ticker.close(SIGNS[-1])

    lines = stream.getvalue().split(CLEAR)
    assert "\n" not in stream.getvalue()
    assert [
        "pipette-launch: start, 2 s",
        "pipette-launch: 0 of about 60 s; compute, 1 of 4; done: start 3.1 s",
    ] == lines[1:3]
    assert "pipette-launch: 2 of about 60 s; links, 0 of 7; done: start 3.1 s, compute 9.9 s"[:69] == lines[4]
    assert ("", "") == (lines[0], lines[-1])


def test_it_does_not_flicker() -> None:
    """Signs that follow each other at once are not all shown, nor what is on the screen already."""
    stream = io.StringIO()
    ticker = ProgressLine(stream, budget_s=60.0, clock=lambda: 7.0, is_terminal=True)
    ticker.show(SIGNS[1])
    assert "" == stream.getvalue()

    slow = ProgressLine(stream, budget_s=60.0, clock=iter((0.0, 1.0, 1.3)).__next__, is_terminal=True)
    slow.show(SIGNS[1])
    slow.show(SIGNS[1])
    assert 1 == stream.getvalue().count(CLEAR)


def test_a_file_is_no_terminal() -> None:
    """Whatever TERM says."""
    assert not ProgressLine(io.StringIO(), budget_s=1.0)._is_terminal


def test_the_parts_of_a_warmup() -> None:
    """All of them, in order, and the plan."""
    text = parts_words({"start": 3.14, "compute": 9.86}, plan_s=0.31, total_s=14.2)

    assert "the warm-up took 14.2 s: start 3.1, compute 9.9, plan 0.3" == text
