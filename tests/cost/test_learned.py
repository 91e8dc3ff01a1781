"""Factors learned from earlier jobs, and the error that two predicted steps may have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements

from pipette_launch.cost.learned import (
    LEARNED,
    NOTHING_LEARNED,
    CorrectedPredictor,
    Corrections,
    corrections_from,
)
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Batch, Layout, Samples
from pipette_launch.facts.layout import LayoutColumns
from pipette_launch.facts.outcome import Outcome, PeakReading

JOB = tiny_job(4, batch=Batch(global_batch_size=32))
MEASURED = tiny_measurements(tiny_cluster())
LAYOUTS = [
    Layout(tp=tp, pp=pp, dp=4 // (tp * pp), micro_batch_size=mbs)
    for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))
    for mbs in (1, 2, 4)
]


def outcome(layout: Layout, *, step: float = 1.2, memory: float | None = 1.1, **changes: object) -> Outcome:
    """A run with these ratios of measured to predicted step and memory."""
    peak = PeakReading(
        rank=0, pp_rank=0, predicted_bytes=1_000_000, measured_bytes=int(1e6 * (memory or 0)), source="allocator"
    )
    made = Outcome(
        key="k",
        layout=layout,
        placement=(0, 1, 2, 3),
        predicted_step_s=1.0,
        measured_step=Samples(values_s=(step,)),
        first_iteration=1,
        last_iteration=20,
        losses=(),
        configuration_digest=layout.words(),
        peaks=(peak,) if memory else (),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def taught() -> Corrections:
    """Every layout took a fifth longer and a tenth more memory."""
    return corrections_from([outcome(layout) for layout in LAYOUTS])


def test_nothing_recorded_changes_nothing() -> None:
    """Without outcomes every figure is the model's, and there are no notes."""
    plain, same = Predictor(JOB, MEASURED), CorrectedPredictor(JOB, MEASURED)

    for layout in LAYOUTS:
        assert plain.step_time(layout, range(4)) == same.step_time(layout, range(4))
        assert plain.bound_s(layout) == same.bound_s(layout)
        assert tuple(parts.total for parts in peak_memory_bytes(JOB, layout)) == same.peaks(layout)
    assert NOTHING_LEARNED is corrections_from([])
    assert () == NOTHING_LEARNED.notes


def test_outcomes_of_earlier_releases_teach_nothing() -> None:
    """Outcomes without a digest describe no configuration."""
    assert NOTHING_LEARNED is corrections_from([outcome(layout, configuration_digest="") for layout in LAYOUTS])


def test_a_learned_correction_scales_time_bound_and_objective_alike() -> None:
    """The parts still sum to the step, the objective equals it to the digit, and the bound stays a bound."""
    plain, corrected = Predictor(JOB, MEASURED), CorrectedPredictor(JOB, MEASURED, taught())

    for layout in LAYOUTS:
        step = corrected.step_time(layout, range(4))
        assert 1.2 == pytest.approx(step.total_s / plain.step_time(layout, range(4)).total_s, rel=1e-9)
        assert step.total_s == pytest.approx(sum(step.breakdown_s.values()))
        assert step.breakdown_s[LEARNED] > 0
        assert step.total_s == corrected.placement_cost(layout).cost(range(4))
        assert corrected.bound_s(layout) <= step.total_s * (1 + 1e-12)


def test_memory_is_corrected_by_at_least_the_mean() -> None:
    """One standard deviation is added to the mean, so equal outcomes give their own ratio."""
    layout = Layout(dp=4)
    equal = CorrectedPredictor(JOB, MEASURED, taught())
    spread = corrections_from([outcome(each, memory=1.1 if number % 2 else 1.2) for number, each in enumerate(LAYOUTS)])

    assert equal.peaks(layout)[0] == pytest.approx(1.1 * peak_memory_bytes(JOB, layout)[0].total, rel=1e-6)
    assert spread.memory is not None
    assert spread.memory.factor == pytest.approx((1.1 * 1.2) ** 0.5)
    assert 1.19 < spread.memory.careful_factor < 1.21


def test_a_predicted_peak_is_never_lowered() -> None:
    """Jobs that needed less memory than predicted lower nothing; shorter steps lower the predicted step."""
    lean = CorrectedPredictor(
        JOB, MEASURED, corrections_from([outcome(each, step=0.8, memory=0.8) for each in LAYOUTS])
    )

    assert lean.memory_factor == 1.0
    assert lean.step_factor == pytest.approx(0.8)


def test_all_peaks_are_the_peaks_of_each() -> None:
    """`all_peaks` returns the peaks in the order of the layouts, with and without a correction."""
    layouts = [Layout(dp=4), Layout(pp=2, dp=2), Layout(dp=4, use_distributed_optimizer=True)]

    for corrections in (NOTHING_LEARNED, taught()):
        predictor = CorrectedPredictor(JOB, MEASURED, corrections)
        assert tuple(predictor.peaks(layout) for layout in layouts) == predictor.all_peaks(layouts)
        assert predictor.all_peaks([]) == ()
        # The search drops layouts by `fullest_N`, to the byte.
        fullest = [max(peaks) for peaks in predictor.all_peaks(layouts)]
        assert fullest == predictor.fullest_N(LayoutColumns.of(layouts)).tolist()


def test_all_jobs_on_the_machines_share_one_factor() -> None:
    """Every layout of every model gets the same factor, so a correction never changes the order of two layouts."""
    other = replace(JOB, model=replace(JOB.model, num_layers=8))

    for job in (JOB, other):
        corrected = CorrectedPredictor(job, MEASURED, taught())
        assert corrected.step_factor == pytest.approx(1.2)
        assert corrected.memory_factor == pytest.approx(1.1)


def test_the_newest_outcome_of_a_configuration_replaces_the_older_ones() -> None:
    """Twenty runs of one layout count as one configuration, with the error of the last run."""
    again = [outcome(LAYOUTS[0], step=2.0)] * 20 + [outcome(layout) for layout in LAYOUTS[:4]]
    learned = corrections_from(again)

    assert learned.step is not None
    assert pytest.approx(1.2) == learned.step.factor
    assert "learned from 4 earlier outcomes" in learned.notes[0]


def test_errors_without_a_common_part_correct_nothing() -> None:
    """Errors that are as often positive as negative are not better predicted by their mean."""
    mixed = corrections_from(
        [outcome(each, step=1.2 if number % 2 else 1 / 1.2, memory=None) for number, each in enumerate(LAYOUTS)]
    )

    assert mixed.step is None
    assert "predicting each run from the others leaves" in mixed.notes[0]


def test_the_notes_report_what_was_learned() -> None:
    """The notes give the number of outcomes and the error that is left, or the reason why nothing was learned."""
    few = corrections_from([outcome(layout, memory=None) for layout in LAYOUTS[:3]])

    assert (
        (
            "Step times are not corrected by earlier outcomes on these machines: 4 different configurations are "
            "needed, and 3 were measured."
        ),
    ) == few.notes
    assert (None, None) == (few.step, few.memory)
    assert (
        "Step times are multiplied by 1.200, learned from 18 earlier outcomes on these machines; each is predicted by "
        "the others to 0.0% instead of 18.2%."
    ) == taught().notes[0]


def test_a_corrected_prediction_teaches_by_what_it_was_before() -> None:
    """A run predicted 1.2 times longer by correction, and measured so, still says that the model is 1.2 too short."""
    made = outcome(Layout(dp=4), step=1.2, predicted_step_s=1.2, step_correction=1.2)

    assert outcome(Layout(dp=4), step=1.2).log_step_error == pytest.approx(made.log_step_error)
    assert 0.0 == made.error
