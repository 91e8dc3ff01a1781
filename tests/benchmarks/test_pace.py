"""How evenly a machine computes, in words."""

from __future__ import annotations

from benchmarks import pace


def test_words_tell_how_far_looks_lie_apart() -> None:
    """Median, the middle half and the extremes, in milliseconds."""
    assert "10.0 ms in the median, half of 5 within 9.5 to 15.0, all 9.0 to 20.0" == pace.words(
        [0.010, 0.009, 0.020, 0.010, 0.010]
    )


def test_every_look_takes_time() -> None:
    """As many as are asked for, none of them free."""
    assert 3 == len(found := pace.looks(3))
    assert min(found) > 0
