"""Placements: devices stay in order inside hosts, and hosts and single ranks move between hosts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
from facts_for_tests import expert_groups, tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from search.fabrics import cluster_with, fat_tree
from search.problems import starts
from search.test_host_swaps import job_of, moved
from search.toys import OneByOne, after, link_cost, never, random_distances
from search.worlds import ALL_FIELDS, improvements, is_in_device_order, on_gpus, planned

from benchmarks.bench_exhaustion import exhaustion
from pipette_launch.cost.step.predictor import PlacementCost, Predictor
from pipette_launch.facts import Batch, Cluster, Job, Layout, Links
from pipette_launch.facts.cluster import in_device_order
from pipette_launch.search import placement as placement_module
from pipette_launch.search.placement import (
    annealed,
    begin,
    improve,
    neighbour,
    rearranged,
    shuffled,
)
from pipette_launch.search.slots import IsLate, Placed, PlacementProblem, Slots, host_order, tilings

NOISES = (0.005, 0.015, 0.03)


def inside(devices: int, *, fast: tuple[tuple[int, int], ...] = (), noise: float = 0.0, seed: int = 0) -> Links:
    """Links of one host, those of some pairs four times faster than others, each with noise of its own."""
    rng = np.random.default_rng(seed)
    speed_DD = np.full((devices, devices), 1e8)
    for one, other in fast:
        speed_DD[[one, other], [other, one]] *= 4
    speed_DD *= np.exp(rng.normal(0.0, noise, speed_DD.shape))
    return Links(latency_s=np.full_like(speed_DD, 1e-5), bandwidth_bytes_per_s=speed_DD)


def noisy_gpus(seed: int) -> Cluster:
    """Four hosts of four GPUs, in two islands or in none, whose links inside hosts differ by noise alone."""
    noise = NOISES[seed % len(NOISES)]
    speeds = (5e7, 5e6) if seed % 2 else (5e7, 5e7)
    cluster = on_gpus(
        cluster_with(fat_tree(4, sizes=(2,), bytes_per_s=speeds, noise=noise, seed=seed).links, devices=4)
    )
    return replace(cluster, within_host=tuple(inside(4, noise=noise, seed=4 * seed + host) for host in range(4)))


def fast_pairs(hosts: int) -> Cluster:
    """Hosts of four GPUs, two fast links in each."""
    cluster = on_gpus(tiny_cluster(hosts, 4))
    links = tuple(inside(4, fast=((0, 2), (1, 3)), noise=0.01, seed=host) for host in range(hosts))
    return replace(cluster, within_host=links)


def tensor_job(hosts: int) -> Job:
    """Groups of two tensor-parallel ranks, and nothing else allowed."""
    own = Layout(tp=2, etp=2, dp=2 * hosts)
    return tiny_job(4 * hosts, own=own, batch=Batch(global_batch_size=4 * hosts), pinned=frozenset(ALL_FIELDS))


def problem_of(cluster: Cluster) -> PlacementProblem:
    """Pairs of tensor-parallel ranks on a cluster."""
    job = tensor_job(len(cluster.hosts))
    cost = Predictor(job, tiny_measurements(cluster)).placement_cost(job.own)
    return PlacementProblem(layout=job.own, cluster=cluster, objective=cost, bound_s=0.0)


def test_noise_never_permutes_the_devices_of_a_host() -> None:
    """100 seeds: chosen and alternative plans keep device order though some exchange hosts."""
    own = Layout(tp=2, etp=2, pp=2, dp=4)
    pinned = frozenset(ALL_FIELDS) - {"pp", "dp"}
    job = tiny_job(16, own=own, batch=Batch(global_batch_size=32), pinned=pinned)
    plans = [planned(job, tiny_measurements(noisy_gpus(seed)), margin=0.0) for seed in range(100)]
    placements = [choice.placement for plan in plans for choice in (plan.chosen, *plan.alternatives)]

    assert all(is_in_device_order(placement, 4) for placement in placements)
    assert sum(plan.chosen.placement != host_order(16) for plan in plans) > 20


@pytest.mark.parametrize("seed", range(3))
def test_every_round_leaves_devices_in_order(seed: int) -> None:
    """Starts, rounds of hosts and of single ranks, on even links and on uneven ones."""
    for cluster in (noisy_gpus(seed), fast_pairs(4)):
        rounds = improvements(problem_of(cluster), seed=random.Random(seed).randrange(99))

        assert all(is_in_device_order(found.placement, 4) for found in rounds)


def on_links(seed: int) -> OneByOne:
    """Four stages of two replicas on drawn links."""
    return link_cost(Layout(pp=4, dp=2), random_distances(8, random.Random(seed)))


def run(objective: OneByOne, *, seed: int = 0, is_late: Callable[[], bool] = never) -> Placed:
    """Anneal from torchrun's order."""
    order = host_order(8)
    problem = PlacementProblem(layout=Layout(pp=4, dp=2), cluster=tiny_cluster(8, 1), objective=objective, bound_s=0.0)
    start = Placed(placement=order, cost_s=objective.cost(order))
    return annealed(problem, start, rng=random.Random(seed), is_late=is_late)


@given(st.integers(0, 1000), st.integers(1, 60))
def test_it_never_returns_worse_than_its_start(seed: int, asked: int) -> None:
    """Whatever the links and the time, the result costs what is said, and at most what the start did."""
    objective = on_links(seed)
    found = run(objective, seed=seed, is_late=after(asked))

    assert objective.cost(found.placement) == found.cost_s <= objective.cost(host_order(8))


@given(st.integers(0, 100), st.integers(1, 30), st.integers(0, 30))
def test_more_time_is_never_worse(seed: int, short: int, more: int) -> None:
    """The same seed walks the same way, and only further."""
    objective = on_links(seed)

    assert run(objective, is_late=after(short + more)).cost_s <= run(objective, is_late=after(short)).cost_s


def test_it_climbs_out_of_a_valley() -> None:
    """From a start all of whose neighbours cost more it comes to a better placement."""

    def cost(placement: tuple[int, ...]) -> float:
        num_moved = sum(rank != slot for slot, rank in enumerate(placement))
        return 100.0 if num_moved == 0 else 100.05 if num_moved == 2 else 99.0

    assert 99.0 in [run(OneByOne(cost), seed=seed).cost_s for seed in range(8)]


def test_the_same_arguments_give_the_same_walk() -> None:
    """No global chance is used."""
    random.seed(1)
    first = run(on_links(3), seed=7)
    random.seed(2)

    assert first == run(on_links(3), seed=7)


def test_a_past_deadline_returns_the_start() -> None:
    """Without time nothing is tried, and nothing is lost."""
    assert host_order(8) == run(on_links(0), is_late=after(0)).placement


def cost_of(layout: Layout, cluster: Cluster) -> PlacementCost:
    """The step time of eight layers on a cluster, experts in all of them where the layout has expert groups."""
    experts: dict[str, object] = {"num_experts": 8, "moe_layer_freq": (1,) * 8} if layout.ep > 1 else {}
    measured = tiny_measurements(cluster)
    moe = tuple(replace(one, part="moe_layer") for one in measured.compute if one.part == "layer")
    return Predictor(job_of(layout, **experts), replace(measured, compute=measured.compute + moe)).placement_cost(
        layout
    )


def noisy(hosts: int, devices: int, *, seed: int = 0, rack: int = 4, gpus: bool = False) -> Cluster:
    """Racks four times faster inside, 20 % of noise."""
    fabric = fat_tree(hosts, sizes=(rack,), bytes_per_s=(2e8, 5e7), noise=0.2, seed=seed)
    cluster = cluster_with(fabric.links, devices=devices)
    return on_gpus(cluster) if gpus else cluster


def host_problem_of(layout: Layout, cluster: Cluster) -> PlacementProblem:
    """The layout on the cluster, by its step time."""
    return PlacementProblem(layout=layout, cluster=cluster, objective=cost_of(layout, cluster), bound_s=0.0)


def placed(layout: Layout, cluster: Cluster) -> list[Placed]:
    """Everything that the search for a placement yields."""
    return improvements(host_problem_of(layout, cluster))


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([Layout(tp=2, etp=2, pp=4, dp=3), Layout(pp=3, dp=8), Layout(dp=24, ep=8)]),
    st.booleans(),
    st.integers(0, 50),
    st.integers(1, 400),
)
def test_every_placement_is_legal_and_none_is_worse(layout: Layout, gpus: bool, seed: int, asked: int) -> None:
    """On twelve hosts: bijections that keep residues on CUDA, each as cheap as said, never dearer than host order."""
    layers = {"batch": Batch(global_batch_size=24 * 8), "model": tiny_model(num_layers=12)}
    cluster = noisy(12, 2, seed=seed, gpus=gpus)
    experts = {"num_experts": 8, "moe_layer_freq": (1,) * 12} if layout.ep > 1 else {}
    job = replace(job_of(layout), **{**layers, "model": replace(layers["model"], **experts)})  # type: ignore[arg-type]
    measured = tiny_measurements(cluster)
    moe = tuple(replace(one, part="moe_layer") for one in measured.compute if one.part == "layer")
    cost = Predictor(job, replace(measured, compute=measured.compute + moe)).placement_cost(layout)
    problem = PlacementProblem(layout=layout, cluster=cluster, objective=cost, bound_s=0.0)
    found = improvements(problem, seed=seed, is_late=after(asked))

    assert all(list(range(24)) == sorted(one.placement) for one in found)
    assert all(Slots.of(cluster).allows(one.placement) for one in found)
    assert [one.cost_s for one in found] == pytest.approx([cost.cost(one.placement) for one in found], rel=1e-12)
    costs = [cost.cost(host_order(24)), *(one.cost_s for one in found)]
    assert sorted(costs, reverse=True) == costs


@pytest.mark.parametrize("gpus", [False, True])
def test_three_hosts_of_two_are_placed_exactly(gpus: bool) -> None:
    """Pipelines of two on hosts that they do not divide: the best of all allowed placements of six slots."""
    layout, cluster = Layout(pp=2, dp=3), noisy(3, 2, rack=2, gpus=gpus)
    cost, slots = cost_of(layout, cluster), Slots.of(cluster)

    last = placed(layout, cluster)[-1]

    assert last.cost_s == min(cost.cost(some) for some in permutations(range(6)) if slots.allows(some))


def test_five_hosts_of_four_are_no_worse_than_any_order_of_hosts() -> None:
    """Pipelines of four, five replicas, twenty devices: at least as fast as each tiling along each order of hosts."""
    layout, cluster = Layout(pp=4, dp=5), noisy(5, 4, rack=3)
    cost = cost_of(layout, cluster)
    tried = [
        block_HD[list(order)].ravel()
        for block_HD in tilings(layout, Slots.of(cluster))
        for order in permutations(range(5))
    ]

    assert placed(layout, cluster)[-1].cost_s <= cost.costs(np.array(tried)).min()


def test_pipelines_go_inside_a_host() -> None:
    """Where hops weigh more than rings, each of four hosts holds whole pipelines."""
    layout, cluster = Layout(pp=2, dp=4), noisy(4, 2, rack=2)
    slow = replace(cluster, between_hosts=Links.uniform(4, latency_s=5e-2, bandwidth_bytes_per_s=1e9))
    last = placed(layout, slow)[-1]
    stages = [[layout.cell_of(rank).dp for rank in last.placement[2 * host : 2 * host + 2]] for host in range(4)]

    assert all(len(set(replicas)) == 1 for replicas in stages)


def test_expert_groups_stay_inside_their_domain() -> None:
    """Two NVLink domains of four hosts, shuffled: each expert group of four hosts lies in one of them."""
    fabric = fat_tree(8, sizes=(4,), bytes_per_s=(1e10, 1e8), noise=0.05, seed=3)
    layout, cluster = Layout(dp=16, ep=8), cluster_with(fabric.links, devices=2)
    found, _ = begin(host_problem_of(layout, cluster))
    domain_of_rank = {rank: fabric.group_LH[0][slot // 2] for slot, rank in enumerate(found.placement)}

    assert all(len({domain_of_rank[rank] for rank in group}) == 1 for group in expert_groups(layout))


def test_units_that_do_not_fill_a_domain_leave_its_rest_to_others() -> None:
    """Domains of five hosts, groups of two hosts: two in each domain, and one of the hosts that are left."""
    fabric = fat_tree(10, sizes=(5,), bytes_per_s=(1e10, 1e8), noise=0.05, seed=4)
    layout, cluster = Layout(dp=20, ep=4), on_gpus(cluster_with(fabric.links, devices=2))
    found, _ = begin(host_problem_of(layout, cluster))
    domain_of_rank = {rank: fabric.group_LH[0][slot // 2] for slot, rank in enumerate(found.placement)}
    inside = [len({domain_of_rank[rank] for rank in group}) == 1 for group in expert_groups(layout)]

    assert sum(inside) == 4


def test_slow_hosts_take_the_light_stage() -> None:
    """Two of eight hosts are half as fast, equal links, two layers before six: they hold the two layers."""
    layout = Layout(tp=2, etp=2, pp=2, dp=4, layers_per_chunk=(2, 6))
    links = Links.uniform(8, latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    speed = tuple(0.5 if slot // 2 in {1, 6} else 1.0 for slot in range(16))
    cluster = replace(cluster_with(links, devices=2), slot_speed=speed)

    last = placed(layout, cluster)[-1]

    assert {layout.cell_of(last.placement[slot]).pp for slot in (2, 3, 12, 13)} == {0}


def test_two_islands_are_crossed_no_more_than_by_hand() -> None:
    """Either pipelines or rings must leave an island of four hosts: as fast as the better of the two, by hand."""
    fabric = fat_tree(8, sizes=(4,), bytes_per_s=(1e9, 1e7), seed=6)
    layout, cluster = Layout(tp=2, etp=2, pp=4, dp=2), cluster_with(fabric.links, devices=2)
    cost = cost_of(layout, cluster)
    islands = np.argsort(fabric.group_LH[0], kind="stable")
    pipelines_inside = moved(islands.reshape(2, 4).T.ravel())
    rings_inside = moved(islands)

    assert placed(layout, cluster)[-1].cost_s <= min(cost.cost(pipelines_inside), cost.cost(rings_inside))


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(3)), st.integers(0, 100))
def test_renaming_hosts_changes_nothing(names: list[int], seed: int) -> None:
    """Hosts that move with their links and their ranks: the same step time, and the exact search finds the same."""
    layout, cluster = Layout(pp=2, dp=3), noisy(3, 2, seed=seed)
    links = Links(
        latency_s=cluster.between_hosts.latency_s[np.ix_(names, names)],
        bandwidth_bytes_per_s=cluster.between_hosts.bandwidth_bytes_per_s[np.ix_(names, names)],
    )
    renamed = replace(cluster, between_hosts=links)
    placement = np.random.default_rng(seed).permutation(6)
    same = placement.reshape(3, 2)[names].ravel()

    assert cost_of(layout, renamed).cost(same) == pytest.approx(cost_of(layout, cluster).cost(placement), rel=1e-12)
    assert placed(layout, renamed)[-1].cost_s == pytest.approx(placed(layout, cluster)[-1].cost_s, rel=1e-12)


def test_shuffling_moves_whole_hosts() -> None:
    """Three hosts at least pass on what they hold, and stay whole."""
    start = host_order(20)
    found = shuffled(start, Slots(num_hosts=10, devices_per_host=2, keeps_residues=True), random.Random(0), share=0.1)
    blocks = [found[2 * host : 2 * host + 2] for host in range(10)]

    assert sorted(blocks) == [start[2 * host : 2 * host + 2] for host in range(10)]
    assert sum(found[2 * host] != start[2 * host] for host in range(10)) == 3


def test_a_rearrangement_is_judged_by_the_step_time() -> None:
    """On ten hosts of two racks it is faster than its start, and costs what it says."""
    layout, cluster = Layout(tp=2, etp=2, pp=5, dp=2), noisy(10, 2, rack=5, seed=1)
    job = replace(job_of(layout), model=tiny_model(num_layers=10))
    cost = Predictor(job, tiny_measurements(cluster)).placement_cost(layout)
    start = Placed(placement=host_order(20), cost_s=cost.cost(host_order(20)))

    problem = PlacementProblem(layout=layout, cluster=cluster, objective=cost, bound_s=0.0)
    found = rearranged(problem, start, model=cost, rng=random.Random(0), is_late=never)

    assert found.cost_s < start.cost_s
    assert cost.cost(found.placement) == found.cost_s


def test_a_placement_that_saves_nothing_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model promised a gain, and the step is equally long: a second model would promise the same."""
    cluster = noisy(10, 2)
    made: list[tuple[int, ...]] = []

    def linearised(_: object, placement: np.ndarray) -> SimpleNamespace:
        made.append(tuple(placement.tolist()))
        return SimpleNamespace(cost=lambda _: 1.0)

    turned = np.roll(np.arange(10), 1)
    monkeypatch.setattr(placement_module, "linearise", linearised)
    monkeypatch.setattr(placement_module, "descend", lambda *_, **__: SimpleNamespace(cost_s=0.5, place_Q=turned))
    start, cost = Placed(placement=host_order(20), cost_s=1.0), SimpleNamespace(cost=lambda _: 1.0)
    problem = PlacementProblem(layout=Layout(dp=20), cluster=cluster, objective=cost, bound_s=0.0)
    found = rearranged(problem, start, model=cost, rng=random.Random(0), is_late=never)

    assert start == found
    assert [start.placement] == made


@pytest.mark.parametrize("turn", range(4))
def test_every_round_starts_somewhere_and_ends_no_worse(turn: int) -> None:
    """Other starts and kicks come back with the best that was known, or better."""
    layout, cluster = Layout(tp=2, etp=2, pp=4, dp=2), noisy(8, 2)
    cost = cost_of(layout, cluster)
    best = Placed(placement=host_order(16), cost_s=cost.cost(host_order(16)))

    problem = PlacementProblem(layout=layout, cluster=cluster, objective=cost, bound_s=0.0)
    found = improve(problem, best, turn=turn, rng=random.Random(turn), is_late=never)

    assert found.cost_s < best.cost_s


def test_starts_are_different_and_the_first_is_host_order() -> None:
    """No placement is priced twice, and `most` is kept."""
    layout, cluster = Layout(tp=2, etp=2, pp=4, dp=4), noisy(16, 2, gpus=True)
    found = starts(layout, cluster, most=4)

    assert tuple(found[0]) == host_order(32)
    assert len(set(map(tuple, found))) == len(found) == 4


slots = st.builds(Slots, num_hosts=st.integers(2, 4), devices_per_host=st.integers(1, 4), keeps_residues=st.booleans())
LAYOUTS_OF_6 = [Layout(dp=6), Layout(pp=6), Layout(pp=3, dp=2), Layout(tp=2, etp=2, dp=3), Layout(tp=2, etp=2, pp=3)]


def best_placement(
    layout: Layout, cluster: Cluster, *, seed: int = 0, is_late: IsLate = never, rng_distances: int = 0
) -> Placed:
    """Search to the end on random distances."""
    distances = random_distances(cluster.num_slots, random.Random(rng_distances))
    problem = PlacementProblem(layout=layout, cluster=cluster, objective=link_cost(layout, distances), bound_s=0.0)
    return improvements(problem, seed=seed, is_late=is_late)[-1]


@given(slots, st.integers(0, 1000))
def test_moves_keep_placements_legal(slots: Slots, seed: int) -> None:
    """After any number of moves a placement is a bijection, and a CUDA host's residues differ."""
    rng = random.Random(seed)
    placement = host_order(slots.num_slots)
    for _ in range(20):
        placement = neighbour(placement, slots, rng)

        assert list(range(slots.num_slots)) == sorted(placement)
        assert slots.allows(placement)


@pytest.mark.parametrize("keeps_residues", [False, True])
def test_moves_reach_every_allowed_placement(keeps_residues: bool) -> None:
    """Every set of ranks that a host may have is reached; which devices they take is not searched for here."""
    slots = Slots(num_hosts=2, devices_per_host=2, keeps_residues=keeps_residues)
    rng = random.Random(0)
    seen = {host_order(slots.num_slots)}
    for _ in range(1000):
        seen.add(tuple(in_device_order(neighbour(rng.choice(sorted(seen)), slots, rng), 2).tolist()))

    assert {found for found in permutations(range(4)) if slots.allows(found) and is_in_device_order(found, 2)} == seen
    assert (4 if keeps_residues else 6) == len(seen)


@pytest.mark.parametrize("layout", LAYOUTS_OF_6, ids=Layout.words)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_few_slots_are_placed_as_by_brute_force(layout: Layout, kind: str) -> None:
    """On six slots the search ends at the best of all allowed permutations in device order."""
    cluster = tiny_cluster(3, 2)
    cluster = on_gpus(cluster) if kind == "cuda" else cluster
    slots = Slots.of(cluster)
    cost = link_cost(layout, random_distances(6, random.Random(0)))
    allowed = [found for found in permutations(range(6)) if slots.allows(found) and is_in_device_order(found, 2)]
    least = min(map(cost.cost, allowed))

    found = best_placement(layout, cluster)

    assert least == pytest.approx(found.cost_s)
    assert slots.allows(found.placement)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 100), st.integers(1, 100), st.integers(0, 100))
def test_more_budget_is_never_worse(seed: int, short: int, more: int) -> None:
    """The same seed follows the same course, and only further."""
    layout = Layout(pp=4, dp=2)
    cluster = tiny_cluster(4, 2)

    less_time = best_placement(layout, cluster, seed=seed, is_late=after(short), rng_distances=seed)
    more_time = best_placement(layout, cluster, seed=seed, is_late=after(short + more), rng_distances=seed)

    assert more_time.cost_s <= less_time.cost_s


@pytest.mark.parametrize("seed", range(2))
def test_annealing_comes_close_to_the_optimum(seed: int) -> None:
    """On eight slots annealing ends within 15 % of the best placement even on wild links."""
    layout, cluster = Layout(pp=4, dp=2), tiny_cluster(4, 2)
    cost = link_cost(layout, random_distances(8, random.Random(seed)))
    annealed = best_placement(layout, cluster, rng_distances=seed)
    best_s = exhaustion(PlacementProblem(layout=layout, cluster=cluster, objective=cost, bound_s=0.0)).cost_s

    assert best_s <= annealed.cost_s <= 1.15 * best_s


def test_annealing_puts_pipelines_into_racks() -> None:
    """Eight hosts in two interleaved racks, pipelines of four: no hop leaves a rack."""
    layout, cluster = Layout(pp=4, dp=2), tiny_cluster(8, 1)
    distances = tuple(tuple(0.0 if i == j else 1.0 + 9.0 * ((i ^ j) & 1) for j in range(8)) for i in range(8))
    cost = link_cost(layout, distances)
    problem = PlacementProblem(layout=layout, cluster=cluster, objective=cost, bound_s=4.0)
    found = improvements(problem)[-1]

    assert found.cost_s == 3.0 + 10.0 + 0.0


def test_a_met_bound_ends_the_search() -> None:
    """Nothing is tried once a start is as good as the bound."""
    cluster = tiny_cluster(4, 2)
    cost = OneByOne(lambda placement: 1.0)
    found = improvements(PlacementProblem(layout=Layout(dp=8), cluster=cluster, objective=cost, bound_s=1.0))

    assert [Placed(placement=tuple(range(8)), cost_s=1.0)] == found


@given(st.permutations(range(6)), st.sampled_from(LAYOUTS_OF_6))
def test_renaming_equal_slots_changes_nothing(names: list[int], layout: Layout) -> None:
    """Where all links are equal, a placement costs what any other does."""
    equal = tuple(tuple(float(i != j) for j in range(6)) for i in range(6))
    cost = link_cost(layout, equal)

    assert cost.cost(range(6)) == cost.cost(names)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_starts_are_legal_and_begin_with_host_order(kind: str) -> None:
    """Host order is always tried, and no start breaks the rules."""
    cluster = tiny_cluster(4, 2)
    cluster = on_gpus(cluster) if kind == "cuda" else cluster
    slots = Slots.of(cluster)
    found = starts(Layout(pp=4, dp=2), cluster, most=20)

    assert list(range(8)) == found[0].tolist()
    assert all(slots.allows(placement) and sorted(placement) == list(range(8)) for placement in found)


def test_fast_hosts_may_hold_the_first_stage_or_both_ends() -> None:
    """Of eight hosts four are slow: one start gives the others the first two stages, one the first and the last."""
    slow = {0, 2, 5, 6}
    bandwidth = tuple(tuple(0.0 if i == j else (1e9 if {i, j} & slow else 3e9) for j in range(8)) for i in range(8))
    links = Links(latency_s=((0.0,) * 8,) * 8, bandwidth_bytes_per_s=bandwidth)
    cluster = replace(tiny_cluster(8, 1), between_hosts=links)
    fast_stages = {
        frozenset(rank // 2 for slot, rank in enumerate(placement.tolist()) if slot not in slow)
        for placement in starts(Layout(pp=4, dp=2), cluster, most=20)
    }

    assert {frozenset({0, 1}), frozenset({0, 3})} <= fast_stages


def test_one_slot_has_one_placement() -> None:
    """A job of one process is placed at once."""
    assert Placed(placement=(0,), cost_s=0.0) == best_placement(Layout(), tiny_cluster(1, 1))
