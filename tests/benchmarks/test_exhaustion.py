"""The benchmark of exhaustion prices each placement once, and only rotated rings stand for each other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bench_exhaustion import placements
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Batch, Layout, Links
from pipette_launch.search.slots import Slots

LAYOUTS_OF_6 = [Layout(dp=6), Layout(pp=6), Layout(pp=3, dp=2), Layout(tp=2, etp=2, dp=3), Layout(tp=2, etp=2, pp=3)]


@pytest.mark.parametrize("layout", LAYOUTS_OF_6, ids=Layout.words)
def test_symmetry_leaves_one_of_each_kind(layout: Layout) -> None:
    """Turning the data- and tensor-parallel rings is all that the enumeration saves."""
    slots = Slots(num_hosts=6, devices_per_host=1, keeps_residues=False)
    found = list(placements(layout, slots))

    assert len(set(found)) == len(found) == 720 // (layout.dp * layout.tp)


def test_residues_leave_fewer_placements() -> None:
    """Two hosts of two GPUs: of six ways to share four ranks four keep residues apart."""
    layout, slots = Layout(pp=2, dp=2), Slots(num_hosts=2, devices_per_host=2, keeps_residues=True)

    assert 4 == len(list(placements(layout, slots)))
    assert 6 == len(list(placements(layout, replace(slots, keeps_residues=False))))


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(LAYOUTS_OF_6), st.integers(0, 1000), st.integers(0, 5), st.integers(0, 1))
def test_turning_the_rings_changes_nothing(layout: Layout, seed: int, dp: int, tp: int) -> None:
    """The symmetry that the enumeration relies on holds for the real objective, on unequal links."""
    rng = random.Random(seed)
    links = Links(
        latency_s=tuple(tuple(0.0 if i == j else rng.uniform(1e-5, 1e-3) for j in range(6)) for i in range(6)),
        bandwidth_bytes_per_s=tuple(
            tuple(0.0 if i == j else rng.uniform(1e7, 1e9) for j in range(6)) for i in range(6)
        ),
    )
    job = tiny_job(6, model=tiny_model(num_layers=6), batch=Batch(global_batch_size=12))
    cost = (
        Predictor(job, tiny_measurements(replace(tiny_cluster(6, 1), between_hosts=links))).placement_cost(layout).cost
    )
    placement = tuple(rng.sample(range(6), 6))
    cells = [layout.cell_of(rank) for rank in placement]
    turned = tuple(
        layout.rank_of(cell._replace(dp=(cell.dp + dp) % layout.dp, tp=(cell.tp + tp) % layout.tp)) for cell in cells
    )

    assert cost(turned) == pytest.approx(cost(placement), rel=1e-12)


def test_expert_groups_forbid_turning() -> None:
    """With expert parallelism every placement is tried."""
    layout = Layout(dp=4, ep=2)

    assert len(list(placements(layout, Slots(num_hosts=4, devices_per_host=1, keeps_residues=False)))) == 24
