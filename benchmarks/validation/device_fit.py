"""A device model fitted to a few measured steps: least squares on log time, with a prior for each constant.

First the few parameters of the device are fitted to all steps; then each shape of computation that was met (a model's
widths with tp, cp and micro-batch) gets factors of its own on the time of its layers and of its ends (embedding and
head), as a warm-up would have measured them. Both are maximum a posteriori: a parameter moves from where it was only as
far as the steps outweigh its prior width, and steps far off count less (Huber). Gauss-Newton with Levenberg's damping.
"""

# N = measured steps, K = parameters, in logarithms relative to where they start.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.validation.case_factors import CaseFactor, shape_of, with_factors
from pipette_launch.cost.compute.device_model import case_of, imagined
from pipette_launch.cost.layers.attention import is_flash
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.errors import FactError
from pipette_launch.facts.devices import DeviceSpec
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import ComputeCase
from pipette_launch.facts.model import ModelSpec

Array = NDArray[np.float64]

NOISE = 0.03
"""Prior belief: a measured step repeats to 3 %."""
DEVICE_WIDTH = 0.5
"""Prior belief: a device's parameters are known to within a factor of 1.65."""
CASE_WIDTH = 0.3
"""Prior belief: a kernel's time differs by 30 % from a smooth curve."""
OUTLIER = 0.2
"""A log error beyond this says more of the run than of the device."""

_MOST_ROUNDS = 20
_STEP = 1e-3
_LEAST_GAIN = 1e-3
_SHARES = ("matmul_share", "attention_share", "memory_share")
_LINKS = ("within_latency", "within_bandwidth", "between_latency", "between_bandwidth")
PARAMETERS = (*_SHARES, "half_size", "launch_s", *_LINKS)
"""Fitted constants of a device, in this order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """One configuration that ran, and how long its step took."""

    job: Job
    layout: Layout
    num_hosts: int
    devices_per_host: int
    step_s: float

    def __post_init__(self) -> None:
        if not self.step_s > 0:
            raise FactError(f"a measured step takes more than 0 s, got {self.step_s}")
        if self.layout.world_size != self.num_hosts * self.devices_per_host:
            raise FactError(
                f"a step of {self.layout.world_size} ranks on {self.num_hosts} hosts of {self.devices_per_host} devices"
            )

    @property
    def shape(self) -> tuple[ModelSpec, ComputeCase]:
        """Computation of a slot. Steps of equal shape share their factors."""
        return shape_of(self.job.model), case_of(self.layout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """A device model that has seen measured steps."""

    device: DeviceSpec
    factors: tuple[CaseFactor, ...]
    num_steps: int
    error_before: float
    """Root mean square of log(predicted / measured) over the steps, with the device as it was given."""
    error_after: float
    """The same, fitted. Over the very steps of the fit: other steps will do worse."""


def fit(steps: Sequence[MeasuredStep], device: DeviceSpec, *, by_case: bool = True) -> Fitted:
    """Fit a device model to measured steps.

    Args:
        steps: configurations that ran on such devices, ranks in torchrun's order.
        device: where to start, and the prior.
        by_case: also fit factors for each shape of computation.

    Raises:
        FactError: there are no steps.

    """
    if not steps:
        raise FactError("a fit needs at least one measured step")
    told = _told_by(steps)

    def tried(log_K: Array) -> DeviceSpec:
        full_K = np.zeros(len(PARAMETERS))
        full_K[told] = log_K
        return adjusted(device, full_K)

    def errors(log_K: Array) -> Array:
        return _tempered(_log_errors(steps, tried(log_K), ()))

    best = tried(_least_squares(errors, np.zeros(len(told)), DEVICE_WIDTH / NOISE))
    factors = _case_factors(steps, best) if by_case else ()
    return Fitted(
        device=replace(best, source=f"{device.source} Fitted to {len(steps)} measured steps."),
        factors=factors,
        num_steps=len(steps),
        error_before=_rms(_log_errors(steps, device, ())),
        error_after=_rms(_log_errors(steps, best, factors)),
    )


def _told_by(steps: Sequence[MeasuredStep]) -> list[int]:
    """Indices of the parameters on which any of these steps can depend."""
    silent = set() if any(step.num_hosts > 1 for step in steps) else {"between_latency", "between_bandwidth"}
    if not any(is_flash(step.job.model) for step in steps):
        silent.add("attention_share")
    return [index for index, name in enumerate(PARAMETERS) if name not in silent]


def predicted_s(step: MeasuredStep, device: DeviceSpec, factors: Sequence[CaseFactor] = ()) -> float:
    """Seconds of a step by the device model, without the measured value."""
    measurements = imagined(
        step.job,
        device,
        num_hosts=step.num_hosts,
        devices_per_host=step.devices_per_host,
        layouts=[step.layout],
    )
    measurements = with_factors(measurements, step.job.model, factors)
    return Predictor(step.job, measurements).step_time(step.layout, range(step.layout.world_size)).total_s


def adjusted(device: DeviceSpec, log_K: Array) -> DeviceSpec:
    """Multiply each of `PARAMETERS` by exp of its entry; shares stop at 1."""
    by = dict(zip(PARAMETERS, np.exp(log_K).tolist(), strict=True))
    efficiency = device.efficiency
    shares = {name: min(1.0, getattr(efficiency, name) * by[name]) for name in _SHARES}
    within, between = device.within_host, device.between_hosts
    return replace(
        device,
        efficiency=replace(
            efficiency,
            half_size=efficiency.half_size * by["half_size"],
            launch_s=efficiency.launch_s * by["launch_s"],
            **shares,
        ),
        within_host=replace(
            within,
            latency_s=within.latency_s * by["within_latency"],
            bytes_per_s=within.bytes_per_s * by["within_bandwidth"],
        ),
        between_hosts=replace(
            between,
            latency_s=between.latency_s * by["between_latency"],
            bytes_per_s=between.bytes_per_s * by["between_bandwidth"],
        ),
    )


def _case_factors(steps: Sequence[MeasuredStep], device: DeviceSpec) -> tuple[CaseFactor, ...]:
    """Fit each shape by itself: its steps depend on no other's factors."""
    groups: dict[tuple[ModelSpec, ComputeCase], list[MeasuredStep]] = {}
    for step in steps:
        groups.setdefault(step.shape, []).append(step)
    return tuple(_case_factor(group, device) for group in groups.values())


def _case_factor(steps: Sequence[MeasuredStep], device: DeviceSpec) -> CaseFactor:
    """Fit the factors of the one shape that these steps share."""
    model, case = steps[0].shape

    def factor(log_K: Array) -> CaseFactor:
        layer, ends = np.exp(log_K).tolist()
        return CaseFactor(model=model, case=case, layer=layer, ends=ends)

    def errors(log_K: Array) -> Array:
        return _tempered(_log_errors(steps, device, (factor(log_K),)))

    return factor(_least_squares(errors, np.zeros(2), CASE_WIDTH / NOISE))


def _log_errors(steps: Sequence[MeasuredStep], device: DeviceSpec, factors: Sequence[CaseFactor]) -> Array:
    return np.log([predicted_s(step, device, factors) / step.step_s for step in steps])


def _tempered(errors_N: Array) -> Array:
    """Weigh errors beyond `OUTLIER` linearly, not squared (Huber 1964): a hung run says nothing about a device."""
    size_N = np.abs(errors_N)
    tempered: Array = np.sign(errors_N) * np.where(
        size_N > OUTLIER, np.sqrt(np.maximum(2 * OUTLIER * size_N - OUTLIER**2, 0.0)), size_N
    )
    return tempered


def _rms(errors_N: Array) -> float:
    return float(np.sqrt((errors_N**2).mean()))


def _least_squares(errors: Callable[[Array], Array], start_K: Array, width: float) -> Array:
    """Minimise |errors|^2 + |x - start|^2 / width^2 from `start`."""
    found_K, errors_N = start_K, errors(start_K)
    cost = float(errors_N @ errors_N)
    damping = 1e-3
    for _ in range(_MOST_ROUNDS):
        slopes_NK = _slopes(errors, found_K, errors_N)
        normal_KK = slopes_NK.T @ slopes_NK + np.eye(len(start_K)) / width**2
        downhill_K = -(slopes_NK.T @ errors_N + (found_K - start_K) / width**2)
        while damping < 1e6:
            tried_K = found_K + np.linalg.solve(normal_KK + damping * np.diag(np.diag(normal_KK)), downhill_K)
            tried_N = errors(tried_K)
            tried = float(tried_N @ tried_N + ((tried_K - start_K) ** 2).sum() / width**2)
            if tried < cost:
                break
            damping *= 10
        else:
            return found_K
        gain, found_K, errors_N, cost = (cost - tried) / cost, tried_K, tried_N, tried
        damping = max(damping / 10, 1e-9)
        if gain < _LEAST_GAIN:
            return found_K
    return found_K


def _slopes(errors: Callable[[Array], Array], at_K: Array, errors_N: Array) -> Array:
    """Derivatives by forward differences."""
    steps_KK = _STEP * np.eye(len(at_K))
    return np.stack([(errors(at_K + step_K) - errors_N) / _STEP for step_K in steps_KK], axis=1)
