"""Tokens and FLOPs a second follow from the step, and the part of the peak from the devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job

from pipette_launch.facts import Cluster, Layout
from pipette_launch.facts.results.rate import Rate


def named(name: str) -> Cluster:
    """Two hosts of two such devices."""
    cluster = tiny_cluster(2, 2)
    hosts = tuple(
        replace(host, devices=tuple(replace(device, name=name) for device in host.devices)) for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts)


def test_a_rate_is_of_all_tokens_and_of_each_ranks_flops() -> None:
    """Eight sequences of 32 tokens in half a second are 512 tokens a second; four ranks share their FLOPs."""
    job = tiny_job(4)
    rate = Rate.of(job, Layout(dp=4), 0.5, named("NVIDIA A100-SXM4-80GB"))
    flops_per_s = job.model.step_flops(8, tp=1) / 0.5 / 4

    assert Rate(tokens_per_s=512, flops_per_s=flops_per_s, mfu=flops_per_s / 19.5e12) == rate
    assert rate.times(2) == Rate.of(job, Layout(dp=4), 0.25, named("NVIDIA A100-SXM4-80GB"))


def mixed() -> Cluster:
    """A host of A100 and one of H200."""
    first, second = named("NVIDIA A100-SXM4-80GB").hosts[0], named("NVIDIA H200").hosts[1]
    return replace(tiny_cluster(2, 2), hosts=(first, second))


@pytest.mark.parametrize("cluster", [mixed(), named("AMD EPYC 9000")])
def test_without_a_known_peak_there_are_flops_alone(cluster: Cluster) -> None:
    """The devices are of several types, or of one whose peak nobody told."""
    rate = Rate.of(tiny_job(4), Layout(dp=4), 0.5, cluster)

    assert rate is not None
    assert rate.mfu is None
    assert rate.times(2).mfu is None


def test_no_time_has_no_rate() -> None:
    """A step of 0 s is no step."""
    assert Rate.of(tiny_job(4), Layout(dp=4), 0.0, tiny_cluster(2, 2)) is None
