"""What fits, what comes first, and how far layouts lie apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, with_one_full
from search.worlds import on_gpus

from pipette_launch.facts import DeviceOverhead, Layout
from pipette_launch.facts.layout import LayoutColumns
from pipette_launch.search.candidates import doublings_apart, limits_N, memory_limit_bytes

GIB = 1 << 30


def test_the_limit_leaves_margin_and_overhead() -> None:
    """Of 8 GiB a quarter stays free, and 1 GiB is what communicators and context took."""
    measurements = replace(tiny_measurements(tiny_cluster(memory_bytes=8 * GIB)), overhead_bytes=GIB)

    assert memory_limit_bytes(tiny_job(), Layout(dp=4), measurements, memory_margin=0.25) == 5 * GIB


def test_memory_that_another_process_holds_is_not_ours() -> None:
    """The device with least free memory sets the limit for all."""
    measurements = tiny_measurements(with_one_full(tiny_cluster(memory_bytes=8 * GIB), 3 * GIB))

    assert memory_limit_bytes(tiny_job(), Layout(dp=4), measurements, memory_margin=0.25) == 2.25 * GIB


def test_on_gpus_the_limit_leaves_the_allocators_reserve_too() -> None:
    """Of 8 GiB 1 GiB is context; the rest is divided by 1.03, and 64 MiB of it are workspaces."""
    measurements = replace(tiny_measurements(on_gpus(tiny_cluster(memory_bytes=8 * GIB))), overhead_bytes=GIB)
    limit = memory_limit_bytes(tiny_job(), Layout(dp=4), measurements, memory_margin=0.0)

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
        return memory_limit_bytes(tiny_job(), layout, measurements, memory_margin=0.0)

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
