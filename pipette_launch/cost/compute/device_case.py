"""How the kernels of one shape of computation differ from a device's smooth curve, as measured steps have told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipette_launch.errors import FactError
from pipette_launch.facts.measurements import ComputeCase
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
    return replace(model, num_layers=1, moe_layer_freq=model.moe_layer_freq[:1])


def factors_of(factors: Sequence[CaseFactor], model: ModelSpec, case: ComputeCase) -> tuple[float, float]:
    """Return the factors on layers and on ends of a shape: 1 where no step has told."""
    if not factors:
        return 1.0, 1.0
    shape = shape_of(model)
    for factor in factors:
        if factor.case == case and factor.model == shape:
            return factor.layer, factor.ends
    return 1.0, 1.0
