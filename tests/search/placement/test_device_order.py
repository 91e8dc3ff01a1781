"""Devices stay in order inside hosts, unless another order alone pays clearly on links that differ."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from search.fabrics import cluster_with, fat_tree
from search.toys import never
from search.worlds import ALL_FIELDS, improvements, on_gpus, planned, slow_neighbours

from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Batch, Cluster, Job, Layout, Links
from pipette_launch.facts.cluster import in_device_order, is_in_device_order, shared_order
from pipette_launch.search.candidates import Candidate, SearchInputs
from pipette_launch.search.frontier import Promising
from pipette_launch.search.placement.device_order import ordered, settled
from pipette_launch.search.placement.slots import PlacementProblem, host_order
from pipette_launch.search.pricing import price
from pipette_launch.search.templates import placed_anew

NOISES = (0.005, 0.015, 0.03)
PAIRS = (0, 2, 1, 3)
"""Puts the ends of the fast links 0-2 and 1-3 side by side."""


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


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_fast_pairs_keep_their_order(kind: str) -> None:
    """The tensor-parallel groups of all hosts lie on the fast links, and the plan says what that saves."""
    cluster = fast_pairs(3)
    cluster = cluster if kind == "cuda" else replace(cluster, hosts=tiny_cluster(3, 4).hosts)
    plan = planned(tensor_job(3), tiny_measurements(cluster))

    assert PAIRS == shared_order(plan.chosen.placement, 4)
    assert "ranks take the devices in the order 0,2,1,3" in plan.reasons[-1]


def test_one_host_with_slow_links_gives_all_hosts_its_order() -> None:
    """No two hosts differ, or the links from stage to stage would leave their rail."""
    plan = planned(
        tiny_job(36, own=Layout(tp=2, dp=18), batch=Batch(global_batch_size=36), pinned=frozenset(ALL_FIELDS)),
        slow_neighbours(),
        margin=0.0,
    )

    order = shared_order(plan.chosen.placement, 4)

    # The slow links are 0-1 and 2-3.
    assert order is not None
    assert frozenset(order[:2]) not in ({0, 1}, {2, 3})
    assert plan.floor_s == pytest.approx(plan.chosen.step_time_s)


def test_eight_devices_find_their_pairs() -> None:
    """Fast links from each device to the one four further on: no single swap of two devices shows a gain."""
    links = inside(8, fast=tuple((one, one + 4) for one in range(4)), noise=0.01)
    cluster = replace(on_gpus(tiny_cluster(1, 8)), within_host=(links,))
    job = tiny_job(8, own=Layout(tp=2, etp=2, dp=4), pinned=frozenset(ALL_FIELDS))
    plan = planned(job, tiny_measurements(cluster))
    order = shared_order(plan.chosen.placement, 8)

    assert order is not None
    assert {(0, 4), (1, 5), (2, 6), (3, 7)} == {tuple(sorted(order[pair : pair + 2])) for pair in range(0, 8, 2)}


def test_an_order_must_save_two_percent_of_the_step() -> None:
    """Pairs whose links are twice as fast, for a job that sends hardly anything."""
    problem = problem_of(fast_pairs(2))
    small = replace(problem, objective=_Scaled(problem))
    placed = small.best_of([host_order(8)])

    assert host_order(8) == ordered(small, placed, is_late=never, thorough=True).placement


class _Scaled:
    """An objective in which the placement moves a fiftieth of the step at most."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem

    def costs(self, placement_KW: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        """Shrink all differences to less than 1.8 % of the step."""
        costs_s = self._problem.objective.costs(placement_KW)
        base_s = self._problem.objective.costs(np.array([host_order(8)]))[0]
        return np.asarray(1.0 + 0.018 * (costs_s / base_s - 1.0))


def test_a_placement_from_elsewhere_is_judged_anew() -> None:
    """An order that pays stays; one by noise goes, as do orders in which hosts differ."""
    uneven, even = problem_of(fast_pairs(2)), problem_of(on_gpus(tiny_cluster(2, 4)))
    pairs = tuple(in_device_order(range(8), 4, PAIRS).tolist())

    assert pairs == settled(uneven, pairs).placement
    assert host_order(8) == settled(even, pairs).placement
    assert host_order(8) == settled(uneven, (1, 0, 2, 3, 7, 6, 5, 4)).placement


def test_a_layout_takes_no_order_over_from_another() -> None:
    """The placement of the best layout so far is priced for its neighbours with devices in order."""
    job, measurements = tensor_job(2), tiny_measurements(on_gpus(tiny_cluster(2, 4)))
    inputs = SearchInputs.of(job, measurements, memory_margin=0.1)
    one = Promising(least_s=0.0, number=0, layout=job.own, peak_bytes=(1,))
    found = price(inputs, one, is_late=never, carried=tuple(in_device_order(range(8), 4, PAIRS).tolist()))

    assert isinstance(found, Candidate)
    assert host_order(8) == found.placed.placement


def test_ranks_placed_anew_after_a_loss_take_devices_in_order() -> None:
    """Also where the plan that was made ahead has another order, and the links that are left are even."""
    cluster = on_gpus(tiny_cluster(2, 4))
    job = tensor_job(2)
    plan = planned(job, tiny_measurements(cluster))
    permuted = replace(plan.chosen, placement=tuple(in_device_order(range(8), 4, PAIRS).tolist()))
    inputs = SearchInputs.of(job, tiny_measurements(cluster), memory_margin=0.1)

    assert is_in_device_order(placed_anew(inputs, permuted, seed=0, is_late=never).placement, 4)


@pytest.mark.parametrize("seed", range(3))
def test_every_round_leaves_devices_in_a_shared_order(seed: int) -> None:
    """Starts, rounds of hosts and of single ranks, on even links and on uneven ones."""
    for cluster in (noisy_gpus(seed), fast_pairs(4)):
        rounds = improvements(problem_of(cluster), seed=random.Random(seed).randrange(99))

        assert all(shared_order(found.placement, 4) in (tuple(range(4)), PAIRS, (2, 0, 3, 1)) for found in rounds)
