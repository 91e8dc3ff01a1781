"""How long workers wait for each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.probe.waits import START_S, wait_s


@pytest.mark.parametrize(
    ("num_ranks", "left_s", "expected"), [(2, 0.0, 60.1), (2, -9.0, 60.1), (4096, 0.0, 264.8), (4096, 30.0, 294.8)]
)
def test_a_wait_by_hand(num_ranks: int, left_s: float, expected: float) -> None:
    """A minute, a second for every 20 ranks, and what the phase may still take."""
    assert pytest.approx(expected) == wait_s(num_ranks, left_s)


def test_imports_may_take_three_minutes_in_a_small_job() -> None:
    """The start of a worker on a cold file system is waited for longer than a phase that is over."""
    assert 180 < wait_s(8, START_S) < 181


@given(
    ranks=st.integers(1, 20_000), more=st.integers(0, 20_000), left_s=st.floats(-1e3, 1e4), later_s=st.floats(0, 1e3)
)
def test_more_ranks_and_more_work_are_waited_for_longer(ranks: int, more: int, left_s: float, later_s: float) -> None:
    """No wait shrinks with ranks or remaining time, or falls below the least one."""
    assert 5.0 <= wait_s(ranks, left_s, least_s=5.0) <= wait_s(ranks + more, left_s + later_s, least_s=5.0)
