"""What must hold for the step time on every cluster and placement, and for its bound."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import drawn_cluster, drawn_fits, tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import (
    Batch,
    Cluster,
    ComputeCase,
    ComputeTime,
    Job,
    Layout,
    Links,
    Measurements,
    Recompute,
    Samples,
)

FULL = Recompute(granularity="full", method="uniform", num_layers=1)
ALLTOALL = ("--moe-token-dispatcher-type alltoall",)
FOUR = (
    Layout(dp=4),
    Layout(tp=2, dp=2),
    Layout(tp=2, pp=2),
    Layout(pp=2, dp=2),
    Layout(pp=2, dp=2, use_tp_pp_dp_mapping=True, micro_batch_size=2),
    Layout(pp=4),
    Layout(pp=2, vpp=2, dp=2, overlap_grad_reduce=True, use_distributed_optimizer=True),
    Layout(pp=2, dp=2, overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True),
    Layout(pp=2, vpp=2, dp=2, overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True),
    Layout(tp=2, pp=2, sequence_parallel=True, recompute=FULL),
    Layout(cp=2, dp=2),
    Layout(cp=2, pp=2, use_distributed_optimizer=True),
)
EXPERTS = (
    Layout(dp=4, ep=4),
    Layout(dp=4, ep=2, use_distributed_optimizer=True),
    Layout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True),
    Layout(pp=2, dp=2, ep=2),
    Layout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
)


def job(world_size: int = 4, **changes: object) -> Job:
    """Sixteen samples a step."""
    return tiny_job(world_size, **({"batch": Batch(global_batch_size=16)} | changes))


def expert_job() -> Job:
    """Layers 1 and 3 have four experts."""
    return job(model=tiny_model(num_experts=4, moe_layer_freq=(0, 1, 0, 1)), performance_flags=ALLTOALL)


def measurements(cluster: Cluster, **changes: object) -> Measurements:
    """All compute cases, expert layers too, and an optimizer that costs something."""
    base = tiny_measurements(cluster)
    sample = Samples(values_s=(2e-3,))
    experts = tuple(
        ComputeTime(case=case, part="moe_layer", slot=0, forward=sample, input_grad=sample, weight_grad=sample)
        for case in base.compute_cases()
    )
    return replace(base, compute=base.compute + experts, optimizer_s_per_parameter=1e-9, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("this", "layout"),
    [(job(), layout) for layout in FOUR] + [(expert_job(), layout) for layout in EXPERTS],
    ids=lambda value: value.words() if isinstance(value, Layout) else "",
)
def test_no_placement_beats_the_bound(this: Job, layout: Layout) -> None:
    """All 24 placements of four slots on drawn clusters, with and without measured collectives."""
    rng = random.Random(layout.words())
    for fits in (False, True):
        cluster = drawn_cluster(rng)
        predictor = Predictor(this, measurements(cluster, collectives=drawn_fits(rng) if fits else ()))
        cost = predictor.placement_cost(layout).cost

        best_s = min(cost(placement) for placement in itertools.permutations(range(4)))

        assert 0 < predictor.bound_s(layout) <= best_s * (1 + 1e-12)


@pytest.mark.parametrize("layout", [Layout(pp=3, dp=2), Layout(tp=2, pp=3), Layout(tp=3, pp=2)], ids=Layout.words)
def test_no_placement_of_six_slots_beats_the_bound(layout: Layout) -> None:
    """All 720 placements of three hosts with two slots each."""
    rng = random.Random(6)
    this = replace(job(6), model=tiny_model(num_layers=6, num_attention_heads=6, num_query_groups=6))
    cluster = drawn_cluster(rng, hosts=3)
    cases = tuple(ComputeCase(tp=tp, cp=1, micro_batch_size=1) for tp in (1, 2, 3))
    predictor = Predictor(replace(this, batch=Batch(global_batch_size=6)), tiny_measurements(cluster, cases))
    cost = predictor.placement_cost(layout).cost

    best_s = min(cost(placement) for placement in itertools.permutations(range(6)))

    assert predictor.bound_s(layout) <= best_s * (1 + 1e-12)


def test_the_bound_is_met_where_all_links_are_equal() -> None:
    """One host, equal slots: every placement is the best."""
    predictor = Predictor(job(), measurements(tiny_cluster(1, 4)))

    for layout in FOUR:
        assert predictor.bound_s(layout) == pytest.approx(predictor.step_time(layout, range(4)).total_s)


@given(st.sampled_from(FOUR + EXPERTS), st.permutations(range(4)), st.randoms())
def test_the_objective_is_the_step_time(layout: Layout, placement: list[int], rng: random.Random) -> None:
    """To the last digit; and the parts sum to it."""
    predictor = Predictor(expert_job(), measurements(drawn_cluster(rng), collectives=drawn_fits(rng)))
    step = predictor.step_time(layout, placement)

    assert step.total_s == predictor.placement_cost(layout).cost(placement)
    assert sum(step.breakdown_s.values()) == pytest.approx(step.total_s, rel=1e-12)
    assert min(step.breakdown_s.values()) >= -1e-12


@given(st.sampled_from(FOUR), st.permutations(range(4)), st.randoms())
def test_a_step_takes_at_least_its_busiest_stage(layout: Layout, placement: list[int], rng: random.Random) -> None:
    """No rank's compute is lost: every stage's passes on the fastest slot fit into the step."""
    cluster = drawn_cluster(rng)
    this = job()
    step_s = Predictor(this, measurements(cluster)).step_time(layout, placement).total_s
    layers = max(layout.stage_layers(4))
    # The case is measured on slot 0: at speed 1 a layer takes 3 ms times that slot's speed, tokens over tp and cp.
    layer_s = 3e-3 * layout.micro_batch_size / (layout.tp * layout.cp) * cluster.slot_speed[0]
    fastest_s = layers * layer_s / max(cluster.slot_speed)

    assert step_s >= layout.num_microbatches(16) * fastest_s


@given(st.sampled_from(FOUR + EXPERTS), st.permutations(range(4)), st.randoms())
def test_renaming_equal_hosts_changes_nothing(layout: Layout, placement: list[int], rng: random.Random) -> None:
    """Two hosts that are alike may swap their places in the plan."""
    within = drawn_cluster(rng).within_host[0]
    cluster = replace(tiny_cluster(2, 2), within_host=(within, within))
    predictor = Predictor(expert_job(), measurements(cluster))

    assert predictor.placement_cost(layout).cost(placement) == predictor.placement_cost(layout).cost(
        [*placement[2:], *placement[:2]]
    )


@given(st.sampled_from(FOUR + EXPERTS), st.permutations(range(4)), st.floats(1.0, 10.0), st.booleans(), st.randoms())
def test_a_slower_link_never_makes_a_step_faster(
    layout: Layout, placement: list[int], factor: float, is_latency: bool, rng: random.Random
) -> None:
    """Whichever link, by latency or by bandwidth."""
    cluster = drawn_cluster(rng)
    links = cluster.between_hosts
    latency, bandwidth = np.array(links.latency_s), np.array(links.bandwidth_bytes_per_s)
    if is_latency:
        latency[0, 1] *= factor
    else:
        bandwidth[0, 1] /= factor
    slower = Links(
        latency_s=tuple(map(tuple, latency.tolist())), bandwidth_bytes_per_s=tuple(map(tuple, bandwidth.tolist()))
    )
    before, after = (
        Predictor(expert_job(), measurements(each)).placement_cost(layout).cost(placement)
        for each in (cluster, replace(cluster, between_hosts=slower))
    )

    assert before <= after * (1 + 1e-12)
