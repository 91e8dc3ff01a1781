"""Placements on machines with structure: what talks most ends up near, and slow devices where they hurt least."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from facts_for_tests import expert_groups, tiny_measurements, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from search.fabrics import cluster_with, fat_tree
from search.step_model.test_linear import job_of, moved
from search.toys import after, never
from search.worlds import improvements, on_gpus

from pipette_launch.cost.step.placed import PlacementCost
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Batch, Cluster, Layout, Links
from pipette_launch.search.placement.blocks import rearranged, shuffled
from pipette_launch.search.placement.search import begin, improve
from pipette_launch.search.placement.slots import Placed, PlacementProblem, Slots, host_order
from pipette_launch.search.placement.starts import starts, tilings


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


def problem_of(layout: Layout, cluster: Cluster) -> PlacementProblem:
    """The layout on the cluster, by its step time."""
    return PlacementProblem(layout=layout, cluster=cluster, objective=cost_of(layout, cluster), bound_s=0.0)


def placed(layout: Layout, cluster: Cluster) -> list[Placed]:
    """Everything that the search for a placement yields."""
    return improvements(problem_of(layout, cluster))


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

    assert last.is_optimal
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
    found, _ = begin(problem_of(layout, cluster), is_late=never)
    domain_of_rank = {rank: fabric.group_LH[0][slot // 2] for slot, rank in enumerate(found.placement)}

    assert all(len({domain_of_rank[rank] for rank in group}) == 1 for group in expert_groups(layout))


def test_units_that_do_not_fill_a_domain_leave_its_rest_to_others() -> None:
    """Domains of five hosts, groups of two hosts: two in each domain, and one of the hosts that are left."""
    fabric = fat_tree(10, sizes=(5,), bytes_per_s=(1e10, 1e8), noise=0.05, seed=4)
    layout, cluster = Layout(dp=20, ep=4), on_gpus(cluster_with(fabric.links, devices=2))
    found, _ = begin(problem_of(layout, cluster), is_late=never)
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
    start = Placed(placement=host_order(20), cost_s=cost.cost(host_order(20)), is_optimal=False)

    problem = PlacementProblem(layout=layout, cluster=cluster, objective=cost, bound_s=0.0)
    found = rearranged(problem, start, model=cost, rng=random.Random(0), is_late=never)

    assert found.cost_s < start.cost_s
    assert cost.cost(found.placement) == found.cost_s


@pytest.mark.parametrize("turn", range(4))
def test_every_round_starts_somewhere_and_ends_no_worse(turn: int) -> None:
    """Other starts and kicks come back with the best that was known, or better."""
    layout, cluster = Layout(tp=2, etp=2, pp=4, dp=2), noisy(8, 2)
    cost = cost_of(layout, cluster)
    best = Placed(placement=host_order(16), cost_s=cost.cost(host_order(16)), is_optimal=False)

    problem = PlacementProblem(layout=layout, cluster=cluster, objective=cost, bound_s=0.0)
    found = improve(problem, best, turn=turn, rng=random.Random(turn), is_late=never)

    assert found.cost_s < best.cost_s


def test_starts_are_different_and_the_first_is_host_order() -> None:
    """No placement is priced twice, and `most` is kept."""
    layout, cluster = Layout(tp=2, etp=2, pp=4, dp=4), noisy(16, 2, gpus=True)
    found = starts(layout, cluster, most=4)

    assert tuple(found[0]) == host_order(32)
    assert len(set(map(tuple, found))) == len(found) == 4
