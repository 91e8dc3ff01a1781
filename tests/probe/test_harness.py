"""Tests of the budget, the fit, and how workers stay in step."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import OneRankStore

from pipette_launch.errors import ProbeError
from pipette_launch.probe.harness import Budget, Conductor, Line, Progress, Seat, fit_line, seat_of

SIZES = (8, 65536, 1 << 20)


def conductor(store: OneRankStore, rank: int, world_size: int = 2) -> Conductor:
    """A conductor over the fake store."""
    return Conductor(store=store, rank=rank, world_size=world_size, timeout_s=7)


@given(latency_s=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e6, 1e11))
def test_the_fit_recovers_a_planted_line(latency_s: float, bandwidth: float) -> None:
    """Exact timings give back the latency and bandwidth they were made from."""
    line = fit_line(SIZES, [latency_s + size / bandwidth for size in SIZES])

    assert line.latency_s + SIZES[-1] * line.seconds_per_byte == pytest.approx(
        latency_s + SIZES[-1] / bandwidth, rel=1e-6
    )
    assert line.latency_s == pytest.approx(latency_s, rel=1e-3, abs=1e-9)
    assert line.seconds_per_byte == pytest.approx(1 / bandwidth, rel=1e-3, abs=1e-15)


def test_a_disturbed_small_message_is_no_latency() -> None:
    """Two milliseconds for eight bytes, when more bytes took a tenth of it, do not make a link infinitely fast."""
    line = fit_line((8, 64 << 10, 1 << 20), (2.0e-3, 0.2e-3, 2.0e-3))

    assert line.latency_s <= 0.2e-3
    assert 1.8e-3 / (1 << 20) == pytest.approx(line.seconds_per_byte, rel=0.01)


@pytest.mark.parametrize("disturbed", range(4))
def test_one_disturbed_size_does_not_bend_the_line(disturbed: int) -> None:
    """A size that took five times as long leaves the latency unless it is the smallest, the slope unless largest."""
    sizes = (8, 65536, 1 << 19, 1 << 21)
    times = [1e-3 + size / 1e8 for size in sizes]
    times[disturbed] *= 5
    line = fit_line(sizes, times)

    assert line.latency_s == pytest.approx(1e-3, rel=0.05) or disturbed == 0
    assert line.seconds_per_byte == pytest.approx(1e-8, rel=0.25 if disturbed < 3 else 5)


@given(seconds=st.lists(st.floats(0, 10), min_size=3, max_size=3))
def test_the_fit_is_never_negative(seconds: list[float]) -> None:
    """Whatever noise gives, latency is not below 0 and a byte takes some time."""
    line = fit_line(SIZES, seconds)

    assert line.latency_s >= 0
    assert line.seconds_per_byte > 0


def test_a_flat_line_is_taken_pessimistically() -> None:
    """Where large messages seem faster, all of the largest one's time counts as transfer."""
    assert Line(1.0, 0.5 / 100) == fit_line((1, 10, 100), (3.0, 2.0, 0.5))._replace(latency_s=1.0)


def test_the_budget_counts_shares_from_the_start() -> None:
    """Of 60 s begun at 100, the 40 % share ends at 124."""
    budget = Budget(started_s=100, budget_s=60, clock=lambda: 120)

    assert 4 == budget.left_s(0.4)
    assert budget.allows(0.4)
    assert not budget.allows(0.4, needs_s=4)
    assert budget.allows(1.0, needs_s=39)
    assert 6 == budget.later(2).left_s(0.4)


def test_everyone_follows_rank_0() -> None:
    """Rank 1 takes rank 0's answers in order, whatever it would have said itself."""
    store = OneRankStore()
    answers = [conductor(store, 0).agree(lambda: True)]
    first = conductor(store, 0)
    assert [first.agree(lambda: True), first.agree(lambda: False)] == [True, False]

    second = conductor(store, 1)

    assert [*answers, False] == [second.agree(lambda: False), second.agree(lambda: True)]


def test_rank_0_tells_all() -> None:
    """Every rank gets rank 0's text, empty ones and long ones too."""
    store = OneRankStore()
    first, second = conductor(store, 0), conductor(store, 1)
    texts = ["", "plan", "x" * 100_000]

    assert texts == [first.tell(text) for text in texts]
    assert texts == [second.tell("mine") for _ in texts]


def test_a_missing_decision_has_a_deadline() -> None:
    """When rank 0 is gone, the others say for what they waited, and how long."""
    with pytest.raises(ProbeError, match="waited 7 s in vain for rank 0's decision"):
        conductor(OneRankStore(), 1).agree(lambda: True)


def test_a_missing_worker_has_a_deadline() -> None:
    """Rank 0 waits for all, as long as they may rightly take."""
    with pytest.raises(ProbeError, match="waited 10 s in vain for all workers to arrive"):
        conductor(OneRankStore(), 0).meet(extra_s=3)


def test_results_come_home_in_rank_order() -> None:
    """Rank 0 gets everyone's text, the others nothing."""
    store = OneRankStore()

    assert conductor(store, 1).gather("b", extra_s=0) is None
    assert ["a", "b"] == conductor(store, 0).gather("a", extra_s=0)


def test_progress_is_a_file_and_a_clock(tmp_path: Path) -> None:
    """The agent reads the phase; an inner phase takes its time from the outer one."""
    times = deque([0.0, 1.0, 3.0, 10.0])
    progress = Progress(folder=tmp_path, local_rank=3, clock=times.popleft)
    with progress.during("compute"), progress.during("memory"):
        shown = (tmp_path / "3").read_text()

    assert "memory\n" == shown
    assert {"memory": 2.0, "compute": 8.0} == progress.phase_s
    assert ["3"] == sorted(path.name for path in tmp_path.iterdir())


def test_a_failing_phase_stays_on_display(tmp_path: Path) -> None:
    """What the agent finds after a failure is the phase at fault, and the reason beside it."""
    progress = Progress(folder=tmp_path, local_rank=0)
    with pytest.raises(ZeroDivisionError), progress.during("links"):
        _ = 1 / 0
    progress.fail("no luck")

    assert "links\n" == (tmp_path / "0").read_text()
    assert "no luck\n" == (tmp_path / "0.error").read_text()


ENVIRON = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_the_seat_is_read_from_torchruns_environment() -> None:
    """The values of torchrun's contract."""
    assert Seat(3, 4, "10.0.0.1", 29500, agent_hosts_store=True) == seat_of(ENVIRON)


@pytest.mark.parametrize(("name", "value"), [("RANK", None), ("WORLD_SIZE", "four"), ("MASTER_PORT", "")])
def test_a_bad_environment_is_named(name: str, value: str | None) -> None:
    """A missing or malformed variable is named with its value."""
    environ = {key: text for key, text in {**ENVIRON, name: value}.items() if text is not None}

    with pytest.raises(ProbeError, match=f"{name}={value!r}"):
        seat_of(environ)
