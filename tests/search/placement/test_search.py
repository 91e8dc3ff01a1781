"""Placements are bijections that keep the rules of the device, and the search finds the best of them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from search.toys import OneByOne, after, link_cost, never, random_distances
from search.worlds import improvements, on_gpus

from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Batch, Cluster, Layout, Links
from pipette_launch.facts.cluster import in_device_order, is_in_device_order
from pipette_launch.search.placement.annealing import neighbour
from pipette_launch.search.placement.exhaustive import exhaustion, num_placements, placements
from pipette_launch.search.placement.slots import IsLate, Placed, PlacementProblem, Slots, host_order
from pipette_launch.search.placement.starts import starts

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
def test_exact_is_brute_force(layout: Layout, kind: str) -> None:
    """On six slots the search ends at the best of all allowed permutations in device order, and says so."""
    cluster = tiny_cluster(3, 2)
    cluster = on_gpus(cluster) if kind == "cuda" else cluster
    slots = Slots.of(cluster)
    cost = link_cost(layout, random_distances(6, random.Random(0)))
    allowed = [found for found in permutations(range(6)) if slots.allows(found) and is_in_device_order(found, 2)]
    least = min(map(cost.cost, allowed))

    found = best_placement(layout, cluster)

    assert least == pytest.approx(found.cost_s)
    assert found.is_optimal
    assert slots.allows(found.placement)


@pytest.mark.parametrize("layout", LAYOUTS_OF_6, ids=Layout.words)
def test_symmetry_leaves_one_of_each_kind(layout: Layout) -> None:
    """Turning the data- and tensor-parallel rings is all that the enumeration saves."""
    slots = Slots(num_hosts=6, devices_per_host=1, keeps_residues=False)
    found = list(placements(layout, slots))

    assert len(set(found)) == len(found) == 720 // (layout.dp * layout.tp)
    assert num_placements(layout, slots) == len(found)


def test_residues_leave_fewer_placements() -> None:
    """Two hosts of two GPUs: of six ways to share four ranks four keep residues apart."""
    layout, slots = Layout(pp=2, dp=2), Slots(num_hosts=2, devices_per_host=2, keeps_residues=True)

    assert 4 == num_placements(layout, slots) == len(list(placements(layout, slots)))
    assert 6 == num_placements(layout, replace(slots, keeps_residues=False))


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
    """On eight slots annealing ends within 15 % of the best placement even on wild links, and exhaustion finds it."""
    layout, cluster = Layout(pp=4, dp=2), tiny_cluster(4, 2)
    cost = link_cost(layout, random_distances(8, random.Random(seed)))
    annealed = best_placement(layout, cluster, rng_distances=seed)
    problem = PlacementProblem(layout=layout, cluster=cluster, objective=cost, bound_s=0.0)
    *_, exact = exhaustion(problem, annealed, is_late=never)

    assert exact.is_optimal
    assert exact.cost_s <= annealed.cost_s <= 1.15 * exact.cost_s


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

    assert [Placed(placement=tuple(range(8)), cost_s=1.0, is_optimal=True)] == found


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
    assert Placed(placement=(0,), cost_s=0.0, is_optimal=True) == best_placement(Layout(), tiny_cluster(1, 1))
