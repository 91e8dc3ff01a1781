"""Progress lines of a warm-up, a search or a trial, and the lines of a decision."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from facts_for_tests import nodes, tiny_cluster, tiny_measurements
from launch.worlds import options, plan, records

from pipette_launch.facts import Layout
from pipette_launch.facts.messages import RunTraining, RunWarmup
from pipette_launch.launch.cache import Cache
from pipette_launch.launch.terminal import (
    CLEAR,
    LOG_S,
    ProgressLine,
    Terminal,
    ended_words,
    parts_words,
    running_words,
    ticking,
)
from pipette_launch.probe.progress import PhaseEnd, Sign

STARTED = PhaseEnd(phase="start", seconds=3.14, words="")
COMPUTED = PhaseEnd(phase="compute", seconds=9.86, words="3 shapes")


def sign(phase: str, done: int = 0, total: int = 0, *ended: PhaseEnd) -> Sign:
    """Return the sign of a worker."""
    return Sign(phase=phase, at_s=0.0, limit_s=60.0, done=done, total=total, ended=ended)


def seconds(step_s: float = 1.0) -> Callable[[], float]:
    """Return a clock that advances by `step_s` at each call."""
    times = iter(range(1000))
    return lambda: next(times) * step_s


class Screen(io.StringIO):
    """A stream to a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.fixture(autouse=True)
def _xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


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
    """Each part comes once, with its duration and result; the last part comes at the end."""
    stream = io.StringIO()
    line = ProgressLine(stream, clock=seconds(LOG_S))
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
    """More calls do not give more lines."""
    stream = io.StringIO()
    line = ProgressLine(stream, clock=seconds(0.25))
    for _ in range(200):
        show(line, SIGNS[0])

    assert 200 * 0.25 / LOG_S == stream.getvalue().count("\n")


def test_a_terminal_has_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never wraps and never ends, and in the end nothing is left of it."""
    monkeypatch.setenv("COLUMNS", "70")
    stream = Screen()
    line = ProgressLine(stream, clock=seconds())
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
    """Signs in quick succession, and unchanged lines, are not drawn again."""
    stream = Screen()
    show(ProgressLine(stream, clock=lambda: 7.0), SIGNS[0])
    assert "" == stream.getvalue()

    slow = ProgressLine(stream, clock=iter((0.0, 1.0, 1.3)).__next__)
    show(slow, SIGNS[0])
    show(slow, SIGNS[0])
    assert 1 == stream.getvalue().count(CLEAR)


def test_a_search_is_shown_while_it_runs() -> None:
    """A thread of its own shows it, and nothing of it is left afterwards."""
    stream = Screen()
    with ticking(ProgressLine(stream), "choosing a plan, {:.1f} s".format):
        deadline_s = time.monotonic() + 10
        while "choosing" not in stream.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    shown = stream.getvalue()
    time.sleep(0.5)

    assert shown.startswith(f"{CLEAR}pipette-launch: choosing a plan, 0.")
    assert shown.endswith(CLEAR)
    assert shown == stream.getvalue()


def test_a_dumb_terminal_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that cannot clear a line gets lines."""
    monkeypatch.setenv("TERM", "dumb")

    assert not ProgressLine(Screen())._is_terminal


def test_the_parts_of_a_warmup() -> None:
    """All of them, in order, and the plan."""
    text = parts_words({"start": 3.14, "compute": 9.86}, plan_s=0.31, total_s=14.2)

    assert "the warm-up took 14.2 s: start 3.1, compute 9.9, plan 0.3" == text


MADE = replace(plan(Layout(pp=2, dp=2)), notes=("Matrix products reach 72% of a peak.",))
NODES = nodes("node0", "node1", tokens=[one.token for one in records()], num_slots=2)
WARMUP = RunWarmup(nodes=NODES, order="")
TRAINING = RunTraining(nodes=NODES, plan=MADE, script_arguments=("--lr", "1"))


def printed(detail: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the output of a start with a warm-up and an ignored request of the user."""
    terminal = Terminal(options(detail=detail))
    terminal.tell(WARMUP, None, Cache(None, ""))
    terminal.warmup_goes_on(Sign(phase="links", at_s=0.0, limit_s=1.0))
    terminal.warmup_is_over(None)
    terminal.say("the warm-up took 3 s")
    terminal.begin("choosing a plan, {:.0f} s".format)
    terminal.end()
    measured = tiny_measurements(tiny_cluster(2, 2))
    terminal.tell(replace(TRAINING, reason="node7 is left out"), measured, Cache(None, ""))
    return capsys.readouterr().err.splitlines()


def test_quiet_prints_what_was_chosen_and_what_is_not_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints two lines, both with our prefix."""
    lines = printed("quiet", capsys)

    assert "pipette-launch: node7 is left out" == lines[0]
    assert lines[1].startswith("pipette-launch: tp1 pp2 dp2 mbs1")
    assert 2 == len(lines)


def test_verbose_prints_all_notes(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --verbose only their number is printed."""
    whole, usual = ("\n".join(printed(detail, capsys)) for detail in ("verbose", "usual"))

    assert MADE.notes[0] in whole
    assert MADE.notes[0] not in usual
    assert "on what was assumed; --pipette-verbose shows them" in usual
    assert "the warm-up took 3 s" in usual
