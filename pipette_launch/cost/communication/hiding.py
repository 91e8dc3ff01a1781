"""Compute behind which collectives of a micro-batch pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Behind = Literal[
    "core_attention_s",
    "input_grad_s",
    "weight_grad_s",
    "forward_s",
    "other_layer_s",
    "layer_forward_s",
    "layer_backward_s",
    "moe_layer_forward_s",
    "moe_layer_backward_s",
]
"""Fields of `Hiding`."""


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
    layer_forward_s: float = 0.0
    """Of a dense layer: behind it go the weights of the next."""
    layer_backward_s: float = 0.0
    """With recompute: behind it go the weights of the next, and gradients of the one before."""
    moe_layer_forward_s: float = 0.0
    """The same of a layer with experts."""
    moe_layer_backward_s: float = 0.0
