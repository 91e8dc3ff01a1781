"""Links between any two slots without a matrix of all slots."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import drawn_cluster, tiny_cluster
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.communication import collectives
from pipette_launch.cost.communication.collectives import Fabric
from pipette_launch.cost.communication.links import Bottlenecks, LinkTable, best_links
from pipette_launch.facts import Links


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_a_look_up_is_what_the_whole_matrix_says(seed: int, hosts: int, devices: int, alike: bool) -> None:
    """From every slot to every slot, itself included, with hosts that share their links and hosts that do not."""
    cluster = drawn_cluster(random.Random(seed), hosts=hosts, devices=devices)
    if alike:
        cluster = replace(cluster, within_host=cluster.within_host[:1] * hosts)
    table = LinkTable.of(cluster)
    sender, receiver = np.indices((cluster.num_slots, cluster.num_slots))
    links = table.links(sender, receiver)

    between, within = cluster.between_hosts.latency_s, [links.latency_s for links in cluster.within_host]
    by_hand = [
        [
            within[a // devices][a % devices, b % devices]
            if a // devices == b // devices
            else between[a // devices, b // devices]
            for b in range(cluster.num_slots)
        ]
        for a in range(cluster.num_slots)
    ]
    assert by_hand == table.latency_s_L[links].tolist()
    assert cluster.seconds_per_byte_SS().tolist() == table.seconds_per_byte_L[links].tolist()


@given(st.integers(0, 10**6), st.integers(2, 5), st.booleans())
def test_no_ring_has_a_faster_slowest_link(seed: int, hosts: int, alike: bool) -> None:
    """By all rings over all sets of hosts; links both ways may differ, and most may be alike."""
    rng = np.random.default_rng(seed)
    rate_HH = rng.choice([1.0, 2.0, 4.0], (hosts, hosts)) if alike else rng.uniform(1.0, 9.0, (hosts, hosts))
    links = Links(latency_s=np.zeros((hosts, hosts)), bandwidth_bytes_per_s=rate_HH)
    bottlenecks = Bottlenecks(links)
    for fewest in range(2, hosts + 1):
        rings = [ring for size in range(fewest, hosts + 1) for ring in itertools.permutations(range(hosts), size)]
        slowest = {ring: max(1 / rate_HH[one, ring[at - 1]] for at, one in enumerate(ring)) for ring in rings}
        for host, least in enumerate(bottlenecks.slowness_H(fewest).tolist()):
            assert least <= min(slowest[ring] for ring in rings if host in ring) * (1 + 1e-12)


def test_a_ring_over_two_islands_crosses_between_them() -> None:
    """Three hosts near each other and two others: a ring over four, or over two through the last host, is slow."""
    island_H = np.array([0, 0, 0, 1, 1])
    rate_HH = np.where(np.equal.outer(island_H, island_H), 4.0, 1.0)
    rate_HH[4], rate_HH[:, 4] = 2.0, 2.0
    bottlenecks = Bottlenecks(Links(latency_s=np.zeros((5, 5)), bandwidth_bytes_per_s=rate_HH))

    assert [1 / 4, 1 / 4, 1 / 4, 1 / 2, 1 / 2] == bottlenecks.slowness_H(2).tolist()
    assert [1 / 4, 1 / 4, 1 / 4, 1 / 2, 1 / 2] == bottlenecks.slowness_H(3).tolist()
    assert [1 / 2] * 5 == bottlenecks.slowness_H(4).tolist()


def test_a_large_cluster_keeps_few_links() -> None:
    """Hosts that are alike share one matrix: 40 hosts of 8 keep 40 * 40 + 8 * 8 links, not 320 * 320."""
    assert 40 * 40 + 8 * 8 == len(LinkTable.of(tiny_cluster(40, 8)).latency_s_L)


def test_the_best_links_by_hand() -> None:
    """A link that another beats in both goes, of links of equal latency the faster stays."""
    latency = [[9.0, 1.0, 2.0], [2.0, 9.0, 3.0], [1.0, 3.0, 9.0]]
    bandwidth = [[9.0, 2.0, 4.0], [5.0, 9.0, 5.0], [1.0, 10.0, 9.0]]

    found = best_links([Links(latency_s=latency, bandwidth_bytes_per_s=bandwidth)])

    assert ((1.0, 1 / 2), (2.0, 1 / 5), (3.0, 1 / 10)) == found
    assert () == best_links([Links.uniform(1, latency_s=1.0, bandwidth_bytes_per_s=1.0)])


@given(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from([1, 3, 1 << 19]))
def test_an_all_to_all_in_pieces_is_the_slowest_of_all_pairs(seed: int, size: int, at_once: int) -> None:
    """However many links are looked at together."""
    fabric = Fabric(drawn_cluster(random.Random(seed), hosts=3, devices=2))
    slots_GK = np.array([np.random.default_rng(seed + row).permutation(6)[:size] for row in range(3)])
    expected = []
    for slots in slots_GK:
        pairs = [fabric.seconds("send", (a, b), 1000 / size) for a in slots for b in slots if a != b]
        expected.append((size - 1) * max(pairs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "LINKS_AT_ONCE", at_once)
        found = fabric.seconds_G("all_to_all", slots_GK, 1000.0)

    assert np.allclose(expected, found, rtol=1e-12)
