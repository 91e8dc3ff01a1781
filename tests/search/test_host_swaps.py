"""The block problem that a step time is made into says where hosts should change places."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import changed_job, tiny_job, tiny_measurements, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from search.fabrics import cluster_with, fat_tree
from search.worlds import on_gpus

from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Batch, Job, Layout
from pipette_launch.search.host_swaps import linearise

DENSE = [
    Layout(dp=16),
    Layout(pp=8, dp=2),
    Layout(tp=2, etp=2, pp=4, dp=2),
    Layout(tp=2, etp=2, pp=2, dp=4, use_distributed_optimizer=True),
    Layout(tp=2, etp=2, pp=2, dp=4, use_tp_pp_dp_mapping=True),
    Layout(tp=2, etp=2, pp=4, dp=2, vpp=2),
    Layout(pp=4, dp=4, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
    Layout(pp=4, vpp=2, dp=4, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
]
OVER_HOSTS = [
    Layout(tp=4, etp=4, pp=2, dp=2),
    Layout(dp=16, ep=8),
    Layout(pp=2, dp=8, ep=4),
    Layout(tp=2, dp=8, ep=4, etp=1),
]


def job_of(layout: Layout, **model: object) -> Job:
    """Eight layers, of which the interleaved layouts take one a chunk."""
    return tiny_job(
        layout.world_size,
        own=layout,
        model=tiny_model(num_layers=8, **model),
        batch=Batch(global_batch_size=8 * layout.dp),
    )


def predictor_of(
    layout: Layout, seed: int, *, slow: float = 0.0, gpus: bool = False, flags: tuple[str, ...] = ()
) -> Predictor:
    """Eight hosts of two devices in racks of four, noisy links, and hosts of unequal speed."""
    fabric = fat_tree(8, sizes=(4,), bytes_per_s=(2e8, 5e7), noise=0.2, seed=seed)
    cluster = cluster_with(fabric.links, devices=2)
    cluster = on_gpus(cluster) if gpus else cluster
    speed = 1 / (1 + slow * np.random.default_rng(seed).random(16))
    experts: dict[str, object] = {"num_experts": 8, "moe_layer_freq": (1,) * 8} if layout.ep > 1 else {}
    measured = tiny_measurements(replace(cluster, slot_speed=tuple(speed.tolist())))
    moe = tuple(replace(one, part="moe_layer") for one in measured.compute if one.part == "layer")
    job = changed_job(job_of(layout, **experts), performance_flags=flags)
    return Predictor(job, replace(measured, compute=measured.compute + moe))


def moved(place_Q: NDArray[np.int64], devices: int = 2) -> tuple[int, ...]:
    """The placement in which host `place_Q[q]` holds what host q holds in host order."""
    ranks = np.empty((len(place_Q), devices), dtype=np.int64)
    ranks[place_Q] = np.arange(len(place_Q) * devices).reshape(-1, devices)
    return tuple(ranks.ravel().tolist())


def rank_correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Spearman's, of values that hardly tie."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(ranks)[0, 1])


def said_and_true(
    layout: Layout, seed: int, *, slow: float, gpus: bool = False, flags: tuple[str, ...] = ()
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the block problem and the objective say of 80 random orders of hosts."""
    predictor = predictor_of(layout, seed, slow=slow, gpus=gpus, flags=flags)
    rng = np.random.default_rng(seed)
    place_KQ = np.array([rng.permutation(8) for _ in range(80)])
    flows = linearise(predictor.placement_cost(layout), np.arange(16))
    cost = predictor.placement_cost(layout).cost
    return flows.costs(place_KQ), np.array([cost(moved(place_Q)) for place_Q in place_KQ])


@pytest.mark.parametrize("layout", DENSE, ids=Layout.words)
@pytest.mark.parametrize("slow", [0.0, 0.3])
def test_it_ranks_placements_as_the_objective_does(layout: Layout, slow: float) -> None:
    """On random orders of hosts the rank correlation is above 0.9, and its favourite is among the fastest tenth."""
    said, true = said_and_true(layout, 1, slow=slow)

    assert rank_correlation(said, true) > 0.9
    assert true[said.argmin()] <= np.quantile(true, 0.1)


@pytest.mark.parametrize("layout", OVER_HOSTS, ids=Layout.words)
def test_it_ranks_groups_over_several_hosts(layout: Layout) -> None:
    """Where tensor or expert groups leave their host, by links that take far longer than compute: above 0.7.

    The mean of four clusters counts, because the correlation of one cluster is between 0.6 and 1. On GPUs: gloo's rings
    go both ways round, and the slowest link of each way, which it adds up, may be of two groups.
    """
    found = [said_and_true(layout, seed, slow=0.0, gpus=True) for seed in range(1, 5)]

    assert np.mean([rank_correlation(*each) for each in found]) > 0.7
    assert all(true[said.argmin()] <= np.quantile(true, 0.1) for said, true in found)


@pytest.mark.parametrize("copies", [1, 2])
def test_it_ranks_shards_over_several_hosts(copies: int) -> None:
    """Where all replicas share the weights, or every half of them: above 0.8."""
    flags = (
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads_params",
        f"--num-distributed-optimizer-instances {copies}",
    )
    layout = Layout(dp=16, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    said, true = said_and_true(layout, 1, slow=0.0, gpus=True, flags=flags)

    assert rank_correlation(said, true) > 0.8
    assert true[said.argmin()] <= np.quantile(true, 0.1)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(DENSE + OVER_HOSTS), st.integers(0, 100), st.permutations(range(8)))
def test_it_is_exact_where_it_was_made(layout: Layout, seed: int, order: list[int]) -> None:
    """At its own placement it costs what the step takes."""
    predictor = predictor_of(layout, seed, slow=0.2)
    placement = moved(np.array(order))

    flows = linearise(predictor.placement_cost(layout), np.array(placement))

    assert flows.cost(np.arange(8)) == pytest.approx(predictor.placement_cost(layout).cost(placement), rel=1e-9)


@pytest.mark.parametrize("layout", [Layout(dp=16), Layout(dp=16, use_distributed_optimizer=True)], ids=Layout.words)
def test_rings_alone_are_exact_everywhere(layout: Layout) -> None:
    """Without pipelines a step differs by its slowest ring link alone, which the block problem knows exactly."""
    said, true = said_and_true(layout, 3, slow=0.0)

    np.testing.assert_allclose(said, true, rtol=1e-9)


def test_a_pipeline_of_four_hosts_is_never_said_to_be_slower_than_it_is() -> None:
    """One replica: cuts lie below the real pipeline, within 1 % of it on links that differ fourfold."""
    said, true = said_and_true(Layout(tp=2, etp=2, pp=8), 4, slow=0.0)

    assert (said <= true * (1 + 1e-9)).all()
    np.testing.assert_allclose(said, true, rtol=0.01)


def test_one_host_has_nothing_to_move() -> None:
    """A single host gives a problem of one seat."""
    layout = Layout(tp=2, etp=2)
    cluster = cluster_with(fat_tree(1, sizes=(1,), bytes_per_s=(1e8, 1e8)).links, devices=2)
    predictor = Predictor(job_of(layout), tiny_measurements(cluster))

    flows = linearise(predictor.placement_cost(layout), np.arange(2))

    assert flows.cost([0]) == pytest.approx(predictor.placement_cost(layout).cost((0, 1)))
