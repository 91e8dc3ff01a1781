"""Scores of predictions: errors, rank correlation, regret of a choice, area under the curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Relative errors of predictions: |predicted / measured - 1|, 0.01 = 1 %."""

    count: int
    mean: float
    median: float
    largest: float
    signed_median: float
    """Below 0: predicted too little."""
    spearman: float | None
    """Rank correlation of predicted and measured; None where it is not defined."""


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors | None:
    """Score predictions against measurements, both of any one unit; None without any."""
    if not predicted:
        return None
    signed = np.asarray(predicted, dtype=float) / np.asarray(measured, dtype=float) - 1
    return Errors(
        count=len(signed),
        mean=float(np.abs(signed).mean()),
        median=float(np.median(np.abs(signed))),
        largest=float(np.abs(signed).max()),
        signed_median=float(np.median(signed)),
        spearman=spearman(predicted, measured),
    )


def ranks(values: Sequence[float]) -> Array:
    """Ranks from 1; equal values share the mean of theirs."""
    array = np.asarray(values, dtype=float)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse.reshape(-1)], dtype=float)


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson correlation of the ranks; None for fewer than two values, or where all are equal."""
    if len(first) < 2:
        return None
    left, right = ranks(first), ranks(second)
    left, right = left - left.mean(), right - right.mean()
    scale = math.sqrt(float((left**2).sum() * (right**2).sum()))
    return float((left * right).sum() / scale) if scale else None


def area_under_curve(scores: Sequence[float], is_positive: Sequence[bool]) -> float | None:
    """Chance that a positive has the higher score than a negative, ties counted half (Mann-Whitney U)."""
    positive = np.asarray(is_positive, dtype=bool)
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return None
    return float((ranks(scores)[positive].sum() - count * (count + 1) / 2) / (count * others))


def regret(predicted_s: Sequence[float], measured_s: Sequence[float]) -> float:
    """Extra time of the predicted best over the measured best: 0.05 = 5 % more."""
    chosen = min(range(len(predicted_s)), key=lambda place: predicted_s[place])
    return measured_s[chosen] / min(measured_s) - 1


def determination(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Return R squared: 1 - residual over total sum of squares; None where all measurements are equal."""
    truth = np.asarray(measured, dtype=float)
    total = float(((truth - truth.mean()) ** 2).sum()) if len(truth) else 0.0
    if not total:
        return None
    return 1 - float(((np.asarray(predicted, dtype=float) - truth) ** 2).sum()) / total
