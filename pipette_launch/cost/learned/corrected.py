"""Predictions corrected by the outcomes of earlier jobs on these machines; without such jobs they are not changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.learned.residual import Point, Residual, features_of, learn
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
"""Its name among the parts of a step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Corrections:
    """What was learned of step time and of peak memory; nothing of either by default."""

    step: Residual | None = None
    memory: Residual | None = None
    notes: tuple[str, ...] = ()
    """What was learned or why it was not, one sentence each; none where nothing was recorded."""


NOTHING_LEARNED = Corrections()


def corrections_from(outcomes: Iterable[Outcome]) -> Corrections:
    """Learn from the outcomes of earlier jobs, the newest last."""
    known = [outcome for outcome in outcomes if outcome.features]
    if not known:
        return NOTHING_LEARNED
    step, no_step = learn([Point(features=one.features, log_error=one.log_step_error) for one in known])
    peaks = [(one, one.log_memory_error) for one in known]
    measured = [Point(features=one.features, log_error=error) for one, error in peaks if error is not None]
    memory, no_memory = learn(measured) if measured else (None, "")
    notes = [_note("Step times", step, no_step), _note("Peaks of memory", memory, no_memory)]
    return Corrections(step=step, memory=memory, notes=tuple(note for note in notes if note))


def _note(what: str, residual: Residual | None, why_not: str) -> str:
    if residual is None:
        return f"{what} are not corrected by earlier outcomes on these machines: {why_not}." if why_not else ""
    return (
        f"{what} are corrected by {len(residual.log_error_N)} earlier outcomes on these machines, each predicted by "
        f"the others to {residual.error_after:.1%} instead of {residual.error_before:.1%}; layouts unlike them are not "
        f"taken to do better."
    )


class CorrectedPredictor(Predictor):
    """Prices layouts as the Predictor does, times what was learned for such layouts."""

    def __init__(self, job: Job, measurements: Measurements, corrections: Corrections = NOTHING_LEARNED) -> None:
        super().__init__(job, measurements)
        self._corrections = corrections
        self._factors: dict[Layout, float] = {}
        self._stages = MeasuredStages(job, measurements)

    @property
    def least_factor(self) -> float:
        """No layout's step is multiplied with less; 0 where something was learned: nothing bounds that from below."""
        return 1.0 if self._corrections.step is None else 0.0

    @property
    def corrects_memory(self) -> bool:
        """Whether earlier outcomes change predicted peaks, of one layout more than of another."""
        return self._corrections.memory is not None

    def factor(self, layout: Layout) -> float:
        """What a layout's step is multiplied with."""
        if layout not in self._factors:
            self._factors[layout] = self._learned(self._corrections.step, layout, careful=False)
        return self._factors[layout]

    def memory_factor(self, layout: Layout) -> float:
        """What a layout's predicted peaks are multiplied with: about one measured peak of six is higher, not of two."""
        return self._learned(self._corrections.memory, layout, careful=True)

    def _learned(self, residual: Residual | None, layout: Layout, *, careful: bool) -> float:
        """What earlier outcomes say of a figure of such layouts; 1 where nothing was learned."""
        if residual is None:
            return 1.0
        devices = self._measurements.cluster.devices_per_host
        features = features_of(self._job, layout, devices_per_host=devices)
        found = residual.correction(features)
        if found is None:
            return residual.unlike(features)
        return found.careful_factor if careful else found.factor

    def step_time(self, layout: Layout, placement: Sequence[int], schedule: Schedule | None = None) -> StepTime:
        """Predict the step; what was learned is a part of its own, below 0 where steps were shorter than predicted."""
        step, factor = super().step_time(layout, placement, schedule), self.factor(layout)
        if factor == 1.0:
            return step
        total_s = step.total_s * factor
        return StepTime(total_s=total_s, breakdown_s={**step.breakdown_s, LEARNED: total_s - step.total_s})

    def placement_cost(self, layout: Layout, schedule: Schedule | None = None) -> PlacementCost:
        """Return what prices placements of this layout, as `step_time` does."""
        return super().placement_cost(layout, schedule).times(self.factor(layout))

    def bound_s(self, layout: Layout) -> float:
        """No placement of this layout is faster: the factor is the same for all of them."""
        return super().bound_s(layout) * self.factor(layout)

    def peaks(self, layout: Layout) -> tuple[int, ...]:
        """Peak bytes of the model's tensors on each pipeline rank, as measured where the warm-up ran the stage.

        Raises:
            LayoutError: the layout cuts the layers or the batch unevenly.

        """
        factor = self.memory_factor(layout)
        predicted = [math.ceil(parts.total * factor) for parts in peak_memory_bytes(self._job, layout)]
        return self._stages.peaks(layout, predicted)

    def all_peaks(self, layouts: Sequence[Layout]) -> tuple[tuple[int, ...], ...]:
        """Return `peaks` of many layouts, far faster than one by one."""
        totals = peak_memory_columns(self._job, LayoutColumns.of(layouts)).totals()
        return tuple(
            self._stages.peaks(layout, [math.ceil(total * factor) for total in stages])
            for layout, stages, factor in zip(layouts, totals, map(self.memory_factor, layouts), strict=True)
        )

    def fullest_N(self, columns: LayoutColumns, *, live: float = 1.0) -> NDArray[np.float64]:
        """Return the largest of the `peaks` of each of many layouts, as floats.

        Args:
            columns: the layouts.
            live: the part of the activations under Megatron's own schedule that another schedule keeps; below 1 the
                prediction stands, whatever was measured of a stage.

        """
        if not len(columns):
            return np.zeros(0)
        found = peak_memory_columns(self._job, columns)
        total_S = replace(found.parts_S, activations=np.ceil(live * found.parts_S.activations).astype(np.int64)).total
        fullest_N = np.maximum.reduceat(total_S, found.starts_N).astype(np.float64)
        if self.corrects_memory:
            fullest_N *= np.array([self.memory_factor(columns.layout(row)) for row in range(len(columns))])
        if live < 1:
            return fullest_N
        for layout in self._stages.layouts:
            rows = columns.rows_of(layout)
            if len(rows):
                fullest_N[rows] = max(self.peaks(layout))
        return fullest_N

    def memory_correction(self, layout: Layout) -> float:
        """The peak of the fullest stage over its closed form: what was learned, or what measuring it showed."""
        if layout not in self._stages.layouts:
            return self.memory_factor(layout)
        peaks = self.peaks(layout)
        fullest = peaks.index(max(peaks))
        return max(peaks) / peak_memory_bytes(self._job, layout)[fullest].total

    def notes(self, layout: Layout) -> tuple[str, ...]:
        """Say what the prices of a layout rest on."""
        return (*super().notes(layout), *self._stages.notes(layout))
