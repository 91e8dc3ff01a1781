"""What remains between prediction and measurement, learned from earlier jobs on the same machines.

A Gaussian process on features of layout and model, with prior mean 0: far from all points it corrects nothing. It is
in the spirit of Pipette's neural estimator (DATE 2024), but learns the logarithm of measured over predicted: the model
does the work, and only its remaining error is learned.
"""

# N = points, F = features that differ between points.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout

Array = NDArray[np.float64]
Settings = tuple[float, float]
"""Length of the kernel in standard deviations of the features, and the part of the variance that is noise."""

LEAST_POINTS = 12
"""Different layouts or models that must have been measured before anything is corrected."""
MOST_POINTS = 64
"""Older points are forgotten, so that learning takes less than a second."""
WORTH = 0.8
"""Corrected errors must be at most this part of the uncorrected ones, each point predicted by the others alone."""
GRID: tuple[Settings, ...] = tuple((length, noise) for length in (0.5, 1.0, 2.0) for noise in (0.1, 0.3, 0.6, 0.9))
MODEL_FEATURES = frozenset({"num_layers", "hidden_size", "seq_length", "vocab_size", "num_experts", "fp32"})
"""Features that every layout of a job shares."""
_CONSTANT = 0.5
"""Part of the signal's variance that is one bias of all points."""
_SAME = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measured run."""

    features: Mapping[str, float]
    log_error: float
    """log(measured / predicted), the prediction uncorrected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What to multiply a prediction with."""

    log_factor: float
    sigma: float
    """Standard deviation of the logarithm of what will be measured."""

    @property
    def factor(self) -> float:
        """The expected ratio of measured to predicted."""
        return math.exp(self.log_factor)

    @property
    def careful_factor(self) -> float:
        """A ratio that is passed in about one case of six."""
        return math.exp(self.log_factor + self.sigma)


@dataclass(frozen=True, kw_only=True, eq=False)
class Residual:
    """A learned correction, for layouts like those it was learned from and no others."""

    names: tuple[str, ...]
    low_F: Array
    high_F: Array
    fixed: Mapping[str, float]
    """Features that all points share: nothing is known of other values."""
    points_NF: Array
    log_error_N: Array
    reach: float
    """No point lies farther from its nearest neighbour; what does is not like any of them."""
    settings: Settings
    error_before: float
    """Root mean square of the logarithms, uncorrected."""
    error_after: float
    """The same when each point is predicted by the others."""

    def correction(self, features: Mapping[str, float]) -> Correction | None:
        """Return what was learned for such a layout; None outside of what was measured."""
        if set(features) != {*self.names, *self.fixed}:
            return None
        if not all(self._covers(name, value) for name, value in features.items()):
            return None
        here_F = (np.array([features[name] for name in self.names]) - self.low_F) / (self.high_F - self.low_F)
        if math.sqrt(_square_distances(here_F[None, :], self.points_NF).min()) > self.reach + _SAME:
            return None
        mean, variance = _predict(self.points_NF, self.log_error_N, here_F, self.settings)
        most = float(np.abs(self.log_error_N).max())
        return Correction(log_factor=min(max(mean, -most), most), sigma=math.sqrt(variance))

    def unlike(self, features: Mapping[str, float]) -> float:
        """Return what to multiply a layout with that is unlike all measured ones, so that it is not preferred for that.

        If those of its model took more than predicted, it is not assumed to do better than their mean. Of another
        model, and where they took less, nothing is said: 1.
        """
        knows_model = all(self._covers(name, features[name]) for name in MODEL_FEATURES & set(features))
        return max(1.0, math.exp(float(np.mean(self.log_error_N)))) if knows_model else 1.0

    def _covers(self, name: str, value: float) -> bool:
        if name in self.names:
            place = self.names.index(name)
            return bool(self.low_F[place] - _SAME <= value <= self.high_F[place] + _SAME)
        return name in self.fixed and abs(self.fixed[name] - value) <= _SAME


def learn(points: Sequence[Point]) -> tuple[Residual | None, str]:
    """Learn from measured runs, the newest last; returns no correction, and why, where it would not help.

    Of runs with equal features the newest counts. Whether it helps is judged by leaving each point out in turn and
    choosing the kernel anew without it, so that no point is predicted with its own help.
    """
    newest: dict[tuple[tuple[str, float], ...], Point] = {}
    for point in points:
        if math.isfinite(point.log_error):
            key = tuple(sorted(point.features.items()))
            newest.pop(key, None)
            newest[key] = point
    merged = list(newest.values())[-MOST_POINTS:]
    if len(merged) < LEAST_POINTS:
        return None, f"{len(merged)} different configurations were measured, and {LEAST_POINTS} are needed"
    names = tuple(sorted(merged[0].features))
    if any(tuple(sorted(point.features)) != names for point in merged):
        return None, "the recorded runs have different features"
    raw = np.array([[point.features[name] for name in names] for point in merged])
    varies = np.ptp(raw, axis=0) > _SAME
    raw_NF, error_N = raw[:, varies], np.array([point.log_error for point in merged])
    low_F, high_F = raw_NF.min(axis=0), raw_NF.max(axis=0)
    # Every feature from 0 to 1 over the measured range.
    points_NF = (raw_NF - low_F) / (high_F - low_F)
    left_N = np.empty(len(error_N))
    for index in range(len(error_N)):
        others = np.arange(len(error_N)) != index
        settings = _best(points_NF[others], error_N[others])
        left_N[index] = error_N[index] - _predict(points_NF[others], error_N[others], points_NF[index], settings)[0]
    before, after = _rms(error_N), _rms(left_N)
    if after > WORTH * before:
        return None, f"predicting each run from the others leaves {after:.1%} of error, after {before:.1%} without"
    distances = np.sqrt(_square_distances(points_NF, points_NF))
    np.fill_diagonal(distances, np.inf)
    return Residual(
        names=tuple(name for name, differs in zip(names, varies, strict=True) if differs),
        low_F=low_F,
        high_F=high_F,
        fixed={name: float(raw[0, index]) for index, name in enumerate(names) if not varies[index]},
        points_NF=points_NF,
        log_error_N=error_N,
        reach=float(distances.min(axis=1).max()),
        settings=_best(points_NF, error_N),
        error_before=before,
        error_after=after,
    ), ""


def features_of(job: Job, layout: Layout, *, devices_per_host: int) -> dict[str, float]:
    """Describe a layout of a job by what may make a prediction wrong; sizes count by doublings."""
    model = job.model
    doublings = {
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "cp": layout.cp,
        "ep": layout.ep,
        "vpp": layout.vpp,
        "micro_batch_size": layout.micro_batch_size,
        "num_microbatches": layout.num_microbatches(job.batch.global_batch_size),
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "seq_length": model.seq_length,
        "vocab_size": model.vocab_size,
        "num_experts": model.num_experts or 1,
        "tp_over_hosts": -(-layout.tp // devices_per_host),
    }
    switches = {
        "sequence_parallel": layout.sequence_parallel,
        "distributed_optimizer": layout.use_distributed_optimizer,
        "overlap": layout.overlap_grad_reduce,
        "selective_recompute": layout.recompute.granularity == "selective",
        "full_recompute": layout.recompute.granularity == "full",
        "fp32": model.params_dtype == "fp32",
    }
    return {
        **{name: math.log2(value) for name, value in doublings.items()},
        **{name: float(value) for name, value in switches.items()},
    }


def _square_distances(one: Array, other: Array) -> Array:
    """Mean over the features of squared differences, in units of a uniform feature's variance (1/12)."""
    if one.shape[1] == 0:
        return np.zeros((len(one), len(other)))
    return np.asarray(12.0 * np.mean((one[:, None, :] - other[None, :, :]) ** 2, axis=2))


def _signal(one: Array, other: Array, settings: Settings) -> Array:
    """Covariance of the signals of two sets of points whose errors have variance 1."""
    length, noise = settings
    near = np.exp(-_square_distances(one, other) / (2 * length**2))
    return np.asarray((1 - noise) * (_CONSTANT + (1 - _CONSTANT) * near))


def _covariance(points_NF: Array, settings: Settings) -> Array:
    """Covariance of what is measured at points: the signals', and noise of each."""
    return _signal(points_NF, points_NF, settings) + settings[1] * np.eye(len(points_NF))


def _predict(points_NF: Array, error_N: Array, here_F: Array, settings: Settings) -> tuple[float, float]:
    """Mean and variance of what will be seen here (Rasmussen and Williams 2006, eq. 2.25 and 2.26)."""
    variance = float(np.mean(error_N**2))
    if variance == 0:
        return 0.0, 0.0
    to_here_N = _signal(points_NF, here_F[None, :], settings)[:, 0]
    weights_N = np.linalg.solve(_covariance(points_NF, settings), to_here_N)
    return float(weights_N @ error_N), variance * max(0.0, 1.0 - float(weights_N @ to_here_N))


def _best(points_NF: Array, error_N: Array) -> Settings:
    """The kernel under which the points predict each other best."""

    def error(settings: Settings) -> float:
        """Each point predicted by the others, in one inversion (Rasmussen and Williams 2006, eq. 5.12)."""
        inverse = np.linalg.inv(_covariance(points_NF, settings))
        return _rms((inverse @ error_N) / np.diag(inverse))

    return min(GRID, key=error)


def _rms(values_N: Array) -> float:
    return math.sqrt(float(np.mean(values_N**2)))
