"""The constant that lies in torch's allocator beside the model's tensors (cuBLAS and TE workspaces), and who knows it.

It is added to a prediction in one of three ways, each scored apart: not at all; as the product states it; or as the
median residual of the static memory of other tests, by transformer implementation and GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipette_launch.units import MIB

Correction = Literal["uncorrected", "stated default", "fitted on other tests"]
FITTED: Correction = "fitted on other tests"
CORRECTIONS: tuple[Correction, ...] = ("uncorrected", "stated default", FITTED)
STATED_BYTES = {
    ("transformer_engine", "A100"): 72 * MIB,
    ("transformer_engine", "H100"): 98 * MIB,
    ("local", "A100"): 66 * MIB,
}
"""facts, memory.md section 7; other GPUs as the nearest there is of the same implementation."""
FEWEST_FAMILIES = 2
"""With fewer families of tests than this a median says too little, and a wider group is asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """Measured minus predicted static memory of one layout."""

    family: int
    implementation: str
    gpu: str
    bytes: float


def stated_bytes(implementation: str, gpu: str) -> float:
    """Workspace constant that the product states without a measurement."""
    known = [size for (name, device), size in STATED_BYTES.items() if name == implementation and device == gpu]
    return (known or [size for (name, _), size in STATED_BYTES.items() if name == implementation] or [0])[0]


def fitted_bytes(residuals: Sequence[Residual], *, family: int, implementation: str, gpu: str) -> float:
    """Median of the other families' median residuals: the same GPU, else any GPU, else the stated default."""
    others = [item for item in residuals if item.family != family and item.implementation == implementation]
    for chosen in ([item for item in others if item.gpu == gpu], others):
        medians = _family_medians(chosen)
        if len(medians) >= FEWEST_FAMILIES:
            return statistics.median(medians)
    return stated_bytes(implementation, gpu)


def _family_medians(residuals: Sequence[Residual]) -> list[float]:
    """One figure for each family, so that a test that was measured often counts once."""
    by_family: dict[int, list[float]] = {}
    for item in residuals:
        by_family.setdefault(item.family, []).append(item.bytes)
    return [statistics.median(values) for values in by_family.values()]
