"""AMP's model: its partition against brute force, terms by hand, and what it cannot see."""

import itertools
from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.baselines import amp
from pipette_launch.errors import FactError, PlanError
from pipette_launch.facts import Batch, Layout, Links, Recompute


def brute_force(seconds: list[float], stages: int) -> float:
    """Least largest sum over every way to cut."""
    cuts = itertools.combinations(range(1, len(seconds)), stages - 1)
    return min(max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cut, len(seconds)))) for cut in cuts)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_the_partition_is_the_best_there_is(seconds: list[float], data: st.DataObject) -> None:
    """Its slowest stage is as fast as the best of all cuts, and every layer is on one stage."""
    stages = data.draw(st.integers(1, len(seconds)))
    parts = amp.partition(seconds, stages)
    bounds = [0, *itertools.accumulate(parts)]

    assert stages == len(parts)
    assert len(seconds) == bounds[-1]
    assert min(parts) >= 1
    assert brute_force(seconds, stages) == max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("stages", [0, 3])
def test_more_stages_than_layers_are_refused(stages: int) -> None:
    """Two layers make one stage or two."""
    with pytest.raises(FactError, match="2 layers cannot make"):
        amp.partition([1.0, 1.0], stages)


def test_a_heavy_head_gets_fewer_layers() -> None:
    """Eight layers of 1 ms, a head of 0.5 ms: [3 3 2] puts 3.1, 3.0 and 2.5 ms on the stages."""
    job = tiny_job(3, model=replace(tiny_job(3).model, num_layers=8))
    layout = amp.own_partition(job, Layout(pp=3), tiny_measurements(tiny_cluster(3, 1)))

    assert (3, 3, 2) == layout.layers_per_chunk


def test_one_micro_batch_or_one_stage_is_cut_evenly() -> None:
    """The program is not run for them."""
    measured = tiny_measurements(tiny_cluster(2, 1))
    job = replace(tiny_job(2), batch=Batch(global_batch_size=1))

    assert () == amp.own_partition(job, Layout(pp=2), measured).layers_per_chunk
    assert () == amp.own_partition(tiny_job(2), Layout(dp=2), measured).layers_per_chunk


def test_a_pipeline_by_hand() -> None:
    """Stages of 3 * 2.1 and 3 * 2.5 ms, two micro-batches, 8,192 bytes over the cut once."""
    job = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    seconds = amp.step_time_s(job, Layout(pp=2), tiny_measurements(tiny_cluster(2, 1)))

    assert seconds == pytest.approx(7.5e-3 + 6.3e-3 + 7.5e-3 + 8192 / 1e8)


def test_replicas_by_hand() -> None:
    """Two passes of 3 * 4.6 ms and a ring of 4 * (h*V + 4 * 12h^2) bytes."""
    seconds = amp.step_time_s(tiny_job(2), Layout(dp=2), tiny_measurements(tiny_cluster(2, 1)))

    assert seconds == pytest.approx(2 * 13.8e-3 + 4 * (64 * 256 + 4 * 12 * 64 * 64) / 1e8)


def test_links_are_known_by_node_only() -> None:
    """One slow link of three is not seen: each node still has a fast one. A node that is slow to all is."""

    def links(slow: set[tuple[int, int]]) -> Links:
        rates = tuple(
            tuple(0.0 if i == j else 1e7 if (i, j) in slow or (j, i) in slow else 1e8 for j in range(3))
            for i in range(3)
        )
        return Links(latency_s=((0.0,) * 3,) * 3, bandwidth_bytes_per_s=rates)

    job = tiny_job(3)
    plain = tiny_cluster(3, 1)
    one_link, one_node = (replace(plain, between_hosts=links(slow)) for slow in ({(0, 1)}, {(0, 1), (0, 2)}))
    times = [amp.step_time_s(job, Layout(dp=3), tiny_measurements(c)) for c in (plain, one_link, one_node)]

    assert times[0] == times[1] < times[2]


def test_it_is_blind_to_memory_and_recompute() -> None:
    """The largest micro-batch on the largest model is priced like any other, and recompute costs nothing."""
    full = Recompute(granularity="full", method="uniform", num_layers=1)
    small = tiny_cluster(2, 1, memory_bytes=1)
    measured = tiny_measurements(small)

    plain = amp.step_time_s(tiny_job(2), Layout(dp=2, micro_batch_size=2), measured)

    assert plain == amp.step_time_s(tiny_job(2), Layout(dp=2, micro_batch_size=2, recompute=full), measured)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(cp=2, dp=2), "context parallelism"),
        (Layout(dp=4, ep=2), "expert parallelism"),
        (Layout(pp=2, dp=2, vpp=2), "interleaved schedule"),
    ],
)
def test_what_it_does_not_know_is_refused(layout: Layout, words: str) -> None:
    """Both pricing and cutting say so."""
    measured = tiny_measurements(tiny_cluster(2, 2))

    for function in (amp.step_time_s, amp.own_partition):
        with pytest.raises(PlanError, match=f"AMP has no {words}"):
            function(tiny_job(4), layout, measured)
