"""AMP's partition of the layers, against brute force and by hand."""

import itertools
from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rivals import amp
from benchmarks.rivals.inputs import UnitPrices
from pipette_launch.errors import FactError
from pipette_launch.facts import Batch, Job, Layout


def brute_force(seconds: list[float], stages: int) -> float:
    """Least largest sum over every way to cut."""
    cuts = itertools.combinations(range(1, len(seconds)), stages - 1)
    return min(max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cut, len(seconds)))) for cut in cuts)


def own_cut(job: Job, layout: Layout, hosts: int) -> tuple[int, ...]:
    """AMP's cut of a job's layers on hosts of one device."""
    return amp.own_cut(
        job, layout, UnitPrices(job, tiny_measurements(tiny_cluster(hosts, 1))).in_torchrun_order(layout)
    )


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

    assert (3, 3, 2) == own_cut(job, Layout(pp=3), 3)


def test_one_micro_batch_or_one_stage_is_cut_evenly() -> None:
    """The program is not run for them."""
    job = replace(tiny_job(2), batch=Batch(global_batch_size=1))

    assert () == own_cut(job, Layout(pp=2), 2)
    assert () == own_cut(tiny_job(2), Layout(dp=2), 2)
