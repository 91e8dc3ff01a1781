"""What the search finds for a layout depends on the layout and the seed alone, and what cannot win is not priced."""

from __future__ import annotations

from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from search.toys import never
from search.worlds import two_racks

from pipette_launch.facts import Batch, Layout
from pipette_launch.search.candidates import Candidate, SearchInputs
from pipette_launch.search.frontier import Promising
from pipette_launch.search.pricing import price, with_better_placement


def promising(inputs: SearchInputs, layout: Layout) -> Promising:
    """Return a layout as the frontier hands it out."""
    return Promising(least_s=0.0, number=0, layout=layout, peak_bytes=inputs.predictor.peaks(layout))


def test_a_layout_gets_the_same_result_whatever_was_done_before_it() -> None:
    """Several layouts, priced and improved in one order and backwards, each time from memos of their own."""
    job = tiny_job(4, own=Layout(pp=4), batch=Batch(global_batch_size=8))
    layouts = [Layout(pp=4), Layout(pp=2, dp=2), Layout(dp=4), Layout(tp=2, pp=2)]

    def found(order: list[Layout]) -> dict[Layout, tuple[Candidate, Candidate]]:
        shared = SearchInputs.of(job, tiny_measurements(two_racks()), memory_margin=0.08)
        results = {}
        for layout in order:
            first = price(shared, promising(shared, layout), is_late=never)
            assert isinstance(first, Candidate)
            results[layout] = (first, with_better_placement(shared, first, seed=3, is_late=never))
        return results

    assert found(layouts) == found(layouts[::-1])


def test_what_cannot_win_is_not_priced() -> None:
    """A layout whose bound is no better than what is to be beaten comes back with its bound alone."""
    inputs = SearchInputs.of(tiny_job(4), tiny_measurements(tiny_cluster()), memory_margin=0.08)
    layout = inputs.job.own
    bound_s = inputs.predictor.bound_s(layout)
    one = promising(inputs, layout)
    beaten, priced = (price(inputs, one, beat_s=seconds, is_late=never) for seconds in (bound_s, 2 * bound_s))

    assert isinstance(beaten, Promising)
    assert beaten.least_s == bound_s
    assert isinstance(priced, Candidate)
    placed = priced.placed
    assert placed.cost_s == inputs.predictor.placement_cost(layout).cost(placed.placement) <= priced.host_order_s
