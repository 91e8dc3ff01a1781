"""Correction of predictions by the outcomes of earlier jobs on the same machines, and the error of a prediction."""

# Letters of array axes: G = groups of one dimension, K = members of a group, W = ranks = slots.

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.exchanges import collective_dimensions
from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.memory.overhead import MeasuredStages
from pipette_launch.cost.memory.peak import peak_memory_bytes, peak_memory_columns
from pipette_launch.cost.step.assemble import LAUNCHING, StepTime
from pipette_launch.cost.step.predictor import PlacementCost, Predictor
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout, LayoutColumns
from pipette_launch.facts.measurements import LAYERS, ComputeCase, ComputeTime, Measurements
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

ERRORS_APART = 2.0
"""Number of standard errors by which two steps must differ to count as different."""
MODELLED_ERROR = 0.1
"""Relative error of a layer's time that was carried over from another case. On reserved CPU cores, times of layers were
predicted from cases with equal tp and 0.5 to 8 times the tokens. The errors of these predictions were -24 to +14 %,
with a root mean square of 12 %. On GPUs no warm-up has been compared. The device model alone, which knows no measured
case, is 6 % off in the mean for published steps of dense models on GPUs, and 11 % with experts."""
CARRIED_ERROR = 0.2
"""Relative error of a collective's time that was carried over from another kind or group size. The collective times of
18 warm-ups on four hosts over gloo were predicted from groups of other sizes or kinds. The root mean square error of
these predictions was 14 % from 1 MB on, and 23 % with messages of 100 KB included. All-reduces of 1 MiB to 1 GiB on 2
to 8 A100 with NVSwitch give 14 % too (vTrain's table, from each size of group to each other). On V100 without a switch
groups of different sizes have different links, and half of the errors exceed 60 %."""
SHAPE_ERROR = 0.06
"""Relative error between predicted steps of layouts with different degrees. The value comes from 36 predicted ratios of
another layout's step to the user's own step, on four CPU hosts over gloo with six networks and three models. The 36
predicted ratios were 6 % too small in the mean. The median error of the 36 ratios was 5 %, and their root mean square
error was 10 %. On GPUs only predictions without measurements have been compared: the lead of one published layout over
another is 4.5 % off in the mean for dense models, and 13 % with experts."""
COMPUTED = ("compute", "recompute", LAUNCHING, "bubble")
"""Parts of a step that grow with the compute times."""


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

    The newest outcome of a configuration replaces its older outcomes. Outcomes of old releases are left out, because
    their files do not describe the measured configuration.
    """
    newest: dict[tuple[tuple[str, float], ...], Outcome] = {}
    for outcome in outcomes:
        if outcome.features:
            key = tuple(sorted(outcome.features.items()))
            newest.pop(key, None)
            newest[key] = outcome
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


def features_of(job: Job, layout: Layout, *, devices_per_host: int) -> dict[str, float]:
    """Return numbers by name that describe a job and a layout; sizes are given as log2."""
    model = job.model
    degrees = ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch_size")
    sizes = {name: int(getattr(layout, name)) for name in degrees}
    sizes["num_microbatches"] = layout.num_microbatches(job.batch.global_batch_size)
    sizes |= {name: getattr(model, name) for name in ("num_layers", "hidden_size", "seq_length", "vocab_size")}
    sizes |= {"num_experts": model.num_experts or 1, "tp_over_hosts": -(-layout.tp // devices_per_host)}
    switches = {
        "sequence_parallel": layout.sequence_parallel,
        "distributed_optimizer": layout.use_distributed_optimizer,
        "overlap": layout.overlap_grad_reduce,
        "selective_recompute": layout.recompute.granularity == "selective",
        "full_recompute": layout.recompute.granularity == "full",
        "fp32": model.params_dtype == "fp32",
    }
    found = {name: math.log2(size) for name, size in sizes.items()}
    return found | {name: float(value) for name, value in switches.items()}


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


class Uncertainty:
    """Error of predicted steps due to few samples, or to times that were measured on other shapes."""

    def __init__(self, job: Job, table: ComputeTable, measurements: Measurements) -> None:
        self._job, self._table = job, table
        self._devices = measurements.cluster.devices_per_host
        self._domain = Domains.of(measurements.cluster).smallest
        self._collectives = {
            (one.kind, len(one.slots), self._lies_across(np.array([one.slots]))) for one in measurements.group_times
        }
        layers: dict[ComputeCase, list[ComputeTime]] = {}
        for time in measurements.compute:
            if time.part in LAYERS:
                layers.setdefault(time.case, []).append(time)
        # For each compute case: relative standard error of the mean over the slots, and True if a device model made the
        # time.
        self._errors = {
            case: (math.hypot(*map(_scatter, times)) / len(times), any(time.source == "modelled" for time in times))
            for case, times in layers.items()
        }
        self._has_measured = not all(is_modelled for _, is_modelled in self._errors.values())

    @property
    def differs(self) -> bool:
        """True if some predicted steps may rest on better measurements than other predicted steps."""
        return self._has_measured or bool(self._collectives)

    def carried_s(self, layout: Layout, placement: Sequence[int], parts_s: Mapping[str, float]) -> float:
        """Return the standard error of a step, in seconds, due to times that were carried over from other shapes.

        The standard error is 0 s if all times were measured. The part of the error from compute is also 0 s if the
        device model carried over all times of layers, because then all steps are equally uncertain. `placement` has the
        RANK of each slot, and `parts_s` has the parts of the step (`StepTime.breakdown_s`).
        """
        _, is_modelled = self._errors.get(case_of(layout), (0.0, True))
        computed_s = _computed_s(parts_s) if self._has_measured and is_modelled else 0.0
        slot_W = np.argsort(np.array(placement, dtype=np.int64))
        # Parts of the step with a collective that was not measured on a group of equal size and equal spread over
        # hosts.
        parts = {
            part
            for one in (collective_dimensions(self._job, layout, self._domain) if self._collectives else ())
            for kind in one.kinds
            if (kind, one.ranks_GK.shape[1], self._lies_across(slot_W[one.ranks_GK])) not in self._collectives
            for part in one.parts
        }
        return math.hypot(MODELLED_ERROR * computed_s, CARRIED_ERROR * sum(parts_s.get(name, 0.0) for name in parts))

    def _lies_across(self, slots_GK: NDArray[np.int64]) -> bool:
        hosts_GK = slots_GK // self._devices
        return bool((hosts_GK != hosts_GK[:, :1]).any())

    def shape_error(self, one: Layout, other: Layout) -> float:
        """Return the relative error between two predicted steps due to different degrees.

        The relative error is 0 if the device model carried over all times of layers from other shapes.
        """
        degrees = {(layout.tp, layout.pp, layout.cp, layout.ep, layout.vpp) for layout in (one, other)}
        return SHAPE_ERROR if self._has_measured and len(degrees) > 1 else 0.0

    def have_same_source(self, one: Layout, other: Layout) -> bool:
        """Return True if both layouts use the same compute times, so that both steps have the same error."""
        return self._table.source(case_of(one)) == self._table.source(case_of(other))

    def chance_s(self, *steps: tuple[Layout, Mapping[str, float]]) -> float:
        """Return the seconds by which two predicted steps may differ by chance; 0 if both use the same compute times.

        If the device model predicted the times of both steps, the device model's error cancels and is left out. Each
        predicted step is a pair: its layout, and the seconds of its parts (`StepTime.breakdown_s`).
        """
        if self.have_same_source(*(layout for layout, _ in steps)):
            return 0.0
        found = []
        for layout, parts_s in steps:
            case = case_of(layout)
            source = self._table.source(case)
            error, is_modelled = self._errors.get(source, (0.0, False)) if source else (0.0, False)
            # The time of a compute case is also carried over if its source (`ComputeTable.source`) is another case.
            found.append((error, is_modelled or source != case, _computed_s(parts_s)))
        own_error = 0.0 if all(is_modelled for _, is_modelled, _ in found) else MODELLED_ERROR
        errors_s = [math.hypot(error, own_error * is_modelled) * seconds for error, is_modelled, seconds in found]
        return ERRORS_APART * math.hypot(*errors_s)


def _computed_s(parts_s: Mapping[str, float]) -> float:
    return sum(parts_s.get(name, 0.0) for name in COMPUTED)


def _scatter(time: ComputeTime) -> float:
    """Return the standard error of the seconds of all passes of a layer on one slot, divided by these seconds."""
    passes = (time.forward, time.input_grad, time.weight_grad)
    whole_s = sum(one.median_s for one in passes)
    return math.hypot(*(one.median_error_s for one in passes)) / whole_s if whole_s else 0.0
