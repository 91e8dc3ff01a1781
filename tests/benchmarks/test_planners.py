"""The comparison of planners: its networks, its footing, and what its table says of picks that do not fit."""

import time
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model

from benchmarks import bench_planners
from benchmarks.planners import show
from benchmarks.planners.duel import MAPPERS, RIVALS, duel
from benchmarks.planners.machines import MACHINES, NETWORKS, with_network
from benchmarks.planners.zoo import MODELS, job_of, plain
from benchmarks.rivals.pick import PlannerOptions
from pipette_launch.cost.communication.collectives import Fabric
from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.facts import Batch, ComputeCase, Layout
from pipette_launch.text import GIB


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("hosts", [8, 16, 64])
def test_networks_are_shares_of_the_nominal_link(name: str, hosts: int) -> None:
    """Every link has a share between 0 and 1, no two hosts are as near as a host to itself, and a seed repeats it."""
    network, again = (NETWORKS[name](hosts, np.random.default_rng(5)) for _ in range(2))
    links = network.share_HH[~np.eye(hosts, dtype=bool)]

    assert 0.1 < links.min() < links.max() <= 1
    assert np.array_equal(network.share_HH, again.share_HH)
    assert len(network.switches_H) in (0, hosts)


def test_hosts_under_one_declared_switch_are_nearer() -> None:
    """In tiers the mean share within a leaf is above that within a pod, and this above that across the core."""
    network = NETWORKS["tiered"](64, np.random.default_rng(1))
    pod_H, leaf_H = np.array(network.switches_H).T
    same_leaf, same_pod = leaf_H[:, None] == leaf_H, pod_H[:, None] == pod_H
    means = [
        float(network.share_HH[where & ~np.eye(64, dtype=bool)].mean())
        for where in (same_leaf, same_pod & ~same_leaf, ~same_pod)
    ]

    assert means == sorted(means, reverse=True)
    assert means[0] > means[1] + 0.1 > means[2] + 0.2


def test_collectives_slow_down_as_their_links_do() -> None:
    """What a measured group says beyond its links stays what it was on equal links."""
    job = job_of("2.5B", MACHINES["A100"], 32)
    equal = imagined(
        job, MACHINES["A100"].spec, num_hosts=4, devices_per_host=8, layouts=[Layout(tp=8, etp=8, dp=4), Layout(dp=32)]
    )
    unequal = with_network(equal, NETWORKS["mixed cards"](4, np.random.default_rng(2)))
    before, after = (
        Fabric(one.cluster, one.collectives).scale("all_reduce", 32).bytes_factor for one in (equal, unequal)
    )

    assert before.tolist() == pytest.approx(after.tolist())
    assert equal.cluster.between_hosts != unequal.cluster.between_hosts


def test_a_duel_counts_what_does_not_fit() -> None:
    """AMP's pick is over 80 MiB a device: that is counted, and what runs is the first of its ranking that fits."""
    model = tiny_model(num_layers=4, hidden_size=512, ffn_hidden_size=2048, kv_channels=128, seq_length=256)
    cases = tuple(ComputeCase(tp=tp, cp=1, micro_batch_size=size) for tp in (1, 2) for size in (1, 2))
    measured = tiny_measurements(tiny_cluster(2, 2, memory_bytes=80 << 20), cases)
    options = PlannerOptions(capacity_bytes=measured.cluster.memory_bytes, clock=time.monotonic, budget_s=0.01)
    found = duel(tiny_job(4, model=model, batch=Batch(global_batch_size=4)), measured, options, budget_s=20)

    assert found.plan is not None
    assert set(found.mapped_s) == set(MAPPERS)
    for rival, outcome in found.outcomes.items():
        ratio = found.ratio(rival)
        assert outcome.fits == (outcome.rank == 0)
        assert ratio is None or ratio >= 1 - 1e-3
    assert found.outcomes["amp"].rank > 0
    assert "varuna" not in found.outcomes
    heads = list(show.head())[-2]
    assert heads.count("|") == show.row("one", found).count("|")
    assert heads.count("|") == show.row("one", replace(found, plan=None, why_not="it is too large")).count("|")
    assert len(RIVALS) == sum(
        line.startswith(f"| {rival} |") for line in show.summary({"one": found}) for rival in RIVALS
    )


def test_everybody_may_be_held_to_the_plainest_flags() -> None:
    """The plain footing pins flags alone; degrees, micro-batch and order stay free."""
    job = plain(job_of("8.1B", MACHINES["V100"], 64))

    assert not {"tp", "pp", "dp", "micro_batch_size"} & set(job.pinned)
    assert all(getattr(job.own, name) == getattr(Layout(), name) for name in job.pinned)


def test_the_cases_are_the_whole_grid() -> None:
    """Two clusters, all ten models or six, three sizes, three kinds of links; the quick ones are among them."""
    assert 2 * len(MODELS) * 3 * 3 == len(set(bench_planners.names(every=True)))
    assert 2 * 6 * 3 * 3 == len(set(bench_planners.names(every=False)))
    assert set(bench_planners.QUICK) <= set(bench_planners.names(every=False))
    assert int(31.73 * GIB) == MACHINES["V100"].spec.memory_bytes
