"""The work of a search can be shared among processes, and what comes of it is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from search.toys import never
from search.worlds import PROVENANCE, still, two_racks

from pipette_launch.facts import Batch, Layout, Plan
from pipette_launch.search.candidates import Field
from pipette_launch.search.solve import SolveOptions, solve
from pipette_launch.search.tasks import Task, TaskRunner, Tried, alone, perform


def shared_by(size: int, *, seed: int) -> object:
    """A crew of so many members, each of which knows nothing but its own field and its share of every batch."""

    def make(field: Field) -> TaskRunner:
        fields = [Field.of(field.job, field.measurements, memory_margin=field.memory_margin) for _ in range(size)]

        def crew(tasks: Sequence[Task]) -> list[Tried | None]:
            found: list[Tried | None] = [None] * len(tasks)
            for member, own in enumerate(fields):
                # Backwards, so that no task can lean on the one before it.
                for index in reversed(range(member, len(tasks), size)):
                    found[index] = perform(own, tasks[index], seed=seed, is_late=never)
            return found

        return crew

    return make


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_plan_is_the_same_whoever_shares_the_work(size: int) -> None:
    """One process and any number of them choose the same layout, placement, runners-up and floor."""
    job = tiny_job(4, own=Layout(pp=4), batch=Batch(global_batch_size=8))
    measurements = tiny_measurements(two_racks())

    def planned(**crew: object) -> Plan:
        plan = solve(
            job,
            measurements,
            options=SolveOptions(seed=3),
            clock=still,
            provenance=PROVENANCE,
            **crew,  # type: ignore[arg-type]
        )
        return replace(plan, solve_s=0.0)

    assert planned() == planned(make_crew=shared_by(size, seed=3))


def test_what_cannot_win_is_not_priced() -> None:
    """A layout whose bound is no better than what is to be beaten comes back with its bound alone."""
    field = Field.of(tiny_job(4), tiny_measurements(tiny_cluster()), memory_margin=0.08)
    layout = field.job.own
    bound_s = field.predictor.bound_s(layout)
    crew = alone(field, seed=0, clock=still, deadline_s=1.0)
    beaten, priced = crew([Task(stage="price", layout=layout, beat_s=seconds) for seconds in (bound_s, 2 * bound_s)])

    assert Tried(bound_s=bound_s) == beaten
    assert priced is not None
    assert priced.is_priced
    assert priced.cost_s == field.predictor.placement_cost(layout).cost(priced.placement) <= priced.host_order_s


def test_without_time_nothing_is_begun() -> None:
    """A crew that is late returns nothing for each task."""
    field = Field.of(tiny_job(4), tiny_measurements(tiny_cluster()), memory_margin=0.08)
    crew = alone(field, seed=0, clock=still, deadline_s=0.0)

    assert [None, None] == crew([Task(stage="price", layout=field.job.own)] * 2)
