"""No placement beats the bound, and on hosts with slow links the bound is near the best placement."""

import itertools
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import drawn_cluster, drawn_fits, tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from search.worlds import on_gpus

from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import (
    Batch,
    Cluster,
    ComputeCase,
    ComputeTime,
    Layout,
    Links,
    Measurements,
    Samples,
)
from pipette_launch.search.slots import Slots
from pipette_launch.search.worst_hosts import worst_hosts_bound_s

SHAPES = [(2, 1), (4, 1), (5, 1), (6, 1), (2, 2), (3, 2), (2, 3), (1, 4), (1, 6)]
STYLES = ["drawn", "islands", "slow host", "noisy"]
PERMUTATIONS = {slots: np.array(list(itertools.permutations(range(slots)))) for slots in (2, 4, 5, 6)}
"""Of six slots the tests with drawn machines take every seventh."""
EXPERTS: dict[str, object] = {"num_experts": 4, "moe_layer_freq": (0, 1) * 6, "moe_ffn_hidden_size": 128}

SHARDINGS: tuple[tuple[str, ...], ...] = (
    (),
    ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params"),
)


def cluster_of(hosts: int, devices: int, style: str, rng: random.Random) -> Cluster:
    """Machines whose links differ in some way."""
    if style == "drawn":
        return drawn_cluster(rng, hosts=hosts, devices=devices)

    def rate(one: int, other: int) -> float:
        if style == "islands":
            return 1e9 if one % 2 == other % 2 else 1e7
        if style == "slow host":
            return 1e7 if 0 in {one, other} else 1e9
        return 1e8 * rng.uniform(0.8, 1.2)

    rates = [[rate(one, other) for other in range(hosts)] for one in range(hosts)]
    links = Links(latency_s=np.full((hosts, hosts), 1e-5), bandwidth_bytes_per_s=rates)
    return replace(tiny_cluster(hosts, devices), between_hosts=links) if hosts > 1 else tiny_cluster(hosts, devices)


def measurements_of(cluster: Cluster, rng: random.Random) -> Measurements:
    """Every tp of up to seven, parts of drawn times, now and then with measured collectives."""
    cases = tuple(ComputeCase(tp=tp, cp=1, micro_batch_size=1) for tp in range(1, 8))
    scale = rng.choice((1e-5, 1e-4, 1e-3))
    parts = {part: rng.uniform(0.3, 3) * scale for part in ("layer", "moe_layer", "embedding", "head")}
    compute = tuple(
        ComputeTime(case=case, part=part, slot=0, forward=each, input_grad=each, weight_grad=each)  # type: ignore[arg-type]
        for case in cases
        for part, seconds in parts.items()
        for each in (Samples(values_s=(seconds / case.tp,)),)
    )
    fits = drawn_fits(rng) if cluster.num_slots >= 4 and rng.random() < 0.3 else ()
    return replace(tiny_measurements(cluster, cases), compute=compute, collectives=fits, optimizer_s_per_parameter=1e-9)


def layout_of(slots: int, rng: random.Random, *, experts: bool) -> Layout:
    """Any layout of twelve layers on so many slots."""

    def divisor(number: int) -> int:
        return rng.choice([each for each in range(1, number + 1) if number % each == 0])

    tp = divisor(slots)
    pp = rng.choice([each for each in (1, 2, 3, 4, 6) if slots // tp % each == 0])
    cp = divisor(slots // tp // pp)
    dp = slots // (tp * pp * cp)
    sharded = rng.random() < 0.5
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=rng.choice([each for each in (1, 2, 4) if slots // pp % each == 0]) if experts else 1,
        vpp=rng.choice((1, 2)) if pp in {2, 3} else 1,
        micro_batch_size=rng.choice([each for each in (1, 5) if 60 % (dp * each) == 0]),
        sequence_parallel=tp > 1 and rng.random() < 0.5,
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=rng.random() < 0.3,
        overlap_param_gather=sharded and rng.random() < 0.3,
    )


def model_of(experts: bool) -> dict[str, object]:
    """Twelve narrow layers that any tp up to six divides."""
    wide = {"num_layers": 12, "hidden_size": 192, "num_attention_heads": 12, "num_query_groups": 12}
    return {**wide, **(EXPERTS if experts else {})}


@settings(max_examples=40)
@given(
    st.sampled_from(SHAPES), st.sampled_from(STYLES), st.booleans(), st.booleans(), st.randoms(use_true_random=False)
)
def test_no_placement_beats_the_bound(
    shape: tuple[int, int], style: str, experts: bool, gpus: bool, rng: random.Random
) -> None:
    """All placements of up to five slots, some of six, on GPUs those allowed; none is below that of the best links."""
    cluster = cluster_of(*shape, style, rng)
    cluster = on_gpus(cluster) if gpus else cluster
    flags = ("--moe-token-dispatcher-type alltoall",) if rng.random() < 0.5 else ()
    flags += rng.choice(SHARDINGS)
    job = tiny_job(cluster.num_slots, model=tiny_model(**model_of(experts)), performance_flags=flags)
    predictor = Predictor(replace(job, batch=Batch(global_batch_size=60)), measurements_of(cluster, rng))
    layout = layout_of(cluster.num_slots, rng, experts=experts)
    model = predictor.placement_cost(layout)

    bound_s = worst_hosts_bound_s(model)

    every = PERMUTATIONS[cluster.num_slots]
    every = every[[Slots.of(cluster).allows(placement) for placement in every]]
    assert bound_s <= model.costs(every if len(every) <= 120 else every[::7]).min() * (1 + 1e-12)


def bounds_and_best(cluster: Cluster, layout: Layout) -> tuple[float, float, float]:
    """The bound of the best links everywhere, the bound of the worst hosts, and the best of all placements."""
    job = replace(tiny_job(cluster.num_slots, model=tiny_model(**model_of(False))), batch=Batch(global_batch_size=12))
    predictor = Predictor(job, measurements_of(cluster, random.Random(1)))
    model = predictor.placement_cost(layout)
    best_s = float(model.costs(PERMUTATIONS[cluster.num_slots]).min())
    return predictor.bound_s(layout), worst_hosts_bound_s(model), best_s


@pytest.mark.parametrize("layout", [Layout(dp=6), Layout(cp=6), Layout(tp=2, dp=3), Layout(pp=2, dp=3)])
def test_a_slow_host_is_in_some_group(layout: Layout) -> None:
    """One of six hosts is slow: at least four fifths of the way from the bound of the best links to the best step."""
    best_links_s, worst_hosts_s, best_s = bounds_and_best(cluster_of(6, 1, "slow host", random.Random(0)), layout)

    assert worst_hosts_s - best_links_s >= 0.8 * (best_s - best_links_s) > 0


def test_every_large_group_has_a_rank_on_some_slow_host() -> None:
    """Four of six hosts are slow, and groups of three have a rank on some of them, whichever hosts they leave out."""
    slow_HH = np.array([[1e7 if max(one, other) > 1 else 1e9 for other in range(6)] for one in range(6)])
    links = Links(latency_s=np.full((6, 6), 1e-5), bandwidth_bytes_per_s=slow_HH)
    cluster = replace(tiny_cluster(6, 1), between_hosts=links)

    best_links_s, worst_hosts_s, best_s = bounds_and_best(cluster, Layout(tp=3, dp=2))

    assert worst_hosts_s - best_links_s >= 0.8 * (best_s - best_links_s) > 0


def test_a_slow_slot_of_the_worst_host_counts() -> None:
    """One slot at half speed on the host with slow links: some stage has both."""
    cluster = replace(cluster_of(2, 2, "noisy", random.Random(0)), slot_speed=(1.0, 1.0, 0.5, 1.0))
    _, worst_hosts_s, best_s = bounds_and_best(cluster, Layout(dp=4))

    assert worst_hosts_s == pytest.approx(best_s, rel=0.2)
    assert worst_hosts_s <= best_s * (1 + 1e-12)


def test_a_single_host_has_no_slow_links() -> None:
    """Its bound is 0 s, and the bound of the best links remains."""
    assert bounds_and_best(tiny_cluster(1, 4), Layout(tp=2, dp=2))[1] == 0.0


def test_a_factor_is_the_bounds_too() -> None:
    """What was learned of a layout multiplies every placement's time, and the bound."""
    job = replace(tiny_job(), batch=Batch(global_batch_size=8))
    model = Predictor(job, tiny_measurements(tiny_cluster())).placement_cost(Layout(dp=4))

    assert worst_hosts_bound_s(model.times(2.0)) == pytest.approx(2 * worst_hosts_bound_s(model))


def test_sixty_four_hosts_are_quick() -> None:
    """512 slots, each link of its own: well under the five seconds that a slow machine may take."""
    rng = np.random.default_rng(0)
    links = Links(latency_s=np.full((64, 64), 1e-5), bandwidth_bytes_per_s=1e9 * rng.uniform(0.5, 1, (64, 64)))
    cluster = replace(tiny_cluster(64, 8), between_hosts=links)
    job = replace(tiny_job(512, model=tiny_model(num_layers=8)), batch=Batch(global_batch_size=1024))
    predictor = Predictor(job, tiny_measurements(cluster))
    layout = Layout(tp=4, pp=8, dp=16)
    started_s = time.process_time()

    bound_s = worst_hosts_bound_s(predictor.placement_cost(layout))

    assert time.process_time() - started_s < 5
    assert bound_s > predictor.bound_s(layout)


def test_the_latency_of_one_direction_and_the_bandwidth_of_the_other_are_not_one_link() -> None:
    """From host 0 to host 1 messages start late and run fast; back they start at once and run slowly."""
    links = Links(latency_s=[[0.0, 1.0], [1e-5, 0.0]], bandwidth_bytes_per_s=[[0.0, 1e12], [1e7, 0.0]])

    _, bound_s, best_s = bounds_and_best(replace(tiny_cluster(2, 1), between_hosts=links), Layout(dp=2))

    assert bound_s <= best_s * (1 + 1e-12)
