"""What a task of the search finds depends on the task alone, and what cannot win is not priced."""

from __future__ import annotations

from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from search.toys import never
from search.worlds import two_racks

from pipette_launch.facts import Batch, Layout
from pipette_launch.search.candidates import Field
from pipette_launch.search.tasks import Task, Tried, perform


def test_a_task_finds_the_same_whatever_was_done_before_it() -> None:
    """Several layouts, priced and improved in one order and backwards, each time from memos of their own."""
    job = tiny_job(4, own=Layout(pp=4), batch=Batch(global_batch_size=8))
    layouts = [Layout(pp=4), Layout(pp=2, dp=2), Layout(dp=4), Layout(tp=2, pp=2)]

    def field() -> Field:
        return Field.of(job, tiny_measurements(two_racks()), memory_margin=0.08)

    def found(order: list[Layout], shared: Field) -> dict[Layout, tuple[Tried, Tried]]:
        results = {}
        for layout in order:
            first = perform(shared, Task(stage="price", layout=layout), seed=3, is_late=never)
            task = Task(stage="improve", layout=layout, placement=first.placement, cost_s=first.cost_s)
            results[layout] = (first, perform(shared, task, seed=3, is_late=never))
        return results

    assert found(layouts, field()) == found(layouts[::-1], field())


def test_what_cannot_win_is_not_priced() -> None:
    """A layout whose bound is no better than what is to be beaten comes back with its bound alone."""
    field = Field.of(tiny_job(4), tiny_measurements(tiny_cluster()), memory_margin=0.08)
    layout = field.job.own
    bound_s = field.predictor.bound_s(layout)
    beaten, priced = (
        perform(field, Task(stage="price", layout=layout, beat_s=seconds), seed=0, is_late=never)
        for seconds in (bound_s, 2 * bound_s)
    )

    assert Tried(bound_s=bound_s) == beaten
    assert priced.is_priced
    assert priced.cost_s == field.predictor.placement_cost(layout).cost(priced.placement) <= priced.host_order_s
