"""The measured steps and memory of a plan that ran, beside what was predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from pipette_launch.facts.files import ADDED_LATER, check_numbers
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Samples
from pipette_launch.facts.plan import Rate


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledRank:
    """The passes of one rank, in the order in which they began."""

    rank: int
    world_size: int
    kind_A: tuple[str, ...]
    """`F` forward, `B` backward."""
    start_s_A: tuple[float, ...]
    """By the clock of the rank's host."""
    end_s_A: tuple[float, ...]

    def __post_init__(self) -> None:
        check_numbers(self, "rank", "world_size", limit=0)


STALE_S = 60.0
"""A launcher writes every 10 s; one that has not written for so long is gone, or its file system is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveJob:
    """Figures of a job as its files have them; None and empty are not known. Moments are seconds since 1970."""

    KIND: ClassVar[str] = "live-job"
    SCHEMA_VERSION: ClassVar[int] = 1

    read_s: float
    """When this was read."""
    written_s: float
    """When the launcher last wrote it."""
    script: str = ""
    host: str = ""
    """The first of those that run ranks."""
    nodes: int = 0
    began_s: float | None = None
    phase: str = ""
    """`warmup`, `trials`, `training`, `succeeded` or `failed`."""
    phase_began_s: float | None = None
    warmup_phase: str = ""
    """What a warm-up measures at present."""
    warmup_done: int = 0
    warmup_total: int = 0
    """Steps of that; 0 where they are not counted."""
    warmup_phase_s: dict[str, float] = field(default_factory=dict)
    """What the phases of the warm-up took that have ended."""
    key: str = ""
    """Of the plan."""
    layout: str = ""
    schedule: str = ""
    restarts: int = 0
    lost_nodes: int = 0
    predicted_step_s: float | None = None
    own_predicted_step_s: float | None = None
    """Of the user's own configuration."""
    step_s: float | None = None
    """As the training printed it last."""
    predicted_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    iteration: int | None = None
    iterations: int | None = None
    """How many there are to be."""
    printed_s: float | None = None
    """When the last iteration was printed."""
    memory_need_bytes: int | None = None
    memory_limit_bytes: int | None = None
    measured_memory_bytes: int | None = None
    verdicts: tuple[Verdict, ...] = ()
    """What is amiss with the machines, by the measurements that the plan rests on."""

    @property
    def age_s(self) -> float:
        """How long ago it was written; clocks of two machines may differ."""
        return max(self.read_s - self.written_s, 0.0)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.phase in ("succeeded", "failed")

    @property
    def is_stale(self) -> bool:
        """Whether a job that should go on has not been heard of for too long."""
        return not self.is_over and self.age_s > STALE_S
