"""What all of them are priced on is what ours is priced on."""

from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from hypothesis import given
from hypothesis import strategies as st
from published import llama_7b

from benchmarks.rivals.inputs import UnitPrices, slot_of_rank
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.errors import PlanError
from pipette_launch.facts import Layout

CLUSTER = tiny_cluster(2, 2)
MEASURED = tiny_measurements(CLUSTER)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_stages_add_up_as_ours_do(pp: int, micro_batch_size: int) -> None:
    """Without tensor parallelism a stage takes what `ComputeTable` says of its chunk."""
    job, layout = tiny_job(4), Layout(pp=pp, dp=4 // pp, micro_batch_size=micro_batch_size)
    found = UnitPrices(job, MEASURED).in_torchrun_order(layout)
    forward, backward = found.stages_s(layout.stage_layers(4))
    passes = ComputeTable(job, MEASURED).chunk_passes(layout)

    assert forward == pytest.approx([chunk.forward_s for chunk in passes])
    assert backward == pytest.approx([chunk.backward_s for chunk in passes])


def test_tensor_parallel_collectives_are_inside() -> None:
    """Over all units they are what our own prediction spends on them."""
    job, layout = tiny_job(4), Layout(tp=2, dp=2)
    found = UnitPrices(job, MEASURED).in_torchrun_order(layout)
    compute = ComputeTable(job, MEASURED).chunk_passes(layout)[0]
    ours = Predictor(job, MEASURED).step_time(layout, range(4)).breakdown_s["tensor_parallel"]
    inside = found.forward_s_U.sum() + found.backward_s_U.sum() - compute.forward_s - compute.backward_s

    assert inside * layout.num_microbatches(8) == pytest.approx(ours)


def test_recompute_is_nobodys_forward() -> None:
    """Units say what one forward and one backward take; who recomputes adds a forward himself."""
    job = llama_7b()
    measured = tiny_measurements(tiny_cluster(1, 8))
    plain = Layout(pp=4, dp=2)
    full = replace(plain, recompute=replace(plain.recompute, granularity="full", method="uniform", num_layers=1))
    slots = slot_of_rank(plain, measured, None)
    one, other = (UnitPrices(job, measured).of(layout, slots).backward_s_U for layout in (plain, full))

    assert one == pytest.approx(other)


def test_a_placement_is_turned_around() -> None:
    """It says the RANK of each slot; asked for is the slot of each RANK."""
    assert [3, 0, 1, 2] == slot_of_rank(Layout(dp=4), MEASURED, [1, 2, 3, 0]).tolist()
    assert np.arange(4).tolist() == slot_of_rank(Layout(dp=4), MEASURED, None).tolist()


@pytest.mark.parametrize("placement", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4]])
def test_an_impossible_placement_is_refused(placement: list[int]) -> None:
    """Every RANK once, no other."""
    with pytest.raises(PlanError, match="every RANK from 0 to 3 once"):
        slot_of_rank(Layout(dp=4), MEASURED, placement)


def test_a_layout_of_another_size_is_refused() -> None:
    """Two ranks do not fill four slots."""
    with pytest.raises(PlanError, match="2 ranks for the 4 slots"):
        slot_of_rank(Layout(dp=2), MEASURED, None)
