"""Hosts share an NVLink domain where their type has one and their links are as fast, and blocks are split or not."""

from __future__ import annotations

import pytest
from facts_for_tests import tiny_cluster
from search.fabrics import cluster_with, fat_tree
from search.worlds import named, on_gpus

from pipette_launch.cost.compute.imagined_device import imagined_cluster
from pipette_launch.facts import files
from pipette_launch.facts.machines.fabric import UNIFORM
from pipette_launch.facts.machines.known_devices import known_devices
from pipette_launch.facts.machines.rooms import RankBlock, Rooms

IN_HOST = RankBlock(size=2, room="host", kind="tensor-parallel", asked_by="--tp-comm-overlap")
IN_DOMAIN = RankBlock(size=4, room="domain", kind="expert-parallel", asked_by="HybridEP")


@pytest.mark.parametrize(
    ("device", "domain_H"),
    [("NVIDIA GB200", (0, 0, 0, 1, 1, 1)), ("NVIDIA H100 80GB HBM3", tuple(range(6))), ("unheard of", tuple(range(6)))],
)
def test_domains_are_of_the_device(device: str, domain_H: tuple[int, ...]) -> None:
    """The same fast links are a domain between trays of GB200 alone."""
    fabric = fat_tree(6, sizes=(3,), bytes_per_s=(6e11, 5e10), noise=0.05, seed=2)
    found = Rooms.of(named(on_gpus(cluster_with(fabric.links, devices=4)), device))
    places = [found.domain_H[host] for host in fabric.group_LH[0].argsort(kind="stable")]

    assert 4 == found.devices_per_host
    assert len(set(domain_H)) == len(found.domains)
    assert domain_H == tuple(list(dict.fromkeys(places)).index(place) for place in places)


def test_imagined_racks_are_domains() -> None:
    """64 hosts of GB200 NVL72 get 16 of each domain."""
    cluster = imagined_cluster(known_devices()["GB200-NVL72"], num_hosts=64, devices_per_host=4, fabric=UNIFORM)
    rooms = Rooms.of(cluster)

    assert [16] * 4 == [len(hosts) for hosts in rooms.domains]
    assert {64} == rooms.domain_devices
    assert {64, 16} == rooms.first(20).domain_devices
    assert () == rooms.first(65).domain_H


@pytest.mark.parametrize(
    ("block", "placement", "split"),
    [
        (IN_HOST, (0, 1, 2, 3, 4, 5, 6, 7), False),
        (IN_HOST, (1, 0, 6, 7, 4, 5, 3, 2), False),
        (IN_HOST, (0, 3, 2, 1, 4, 5, 6, 7), True),
        (IN_DOMAIN, (0, 1, 4, 5, 2, 3, 6, 7), False),
        (IN_DOMAIN, (0, 5, 6, 7, 2, 3, 4, 1), True),
        (IN_DOMAIN, (0, 1, 2, 3, 4, 5, 6, 7), True),
    ],
)
def test_a_block_is_split_or_not(block: RankBlock, placement: tuple[int, ...], split: bool) -> None:
    """Four hosts of two devices, of which the even ones are one domain and the odd ones another."""
    rooms = Rooms(devices_per_host=2, domain_H=(0, 1, 0, 1))

    assert (block if split else None) == rooms.split((block,), placement)
    assert rooms.split((), placement) is None


def test_what_is_not_known_splits_nothing() -> None:
    """Without domains only hosts are judged."""
    assert Rooms(devices_per_host=2).split((IN_DOMAIN,), (0, 5, 6, 7, 2, 3, 4, 1)) is None


def test_blocks_are_said_in_a_sentence() -> None:
    """The plan repeats it."""
    found = "Each of the blocks of 4 expert-parallel ranks lies inside an NVLink domain, as HybridEP demands."

    assert found == IN_DOMAIN.sentence
    assert IN_HOST.sentence.endswith("lies inside a host, as --tp-comm-overlap demands.")
    assert files.digest(IN_HOST) != files.digest(IN_DOMAIN)
    assert Rooms.of(tiny_cluster(2, 2)).domain_H == (0, 1)
