"""Correction of predictions by the outcomes of earlier jobs on the same machines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.memory.overhead import MeasuredStages
from pipette_launch.cost.memory.peak import peak_memory_bytes, peak_memory_columns
from pipette_launch.cost.step.assemble import StepTime
from pipette_launch.cost.step.predictor import PlacementCost, Predictor
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout, LayoutColumns
from pipette_launch.facts.measurements import Measurements
from pipette_launch.facts.outcome import Outcome
from pipette_launch.facts.schedule import Schedule

LEARNED = "learned_correction"
"""Name of the correction among the parts of a step (`StepTime.breakdown_s`)."""
LEAST_OUTCOMES = 4
"""Least number of measured configurations from which a correction is learned."""
MOST_OUTCOMES = 64
"""Largest number of outcomes that are used; older outcomes are left out."""
WORTH = 0.8
"""A learned factor is used only if the error with the factor is at most this share of the error without the factor. For
the error with a learned factor, each outcome is predicted with the factor of all other outcomes."""


class Factor(NamedTuple):
    """Learned ratio of measured to predicted figures (step times or memory peaks) in earlier jobs."""

    factor: float
    """Expected ratio of measured to predicted: the geometric mean of earlier jobs."""
    careful_factor: float
    """Ratio of measured to predicted, at least 1, that about one job of six exceeds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Corrections:
    """Factors on the predicted step time and on the predicted memory peak; None = no correction."""

    step: Factor | None = None
    memory: Factor | None = None
    notes: tuple[str, ...] = ()
    """Sentences about the learned factors of step times and of memory peaks, or the reasons why no factor is used."""


NOTHING_LEARNED = Corrections()


def corrections_from(outcomes: Iterable[Outcome]) -> Corrections:
    """Learn corrections from the outcomes of earlier jobs on these machines; `outcomes` has the oldest job first.

    The newest outcome of a configuration replaces its older outcomes.
    """
    newest: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.configuration_digest:
            newest.pop(outcome.configuration_digest, None)
            newest[outcome.configuration_digest] = outcome
    known = list(newest.values())[-MOST_OUTCOMES:]
    if not known:
        return NOTHING_LEARNED
    step, step_note = _learn("Step times", [outcome.log_step_error for outcome in known])
    memory_errors = [error for outcome in known if (error := outcome.log_memory_error) is not None]
    memory, memory_note = _learn("Peaks of memory", memory_errors) if memory_errors else (None, "")
    return Corrections(step=step, memory=memory, notes=tuple(filter(None, (step_note, memory_note))))


def _learn(what: str, log_errors: Sequence[float]) -> tuple[Factor | None, str]:
    """Return the learned factor and a sentence about its use.

    The factor is left out (None) if it does not lower the error.
    """
    errors_N = np.array([error for error in log_errors if math.isfinite(error)])
    count, refused = len(errors_N), f"{what} are not corrected by earlier outcomes on these machines:"
    if count < LEAST_OUTCOMES:
        was = "was" if count == 1 else "were"
        return None, f"{refused} {LEAST_OUTCOMES} different configurations are needed, and {count} {was} measured."
    mean = float(errors_N.mean())
    # Difference between each outcome's log error and the mean log error of all other outcomes.
    left_N = (errors_N - mean) * count / (count - 1)
    before, after = (math.sqrt(float(np.mean(each_N**2))) for each_N in (errors_N, left_N))
    if after > WORTH * before:
        return None, (
            f"{refused} predicting each run from the others leaves {after:.1%} of error, after {before:.1%} without."
        )
    # Standard deviation of the log error that is expected for one further job.
    spread = float(errors_N.std(ddof=1)) * math.sqrt(1 + 1 / count)
    found = Factor(math.exp(mean), max(1.0, math.exp(mean + spread)))
    return found, (
        f"{what} are multiplied by {found.factor:.3f}, learned from {count} earlier outcomes on these machines; each "
        f"is predicted by the others to {after:.1%} instead of {before:.1%}."
    )


class CorrectedPredictor(Predictor):
    """Predictor that applies learned factors, and replaces predicted peaks of stages by measured peaks."""

    def __init__(self, job: Job, measurements: Measurements, corrections: Corrections = NOTHING_LEARNED) -> None:
        super().__init__(job, measurements)
        self.step_factor = corrections.step.factor if corrections.step else 1.0
        """Learned factor on every predicted step time."""
        self.memory_factor = corrections.memory.careful_factor if corrections.memory else 1.0
        """Learned factor on every predicted memory peak."""
        self._stages = MeasuredStages(job, measurements)

    def step_time(self, layout: Layout, placement: Sequence[int], schedule: Schedule | None = None) -> StepTime:
        """Predict the step; the part `learned_correction` is negative if earlier steps were shorter than predicted."""
        step = super().step_time(layout, placement, schedule)
        if self.step_factor == 1.0:
            return step
        total_s = step.total_s * self.step_factor
        return StepTime(total_s=total_s, breakdown_s={**step.breakdown_s, LEARNED: total_s - step.total_s})

    def placement_cost(self, layout: Layout, schedule: Schedule | None = None) -> PlacementCost:
        """Return a function from placements to the step time that `step_time` predicts."""
        return super().placement_cost(layout, schedule).times(self.step_factor)

    def bound_s(self, layout: Layout) -> float:
        """Return a lower bound of the step over all placements of a layout."""
        return super().bound_s(layout) * self.step_factor

    def peaks(self, layout: Layout) -> tuple[int, ...]:
        """Return each pipeline rank's peak bytes of tensors: measured if the warm-up ran the stage, else predicted."""
        return self.all_peaks([layout])[0]

    def all_peaks(self, layouts: Sequence[Layout]) -> tuple[tuple[int, ...], ...]:
        """Return `peaks` of many layouts in one call, which is faster than one call for each layout."""
        totals = peak_memory_columns(self._job, LayoutColumns.of(layouts)).totals()
        return tuple(
            self._stages.peaks(layout, [math.ceil(total * self.memory_factor) for total in stages])
            for layout, stages in zip(layouts, totals, strict=True)
        )

    def fullest_N(self, columns: LayoutColumns, *, live: float = 1.0) -> NDArray[np.float64]:
        """Return the largest of the `peaks` of each of N layouts.

        `live` is a schedule's peak bytes of kept activations, divided by the peak bytes under Megatron's own schedule.
        If `live` is below 1, measured peaks are not used, because the warm-up ran Megatron's schedule.
        """
        if not len(columns):
            return np.zeros(0)
        found = peak_memory_columns(self._job, columns)
        total_S = replace(found.parts_S, activations=np.ceil(live * found.parts_S.activations).astype(np.int64)).total
        fullest_N = np.ceil(np.maximum.reduceat(total_S, found.starts_N) * self.memory_factor)
        for layout in self._stages.layouts if live >= 1 else ():
            rows = columns.rows_of(layout)
            if len(rows):
                fullest_N[rows] = max(self.peaks(layout))
        return fullest_N

    def memory_correction(self, layout: Layout) -> float:
        """Return the corrected or measured peak of the fullest stage, divided by its predicted peak."""
        if layout not in self._stages.layouts:
            return self.memory_factor
        peaks = self.peaks(layout)
        fullest = peaks.index(max(peaks))
        return max(peaks) / peak_memory_bytes(self._job, layout)[fullest].total

    def notes(self, layout: Layout) -> tuple[str, ...]:
        """Return sentences about the assumptions for a layout, and about its stages whose memory was measured."""
        return (*super().notes(layout), *self._stages.notes(layout))
