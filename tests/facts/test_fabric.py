"""Tests of networks that a file describes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.errors import FactError, FileFormatError
from pipette_launch.facts import files
from pipette_launch.facts.devices import KNOWN_DEVICES
from pipette_launch.facts.fabric import UNIFORM, FabricSpec, Tier, built_in_fabric

EXAMPLES = Path(__file__).parents[2] / "examples"
H100 = KNOWN_DEVICES["H100-SXM"]
GB200 = KNOWN_DEVICES["GB200-NVL72"]
TREE = FabricSpec(
    source="Made up.",
    tiers=(
        Tier(name="leaf", hosts_per_group=2),
        Tier(name="pod", hosts_per_group=4, share=0.5, latency_s=2e-5),
        Tier(name="core", bandwidth_bytes_per_s=5e9),
    ),
)


def rows(fabric: FabricSpec, hosts: int) -> list[float]:
    """Return GB/s from host 0 to each host."""
    return [rate / 1e9 for rate in np.asarray(fabric.links(hosts, H100).bandwidth_bytes_per_s)[0].tolist()]


def test_the_innermost_common_tier_is_the_link() -> None:
    """Leaves of two hosts have the card's rate, pods of four half of it, and other pairs a rate of their own."""
    links = TREE.links(6, H100)

    assert [0.0, 47.0, 23.5, 23.5, 5.0, 5.0] == rows(TREE, 6)
    assert [0.0, 1e-5, 2e-5, 2e-5, 1e-5, 1e-5] == pytest.approx(np.asarray(links.latency_s)[0].tolist())


def test_slow_hosts_slow_their_links_and_slots() -> None:
    """The slower end of a link counts. Devices are compared with the median."""
    slow = FabricSpec(
        source="-", tiers=TREE.tiers, network_factor={"host1": 0.5, "host4": 0.8}, compute_factor={"host2": 0.75}
    )

    assert [0.0, 23.5, 23.5, 23.5, 4.0, 5.0] == rows(slow, 6)
    assert (1.0, 1.0, 1.0, 1.0, 0.75, 0.75, 1.0, 1.0) == slow.slot_speed(4, 2)[:8]


def test_groups_may_be_named() -> None:
    """The hosts of an allocation may be scattered over the groups."""
    scattered = FabricSpec(
        source="-",
        hosts=("a", "b", "c", "d"),
        tiers=(Tier(name="leaf", groups=(("a", "c"), ("b",))), Tier(name="spine", share=0.5)),
    )

    assert [0.0, 23.5, 47.0, 23.5] == rows(scattered, 4)
    assert ("a", "b", "c", "d") == scattered.host_names(4)


def test_an_nvlink_domain_comes_with_its_device() -> None:
    """18 trays are linked as devices of one host are, unless the fabric has an NVLink tier."""
    near, far = 720e9, 47e9
    bandwidth = np.asarray(UNIFORM.links(36, GB200).bandwidth_bytes_per_s)
    narrow = FabricSpec(
        source="-",
        tiers=(Tier(name="rack", hosts_per_group=9, link="nvlink"), Tier(name="net")),
        network_factor={"host1": 0.5},
    )
    narrowed = np.asarray(narrow.links(36, GB200).bandwidth_bytes_per_s)

    assert (near, far) == (bandwidth[0, 17], bandwidth[0, 18])
    assert (near, far, far / 2) == (narrowed[0, 1], narrowed[0, 9], narrowed[1, 9])
    assert "NVLink domain of 18 hosts 720 GB/s, network 47 GB/s" == UNIFORM.words(GB200)


@pytest.mark.parametrize(
    ("hosts", "share"), [(2, 18), (18, 18), (32, 16), (36, 18), (64, 16), (100, 10), (97, 18), (38, 18), (128, 16)]
)
def test_a_job_gets_as_many_hosts_of_each_domain(hosts: int, share: int) -> None:
    """Equal shares keep groups of hosts inside domains. Without a large equal share domains are filled in turn."""
    words = UNIFORM.domain_words(GB200, hosts)

    assert [share] == [tier.hosts_per_group for tier in UNIFORM.tiers_on(GB200, hosts) if tier.link == "nvlink"]
    assert bool(words) == (hosts > 18)
    assert ("--segment=" in words) == (share < 18)


def test_shares_of_domains_cut_no_declared_tier() -> None:
    """A share must divide the groups of other tiers. Named groups are not changed."""
    rows_of = {
        size: FabricSpec(source="-", tiers=(Tier(name="row", hosts_per_group=size), Tier(name="net")))
        for size in (32, 36)
    }
    scattered = FabricSpec(source="-", tiers=(Tier(name="leaf", groups=(("host0", "host9"),)), Tier(name="net")))

    assert [16, 18, 18] == [one.tiers_on(GB200, 64)[0].hosts_per_group for one in (*rows_of.values(), scattered)]
    assert "" == rows_of[32].domain_words(H100, 64)


@given(st.integers(1, 40), st.sampled_from([1, 2, 3, 4]))
def test_links_agree_with_the_words_pair_by_pair(hosts: int, leaf: int) -> None:
    """Links are symmetric, no host has a link to itself, and no link is faster than the common tier."""
    fabric = FabricSpec(source="-", tiers=(Tier(name="leaf", hosts_per_group=leaf), Tier(name="spine", share=0.25)))
    bandwidth = np.asarray(fabric.links(hosts, H100).bandwidth_bytes_per_s)

    for i in range(hosts):
        for j in range(hosts):
            assert bandwidth[i, j] == (0.0 if i == j else 47e9 if i // leaf == j // leaf else 47e9 / 4)


def test_built_in_names() -> None:
    """`uniform` and each ratio have built-in fabrics; other names are files."""
    assert built_in_fabric("uniform") is UNIFORM
    tree = built_in_fabric("fat-tree-2:1")
    assert tree is not None
    assert [47.0, 23.5] == rows(tree, 64)[31:33]
    assert (None, None) == (built_in_fabric("fat-tree-0:1"), built_in_fabric("torus"))


@pytest.mark.parametrize("name", ["fat-tree.json", "gb200-nvl72.json"])
def test_examples_are_read_and_written_alike(name: str) -> None:
    """The examples survive reading and writing."""
    path = EXAMPLES / name
    fabric = files.read(path, FabricSpec)

    assert fabric == files.loads(FabricSpec, files.dumps(fabric), "again")
    assert fabric.links(256, GB200).size == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiers": []}, "tiers: a fabric needs at least one tier"),
        ({"tiers": [{"name": "leaf", "width": 3}]}, "f.json: tiers[0]: unknown field 'width'"),
        ({"tiers": [{"name": "leaf", "share": 2}]}, "f.json: tiers[0]: tier 'leaf': share must be above 0"),
        ({"tiers": [{"name": "leaf", "share": 0.5, "bandwidth_bytes_per_s": 1e9}]}, "and share left out"),
        ({"tiers": [{"name": "leaf", "bandwidth_bytes_per_s": -1.0}]}, "bandwidth_bytes_per_s=-1 must be above 0"),
        ({"tiers": [{"name": "leaf", "hosts_per_group": 0}]}, "hosts_per_group=0 must be at least 1"),
        ({"tiers": [{"name": "leaf", "latency_s": -1.0}]}, "latency_s must not be negative, got -1"),
        ({"tiers": [{"name": "leaf", "groups": [["a"], ["a"]]}]}, "a is in its groups more than once"),
        (
            {"tiers": [{"name": "leaf", "link": "rope"}]},
            "f.json: tiers[0]: link: 'rope' is not one of 'card', 'nvlink'",
        ),
        (
            {"tiers": [{"name": "a", "hosts_per_group": 4}, {"name": "b", "hosts_per_group": 6}]},
            "must grow from the inside out in multiples, got 6 around 4",
        ),
        ({"network_factor": {"host3": 0.0}}, "network_factor: host3 must be above 0 and at most 1, got 0"),
        ({"hosts": ["a", "a"]}, "hosts: a is named more than once"),
        ({"hosts": ["a"], "compute_factor": {"b": 0.5}}, "compute_factor: b is not among hosts"),
        ({"source": 3}, "f.json: source: expected str, found 3"),
    ],
)
def test_bad_files_are_refused(changes: dict[str, object], message: str) -> None:
    """The message names file and field."""
    plain = {"kind": "fabric", "schema_version": 2, "source": "-", "tiers": [{"name": "all"}], **changes}
    with pytest.raises(FileFormatError) as caught:
        files.loads(FabricSpec, json.dumps(plain), "f.json")

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fabric", "message"),
    [
        (
            FabricSpec(source="-", tiers=(Tier(name="leaf", hosts_per_group=2),)),
            "host0 and host2 have no common group",
        ),
        (FabricSpec(source="-", tiers=TREE.tiers, hosts=("a", "b")), "2 hosts are named, but the job has 4"),
        (
            FabricSpec(source="-", tiers=TREE.tiers, network_factor={"host9": 0.5}),
            "network_factor: host9 is not one of",
        ),
        (
            FabricSpec(source="-", tiers=(Tier(name="leaf", groups=(("x",),)), Tier(name="all"))),
            "tier 'leaf': x is not one of the job's hosts host0 to host3",
        ),
    ],
)
def test_a_fabric_of_other_hosts_is_refused(fabric: FabricSpec, message: str) -> None:
    """Named hosts must be in the job, and each pair must have a link."""
    with pytest.raises(FactError) as caught:
        fabric.links(4, H100)

    assert message in str(caught.value)
