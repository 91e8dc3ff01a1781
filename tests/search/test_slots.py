"""Ranks that must lie together stay together in every move and every result, and the best such placement is found."""

from __future__ import annotations

import random
from itertools import permutations

import numpy as np
import pytest
from facts_for_tests import tiny_measurements
from hypothesis import given, settings
from hypothesis import strategies as st
from search.test_step_model import job_of
from search.toys import after, link_cost, never, random_distances
from search.worlds import improvements, nvlink_racks, with_experts

from pipette_launch.cost.step.predictor import PlacementCost, Predictor
from pipette_launch.facts import Cluster, Layout
from pipette_launch.facts.cluster import in_device_order, is_in_device_order
from pipette_launch.facts.co_location import RankBlock
from pipette_launch.search.placement import exhaustion, neighbour, rearranged, shuffled
from pipette_launch.search.slots import Objective, Placed, PlacementProblem, Slots, host_order, starts


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
    """On eight slots with wild links the search ends as near to the optimum as without blocks, and exhaustion at it."""
    cluster = nvlink_racks(4, 2, 2, seed=seed)
    cost = link_cost(layout, random_distances(8, random.Random(seed)))
    problem = problem_of(layout, cluster, blocks, cost)
    in_order = (found for found in permutations(range(8)) if is_in_device_order(found, 2))
    allowed = np.array([found for found in in_order if problem.slots.allows(found)])
    least_s = float(cost.costs(allowed).min())
    searched = improvements(problem, seed=seed)[-1]
    *_, exact = exhaustion(problem, searched, is_late=never)

    assert exact.is_optimal
    assert exact.cost_s == pytest.approx(least_s)
    assert problem.slots.allows(exact.placement)
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
    start = Placed(placement=worst, cost_s=cost.cost(worst), is_optimal=False)
    found = rearranged(problem, start, model=cost, rng=random.Random(0), is_late=never)

    assert problem.slots.allows(found.placement)
    assert found.cost_s <= start.cost_s
