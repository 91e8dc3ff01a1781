"""A learned correction changes the figures of layouts like those that were measured, and of no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements

from pipette_launch.cost.learned.corrected import (
    LEARNED,
    NOTHING_LEARNED,
    CorrectedPredictor,
    Corrections,
    corrections_from,
)
from pipette_launch.cost.learned.residual import features_of
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Batch, Layout, Samples
from pipette_launch.facts.outcome import Outcome, PeakReading

JOB = tiny_job(4, batch=Batch(global_batch_size=32))
MEASURED = tiny_measurements(tiny_cluster())
LAYOUTS = [
    Layout(tp=tp, pp=pp, dp=4 // (tp * pp), micro_batch_size=mbs)
    for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))
    for mbs in (1, 2, 4)
]


def outcome(layout: Layout, *, step: float = 1.2, memory: float | None = 1.1, **changes: object) -> Outcome:
    """A run that took `step` times and held `memory` times what was predicted."""
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
        features=features_of(JOB, layout, devices_per_host=2),
        peaks=(peak,) if memory else (),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def taught() -> Corrections:
    """Every layout took a fifth longer and a tenth more memory."""
    return corrections_from([outcome(layout) for layout in LAYOUTS])


def test_nothing_recorded_changes_nothing() -> None:
    """Without outcomes every figure is the model's, and there is nothing to say."""
    plain, same = Predictor(JOB, MEASURED), CorrectedPredictor(JOB, MEASURED)

    for layout in LAYOUTS:
        assert plain.step_time(layout, range(4)) == same.step_time(layout, range(4))
        assert plain.bound_s(layout) == same.bound_s(layout)
        assert tuple(parts.total for parts in peak_memory_bytes(JOB, layout)) == same.peaks(layout)
    assert NOTHING_LEARNED is corrections_from([])
    assert () == NOTHING_LEARNED.notes


def test_outcomes_of_earlier_releases_teach_nothing() -> None:
    """They have no features."""
    assert NOTHING_LEARNED is corrections_from([outcome(layout, features={}) for layout in LAYOUTS])


def test_a_learned_correction_scales_time_bound_and_objective_alike() -> None:
    """The parts still sum to the step, the objective equals it to the digit, and the bound stays a bound."""
    plain, corrected = Predictor(JOB, MEASURED), CorrectedPredictor(JOB, MEASURED, taught())

    for layout in LAYOUTS:
        step = corrected.step_time(layout, range(4))
        assert 1.2 == pytest.approx(step.total_s / plain.step_time(layout, range(4)).total_s, rel=0.03)
        assert step.total_s == pytest.approx(sum(step.breakdown_s.values()))
        assert step.breakdown_s[LEARNED] > 0
        assert step.total_s == corrected.placement_cost(layout).cost(range(4))
        assert corrected.bound_s(layout) <= step.total_s


def test_memory_is_corrected_carefully() -> None:
    """Peaks grow by at least what was seen."""
    corrected = CorrectedPredictor(JOB, MEASURED, taught())
    plain = peak_memory_bytes(JOB, Layout(dp=4))[0].total

    assert 1.09 * plain <= corrected.peaks(Layout(dp=4))[0] <= 1.2 * plain


def test_all_peaks_are_the_peaks_of_each() -> None:
    """Corrected and not, in the order of the layouts; none for none."""
    layouts = [Layout(dp=4), Layout(pp=2, dp=2), Layout(dp=4, use_distributed_optimizer=True)]

    for corrections in (NOTHING_LEARNED, taught()):
        predictor = CorrectedPredictor(JOB, MEASURED, corrections)
        assert tuple(predictor.peaks(layout) for layout in layouts) == predictor.all_peaks(layouts)
        assert predictor.all_peaks([]) == ()


def test_a_layout_unlike_all_measured_is_not_preferred_for_that() -> None:
    """Its figures grow by the mean error of the measured ones; where those did better than predicted, not at all."""
    unlike = Layout(tp=2, cp=2)
    faster = corrections_from([outcome(layout, step=0.8, memory=0.8) for layout in LAYOUTS])
    taught_to_wait = CorrectedPredictor(JOB, MEASURED, taught())
    taught_to_hope = CorrectedPredictor(JOB, MEASURED, faster)

    assert (1.2, 1.1) == (
        pytest.approx(taught_to_wait.factor(unlike)),
        pytest.approx(taught_to_wait.memory_factor(unlike)),
    )
    assert (1.0, 1.0) == (taught_to_hope.factor(unlike), taught_to_hope.memory_factor(unlike))
    assert taught_to_hope.factor(Layout(dp=4)) < 0.85


def test_another_model_is_not_corrected() -> None:
    """Twice as many layers lie outside of what was measured."""
    other = replace(JOB, model=replace(JOB.model, num_layers=8))
    corrected = CorrectedPredictor(other, MEASURED, taught())

    assert 1.0 == corrected.factor(Layout(dp=4)) == corrected.memory_factor(Layout(dp=4))


def test_what_was_learned_is_said() -> None:
    """How many outcomes, and how well they predict each other; or why nothing was learned."""
    few = corrections_from([outcome(layout, memory=None) for layout in LAYOUTS[:3]])

    assert (
        (
            "Step times are not corrected by earlier outcomes on these machines: 3 different configurations were "
            "measured, and 12 are needed."
        ),
    ) == few.notes
    assert (None, None) == (few.step, few.memory)
    assert [f"{what} are corrected by 18 earlier outcomes" for what in ("Step times", "Peaks of memory")] == [
        note.split(" on these")[0] for note in taught().notes
    ]


def test_a_corrected_prediction_teaches_by_what_it_was_before() -> None:
    """A run predicted 1.2 times longer by correction, and measured so, still says that the model is 1.2 too short."""
    made = outcome(Layout(dp=4), step=1.2, predicted_step_s=1.2, step_correction=1.2)

    assert outcome(Layout(dp=4), step=1.2).log_step_error == pytest.approx(made.log_step_error)
    assert 0.0 == made.error
