"""What a comparison of two launchers says."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.netlab import LabError, compare, everywhere
from benchmarks.netlab.compare import Comparison, Ended, in_turns


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


def test_each_leads_every_other_time() -> None:
    """What drifts hits both alike."""
    order: list[str] = []

    def one() -> int:
        order.append("one")
        return 1

    def other() -> int:
        order.append("other")
        return 2

    assert ((1, 2),) * 3 == in_turns(one, other, pairs=3)
    assert ["one", "other", "other", "one", "one", "other"] == order


def test_a_training_is_what_it_printed(tmp_path: Path) -> None:
    """Iterations of all outputs in their order; a fault, or no iteration at all, is an error with the last lines."""
    line = " [2026-11-22 02:00:00] iteration {}/ 2 | elapsed time per iteration (ms): {} | lm loss: {} |"
    outputs = [tmp_path / "first", tmp_path / "second"]
    outputs[0].write_text("hello\n")
    outputs[1].write_text("\n".join([line.format(2, 20.0, "4.0"), line.format(1, 30.0, "5.0")]))

    assert Ended(step_s=(0.03, 0.02), losses=("5.0", "4.0"), wall_s=7) == compare.ended(
        ["train"], outputs, wall_s=7, fault=""
    )
    with pytest.raises(LabError, match=r"train: no iteration was printed\nhello"):
        compare.ended(["train"], outputs[:1], wall_s=7, fault="")
    with pytest.raises(LabError, match="train: n1 failed"):
        compare.ended(["train"], outputs, wall_s=7, fault="n1 failed")


@pytest.mark.timeout(60)
def test_what_does_not_end_in_time_is_ended() -> None:
    """All of it, with the exit code of timeout(1) and nobody to blame; a failure in time has its own."""

    def start(code: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", code], text=True, start_new_session=True)

    began_s = time.monotonic()
    assert (124, "") == everywhere.finish({"n0": start("import time; time.sleep(100)"), "n1": start("")}, 100, 2)
    assert (3, "n1") == everywhere.finish(
        {"n0": start("import time; time.sleep(100)"), "n1": start("raise SystemExit(3)")}, 0.1, 100
    )
    assert time.monotonic() - began_s < 50
