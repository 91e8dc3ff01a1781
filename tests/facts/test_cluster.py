"""Tests of hosts, slots and links."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import tiny_cluster

from pipette_launch.errors import FactError
from pipette_launch.facts import Links
from pipette_launch.facts.cluster import in_device_order


def test_slots_are_numbered_host_by_host() -> None:
    """A slot has a host and a name."""
    cluster = tiny_cluster(hosts=2, devices=3)

    assert (6, 1, "node1:2") == (cluster.num_slots, cluster.host_of(5), cluster.slot_name(5))


def test_free_memory_counts() -> None:
    """Memory of other processes is not available to the job."""
    cluster = tiny_cluster(hosts=1, devices=2, memory_bytes=100)
    host = cluster.hosts[0]
    busy = replace(host, devices=(host.devices[0], replace(host.devices[1], memory_free_bytes=60)))

    assert 60 == replace(cluster, hosts=(busy,)).memory_bytes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"slot_speed": (1.0,)}, "slot_speed needs 4 positive values"),
        ({"between_hosts": Links.uniform(3, latency_s=1, bandwidth_bytes_per_s=1)}, "3 wide for 2 hosts"),
        ({"within_host": ()}, "within_host needs one matrix for each host"),
    ],
)
def test_a_cluster_checks_itself(changes: dict[str, object], expected: str) -> None:
    """Matrices and speeds must match the hosts."""
    with pytest.raises(FactError, match=expected):
        replace(tiny_cluster(), **changes)  # type: ignore[arg-type]


def test_hosts_must_be_alike_and_apart() -> None:
    """Unequal device counts and equal names are errors that name the hosts."""
    one, two = tiny_cluster().hosts

    with pytest.raises(FactError, match="node0: 2, node1: 1"):
        replace(tiny_cluster(), hosts=(one, replace(two, devices=two.devices[:1])))
    with pytest.raises(FactError, match="host names must differ, got node0, node0"):
        replace(tiny_cluster(), hosts=(one, replace(two, name="node0")))


def test_a_link_needs_a_bandwidth() -> None:
    """The message names both ends."""
    with pytest.raises(FactError, match=re.escape("0 -> 1 has latency 0.0 s and bandwidth 0.0")):
        Links(latency_s=((0.0, 0.0), (0.0, 0.0)), bandwidth_bytes_per_s=((0.0, 0.0), (1.0, 0.0)))


def test_links_are_equal_by_their_numbers() -> None:
    """Rows and arrays give equal links, which are read-only."""
    rows = [[0.0, 1.0], [2.0, 0.0]]
    array = np.array(rows)
    one, two = (Links(latency_s=given, bandwidth_bytes_per_s=given) for given in (rows, array))
    array[0, 1] = 7.0

    assert (one, hash(one)) == (two, hash(two))
    assert one != replace(one, latency_s=np.array([[0.0, 3.0], [2.0, 0.0]]))
    assert not two.latency_s.flags.writeable
    assert hash(one) == hash(replace(one, latency_s=[[-0.0, 1.0], [2.0, 0.0]]))


def test_the_slowest_and_the_fastest_link_by_hand() -> None:
    """If all are equal, the first is the slowest and the last the fastest. A single place has no link."""
    rates = [[0.0, 3.0, 2.0], [2.0, 0.0, 5.0], [5.0, 4.0, 0.0]]
    links = Links(latency_s=np.zeros((3, 3)), bandwidth_bytes_per_s=rates)

    assert ((0, 2), (2, 0)) == links.extremes
    assert () == Links.uniform(1, latency_s=0.0, bandwidth_bytes_per_s=1.0).extremes


@pytest.mark.parametrize("rows", [[[0.0, 1.0]], [[0.0, 1.0], [1.0]], [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]])
def test_links_are_square(rows: list[list[float]]) -> None:
    """Rows with another length than the number of rows are refused."""
    with pytest.raises(FactError, match="links: both matrices must be 2 x 2"):
        Links(latency_s=[[0.0, 1.0], [1.0, 0.0]], bandwidth_bytes_per_s=rows)


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_the_first_bad_link_is_named(bad: float) -> None:
    """The first pair with a negative or missing latency is named. The diagonal is ignored."""
    latency = np.zeros((3, 3))
    latency[0, 0] = latency[1, 2] = latency[2, 0] = bad

    with pytest.raises(FactError, match=re.escape(f"links: 1 -> 2 has latency {bad} s and bandwidth 5.0 bytes/s")):
        Links(latency_s=latency, bandwidth_bytes_per_s=np.full((3, 3), 5.0))


def test_hosts_that_are_alike_share_their_links() -> None:
    """Hosts with equal links share one object."""
    cluster = tiny_cluster(hosts=3, devices=2)

    assert 1 == len({id(links) for links in cluster.within_host})


def test_ranks_rise_with_devices() -> None:
    """Each host keeps its ranks, which take its devices in order."""
    scrambled = (6, 1, 4, 3, 5, 0, 7, 2)

    assert [1, 3, 4, 6, 0, 2, 5, 7] == in_device_order(scrambled, 4).tolist()
    assert [[0, 1], [2, 3]] == in_device_order([[1, 0], [3, 2]], 2).tolist()
