"""What the screen shows of a warm-up, a search or a trial while it runs."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import pytest

from pipette_launch.launch.display.progress import (
    CLEAR,
    LOG_S,
    ProgressLine,
    Ticker,
    ended_words,
    parts_words,
    running_words,
)
from pipette_launch.probe.messages import PhaseEnd, Sign

STARTED = PhaseEnd(phase="start", seconds=3.14, words="")
COMPUTED = PhaseEnd(phase="compute", seconds=9.86, words="3 shapes")


def sign(phase: str, done: int = 0, total: int = 0, *ended: PhaseEnd) -> Sign:
    """A sign of life."""
    return Sign(phase=phase, at_s=0.0, limit_s=60.0, done=done, total=total, ended=ended)


def seconds(step_s: float = 1.0) -> Callable[[], float]:
    """A clock that goes on by so much whenever it is read."""
    times = iter(range(1000))
    return lambda: next(times) * step_s


def show(line: ProgressLine, one: Sign) -> None:
    """Show a sign as the terminal of a job does."""
    line.show(lambda elapsed_s: running_words(one, elapsed_s, 60.0), [ended_words(each) for each in one.ended])


SIGNS = [
    sign("start"),
    sign("compute", 1, 4, STARTED),
    sign("compute", 2, 4, STARTED),
    sign("links", 0, 7, STARTED, COMPUTED),
]


def test_a_log_gets_what_has_ended() -> None:
    """With what it took and what came of it; nothing comes twice, and what ended last is told in the end."""
    stream = io.StringIO()
    line = ProgressLine(stream, clock=seconds(LOG_S), is_terminal=False)
    for one in SIGNS:
        show(line, one)
    assert [
        "pipette-launch: start, 10 s",
        "pipette-launch: start 3.1 s",
        "pipette-launch: 27 of about 60 s; compute, 2 of 4; done: start 3.1 s",
        "pipette-launch: compute 9.9 s: 3 shapes",
    ] == stream.getvalue().splitlines()

    line.close([ended_words(one) for one in (STARTED, COMPUTED, PhaseEnd(phase="links", seconds=4.2, words="8 hosts"))])
    assert "pipette-launch: links 4.2 s: 8 hosts" == stream.getvalue().splitlines()[-1]


def test_a_log_gets_a_line_in_ten_seconds() -> None:
    """However often something is shown."""
    stream = io.StringIO()
    line = ProgressLine(stream, clock=seconds(0.25), is_terminal=False)
    for _ in range(200):
        show(line, SIGNS[0])

    assert 200 * 0.25 / LOG_S == stream.getvalue().count("\n")


def test_a_terminal_has_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never wraps and never ends, and in the end nothing is left of it."""
    monkeypatch.setenv("COLUMNS", "70")
    stream = io.StringIO()
    line = ProgressLine(stream, clock=seconds(), is_terminal=True)
    for one in SIGNS:
        show(line, one)
    line.close()

    lines = stream.getvalue().split(CLEAR)
    assert "\n" not in stream.getvalue()
    assert [
        "pipette-launch: start, 1 s",
        "pipette-launch: 0 of about 60 s; compute, 1 of 4; done: start 3.1 s",
    ] == lines[1:3]
    assert "pipette-launch: 1 of about 60 s; links, 0 of 7; done: start 3.1 s, compute 9.9 s"[:69] == lines[4]
    assert ("", "") == (lines[0], lines[-1])


def test_it_does_not_flicker() -> None:
    """Signs that follow each other at once are not all shown, nor what is on the screen already."""
    stream = io.StringIO()
    show(ProgressLine(stream, clock=lambda: 7.0, is_terminal=True), SIGNS[0])
    assert "" == stream.getvalue()

    slow = ProgressLine(stream, clock=iter((0.0, 1.0, 1.3)).__next__, is_terminal=True)
    show(slow, SIGNS[0])
    show(slow, SIGNS[0])
    assert 1 == stream.getvalue().count(CLEAR)


def test_a_search_is_shown_while_it_runs() -> None:
    """A thread of its own shows it, and nothing of it is left afterwards."""
    stream = io.StringIO()
    ticker = Ticker(ProgressLine(stream, is_terminal=True), "choosing a plan, {:.1f} s".format)
    deadline_s = time.monotonic() + 10
    while "choosing" not in stream.getvalue() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    ticker.stop()
    shown = stream.getvalue()
    time.sleep(0.5)

    assert shown.startswith(f"{CLEAR}pipette-launch: choosing a plan, 0.")
    assert shown.endswith(CLEAR)
    assert shown == stream.getvalue()


def test_a_file_is_no_terminal() -> None:
    """Whatever TERM says."""
    assert not ProgressLine(io.StringIO())._is_terminal


def test_the_parts_of_a_warmup() -> None:
    """All of them, in order, and the plan."""
    text = parts_words({"start": 3.14, "compute": 9.86}, plan_s=0.31, total_s=14.2)

    assert "the warm-up took 14.2 s: start 3.1, compute 9.9, plan 0.3" == text
