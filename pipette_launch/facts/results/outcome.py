"""The measured steps and memory of a plan that ran, beside what was predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from pipette_launch.facts.checks import check_numbers
from pipette_launch.facts.files import ADDED_LATER
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Samples
from pipette_launch.facts.results.rate import Rate


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakReading:
    """The memory of one rank after some iterations, as its training script printed it or its device tells."""

    rank: int
    pp_rank: int
    predicted_bytes: int
    """The same quantity as predicted, uncorrected."""
    measured_bytes: int
    source: str
    """`allocator`: torch's peak, printed by Megatron. `device`: used bytes by NVML, overhead included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The file outcome.json, written once enough iterations of a plan were logged."""

    KIND: ClassVar[str] = "outcome"
    SCHEMA_VERSION: ClassVar[int] = 1

    key: str
    """Of the plan (`Provenance.key`)."""
    layout: Layout
    placement: tuple[int, ...]
    predicted_step_s: float
    measured_step: Samples
    """Step times as the script printed them; the first ones are warm-ups."""
    first_iteration: int
    last_iteration: int
    """One logged line may stand for several iterations."""
    losses: tuple[str, ...]
    """The loss of each of those iterations, as printed; empty text where none was."""
    step_correction: float = field(default=1.0, metadata=ADDED_LATER)
    """What the predicted step was multiplied with, by what earlier outcomes had taught."""
    features: dict[str, float] = field(default_factory=dict, metadata=ADDED_LATER)
    """Of layout and model, so that outcomes of several jobs can be compared; empty in files of earlier releases."""
    peaks: tuple[PeakReading, ...] = field(default=(), metadata=ADDED_LATER)
    """Measured memory, where it was printed or could be read."""
    rate: Rate | None = field(default=None, metadata=ADDED_LATER)
    """What the measured step comes to in tokens and FLOPs a second; None in files of earlier releases."""

    def __post_init__(self) -> None:
        check_numbers(self, "step_correction", limit=0, above=True)

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted_step_s - self.measured_step.median_s) / self.measured_step.median_s

    @property
    def log_step_error(self) -> float:
        """log(measured / predicted) of the step, the prediction uncorrected; NaN without times above 0."""
        raw_s = self.predicted_step_s / self.step_correction
        measured_s = self.measured_step.median_s
        return math.log(measured_s) - math.log(raw_s) if 0 < raw_s < math.inf and measured_s > 0 else math.nan

    @property
    def fullest(self) -> PeakReading | None:
        """The reading to compare: of the allocator where there is one, and of those the highest."""
        inside = [peak for peak in self.peaks if peak.source == "allocator"]
        return max(inside or self.peaks, key=lambda peak: peak.measured_bytes, default=None)

    @property
    def log_memory_error(self) -> float | None:
        """log(measured / predicted) of the fullest rank that was read; None where none was, or one is not above 0."""
        peak = self.fullest
        if peak is None or min(peak.measured_bytes, peak.predicted_bytes) <= 0:
            return None
        return math.log(peak.measured_bytes / peak.predicted_bytes)
