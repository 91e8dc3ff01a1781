"""The bytes that lie in torch's allocator beside the model's tensors (cuBLAS and TransformerEngine workspaces).

They are added to a prediction in one of these ways, each scored apart: not at all; as the product states them from the
libraries' own constants (`cost.memory.overhead`); or stated, plus the median residual of the static memory of other
tests, by transformer implementation and GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipette_launch.cost.memory.overhead import overhead_of
from pipette_launch.facts import Job

Correction = Literal["uncorrected", "workspaces stated", "fitted on other tests"]
STATED: Correction = "workspaces stated"
FITTED: Correction = "fitted on other tests"
CORRECTIONS: tuple[Correction, ...] = ("uncorrected", STATED, FITTED)
FEWEST_FAMILIES = 2
"""Fewest families of tests for a median. With fewer, a wider group is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """Measured less predicted static memory of one layout, stated workspaces included."""

    family: int
    implementation: str
    gpu: str
    bytes: float


def stated_bytes(job: Job, device_name: str, environment: Mapping[str, str]) -> float:
    """Workspaces that the product states for a rank on a known device, by the constants of the libraries."""
    job = replace(job, cublas_workspace_config=environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    overhead = overhead_of(job, job.own, device_kind="cuda", device_name=device_name)
    return overhead.workspace.value


def fitted_bytes(residuals: Sequence[Residual], *, family: int, implementation: str, gpu: str) -> float:
    """Median of the other families' median residuals: the same GPU, else any GPU, else 0."""
    others = [item for item in residuals if item.family != family and item.implementation == implementation]
    for chosen in ([item for item in others if item.gpu == gpu], others):
        medians = _family_medians(chosen)
        if len(medians) >= FEWEST_FAMILIES:
            return statistics.median(medians)
    return 0.0


def _family_medians(residuals: Sequence[Residual]) -> list[float]:
    """One figure for each family, so that a test that was measured often counts once."""
    by_family: dict[int, list[float]] = {}
    for item in residuals:
        by_family.setdefault(item.family, []).append(item.bytes)
    return [statistics.median(values) for values in by_family.values()]
