"""The drawn figures agree with the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_measurements
from pages import drawn
from search.worlds import pipeline_job, planned, two_racks

from pipette_launch.planning.picture import DrawnStep, picture_of, steps_elsewhere_s


def test_the_drawn_step_is_as_long_as_the_plans() -> None:
    """Both drawn steps, with the parts after the last backward, are as long as the plan's."""
    found = drawn()

    assert found.picture.own is not None
    for step, choice in ((found.picture.chosen, found.plan.chosen), (found.picture.own, found.plan.own)):
        assert step.total_s == pytest.approx(choice.step_time_s, rel=1e-3)
        assert max(step.microbatch_A) + 1 == choice.layout.num_microbatches(16)


def test_passes_of_a_rank_do_not_overlap() -> None:
    """Each pass starts after the previous one, and lasts at least as long as its exchanges."""
    step = picture_of(planned(pipeline_job()), pipeline_job(), tiny_measurements(two_racks())).chosen
    for rank in range(step.pp):
        rows = [index for index, one in enumerate(step.rank_A) if one == rank]
        ends = [0.0, *(step.end_s_A[index] for index in rows)]
        assert all(end_s <= step.start_s_A[index] + 1e-12 for end_s, index in zip(ends, rows, strict=False))
        for index in rows:
            exposed_s = step.exposed_s_S[step.stage_A[index]][step.kind_A[index] != "F"]
            assert exposed_s <= step.end_s_A[index] - step.start_s_A[index]


def test_memory_by_kind_sums_to_what_the_plan_says() -> None:
    """The kinds sum to the plan's need on every pipeline rank."""
    found = drawn()

    needs = tuple(sum(kinds.values()) for kinds in found.picture.memory_bytes)
    assert needs == found.plan.chosen.memory.need_bytes


def test_learned_corrections_are_in_the_picture() -> None:
    """A correction that doubles the step doubles the drawn step."""
    found = drawn()
    longer = replace(found.plan.chosen, step_time_s=2 * found.plan.chosen.step_time_s, step_correction=2.0)
    picture = picture_of(replace(found.plan, chosen=longer), found.job, found.measurements)

    assert picture.chosen.makespan_s == pytest.approx(2 * found.picture.chosen.makespan_s)


def test_an_own_configuration_that_stays_is_drawn_once() -> None:
    """Drawing it twice would add nothing."""
    job = replace(tiny_job(), pinned=tuple(type(tiny_job().own).__slots__))
    measurements = tiny_measurements(two_racks())
    made = planned(job, measurements)

    assert made.keeps_own
    assert picture_of(made, job, measurements).own is None


def test_figures_of_a_step() -> None:
    """A step with two passes of one rank and an optimizer, computed by hand."""
    step = DrawnStep(
        pp=1,
        rank_A=(0, 0),
        stage_A=(0, 0),
        kind_A=("F", "B"),
        microbatch_A=(0, 0),
        start_s_A=(0.0, 1.5),
        end_s_A=(1.0, 3.5),
        exposed_s_S=((0.25, 0.5),),
        after_s=(("optimizer", 0.5),),
    )

    assert 3.5 == step.makespan_s
    assert 4.0 == step.total_s


def test_an_order_elsewhere_is_priced_beside_the_plan() -> None:
    """The plan's own order takes the plan's step time, with corrections, and torchrun's order takes the user's."""
    found = drawn()
    plan = replace(found.plan, chosen=replace(found.plan.chosen, step_time_s=2 * found.plan.chosen.step_time_s))
    orders = [plan.chosen.placement, range(4)]
    first_s, torchruns_s = steps_elsewhere_s(plan, found.job, found.measurements, orders)

    assert first_s == pytest.approx(plan.chosen.step_time_s)
    assert torchruns_s > first_s
