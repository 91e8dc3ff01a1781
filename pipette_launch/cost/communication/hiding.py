"""Compute behind which collectives of a micro-batch pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pipette_launch.facts.model import LayerKind

OfLayer: TypeAlias = tuple[Literal["forward", "backward"], LayerKind]
Behind: TypeAlias = Literal["core_attention_s", "input_grad_s", "weight_grad_s", "forward_s", "other_layer_s"] | OfLayer
"""A field of `Hiding`, or a pass of a whole layer of a kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hiding:
    """Compute of one layer, for one micro-batch, behind which a collective passes."""

    core_attention_s: float = 0.0
    """The forward's scores and context: behind them go the rings of context parallelism."""
    input_grad_s: float = 0.0
    """Input gradient of one column-parallel matrix."""
    weight_grad_s: float = 0.0
    """Weight gradient of one column-parallel matrix."""
    forward_s: float = 0.0
    """Forward of one column-parallel matrix: behind it go chunks of `--tp-comm-overlap`."""
    other_layer_s: float = 0.0
    """A quarter of a layer's two passes: behind each go the tokens of one exchange of another micro-batch."""
    layers_s: Mapping[OfLayer, float] = field(default_factory=dict)
    """A pass of one layer, the backward with recompute: behind it go weights of the next and gradients of the one
    before."""

    def seconds(self, behind: Behind) -> float:
        """Look up the compute that `behind` names; 0 of what was not given."""
        return self.layers_s.get(behind, 0.0) if isinstance(behind, tuple) else float(getattr(self, behind))
