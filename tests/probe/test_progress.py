"""Tests of the files by which warm-up workers report their progress."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import pytest

from pipette_launch.probe.progress import PhaseEnd, Progress, last_error, last_sign


def test_progress_is_a_file_and_a_clock(tmp_path: Path) -> None:
    """The agent reads the phase; an inner phase does not count in the outer one."""
    times = deque([0.0, 1.0, 3.0, 10.0])
    progress = Progress(folder=tmp_path, local_rank=3, clock=times.popleft)
    with progress.during("compute"), progress.during("memory"):
        shown = last_sign(tmp_path, 3)

    assert "memory" == (shown and shown.phase)
    assert {"memory": 2.0, "compute": 8.0} == progress.phase_s
    assert ["3.sign"] == sorted(path.name for path in tmp_path.iterdir())


def test_a_failing_phase_stays_on_display(tmp_path: Path) -> None:
    """After a failure the file has the failed phase, and the reason is in a second file."""
    progress = Progress(folder=tmp_path, local_rank=0)
    with pytest.raises(ZeroDivisionError), progress.during("links"):
        progress.step(1, 7 // 0)
    progress.fail("no luck")

    sign = last_sign(tmp_path, 0)
    assert sign is not None
    assert ("links", "no luck") == (sign.where(), last_error(tmp_path, 0))


def test_a_sign_says_what_how_far_and_on_whom_it_waits(tmp_path: Path) -> None:
    """Each message replaces the last, and has the time limit of the next."""
    progress = Progress(folder=tmp_path, local_rank=0, limit_s=5.0)
    assert last_sign(tmp_path, 0) is None
    before_s = time.monotonic()
    seen = []
    with progress.during("links"):
        for act in (
            lambda: progress.step(2, 7, "98 Mbit/s", peers=[4]),
            lambda: progress.waits("the others", limit_s=30.0),
            progress.goes_on,
            lambda: progress.step(3, 7),
        ):
            act()
            seen.append(last_sign(tmp_path, 0))

    assert [(2, "98 Mbit/s", (4,), 5.0), (2, "98 Mbit/s", (), 30.0), (2, "98 Mbit/s", (), 5.0), (3, "", (), 5.0)] == [
        (sign.done, sign.words, sign.peers, sign.limit_s) for sign in seen if sign
    ]
    assert "links, 3 of 7" == seen[3].where() if seen[3] else None
    assert ["", "the others", "", ""] == [sign.waits_for for sign in seen if sign]
    assert all(before_s <= sign.at_s <= time.monotonic() for sign in seen if sign)


def test_phases_that_are_over_are_kept(tmp_path: Path) -> None:
    """Each ended phase keeps its seconds and its summary; counts do not carry over."""
    times = deque([0.0, 1.0, 3.0, 10.0, 10.0, 12.0])
    progress = Progress(folder=tmp_path, local_rank=0, clock=times.popleft, phase_s={"start": 4.0})
    with progress.during("compute"):
        progress.step(1, 2, "a")
        with progress.during("memory"):
            progress.step(2, 2, "b")
        progress.sum_up("5 parts")
    with progress.during("links"):
        pass

    sign = last_sign(tmp_path, 0)
    assert sign is not None
    ended = [("start", 4.0, ""), ("compute", 10.0, "5 parts"), ("links", 2.0, "")]
    assert [PhaseEnd(phase=phase, seconds=seconds, words=words) for phase, seconds, words in ended] == list(sign.ended)
    assert ("start", 0, 0) == (sign.phase, sign.done, sign.total)


def test_a_damaged_sign_is_none(tmp_path: Path) -> None:
    """A damaged progress message is None and no error."""
    (tmp_path / "0.sign").write_text("{")

    assert last_sign(tmp_path, 0) is None
    assert "" == last_error(tmp_path, 0)
