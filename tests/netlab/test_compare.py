"""What a comparison of two launchers says."""

from __future__ import annotations

from benchmarks.netlab.compare import Comparison, Ended


def ended(*step_s: float, losses: tuple[str, ...] = ("5.0", "4.0")) -> Ended:
    """A training."""
    return Ended(step_s=step_s, losses=losses, wall_s=10.0)


def test_first_iterations_do_not_count_and_pairs_are_compared() -> None:
    """Steady steps are medians of what follows the first ones; the ratio is that of every pair."""
    pairs = ((ended(9, 2, 4), ended(9, 1, 2)), (ended(9, 6), ended(1, 4)))
    made = Comparison(cold=ended(9, 1), pairs=pairs, skip=1)

    assert [(3, 1.5), (6, 4)] == made.steps_s()
    assert [2.0, 1.5] == made.ratios()
    assert "ratio           median 1.750, worst 1.500" in list(made.lines())


def test_losses_agree_to_the_digit_or_by_so_much() -> None:
    """Digits are compared as printed; else the distance is told."""
    same = Comparison(cold=ended(1), pairs=((ended(1), ended(1)),), skip=0)
    apart = Comparison(cold=ended(1), pairs=((ended(1), ended(1, losses=("5.0", "4.4"))),), skip=0)

    assert "the same to every printed digit over 2 iterations" == same.agreement()
    assert "apart by 5.00% in the median of 2 iterations, 10.00% at most" == apart.agreement()
