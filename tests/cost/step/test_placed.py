"""Placements priced side by side."""

from __future__ import annotations

import random
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import drawn_cluster, drawn_fits, tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.communication.groups import Groups
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Batch, ComputeTime, Job, Layout, Links, Measurements, Samples

DENSE = replace(tiny_job(8), batch=Batch(global_batch_size=16))
MOE = replace(
    DENSE,
    model=tiny_model(num_experts=4, moe_layer_freq=(0, 1, 0, 1)),
    performance_flags=("--moe-token-dispatcher-type alltoall",),
)
LAYOUTS = (
    (DENSE, Layout(dp=8, use_distributed_optimizer=True)),
    (DENSE, Layout(tp=2, dp=4)),
    (DENSE, Layout(pp=2, dp=4)),
    (DENSE, Layout(tp=2, pp=2, dp=2, sequence_parallel=True)),
    (DENSE, Layout(pp=2, cp=2, dp=2, use_tp_pp_dp_mapping=True)),
    (DENSE, Layout(pp=2, vpp=2, dp=4, overlap_grad_reduce=True, use_distributed_optimizer=True)),
    (
        DENSE,
        Layout(pp=2, vpp=2, dp=4, overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True),
    ),
    (DENSE, Layout(tp=2, pp=4)),
    (MOE, Layout(dp=8, ep=4)),
    (MOE, Layout(tp=2, pp=2, dp=2, ep=2, etp=1, sequence_parallel=True)),
)


def measured(rng: random.Random, *, flat: bool) -> Measurements:
    """Four hosts of two, of unequal links and speeds or all alike, with some groups measured."""
    base = tiny_measurements(tiny_cluster(4, 2) if flat else drawn_cluster(rng, hosts=4, devices=2))
    sample = Samples(values_s=(2e-3,))
    experts = tuple(
        ComputeTime(case=case, part="moe_layer", slot=0, forward=sample, input_grad=sample, weight_grad=sample)
        for case in base.compute_cases()
    )
    fits = () if flat else drawn_fits(rng)
    return replace(base, compute=base.compute + experts, collectives=fits, optimizer_s_per_parameter=1e-9)


@given(case=st.sampled_from(LAYOUTS), seed=st.integers(0, 10**6), flat=st.booleans())
def test_many_placements_at_once_cost_what_each_costs(case: tuple[Job, Layout], seed: int, flat: bool) -> None:
    """The same digits as one by one, and as the step time that is told by its parts."""
    job, layout = case
    rng = random.Random(seed)
    predictor = Predictor(job, measured(rng, flat=flat))
    placements = [rng.sample(range(8), 8) for _ in range(5)]
    placements.append(placements[0])
    cost = predictor.placement_cost(layout)

    costs = cost.costs(np.array(placements)).tolist()

    assert [cost.cost(placement) for placement in placements] == costs
    assert [predictor.step_time(layout, placement).total_s for placement in placements] == costs


def test_no_placements_cost_nothing() -> None:
    """An empty batch has no costs."""
    cost = Predictor(DENSE, measured(random.Random(0), flat=True)).placement_cost(Layout(dp=8))

    assert [] == cost.costs(np.zeros((0, 8), dtype=np.int64)).tolist()


def test_a_factor_multiplies_every_cost() -> None:
    """What was learned of a layout is on each placement's cost, alone or among others."""
    cost = Predictor(DENSE, measured(random.Random(0), flat=False)).placement_cost(Layout(pp=2, dp=4))
    dearer = cost.times(1.5)
    placement = np.arange(8)

    assert cost.cost(placement) * 1.5 == dearer.cost(placement) == dearer.costs(placement[None])[0]
    assert cost is cost.times(1.0)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, cp=2, pp=2, dp=2), Layout(dp=8, ep=4), Layout(tp=2, dp=4, ep=4, etp=1)]
)
def test_the_groups_that_meet_in_a_cell(layout: Layout) -> None:
    """Each cell is priced by all groups that its ranks are in, and by no other."""
    groups = Groups.of(layout)

    for ranks_GK in (groups.tp, groups.cp, groups.ep, groups.etp, groups.ep_etp):
        met = groups.met_PDL(ranks_GK)
        for pp, dp in np.ndindex(layout.pp, layout.dp):
            inside = {g for g, ranks in enumerate(ranks_GK) if set(ranks) & set(groups.grid_PDCT[pp, dp].ravel())}
            assert inside == set(met[pp, dp].tolist())


def test_ten_thousand_slots_are_priced_without_a_matrix_of_all_pairs() -> None:
    """1,280 hosts of eight: some tens of MB where a matrix of all slots would take 800 MB, and below half a second."""
    cluster = tiny_cluster(2, 8)
    rng = np.random.default_rng(0)
    rates = rng.uniform(1e9, 2e9, (1280, 1280))
    cluster = replace(
        cluster,
        hosts=tuple(replace(cluster.hosts[0], name=f"node{index}") for index in range(1280)),
        between_hosts=Links(latency_s=np.full((1280, 1280), 1e-5), bandwidth_bytes_per_s=rates),
        within_host=cluster.within_host[:1] * 1280,
        slot_speed=(1.0,) * 10240,
    )
    job = replace(DENSE, model=tiny_model(num_layers=16), batch=Batch(global_batch_size=1280))
    predictor = Predictor(job, tiny_measurements(cluster))
    layout = Layout(tp=4, pp=8, dp=320, sequence_parallel=True, use_distributed_optimizer=True)
    placement = np.arange(1280 * 8).reshape(1280, 8)[rng.permutation(1280)].ravel()

    tracemalloc.start()
    started_s = time.process_time()
    cost_s = predictor.placement_cost(layout).cost(placement)
    took_s = time.process_time() - started_s
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert cost_s > predictor.bound_s(layout)
    assert took_s < 0.5
    assert peak_bytes < 100e6
