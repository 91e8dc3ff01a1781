"""A training that slows down for good is told of once; single long steps are not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.launch.training.slowdown import WARM_UPS, WINDOW, Slowdown


def words(*step_s: float, limit: float = 0.25) -> list[str]:
    """What is said at these step times."""
    watch = Slowdown(limit, restarts=False)
    return [text for text in (watch.add(one, at) for at, one in enumerate(step_s, 1)) if text]


def test_a_lasting_slowdown_is_told_once() -> None:
    """With both paces and how far the training was; the warm-up counts for nothing."""
    (text,) = words(*[9.0] * WARM_UPS, *[1.0] * WINDOW, *[1.5] * (3 * WINDOW))

    assert text.startswith("steps take 1.50 times as long as at the start of this attempt: 1.50 s")
    assert f"up to iteration {WARM_UPS + 2 * WINDOW})" in text


def test_a_slowdown_in_the_middle_is_found_when_most_of_the_last_steps_are_slow() -> None:
    """Not before."""
    steady = [1.0] * (WARM_UPS + 5 * WINDOW)

    assert [] == words(*steady, *[2.0] * (WINDOW // 2 - 1))
    assert 1 == len(words(*steady, *[2.0] * (WINDOW // 2 + 1)))


def test_a_restart_is_wanted_where_the_user_wants_one() -> None:
    """With the reason that the agents are called for."""
    for restarts in (False, True):
        watch = Slowdown(0.25, restarts=restarts)
        for at in range(WARM_UPS + 3 * WINDOW):
            watch.add(1.0 if at < WARM_UPS + WINDOW else 2.0, at)
        assert restarts == watch.wants_restart.startswith("steps take 2.00 times as long")


@given(st.sets(st.integers(0, 300), max_size=WINDOW // 3), st.floats(1.0, 100.0))
def test_long_steps_here_and_there_are_no_slowdown(long: set[int], factor: float) -> None:
    """Evaluations and checkpoints come between."""
    assert [] == words(*[factor if step in long else 1.0 for step in range(300)])


def test_the_limit_is_the_users() -> None:
    """Of twice the time nothing is said where three times are allowed."""
    assert [] == words(*[1.0] * (WARM_UPS + WINDOW), *[2.0] * WINDOW, limit=2.0)
