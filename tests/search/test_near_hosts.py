"""The hierarchy of a fabric is found in the matrix of its links, for any order of its hosts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from search.fabrics import fat_tree

from pipette_launch.facts import Links
from pipette_launch.search.near_hosts import Tiers, tiers_of


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


def test_nvlink_domains_of_several_hosts_are_a_tier() -> None:
    """Trays of an NVL72 rack reach each other ten times faster than the next rack's, even with a rack half there."""
    fabric = fat_tree(45, sizes=(18,), bytes_per_s=(8e11, 5e10), noise=0.08, seed=1)

    assert [partition(fabric.group_LH[0])] == partitions(tiers_of(fabric.links))


def test_a_host_alone_in_its_rack_joins_no_other() -> None:
    """Being far from its nearest does not make a host bad: racks of 4 beside a lone host stay apart from it."""
    fabric = fat_tree(13, sizes=(4,), bytes_per_s=(5e10, 2e10), seed=2)

    assert [partition(fabric.group_LH[0])] == partitions(tiers_of(fabric.links))


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
