"""Among plans that count as equally fast the simplest is chosen, and the plan says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_measurements
from search.worlds import planned, two_racks

from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.facts import Layout, Recompute
from pipette_launch.search import choose, explanations
from pipette_launch.search.choose import least_gain, num_axes


def test_axes_are_what_goes_beyond_data_parallelism() -> None:
    """Replicas, micro-batches and flags are no axis; chunks of a pipeline, uneven stages and recompute are one each."""
    flags = Layout(dp=8, micro_batch_size=4, use_distributed_optimizer=True, overlap_grad_reduce=True)
    full = Recompute(granularity="full", method="uniform", num_layers=1)
    exotic = Layout(tp=2, pp=2, vpp=2, layers_per_chunk=(1, 2, 2, 1), microbatch_group_size=4, recompute=full)

    assert 0 == num_axes(flags)
    assert 6 == num_axes(exotic)


def test_the_simplest_of_equally_fast_plans_is_chosen_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """If differences of half a step count as equal, the plan has fewer axes than the fastest; not at margin 0."""
    job, measurements = tiny_job(4, own=Layout(pp=4)), tiny_measurements(two_racks())
    fastest = planned(job, measurements).chosen
    for module in (choose, explanations):
        monkeypatch.setattr(module, "EQUAL", 0.5)
    plan, bold = planned(job, measurements), planned(job, measurements, margin=0.0)

    assert num_axes(plan.chosen.layout) < num_axes(fastest.layout)
    assert fastest.step_time_s < plan.chosen.step_time_s < 1.5 * fastest.step_time_s
    assert plan.chosen.step_time_s < plan.own.step_time_s
    (said,) = [reason for reason in plan.reasons if "count as equal" in reason]
    assert said.startswith(f"{fastest.layout.words()} is predicted ")
    assert fastest.step_time_s == bold.chosen.step_time_s


def test_other_degrees_must_save_more_than_their_predictions_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error of nearly the whole step the user's degrees stay, with the reason; not at margin 0."""
    job, measured = tiny_job(4, own=Layout(pp=4), pinned=("micro_batch_size",)), tiny_measurements(two_racks())
    usual = planned(job, measured)
    monkeypatch.setattr(choose, "DOUBTFUL_GAIN", 0.99)
    careful, bold = planned(job, measured), planned(job, measured, margin=0.0)

    assert usual.chosen.layout.pp < 4
    assert (careful.chosen.layout.pp, careful.chosen.layout.vpp) == (4, 1)
    assert usual.chosen.step_time_s == bold.chosen.step_time_s
    if careful.keeps_own:
        assert any("by which the two predictions may be off" in reason for reason in careful.reasons)


def test_of_placements_that_count_as_equal_torchruns_order_is_chosen_and_said() -> None:
    """Not at margin 0, nor where the plan saves enough of the user's own step only if it is placed by the links."""
    pinned = ("tp", "pp", "cp", "use_distributed_optimizer", "overlap_grad_reduce", "recompute")
    own = Layout(pp=2, dp=2, micro_batch_size=2, use_distributed_optimizer=True)
    job, measured = tiny_job(4, own=own, pinned=pinned), tiny_measurements(two_racks(slow_bytes_per_s=8e8))
    fastest = planned(job, measured, margin=0.0)
    plan = planned(job, measured)
    gains = [1 - one.chosen.step_time_s / one.own.step_time_s for one in (plan, fastest)]
    strict = planned(job, measured, margin=sum(gains) / 2)

    assert gains[0] < gains[1] < gains[0] + choose.EQUAL
    assert plan.chosen.layout == fastest.chosen.layout != own
    assert plan.chosen.is_host_order
    assert not fastest.chosen.is_host_order
    assert [True] == [
        "too little to leave torchrun's order" in reason
        for reason in plan.reasons
        if "placement by the links" in reason
    ]
    assert plan.chosen.layout not in [one.layout for one in plan.alternatives]
    assert strict.chosen.placement == fastest.chosen.placement


OWN = Layout(tp=2, dp=2)
OTHER_BATCH, OTHER_DEGREES = replace(OWN, micro_batch_size=2), Layout(pp=2, dp=2)


@pytest.mark.parametrize(
    ("layout", "measured", "expected"),
    [
        (OWN, (OWN,), 0.02),
        (OTHER_BATCH, (OWN, OTHER_BATCH), 0.02),
        (OTHER_BATCH, (OWN,), 0.06),
        (OTHER_BATCH, (OTHER_BATCH,), 0.06),
        (OTHER_DEGREES, (OWN, OTHER_DEGREES), 0.06),
        (OTHER_DEGREES, (), 0.02),
    ],
)
def test_a_doubtful_prediction_must_save_more(layout: Layout, measured: tuple[Layout, ...], expected: float) -> None:
    """Equal degrees with measured times need the margin; if nothing was measured, all predictions are alike."""
    cases = frozenset(map(case_of, measured))

    assert expected == least_gain(layout, OWN, cases, 0.02)
    assert max(expected, 0.1) == least_gain(layout, OWN, cases, 0.1)
    assert 0.0 == least_gain(layout, OWN, cases, 0.0)
