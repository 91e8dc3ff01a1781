"""The rough estimate of which numbers of hosts are worth a search."""

from __future__ import annotations

import math

from pipette_launch.search.fewer_hosts import rough_step


def of_hosts(hosts: int, *, least: int = 2) -> float:
    """Hosts of eight devices, 1,024 samples a step, a model of 32 layers."""
    return rough_step(8 * hosts, devices_per_host=8, samples=1024, layers=32, least_devices=least)


def test_short_pipelines_on_fewer_hosts_come_before_deep_ones_on_more() -> None:
    """The order is that of the step times that whole searches found: 0.91, 1.22, 1.31, 1.50, 1.71 and 2.08 s."""
    assert [64, 56, 48, 60, 32, 62] == sorted((32, 48, 56, 60, 62, 64), key=of_hosts)


def test_no_estimate_where_a_pipeline_is_deeper_than_the_model() -> None:
    """63 hosts share eight devices' worth of factors with the batch: stages of eight devices make 63."""
    assert math.inf == of_hosts(63)


def test_a_replica_has_its_least_devices() -> None:
    """More devices for each make fewer replicas."""
    assert of_hosts(64, least=16) > of_hosts(64)
