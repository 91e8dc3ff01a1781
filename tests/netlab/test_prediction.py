"""Predicted against measured step times of the suite."""

from __future__ import annotations

import pytest

from benchmarks.netlab.suite.parts import Setting
from benchmarks.netlab.suite.prediction import Pair, mean_error, repeats, run, spearman
from benchmarks.netlab.suite.standings import SKIP
from benchmarks.netlab.system import LabError


def pair(predicted_s: float, measured_s: float) -> Pair:
    """Make one of these two figures."""
    return Pair(what="it", predicted_s=predicted_s, measured_s=measured_s)


def test_errors_count_both_ways() -> None:
    """10 % too long and 20 % too short are 15 % in the mean."""
    assert mean_error([pair(1.1, 1.0), pair(0.8, 1.0)]) == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("figures", "order"),
    [
        ([(1, 1), (2, 4), (3, 9)], 1.0),
        ([(1, 9), (2, 4), (3, 1)], -1.0),
        ([(1, 1), (1, 2), (2, 3)], 0.866),
        ([(1, 1), (1, 2), (1, 3)], 0.0),
    ],
)
def test_order_counts_ranks_alone(figures: list[tuple[float, float]], order: float) -> None:
    """Any rising curve is perfect order; equal predictions share their ranks, and say nothing where all are equal."""
    assert spearman([pair(*each) for each in figures]) == pytest.approx(order, abs=1e-3)


def test_all_that_ran_is_compared() -> None:
    """Runs of the space and of the contenders count; one that failed, or that nothing was predicted for, does not."""
    ran = {"layout": "dp4", "placement": [0, 1], "predicted_s": 2.0, "measured_s": 1.0}
    failed = {**ran, "measured_s": None}
    known = {
        "regret": {"fields": [{"name": "islands", "tried": [ran, {**ran, "predicted_s": None}]}]},
        "speedup": {"cells": [{"topology": "uniform", "model": "small", "ours": ran, "others": [failed]}]},
    }
    result = run(Setting(known=known), lambda _: None)

    assert [1, 1] == [len(pairs) for pairs in result.raw.values()]
    assert "mean error 100.0% of 2 configurations" in result.headline


def test_what_differs_from_training_to_training_is_said() -> None:
    """The first steps of a training do not count, nor does a configuration that was trained once."""
    twice = {"layout": "dp4", "placement": [0], "predicted_s": 1.0, "measured_s": 1.0}
    twice["step_s"] = [[*[9.0] * SKIP, 1.0, 1.0], [*[9.0] * SKIP, 1.2, 1.2]]
    once = {**twice, "step_s": [[*[9.0] * SKIP, 5.0]]}
    speedup = {"cells": [{"topology": "uniform", "model": "small", "ours": twice, "others": [once]}]}

    assert pytest.approx([0.2]) == repeats(speedup)
    words = run(Setting(known={"speedup": speedup}), lambda _: None).lines[-1]
    assert "took 20.0% more or less the second time in the mean, 20% at most (1 pairs)" in words


def test_without_runs_nothing_is_said() -> None:
    """An empty comparison would look like a good one."""
    with pytest.raises(LabError, match="regret, nvidia and speedup come first"):
        run(Setting(), lambda _: None)
