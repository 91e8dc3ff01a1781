"""What is learned from outcomes: planted errors are found, noise is not, and nothing is said outside what was seen."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.learned.residual import LEAST_POINTS, MOST_POINTS, Point, Residual, features_of, learn
from pipette_launch.facts import Batch, Layout, Recompute

Error = Callable[[dict[str, float]], float]


def points(count: int, error: Error, *, seed: int = 0) -> list[Point]:
    """Layouts drawn at random, no two alike, each with the error that its features have."""
    rng = np.random.default_rng(seed)
    drawn: dict[tuple[float, ...], dict[str, float]] = {}
    while len(drawn) < count:
        tp, pp, dp, batch = (float(value) for value in rng.integers(0, 4, size=4))
        drawn[tp, pp, dp, batch] = {"tp": tp, "pp": pp, "dp": dp, "micro_batch_size": batch, "fp32": 0.0}
    return [Point(features=features, log_error=error(features)) for features in drawn.values()]


def learned(count: int, error: Error) -> Residual:
    """A residual that was accepted."""
    residual, why_not = learn(points(count, error))
    assert residual is not None, why_not
    return residual


def middle(**changes: float) -> dict[str, float]:
    """A layout in the middle of what is drawn."""
    return {"tp": 1.0, "pp": 2.0, "dp": 1.0, "micro_batch_size": 2.0, "fp32": 0.0, **changes}


def test_a_planted_bias_is_learned() -> None:
    """Steps that always take 20 % longer than predicted are predicted 20 % longer."""
    correction = learned(40, lambda _: math.log(1.2)).correction(middle())

    assert correction is not None
    assert 1.2 == pytest.approx(correction.factor, rel=0.02)


def test_a_planted_slope_is_learned() -> None:
    """An error that grows with tp is corrected where it is, on layouts that were not measured."""
    slope: Error = lambda features: 0.1 * features["tp"]  # noqa: E731
    residual = learned(60, slope)
    fresh = points(40, slope, seed=1)
    corrections = [residual.correction(point.features) for point in fresh]
    after = [
        point.log_error - correction.log_factor
        for point, correction in zip(fresh, corrections, strict=True)
        if correction
    ]

    assert len(after) > 30
    assert np.sqrt(np.mean(np.square(after))) < 0.25 * np.sqrt(np.mean([point.log_error**2 for point in fresh]))


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_not_used(seed: int) -> None:
    """Errors that no feature explains are left alone, and the reason has both figures."""
    rng = np.random.default_rng(100 + seed)
    residual, why_not = learn(points(30, lambda _: float(rng.normal(0, 0.1)), seed=seed))

    assert residual is None
    assert why_not.startswith("predicting each run from the others leaves ")


def test_few_points_are_no_ground() -> None:
    """One fewer than the stated number, and nothing is corrected; repeated runs of one layout count once."""
    few = points(LEAST_POINTS - 1, lambda _: 0.2)
    enough = points(LEAST_POINTS, lambda _: 0.2)

    assert (None, "11 different configurations were measured, and 12 are needed") == learn(few * 5)
    assert learn(enough)[0] is not None
    assert (None, "0 different configurations were measured, and 12 are needed") == learn([])


@pytest.mark.parametrize(
    "changes",
    [{"tp": 4.0}, {"pp": -1.0}, {"micro_batch_size": 3.5}, {"fp32": 1.0}],
    ids=["above", "below", "a little above", "a feature that all share"],
)
def test_outside_of_the_range_nothing_is_said(changes: dict[str, float]) -> None:
    """Each feature must lie between the least and the most that was measured."""
    assert learned(40, lambda _: 0.2).correction(middle(**changes)) is None


def test_a_gap_inside_the_range_is_outside_too() -> None:
    """Small jobs with small tp and large ones with large tp say nothing of a large job with small tp."""
    rng = np.random.default_rng(0)
    clusters = [
        Point(features={"tp": low + float(rng.uniform(0, 1)), "hidden": low + float(rng.uniform(0, 1))}, log_error=0.2)
        for low in (0.0, 9.0)
        for _ in range(10)
    ]
    residual, _ = learn(clusters)

    assert residual is not None
    assert residual.correction({"tp": 9.5, "hidden": 9.5}) is not None
    assert residual.correction({"tp": 0.5, "hidden": 9.5}) is None


def test_other_features_are_not_understood() -> None:
    """Outcomes of a release with other features correct nothing."""
    residual = learned(20, lambda _: 0.2)

    assert residual.correction({"tp": 1.0}) is None
    assert residual.correction({**middle(), "moon": 1.0}) is None
    assert learn([*points(20, lambda _: 0.2), Point(features={"moon": 1.0}, log_error=0.1)]) == (
        None,
        "the recorded runs have different features",
    )


def test_no_correction_is_larger_than_what_was_seen() -> None:
    """Whatever the kernel makes of it."""
    residual = learned(40, lambda features: 0.05 * features["tp"])

    for point in points(60, lambda _: 0.0, seed=3):
        correction = residual.correction(point.features)
        assert correction is None or abs(correction.log_factor) <= 0.15 + 1e-12


def test_a_careful_factor_leaves_room() -> None:
    """With noise in the measurements it is above the expected ratio."""
    rng = np.random.default_rng(2)
    correction = learned(40, lambda _: 0.3 + float(rng.normal(0, 0.05))).correction(middle())

    assert correction is not None
    assert correction.careful_factor > correction.factor > 1.2


def test_runs_that_were_never_wrong_change_nothing() -> None:
    """All errors 0: the correction is 1, to the digit."""
    residual, why_not = learn(points(20, lambda _: 0.0))

    assert residual is None or residual.correction(middle()) is None or residual.correction(middle()).factor == 1.0  # type: ignore[union-attr]
    assert why_not == "" or residual is None


def test_what_is_no_number_is_no_point() -> None:
    """A step of 0 s has no logarithm."""
    broken = [Point(features=middle(tp=0.5), log_error=math.nan)]

    assert learn(points(LEAST_POINTS - 1, lambda _: 0.2) + broken)[0] is None


def test_the_newest_points_count() -> None:
    """After a change of the machines old outcomes are forgotten."""
    old, new = points(60, lambda _: -0.5), points(MOST_POINTS, lambda _: 0.2, seed=5)
    residual, _ = learn(old + new)

    assert residual is not None
    assert {0.2} == set(np.round(residual.log_error_N, 9))


def test_features_tell_layouts_and_models_apart() -> None:
    """Sizes count by doublings, switches by 0 and 1."""
    job = tiny_job(8, batch=Batch(global_batch_size=32), model=tiny_model(hidden_size=128, num_attention_heads=4))
    layout = Layout(
        tp=4, pp=2, micro_batch_size=2, recompute=Recompute(granularity="selective", modules=("core_attn",))
    )
    features = features_of(job, layout, devices_per_host=2)

    assert (2.0, 1.0, 0.0, 1.0, 4.0, 7.0, 1.0, 1.0, 0.0) == tuple(
        features[name]
        for name in (
            "tp",
            "pp",
            "dp",
            "micro_batch_size",
            "num_microbatches",
            "hidden_size",
            "tp_over_hosts",
            "selective_recompute",
            "full_recompute",
        )
    )
