"""Ranks that must lie together stay together in every move and every result, and the best such placement is found."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from facts_for_tests import tiny_measurements
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from search.fabrics import fat_tree
from search.problems import starts
from search.test_host_swaps import job_of
from search.toys import after, link_cost, never, random_distances
from search.worlds import improvements, is_in_device_order, nvlink_racks, with_experts

from pipette_launch.cost.step.predictor import PlacementCost, Predictor
from pipette_launch.facts import Cluster, Layout, Links
from pipette_launch.facts.cluster import in_device_order
from pipette_launch.facts.co_location import RankBlock
from pipette_launch.search.placement import neighbour, rearranged, shuffled
from pipette_launch.search.slots import Objective, Placed, PlacementProblem, Slots, Tiers, host_order, tiers_of


def partition(names_H: NDArray[np.int64]) -> set[frozenset[int]]:
    """Groups without their names."""
    return {frozenset(np.flatnonzero(names_H == name).tolist()) for name in np.unique(names_H)}


def partitions(tiers: Tiers) -> list[set[frozenset[int]]]:
    """Groups of each tier, finest first."""
    return [partition(row) for row in tiers.group_LH]


@pytest.mark.parametrize("seed", range(3))
def test_racks_and_pods_are_recovered(seed: int) -> None:
    """256 shuffled hosts in racks of 16 and pods of 4 racks, 8 % noise and 2 % bad hosts: two tiers, exactly right."""
    fabric = fat_tree(256, sizes=(16, 4), bytes_per_s=(5e10, 4e10, 3e10), noise=0.08, bad=0.02, seed=seed)

    assert [partition(row) for row in fabric.group_LH] == partitions(tiers_of(fabric.links))


def test_a_host_between_two_tiers_hides_no_tier() -> None:
    """A host whose links to its rack are estimated too slow joins inside the gap; the racks are still found."""
    fabric = fat_tree(256, sizes=(16,), bytes_per_s=(5e10, 4e10), seed=1)
    bandwidth_HH = np.array(fabric.links.bandwidth_bytes_per_s)
    near_H = bandwidth_HH[7] > 4.5e10
    bandwidth_HH[7, near_H] = bandwidth_HH[near_H, 7] = 4.75e10
    tiers = tiers_of(replace(fabric.links, bandwidth_bytes_per_s=bandwidth_HH))

    assert [partition(fabric.group_LH[0])] == partitions(tiers)


@pytest.mark.parametrize("spread", [0.08, 0.12])
def test_racks_of_hosts_with_different_speeds_are_found(spread: float) -> None:
    """A link is as fast as its slower host, and takes 1.25 times as long between racks: all racks are found."""
    fabric = fat_tree(256, sizes=(16,), bytes_per_s=(5e10, 4e10), seed=1)
    speed_H = 1 - np.abs(np.random.default_rng(1).normal(0, spread, 256))
    bandwidth_HH = np.array(fabric.links.bandwidth_bytes_per_s) * np.minimum(speed_H[:, None], speed_H)

    assert [partition(fabric.group_LH[0])] == partitions(
        tiers_of(replace(fabric.links, bandwidth_bytes_per_s=bandwidth_HH))
    )


def test_nvlink_domains_of_several_hosts_are_a_tier() -> None:
    """Trays of an NVL72 rack reach each other ten times faster than the next rack's, even with a rack half there."""
    fabric = fat_tree(45, sizes=(18,), bytes_per_s=(8e11, 5e10), noise=0.08, seed=1)

    assert [partition(fabric.group_LH[0])] == partitions(tiers_of(fabric.links))


def test_a_host_alone_in_its_rack_joins_no_other() -> None:
    """Being far from its nearest does not make a host bad: racks of 4 beside a lone host stay apart from it."""
    fabric = fat_tree(13, sizes=(4,), bytes_per_s=(5e10, 2e10), seed=2)

    assert [partition(fabric.group_LH[0])] == partitions(tiers_of(fabric.links))


def test_a_slow_host_is_not_the_end_of_a_chain_of_equal_hosts() -> None:
    """A host with 0.6 of the bandwidth of its 15 equal neighbours lies between two of them."""
    bandwidth_HH = np.full((16, 16), 5e10)
    bandwidth_HH[5] = bandwidth_HH[:, 5] = 3e10
    links = Links(latency_s=np.full((16, 16), 1e-5), bandwidth_bytes_per_s=bandwidth_HH)

    assert 5 not in tiers_of(links).order_H[[0, -1]]


@pytest.mark.parametrize("hosts", [1, 2, 3, 16])
def test_equal_links_have_no_tiers(hosts: int) -> None:
    """Where all links are alike there is nothing to tell apart, and the order holds every host once."""
    tiers = tiers_of(Links.uniform(hosts, latency_s=1e-5, bandwidth_bytes_per_s=1e10))

    assert tiers.num_tiers == 0
    assert list(range(hosts)) == sorted(tiers.order_H.tolist())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 1000), st.sampled_from([0.0, 0.08, 0.5]))
def test_groups_are_nested_runs_of_the_order(hosts: int, rack: int, seed: int, noise: float) -> None:
    """Every group of every tier stands together in the order, inside one group of the next tier."""
    fabric = fat_tree(hosts, sizes=(rack, 3), bytes_per_s=(9e10, 5e10, 2e10), noise=noise, seed=seed)
    tiers = tiers_of(fabric.links)

    assert list(range(hosts)) == sorted(tiers.order_H.tolist())
    for tier in range(tiers.num_tiers):
        along = tiers.group_LH[tier][tiers.order_H]
        assert set(np.diff(along).tolist()) <= {0, 1}
        assert along[0] == 0
        assert [set(run.tolist()) for run in tiers.runs(tier)] == [
            set(np.flatnonzero(tiers.group_LH[tier] == name).tolist()) for name in range(int(along[-1]) + 1)
        ]
    for fine, coarse in pairwise(partitions(tiers)):
        assert all(any(group <= whole for whole in coarse) for group in fine)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(24)))
def test_renaming_hosts_renames_the_groups(names: list[int]) -> None:
    """The hierarchy does not depend on torchrun's order."""
    fabric = fat_tree(24, sizes=(4, 3), bytes_per_s=(9e10, 5e10, 2e10), noise=0.05, seed=3)
    bandwidth = np.array(fabric.links.bandwidth_bytes_per_s)[np.ix_(names, names)]
    latency = np.array(fabric.links.latency_s)[np.ix_(names, names)]
    renamed = Links(
        latency_s=tuple(map(tuple, latency.tolist())), bandwidth_bytes_per_s=tuple(map(tuple, bandwidth.tolist()))
    )

    found = [{frozenset(names[host] for host in group) for group in tier} for tier in partitions(tiers_of(renamed))]

    assert partitions(tiers_of(fabric.links)) == found


def test_neighbours_in_the_order_are_near() -> None:
    """Six hosts on a line, shuffled: the order walks along it, though all are one tier."""
    place = [3, 0, 5, 1, 4, 2]
    latency = tuple(tuple(1e-5 * abs(place[i] - place[j]) for j in range(6)) for i in range(6))
    bandwidth = tuple(tuple(float(i != j) * 1e12 for j in range(6)) for i in range(6))

    walked = [place[host] for host in tiers_of(Links(latency_s=latency, bandwidth_bytes_per_s=bandwidth)).order_H]

    assert walked in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0])


def test_near_hosts_stand_side_by_side() -> None:
    """Two racks, interleaved in torchrun's order, are told apart."""
    racks = (0, 1, 0, 1, 0, 1)
    bandwidth = tuple(
        tuple(0.0 if i == j else (1e10 if racks[i] == racks[j] else 1e8) for j in range(6)) for i in range(6)
    )
    latency = tuple(tuple(0.0 if i == j else 1e-5 for j in range(6)) for i in range(6))

    chain = tiers_of(Links(latency_s=latency, bandwidth_bytes_per_s=bandwidth)).order_H.tolist()

    assert [racks[host] for host in chain] in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])


def test_a_slow_link_is_kept_out_of_the_chain() -> None:
    """Four hosts on a square with one slow side: the chain goes round the other way."""
    slow = {(0, 1), (1, 0)}
    bandwidth = tuple(tuple(0.0 if i == j else (1e7 if (i, j) in slow else 1e9) for j in range(4)) for i in range(4))
    links = Links(latency_s=((0.0,) * 4,) * 4, bandwidth_bytes_per_s=bandwidth)
    chain = tiers_of(links).order_H.tolist()

    assert slow & set(pairwise(chain)) == set()


@pytest.mark.parametrize("seed", range(6))
def test_good_hosts_link_racks(seed: int) -> None:
    """The only slow host of a rack of four never stands beside another rack's host."""
    fabric = fat_tree(64, sizes=(4,), bytes_per_s=(5e10, 3e10), noise=0.08, bad=0.1, seed=seed)
    median_H = np.median(np.asarray(fabric.links.bandwidth_bytes_per_s), axis=1)
    slow = np.flatnonzero(median_H < 0.8 * np.median(median_H))
    rack_H = fabric.group_LH[0]
    alone = {host for host in slow.tolist() if (rack_H[slow] == rack_H[host]).sum() == 1}
    order = tiers_of(fabric.links).order_H.tolist()
    crossing = {host for pair in pairwise(order) for host in pair if len(set(rack_H[[*pair]].tolist())) == 2}

    assert len(alone) >= 2
    assert not crossing & alone


def test_many_slow_hosts_are_told_apart() -> None:
    """Half of the hosts have half of the bandwidth: both halves stand by racks. Three of 32 are not told apart."""
    fabric = fat_tree(32, sizes=(8,), bytes_per_s=(5e10, 3e10), noise=0.05, seed=4)
    rack_H = fabric.group_LH[0]

    def with_slow(slow: set[int]) -> Tiers:
        share_H = np.array([0.5 if host in slow else 1.0 for host in range(32)])
        bandwidth_HH = np.asarray(fabric.links.bandwidth_bytes_per_s) * np.minimum(share_H[:, None], share_H[None, :])
        return tiers_of(replace(fabric.links, bandwidth_bytes_per_s=tuple(map(tuple, bandwidth_HH.tolist()))))

    fast, slow = with_slow(set(range(16))).by_speed

    assert [set(range(16, 32)), set(range(16))] == [set(fast.tolist()), set(slow.tolist())]
    for order in (fast, slow):
        racks = rack_H[order]
        assert len(set(racks.tolist())) == 1 + (np.diff(racks) != 0).sum()
    assert with_slow({3, 4, 5}).by_speed == ()


def block(size: int, room: str) -> RankBlock:
    """So many ranks together."""
    return RankBlock(size=size, within=room, kind="k", asked_by="--flag")  # type: ignore[arg-type]


def problem_of(
    layout: Layout, cluster: Cluster, blocks: tuple[RankBlock, ...], objective: Objective
) -> PlacementProblem:
    """A layout whose blocks must lie together."""
    return PlacementProblem(layout=layout, cluster=cluster, objective=objective, bound_s=0.0, blocks=blocks)


def step_time(layout: Layout, cluster: Cluster) -> PlacementCost:
    """The step time of eight layers of experts."""
    job = job_of(layout, num_experts=8, moe_layer_freq=(1,) * 8)
    return Predictor(job, with_experts(tiny_measurements(cluster))).placement_cost(layout)


CASES = [
    (Layout(tp=2, etp=2, pp=2, dp=8), nvlink_racks(8, 4, 4), (block(2, "host"),)),
    (Layout(pp=2, dp=16, ep=8), nvlink_racks(8, 4, 4), (block(8, "domain"),)),
    (Layout(pp=2, dp=16, ep=16), nvlink_racks(8, 4, 4), (block(16, "domain"),)),
    (Layout(tp=2, pp=2, dp=8, ep=8), nvlink_racks(8, 4, 4), (block(2, "host"), block(8, "domain"))),
    (Layout(dp=12, pp=2, ep=4), nvlink_racks(12, 6, 2), (block(4, "domain"),)),
    (Layout(tp=4, etp=4, dp=2, pp=2), nvlink_racks(4, 2, 4), (block(4, "host"),)),
    (Layout(dp=2, pp=2, tp=2, etp=2), nvlink_racks(2, 1, 4), (block(2, "host"),)),
]


@pytest.mark.parametrize(("layout", "cluster", "blocks"), CASES)
def test_no_move_splits_a_block(layout: Layout, cluster: Cluster, blocks: tuple[RankBlock, ...]) -> None:
    """Whatever the seed, neighbours and kicks are bijections that the slots allow, and go somewhere."""
    slots, rng = Slots.of(cluster, blocks), random.Random(0)
    placement = first = slots.first()
    seen = {first}
    for _ in range(200):
        placement = neighbour(placement, slots, rng)
        kicked = shuffled(placement, slots, rng, share=0.5)
        seen.add(tuple(in_device_order(placement, slots.devices_per_host).tolist()))

        assert list(range(layout.world_size)) == sorted(placement) == sorted(kicked)
        assert slots.allows(placement)
        assert slots.allows(kicked)
    assert len(seen) > 3


@pytest.mark.parametrize(("layout", "cluster", "blocks"), CASES)
def test_every_start_keeps_blocks(layout: Layout, cluster: Cluster, blocks: tuple[RankBlock, ...]) -> None:
    """The first is torchrun's order where that is allowed, and domain by domain where it is not."""
    slots = Slots.of(cluster, blocks)
    found = starts(layout, cluster, most=24, blocks=blocks)

    assert (tuple(found[0]) == host_order(layout.world_size)) == slots.allows(host_order(layout.world_size))
    assert len(set(map(tuple, found))) == len(found)
    assert all(slots.allows(one) for one in found)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 100), st.integers(1, 300), st.booleans())
def test_no_result_splits_a_block(
    case: tuple[Layout, Cluster, tuple[RankBlock, ...]], seed: int, asked: int, by_links: bool
) -> None:
    """By the step time or by drawn links, cut short or not, with hosts in any order."""
    layout, cluster, blocks = case
    cluster = nvlink_racks(len(cluster.hosts), max(len(cluster.hosts) // 2, 1), cluster.devices_per_host, seed=seed)
    distances = random_distances(cluster.num_slots, random.Random(seed))
    objective = link_cost(layout, distances) if by_links else step_time(layout, cluster)
    slots = Slots.of(cluster, blocks)

    for placed in improvements(problem_of(layout, cluster, blocks, objective), seed=seed, is_late=after(asked)):
        assert slots.allows(placed.placement)


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [
        (Layout(tp=2, etp=2, pp=2, dp=2), (block(2, "host"),)),
        (Layout(pp=2, dp=4, ep=4), (block(4, "domain"),)),
        (Layout(tp=2, pp=2, dp=2, ep=2), (block(2, "host"), block(4, "domain"))),
    ],
)
def test_moves_reach_every_allowed_placement(layout: Layout, blocks: tuple[RankBlock, ...]) -> None:
    """On two domains of two hosts of two devices nothing is cut off but what splits a block."""
    slots, rng = Slots.of(nvlink_racks(4, 2, 2), blocks), random.Random(0)
    everything = permutations(range(layout.world_size))
    allowed = sum(slots.allows(found) and is_in_device_order(found, 2) for found in everything)
    seen, todo = {slots.first()}, [slots.first()]
    while todo:
        one = todo.pop()
        for _ in range(150):
            found = tuple(in_device_order(neighbour(one, slots, rng), 2).tolist())
            if found not in seen:
                seen.add(found)
                todo.append(found)

    assert allowed == len(seen)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("layout", "blocks"),
    [
        (Layout(pp=4, dp=2), ()),
        (Layout(tp=2, etp=2, pp=2, dp=2), (block(2, "host"),)),
        (Layout(pp=2, dp=4, ep=4), (block(4, "domain"),)),
    ],
)
def test_the_best_that_is_allowed_is_found(layout: Layout, blocks: tuple[RankBlock, ...], seed: int) -> None:
    """On eight slots with wild links the search ends as near to the optimum as without blocks."""
    cluster = nvlink_racks(4, 2, 2, seed=seed)
    cost = link_cost(layout, random_distances(8, random.Random(seed)))
    problem = problem_of(layout, cluster, blocks, cost)
    in_order = (found for found in permutations(range(8)) if is_in_device_order(found, 2))
    allowed = np.array([found for found in in_order if problem.slots.allows(found)])
    least_s = float(cost.costs(allowed).min())
    searched = improvements(problem, seed=seed)[-1]

    assert problem.slots.allows(searched.placement)
    assert searched.cost_s <= 1.25 * least_s


def test_blocks_are_exchanged_between_domains() -> None:
    """Three domains of three hosts, one of them near to both others: the middle stage goes there."""
    layout, blocks = Layout(pp=3, dp=6, ep=6), (block(6, "domain"),)
    cluster = nvlink_racks(9, 3, 2, seed=4)
    domain_H = np.array(Slots.of(cluster, blocks).domain_H)
    near = int(domain_H[-1])
    distance_DD = np.full((3, 3), 9.0)
    distance_DD[near] = distance_DD[:, near] = 2.0
    np.fill_diagonal(distance_DD, 1.0)
    domain_S = domain_H.repeat(2)
    distance_SS = distance_DD[np.ix_(domain_S, domain_S)]
    np.fill_diagonal(distance_SS, 0.0)
    distances = tuple(map(tuple, distance_SS.tolist()))
    found = improvements(problem_of(layout, cluster, blocks, link_cost(layout, distances)))[-1]

    assert 4.0 + 1.0 == found.cost_s


def test_many_hosts_are_exchanged_inside_their_domains() -> None:
    """The model of the step time moves hosts of a domain alone, and still finds something."""
    layout, blocks = Layout(pp=2, dp=16, ep=8), (block(8, "domain"),)
    cluster = nvlink_racks(16, 4, 2, seed=1)
    cost = step_time(layout, cluster)
    problem = problem_of(layout, cluster, blocks, cost)
    worst = shuffled(problem.slots.first(), problem.slots, random.Random(3), share=1.0)
    start = Placed(placement=worst, cost_s=cost.cost(worst))
    found = rearranged(problem, start, model=cost, rng=random.Random(0), is_late=never)

    assert problem.slots.allows(found.placement)
    assert found.cost_s <= start.cost_s
