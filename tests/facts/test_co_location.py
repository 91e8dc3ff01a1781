"""Tests of NVLink domains and of blocks that a placement may split."""

from __future__ import annotations

import contextlib

import pytest
from facts_for_tests import tiny_cluster, tiny_model
from search.fabrics import cluster_with, fat_tree
from search.worlds import named, on_gpus

from pipette_launch.cost.compute.device_model import imagined_cluster
from pipette_launch.errors import LayoutError
from pipette_launch.facts import Layout, files
from pipette_launch.facts.co_location import Domains, RankBlock, blocks_of, expert_block
from pipette_launch.facts.devices import KNOWN_DEVICES
from pipette_launch.facts.fabric import UNIFORM
from pipette_launch.facts.job import PerformanceOptions

IN_HOST = RankBlock(size=2, within="host", kind="tensor-parallel", asked_by="--tp-comm-overlap")
IN_DOMAIN = RankBlock(size=4, within="domain", kind="expert-parallel", asked_by="HybridEP")


@pytest.mark.parametrize(
    ("device", "domain_H"),
    [("NVIDIA GB200", (0, 0, 0, 1, 1, 1)), ("NVIDIA H100 80GB HBM3", tuple(range(6))), ("unheard of", tuple(range(6)))],
)
def test_domains_are_of_the_device(device: str, domain_H: tuple[int, ...]) -> None:
    """The same fast links form a domain for GB200, but not for other types."""
    fabric = fat_tree(6, sizes=(3,), bytes_per_s=(6e11, 5e10), noise=0.05, seed=2)
    found = Domains.of(named(on_gpus(cluster_with(fabric.links, devices=4)), device))
    places = [found.domain_H[host] for host in fabric.group_LH[0].argsort(kind="stable")]

    assert 4 == found.devices_per_host
    assert len(set(domain_H)) == len(found.domains)
    assert domain_H == tuple(list(dict.fromkeys(places)).index(place) for place in places)


def test_imagined_racks_are_domains() -> None:
    """64 hosts of GB200 NVL72 get 16 of each domain."""
    cluster = imagined_cluster(KNOWN_DEVICES["GB200-NVL72"], num_hosts=64, devices_per_host=4, fabric=UNIFORM)
    rooms = Domains.of(cluster)

    assert [16] * 4 == [len(hosts) for hosts in rooms.domains]
    assert {64} == rooms.domain_devices
    assert {64, 16} == rooms.first(20).domain_devices
    assert () == rooms.first(65).domain_H


@pytest.mark.parametrize("sizes", [(18, 10), (18, 1), (16, 16, 8)])
def test_experts_that_may_run_fit_into_the_smallest_of_several_domains(sizes: tuple[int, ...]) -> None:
    """So the smallest domain decides the price of their exchanges, whatever the other domains are."""
    options = PerformanceOptions(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")  # noqa: S106  this token is text
    domains = Domains(
        devices_per_host=4, domain_H=tuple(rack for rack, hosts in enumerate(sizes) for _ in range(hosts))
    )
    legal = set()
    for group in range(1, 4 * sum(sizes) + 1):
        with contextlib.suppress(LayoutError):
            expert_block(options, group, domains)
            legal.add(group)

    assert {1, 2, 4} <= legal
    assert max(legal) <= domains.smallest == 4 * min(sizes)


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
    """Four hosts of two devices: the even hosts are one domain, the odd hosts another."""
    rooms = Domains(devices_per_host=2, domain_H=(0, 1, 0, 1))

    assert (block if split else None) == rooms.split((block,), placement)
    assert rooms.split((), placement) is None


def test_what_is_not_known_splits_nothing() -> None:
    """Without known domains only hosts can split a block."""
    assert Domains(devices_per_host=2).split((IN_DOMAIN,), (0, 5, 6, 7, 2, 3, 4, 1)) is None


def test_blocks_are_said_in_a_sentence() -> None:
    """The plan shows this sentence."""
    found = "Each of the blocks of 4 expert-parallel ranks lies inside an NVLink domain, as HybridEP requires."

    assert found == IN_DOMAIN.sentence
    assert IN_HOST.sentence.endswith("lies inside a host, as --tp-comm-overlap requires.")
    assert files.digest(IN_HOST) != files.digest(IN_DOMAIN)
    assert Domains.of(tiny_cluster(2, 2)).domain_H == (0, 1)


HGX = Domains(devices_per_host=8, domain_H=tuple(range(16)))
RACKS = Domains(devices_per_host=4, domain_H=(0,) * 16 + (1,) * 16)
UNEVEN = Domains(devices_per_host=4, domain_H=(0,) * 18 + (1,) * 14)
BLIND = Domains(devices_per_host=4)
OVERLAP = PerformanceOptions(tp_comm_overlap=True)


def flex(backend: str = "deepep", *, deepep: bool = False) -> PerformanceOptions:
    """Return the flex dispatcher with a backend."""
    dispatcher = "flex"
    return PerformanceOptions(
        moe_token_dispatcher_type=dispatcher, moe_flex_dispatcher_backend=backend, moe_enable_deepep=deepep
    )


@pytest.mark.parametrize(
    ("options", "layout", "expected"),
    [
        (PerformanceOptions(), Layout(tp=8, dp=8, ep=8), ()),
        (OVERLAP, Layout(dp=64), ()),
        (OVERLAP, Layout(tp=4, dp=16), ((4, "host"),)),
        (flex(), Layout(dp=64), ()),
        (flex(), Layout(dp=64, ep=16), ((8, "host"),)),
    ],
)
def test_what_lies_together_on_hosts(
    options: PerformanceOptions, layout: Layout, expected: tuple[tuple[int, str], ...]
) -> None:
    """Expert blocks exist only for models with experts."""
    found = blocks_of(tiny_model(num_experts=64, moe_layer_freq=(1,) * 4), options, layout, HGX)

    assert expected == tuple((block.size, block.within) for block in found)
    assert all(block.kind == "tensor-parallel" for block in blocks_of(tiny_model(), options, layout, HGX))


@pytest.mark.parametrize(
    ("options", "group", "rooms", "expected"),
    [
        (flex(), 4, HGX, (4, "host")),
        (flex(), 8, HGX, (8, "host")),
        (flex(), 64, HGX, (8, "host")),
        (flex(), 3, HGX, "DeepEP has no settings for groups of ep*etp=3"),
        (flex(), 4, RACKS, (4, "host")),
        (flex(), 8, RACKS, "DeepEP needs blocks of 8 ranks of ep*etp that fill hosts of 4"),
        (flex("hybridep", deepep=True), 8, RACKS, "DeepEP needs blocks"),
        (flex("hybridep"), 4, HGX, (4, "host")),
        (flex("hybridep"), 32, HGX, (8, "host")),
        (flex("hybridep"), 12, HGX, "HybridEP needs groups of ep*etp that fill NVLink domains of 8, or whole domains"),
        (flex("hybridep"), 2, RACKS, (2, "host")),
        (flex("hybridep"), 8, RACKS, (8, "domain")),
        (flex("hybridep"), 64, RACKS, (64, "domain")),
        (flex("ncclep"), 128, RACKS, (64, "domain")),
        (flex("ncclep"), 96, RACKS, "NCCL EP needs groups of ep*etp that fill NVLink domains of 64, or whole domains"),
        (flex("hybridep"), 8, UNEVEN, (8, "domain")),
        (flex("hybridep"), 64, UNEVEN, "HybridEP needs groups of ep*etp that fill NVLink domains of 56 and 72, or"),
        (flex("hybridep"), 64, BLIND, None),
    ],
)
def test_the_blocks_of_each_dispatcher(
    options: PerformanceOptions, group: int, rooms: Domains, expected: tuple[int, str] | str | None
) -> None:
    """DeepEP depends on hosts and 8 ranks, HybridEP and NCCL EP on NVLink domains. Unknown domains refuse nothing."""
    if isinstance(expected, str):
        with pytest.raises(LayoutError) as caught:
            expert_block(options, group, rooms)
        assert expected in str(caught.value)
    else:
        block = expert_block(options, group, rooms)
        assert expected == (block and (block.size, block.within))


def test_userbuffers_want_hosts_that_are_filled() -> None:
    """Groups of 3 or 16 ranks do not fill a host of 8."""
    for tp in (3, 16):
        with pytest.raises(LayoutError, match="--tp-comm-overlap needs tp groups that fill hosts of 8"):
            blocks_of(tiny_model(), OVERLAP, Layout(tp=tp, dp=8), HGX)
