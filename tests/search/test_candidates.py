"""Memory limits, prices of single layouts, and distances of layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, with_one_full
from search.toys import never
from search.worlds import on_gpus, two_racks

from pipette_launch.facts import Batch, Layout
from pipette_launch.facts.layout import LayoutColumns
from pipette_launch.facts.measurements import DeviceOverhead
from pipette_launch.search.candidates import Candidate, Promising, SearchInputs, doublings_apart, limits_N

GIB = 1 << 30


def test_the_limit_leaves_margin_and_overhead() -> None:
    """A quarter of 8 GiB stays free, and communicators and context take 1 GiB."""
    measurements = replace(tiny_measurements(tiny_cluster(memory_bytes=8 * GIB)), overhead_bytes=GIB)

    assert SearchInputs.of(tiny_job(), measurements, memory_margin=0.25).limit_bytes(Layout(dp=4)) == 5 * GIB


def test_memory_that_another_process_holds_is_not_ours() -> None:
    """The device with least free memory sets the limit for all."""
    measurements = tiny_measurements(with_one_full(tiny_cluster(memory_bytes=8 * GIB), 3 * GIB))

    assert SearchInputs.of(tiny_job(), measurements, memory_margin=0.25).limit_bytes(Layout(dp=4)) == 2.25 * GIB


def test_on_gpus_the_limit_leaves_the_allocators_reserve_too() -> None:
    """1 GiB of 8 GiB is context; the rest is divided by 1.03, and 64 MiB are workspaces."""
    measurements = replace(tiny_measurements(on_gpus(tiny_cluster(memory_bytes=8 * GIB))), overhead_bytes=GIB)
    limit = SearchInputs.of(tiny_job(), measurements, memory_margin=0.0).limit_bytes(Layout(dp=4))

    assert int(7 * GIB / 1.03) - (64 << 20) == limit


def test_many_limits_are_those_of_each_layout() -> None:
    """Communicators of 100 MiB each: virtual stages and a distributed optimizer open more of them."""
    apart = DeviceOverhead(alone_bytes=GIB, together_bytes=GIB + (400 << 20), num_communicators=4, workspace_bytes=0)
    measurements = replace(tiny_measurements(on_gpus(tiny_cluster(memory_bytes=8 * GIB))), overhead=apart)
    layouts = [
        Layout(dp=4),
        Layout(dp=4, use_distributed_optimizer=True),
        Layout(pp=2, dp=2),
        Layout(pp=2, dp=2, vpp=2),
        Layout(dp=4, micro_batch_size=2),
    ]

    def limit(layout: Layout) -> int:
        return SearchInputs.of(tiny_job(), measurements, memory_margin=0.0).limit_bytes(layout)

    found = limits_N(tiny_job(), LayoutColumns.of(layouts), limit).tolist()

    assert [limit(layout) for layout in layouts] == found
    assert 4 == len(set(found))


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (Layout(dp=4), Layout(dp=4), 0.0),
        (Layout(dp=4), Layout(tp=4), 4.0),
        (Layout(dp=4), Layout(dp=4, use_distributed_optimizer=True), 1.0),
        (Layout(dp=4), Layout(dp=4, micro_batch_size=8), 3.0),
    ],
)
def test_distance_counts_doublings(one: Layout, other: Layout, apart: float) -> None:
    """Each doubling of a degree counts one, and so does each other field."""
    assert doublings_apart(one, other) == doublings_apart(other, one) == apart


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
            first = shared.price(promising(shared, layout))
            assert isinstance(first, Candidate)
            results[layout] = (first, shared.with_better_placement(first, seed=3, is_late=never))
        return results

    assert found(layouts) == found(layouts[::-1])


def test_what_cannot_win_is_not_priced() -> None:
    """A layout whose bound cannot beat the given step time gets no price."""
    inputs = SearchInputs.of(tiny_job(4), tiny_measurements(tiny_cluster()), memory_margin=0.08)
    layout = inputs.job.own
    bound_s = inputs.predictor.bound_s(layout)
    one = promising(inputs, layout)
    beaten, priced = (inputs.price(one, beat_s=seconds) for seconds in (bound_s, 2 * bound_s))

    assert beaten is None
    assert priced is not None
    placed = priced.placed
    assert placed.cost_s == inputs.predictor.placement_cost(layout).cost(placed.placement) <= priced.host_order_s
