"""Factors between measured kernel times and a device's smooth curve, one for each shape of computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipette_launch.errors import FactError
from pipette_launch.facts.measurements import ComputeCase, ComputeTime, Measurements
from pipette_launch.facts.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseFactor:
    """Factors on the modelled time of one shape of computation."""

    model: ModelSpec
    """As `shape_of` returns it: models that differ only in depth share their shapes."""
    case: ComputeCase
    layer: float
    ends: float
    """On embedding and head."""

    def __post_init__(self) -> None:
        if not (self.layer > 0 and self.ends > 0):
            raise FactError(f"factors must be above 0, got {self.layer} and {self.ends}")


def shape_of(model: ModelSpec) -> ModelSpec:
    """Return the model with one layer of its first kind: what decides how long one layer takes, and nothing else."""
    hybrid = model.hybrid and replace(model.hybrid, pattern=model.hybrid.pattern[:1])
    freq, windows = model.moe_layer_freq[:1], model.attention_windows[:1]
    return replace(model, num_layers=1, moe_layer_freq=freq, attention_windows=windows, hybrid=hybrid)


def with_factors(measurements: Measurements, model: ModelSpec, factors: Sequence[CaseFactor]) -> Measurements:
    """Multiply the modelled compute times of the shapes that a measured step has told of."""
    shape = shape_of(model)
    known = {factor.case: factor for factor in reversed(factors) if factor.model == shape}
    if not known:
        return measurements

    def scaled(time: ComputeTime) -> ComputeTime:
        if time.case not in known:
            return time
        factor = known[time.case].ends if time.part in {"embedding", "head"} else known[time.case].layer
        return replace(
            time.times(factor),
            forward_idle_s=factor * time.forward_idle_s,
            backward_idle_s=factor * time.backward_idle_s,
        )

    return replace(measurements, compute=tuple(map(scaled, measurements.compute)))
