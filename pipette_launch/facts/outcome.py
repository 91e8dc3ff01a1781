"""Results of a run: measured steps and memory, and the state of a running job."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from pipette_launch.facts.files import check_numbers
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Samples
from pipette_launch.facts.plan import Rate


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakReading:
    """Memory of one rank after some iterations, printed by the training script or reported by the device."""

    rank: int
    pp_rank: int
    predicted_bytes: int
    """Predicted bytes, without the correction factor from earlier outcomes."""
    measured_bytes: int
    source: str
    """`allocator`: torch's peak, printed by Megatron. `device`: used bytes by NVML, with overhead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The file outcome.json, written after enough iterations of a plan."""

    KIND: ClassVar[str] = "outcome"

    key: str
    """Key of the plan that ran (`Provenance.key`)."""
    layout: Layout
    placement: tuple[int, ...]
    predicted_step_s: float
    measured_step: Samples
    """Step times that the script printed. The first step times belong to warm-up iterations."""
    first_iteration: int
    last_iteration: int
    """Last printed iteration. One printed line may cover several iterations."""
    losses: tuple[str, ...]
    """Loss of each printed iteration, as text. The text is empty if no loss was printed."""
    step_correction: float = 1.0
    """Factor from earlier outcomes that is included in the predicted step."""
    configuration_digest: str = ""
    """Digest of model, batch and layout, by which later jobs compare outcomes. Empty = later jobs learn nothing."""
    peaks: tuple[PeakReading, ...] = ()
    rate: Rate | None = None
    """Tokens and FLOPs per second of the measured step. None = unknown."""

    def __post_init__(self) -> None:
        check_numbers(self, "step_correction", limit=0, above=True)

    @property
    def error(self) -> float:
        """Relative error of the step time: (predicted - measured) / measured."""
        return (self.predicted_step_s - self.measured_step.median_s) / self.measured_step.median_s

    @property
    def log_step_error(self) -> float:
        """log(measured / predicted) of the step time, without correction. NaN if a time is not above 0."""
        raw_s = self.predicted_step_s / self.step_correction
        measured_s = self.measured_step.median_s
        return math.log(measured_s) - math.log(raw_s) if 0 < raw_s < math.inf and measured_s > 0 else math.nan

    @property
    def fullest(self) -> PeakReading | None:
        """Highest memory reading of torch's allocator, else of the device. None = no readings."""
        inside = [peak for peak in self.peaks if peak.source == "allocator"]
        return max(inside or self.peaks, key=lambda peak: peak.measured_bytes, default=None)

    @property
    def log_memory_error(self) -> float | None:
        """log(measured / predicted) of the fullest rank's memory. `None` if it was not measured."""
        peak = self.fullest
        if peak is None or min(peak.measured_bytes, peak.predicted_bytes) <= 0:
            return None
        return math.log(peak.measured_bytes / peak.predicted_bytes)


STALE_S = 60.0
"""Seconds without a written file after which a launcher is assumed dead. A launcher normally writes every 10 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveJob:
    """State of a job according to the job's files.

    A field that is `None` or empty is unknown. Times are seconds since 1970.
    """

    KIND: ClassVar[str] = "live-job"

    read_s: float
    written_s: float
    """Time when the launcher last wrote its files."""
    script: str = ""
    host: str = ""
    """Name of the first host with ranks."""
    nodes: int = 0
    began_s: float | None = None
    phase: str = ""
    """Phase of the job: `warmup`, `trials`, `training`, `succeeded` or `failed`."""
    phase_began_s: float | None = None
    warmup_phase: str = ""
    warmup_done: int = 0
    warmup_total: int = 0
    """Number of steps in the present part of the warm-up. 0 = the steps of this part are not counted."""
    warmup_phase_s: dict[str, float] = field(default_factory=dict)
    key: str = ""
    layout: str = ""
    schedule: str = ""
    restarts: int = 0
    lost_nodes: int = 0
    predicted_step_s: float | None = None
    own_predicted_step_s: float | None = None
    step_s: float | None = None
    """Last step time that the training printed."""
    predicted_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    iteration: int | None = None
    iterations: int | None = None
    """Planned number of iterations of the training."""
    printed_s: float | None = None
    """Time of the last printed iteration."""
    memory_need_bytes: int | None = None
    memory_limit_bytes: int | None = None
    measured_memory_bytes: int | None = None
    warmup_s: float | None = None
    search_s: float | None = None
    gap: float | None = None
    """Largest possible gain of any other plan, as a share of the step."""
    verdicts: tuple[Verdict, ...] = ()

    @property
    def age_s(self) -> float:
        """Seconds since the launcher last wrote its files. Clocks of two machines may differ."""
        return max(self.read_s - self.written_s, 0.0)

    @property
    def is_over(self) -> bool:
        """True if the job has ended."""
        return self.phase in ("succeeded", "failed")

    @property
    def is_stale(self) -> bool:
        """True if the job has not ended, but its files are so old that the launcher is assumed dead."""
        return not self.is_over and self.age_s > STALE_S
