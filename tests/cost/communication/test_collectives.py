"""Collectives by hand, over measured fits, and the bound over all groups."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import drawn_cluster, tiny_cluster
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipette_launch.cost.communication import collectives
from pipette_launch.cost.communication.collectives import (
    Fabric,
    LinkTable,
    best_links,
    num_steps,
    spread_over_hosts,
)
from pipette_launch.cost.layers.loads import Collective
from pipette_launch.errors import FactError
from pipette_launch.facts import Cluster, Links
from pipette_launch.facts.measurements import CollectiveTime


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_a_look_up_is_what_the_whole_matrix_says(seed: int, hosts: int, devices: int, alike: bool) -> None:
    """From every slot to every slot, itself included, with hosts that share their links and hosts that do not."""
    cluster = drawn_cluster(random.Random(seed), hosts=hosts, devices=devices)
    if alike:
        cluster = replace(cluster, within_host=cluster.within_host[:1] * hosts)
    table = LinkTable(cluster)
    sender, receiver = np.indices((cluster.num_slots, cluster.num_slots))
    links = table.links(sender, receiver)

    def between_slots(matrix: Callable[[Links], NDArray[np.float64]]) -> list[list[float]]:
        between, within = matrix(cluster.between_hosts), [matrix(links) for links in cluster.within_host]
        return [
            [
                float(within[a // devices][a % devices, b % devices])
                if a // devices == b // devices
                else float(between[a // devices, b // devices])
                for b in range(cluster.num_slots)
            ]
            for a in range(cluster.num_slots)
        ]

    assert between_slots(lambda links: links.latency_s) == table.latency_s_L[links].tolist()
    assert between_slots(lambda links: links.seconds_per_byte) == table.seconds_per_byte_L[links].tolist()


def test_a_large_cluster_keeps_few_links() -> None:
    """Hosts that are alike share one matrix: 40 hosts of 8 keep 40 * 40 + 8 * 8 links, not 320 * 320."""
    assert 40 * 40 + 8 * 8 == len(LinkTable(tiny_cluster(40, 8)).latency_s_L)


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


KINDS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def measured(
    kind: Collective, slots: tuple[int, ...], *, latency_s: float = 2e-3, seconds_per_byte: float = 4e-8
) -> CollectiveTime:
    """A fit that is far from the links of `tiny_cluster`."""
    return CollectiveTime(
        kind=kind,
        slots=slots,
        latency_s=latency_s,
        seconds_per_byte=seconds_per_byte,
        spread=0.0,
        sizes_bytes=(1, 2, 3),
    )


def uneven_cluster(seed: int, *, hosts: int = 2, devices: int = 2) -> Cluster:
    """Every link its own latency and bandwidth."""
    rng = np.random.default_rng(seed)

    def links(size: int, scale: float) -> Links:
        latency = rng.uniform(1e-5, 1e-3, (size, size)) / scale
        bandwidth = rng.uniform(1e7, 1e9, (size, size)) * scale
        return Links(
            latency_s=tuple(map(tuple, latency.tolist())), bandwidth_bytes_per_s=tuple(map(tuple, bandwidth.tolist()))
        )

    return replace(
        tiny_cluster(hosts, devices),
        between_hosts=links(hosts, 1.0),
        within_host=tuple(links(devices, 3.0) for _ in range(hosts)),
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Four slots on two hosts: the slowest link has 1e-4 s and 1e8 bytes/s, and a ring has two such links. A chunk
        # of 1000 bytes takes 1.05e-4 s in a ring, and 1.1e-4 s in an all-to-all.
        ("all_reduce", 6 * 1.05e-4),
        ("all_gather", 3 * 1.05e-4),
        ("reduce_scatter", 3 * 1.05e-4),
        ("all_to_all", 3 * 1.1e-4),
    ],
)
def test_a_ring_takes_as_long_as_its_slowest_link(kind: Collective, expected: float) -> None:
    """Steps times (latency + chunk / bandwidth)."""
    assert Fabric(tiny_cluster(2, 2)).seconds(kind, (0, 1, 2, 3), 4000) == pytest.approx(expected)


def test_a_send_uses_its_own_link_and_direction() -> None:
    """From host 0 to host 1 is not from host 1 to host 0."""
    links = Links(latency_s=((0.0, 1e-3), (5e-3, 0.0)), bandwidth_bytes_per_s=((0.0, 1e6), (2e6, 0.0)))
    fabric = Fabric(replace(tiny_cluster(2, 1), between_hosts=links))

    assert fabric.seconds("send", (0, 1), 1000) == pytest.approx(2e-3)
    assert fabric.seconds("send", (1, 0), 1000) == pytest.approx(5.5e-3)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_ring_uses_its_links_the_way_that_it_goes(kind: Collective) -> None:
    """One step over the slowest of its directed links, whether members send to the next or to the one before."""
    cluster = uneven_cluster(3, hosts=3, devices=1)
    shift = Fabric(cluster).ring_shift(kind)
    links = cluster.between_hosts
    step_s = max(
        float(links.latency_s[a, (a + shift) % 3] + 1000 / links.bandwidth_bytes_per_s[a, (a + shift) % 3])
        for a in range(3)
    )

    assert Fabric(cluster).seconds(kind, (0, 1, 2), 3000) == pytest.approx(num_steps(kind, 3) * step_s)


def test_a_measured_ring_corrects_the_links_that_it_used() -> None:
    """Over links that are slow one way, a reduction that went the other way says nothing of libraries that are fast."""
    fast, slow = 1e8, 1e7
    bandwidth = tuple(tuple(0.0 if a == b else slow if (a + 1) % 4 == b else fast for b in range(4)) for a in range(4))
    links = replace(tiny_cluster(4, 1).between_hosts, bandwidth_bytes_per_s=bandwidth)
    cluster = replace(tiny_cluster(4, 1), between_hosts=links)
    assert cluster.device_kind == "cpu"
    backwards = measured("all_reduce", (0, 1, 2, 3), latency_s=0.0, seconds_per_byte=1.5 / fast)
    fabric = Fabric(cluster, (backwards,))

    assert fabric.seconds("all_reduce", (0, 1, 2, 3), 4e6) == pytest.approx(1.5 * 4e6 / fast, rel=1e-2)
    assert fabric.seconds("all_reduce", (0, 3, 2, 1), 4e6) == pytest.approx(1.5 * 4e6 / slow, rel=1e-2)


def test_alone_there_is_nothing_to_send() -> None:
    """A group of one costs nothing."""
    assert [Fabric(tiny_cluster()).seconds(kind, (1,), 1e9) for kind in KINDS] == [0.0] * 5


def test_groups_are_priced_each_by_itself() -> None:
    """Two groups inside a host each, one across: their own sizes, their own links."""
    seconds = Fabric(tiny_cluster(2, 2)).seconds_G(
        "all_gather", np.array([[0, 1], [2, 3], [0, 2]]), np.array([2000.0, 4000.0, 2000.0])
    )

    assert seconds == pytest.approx([1.1e-5, 1.2e-5, 1.1e-4])


def test_an_all_to_all_uses_every_pair() -> None:
    """The slow pair costs although no ring step would use it."""
    fast, slow = 1e9, 1e6
    bandwidth = [[0.0 if i == j else fast for j in range(4)] for i in range(4)]
    bandwidth[2][0] = slow
    links = Links(latency_s=((0.0,) * 4,) * 4, bandwidth_bytes_per_s=tuple(map(tuple, bandwidth)))
    fabric = Fabric(replace(tiny_cluster(1, 4), within_host=(links,)))

    assert fabric.seconds("all_to_all", (0, 1, 2, 3), 4e6) == pytest.approx(3 * 1.0)
    assert fabric.seconds("all_gather", (0, 1, 2, 3), 4e6) == pytest.approx(3 * 1e-3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "send"])
@pytest.mark.parametrize("latency_s", [0.0, 1e-4, 2e-3])
def test_a_measured_group_costs_what_was_measured(kind: Collective, latency_s: float) -> None:
    """A measured group gets its own fit at every size, also if its latency is below the links' latency."""
    slots = (0, 1, 2, 3)
    fabric = Fabric(tiny_cluster(2, 2), [measured(kind, slots, latency_s=latency_s)])

    for size_bytes in (0, 1, 1000, 10**8):
        assert fabric.seconds(kind, slots, size_bytes) == pytest.approx(latency_s + 4e-8 * size_bytes)


def test_a_send_is_what_its_link_says() -> None:
    """The links were measured by sends: another pair's time would only blur them."""
    fabric = Fabric(tiny_cluster(2, 2), [measured("send", (0, 2))])

    assert fabric.seconds("send", (0, 2), 1000) == pytest.approx(1.1e-4)


@pytest.mark.parametrize(("kind", "factor"), [("all_reduce", 1), ("all_gather", 1), ("reduce_scatter", 2)])
def test_what_crowds_a_host_slows_no_wire(kind: Collective, factor: int) -> None:
    """A group inside a host took 40 times its links' time. Groups across hosts get only gloo's own factor.

    Two members on each host have both slots' parts of the wire.
    """
    cluster = tiny_cluster(2, 2)
    assert cluster.device_kind == "cpu"
    inside = Fabric(cluster, [measured(kind, (0, 1), latency_s=0.0, seconds_per_byte=4e-8)])
    plain = Fabric(replace(cluster, within_host=inside.cluster.within_host))
    across = (0, 1, 2, 3)
    size_bytes = 10**8

    assert inside.seconds(kind, (0, 1), size_bytes) == pytest.approx(4.0)
    assert inside.seconds(kind, across, size_bytes) == pytest.approx(
        factor * plain.seconds(kind, across, size_bytes), rel=1e-2
    )


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_ring_has_the_links_of_all_its_members_on_a_host(kind: Collective) -> None:
    """A ring of two slots on each host sends over one wire the bytes that two rings of one slot a host share."""
    cluster = tiny_cluster(2, 2)
    alone = measured(kind, (0, 2), latency_s=0.0, seconds_per_byte=num_steps(kind, 2) / 2 / 1e8)
    fabric = Fabric(cluster, [alone])
    chunk_s = 1e6 / 1e8

    assert fabric.seconds(kind, (0, 2), 2e6) == pytest.approx(num_steps(kind, 2) * chunk_s, rel=1e-2)
    assert fabric.seconds(kind, (0, 1, 2, 3), 4e6) == pytest.approx(num_steps(kind, 4) * chunk_s / 2, rel=1e-2)


@pytest.mark.parametrize(
    ("slots", "expected_s"),
    [
        # Seven steps of 8 MiB over links of 1e8 bytes/s.
        ((0, 1, 2, 3, 4, 5, 6, 8), 7 * (8 << 20) / 1e8),
        ((0, 1, 2, 3, 4, 5, 8, 9), 7 * (8 << 20) / 1e8 / 2),
        ((0, 1, 2, 3, 8, 9, 10, 11), 7 * (8 << 20) / 1e8 / 4),
    ],
)
def test_the_host_with_the_fewest_members_limits_a_ring(slots: tuple[int, ...], expected_s: float) -> None:
    """Groups of 7 + 1, 6 + 2 and 4 + 4 members use 1, 2 and 4 network cards of their smaller host."""
    alone = measured("all_gather", (0, 8), latency_s=0.0, seconds_per_byte=0.5 / 1e8)
    fabric = Fabric(tiny_cluster(2, 8), [alone])

    assert expected_s == pytest.approx(fabric.seconds("all_gather", slots, 64 << 20), rel=1e-2)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_rings_use_all_links_of_a_host_without_measured_collectives(kind: Collective) -> None:
    """Links were measured while all eight slots of a host sent, so a ring of sixteen has eight times a link's rate."""
    fabric = Fabric(tiny_cluster(2, 8, latency_s=0.0))
    steps_s = num_steps(kind, 16) * 1e6 / 1e8 / 8

    assert steps_s == pytest.approx(fabric.seconds(kind, range(16), 16e6))
    assert steps_s == pytest.approx(fabric.bound_s(kind, 16, 16e6))


def test_an_uneven_group_that_was_measured_prices_even_ones() -> None:
    """Its own fewest members are in its correction: 7 + 1 members at the rate of one link leave 4 + 4 four links."""
    uneven, even = (0, 1, 2, 3, 4, 5, 6, 8), (0, 1, 2, 3, 8, 9, 10, 11)
    fabric = Fabric(tiny_cluster(2, 8), [measured("all_gather", uneven, latency_s=0.0, seconds_per_byte=7 / 8 / 1e8)])

    assert 7 / 8 == pytest.approx(fabric.seconds("all_gather", uneven, 1e8), rel=1e-2)
    assert 7 / 8 / 4 == pytest.approx(fabric.seconds("all_gather", even, 1e8), rel=1e-2)


@given(st.integers(1, 6).flatmap(lambda size: st.lists(st.lists(st.integers(0, 3), min_size=size, max_size=size))))
def test_members_are_counted_by_host(groups: list[list[int]]) -> None:
    """Hosts of each group and its fewest members on one of them, as counted one by one; 1 on a single host."""
    counts = [Counter(group) for group in groups]
    host_GK = np.array(groups, dtype=np.int64).reshape(len(groups), -1 if groups else 1)
    hosts_G, fewest_G = spread_over_hosts(host_GK)

    assert [len(count) for count in counts] == hosts_G.tolist()
    assert [min(count.values()) if len(count) > 1 else 1 for count in counts] == fewest_G.tolist()


def test_an_all_to_all_has_a_part_of_the_wire_for_each_member() -> None:
    """All of them send at once."""
    pair = measured("all_to_all", (0, 2), latency_s=0.0, seconds_per_byte=0.5 / 1e8)

    assert Fabric(tiny_cluster(2, 2), [pair]).seconds("all_to_all", (0, 1, 2, 3), 4e6) == pytest.approx(3e-2, rel=1e-2)


def test_what_gloo_waits_for_others_grows_with_the_root_of_the_steps() -> None:
    """A pair's extra latency grows by root 3 for four members, which take three times as many steps."""
    fabric = Fabric(tiny_cluster(4, 1), [measured("all_reduce", (0, 1), latency_s=5e-3, seconds_per_byte=1e-8)])
    wait_s = 5e-3 - 2 * 1e-4

    assert fabric.seconds("all_reduce", (0, 1), 0) == pytest.approx(5e-3)
    assert fabric.seconds("all_reduce", (0, 1, 2, 3), 0) == pytest.approx(6 * 1e-4 + 3**0.5 * wait_s)


def test_the_latency_of_the_library_is_added_to_that_of_the_link() -> None:
    """A link that seems to have no latency does not blow up the price of another group."""
    latency = ((0.0, 0.0, 1e-4), (0.0, 0.0, 1e-4), (1e-4, 1e-4, 0.0))
    links = replace(Links.uniform(3, latency_s=0.0, bandwidth_bytes_per_s=1e8), latency_s=latency)
    fabric = Fabric(replace(tiny_cluster(3, 1), between_hosts=links), [measured("all_reduce", (0, 1))])

    assert fabric.seconds("all_reduce", (0, 2), 0) == pytest.approx(2e-3 + 2 * 1e-4)


def test_a_group_of_equal_shape_costs_more_over_a_slower_link() -> None:
    """The measured fit is scaled by the group's own slowest link."""
    bandwidth = ((0.0, 1e8, 5e7), (1e8, 0.0, 5e7), (5e7, 5e7, 0.0))
    links = Links(
        latency_s=Links.uniform(3, latency_s=1e-4, bandwidth_bytes_per_s=1.0).latency_s, bandwidth_bytes_per_s=bandwidth
    )
    fabric = Fabric(replace(tiny_cluster(3, 1), between_hosts=links), [measured("all_reduce", (0, 1))])

    assert fabric.seconds("all_reduce", (0, 2), 1000) == pytest.approx(2e-3 + 2 * 4e-8 * 1000)


def test_the_nearest_shape_is_taken() -> None:
    """The nearest group agrees in crossing hosts, then in members; the order of the measurements has no effect."""
    fits = [
        measured("all_reduce", (0, 1), latency_s=1.0),
        measured("all_reduce", (0, 4), latency_s=2.0),
        measured("all_reduce", (0, 1, 4, 5), latency_s=3.0),
    ]
    for order in itertools.permutations(fits):
        fabric = Fabric(tiny_cluster(2, 4), order)

        assert fabric.seconds("all_reduce", (2, 3), 0) == pytest.approx(1.0)
        assert fabric.seconds("all_reduce", (1, 5), 0) == pytest.approx(2.0)
        assert fabric.seconds("all_reduce", (2, 3, 6, 7), 0) == pytest.approx(3.0)
        # Three members on one host: the pair inside a host, with 4 steps for 2 and root 2 as long a wait.
        assert fabric.seconds("all_reduce", (0, 1, 2), 0) == pytest.approx(4 * 1e-5 + 2**0.5 * (1.0 - 2 * 1e-5))


def test_a_ring_stands_in_for_another_ring_and_only_for_that() -> None:
    """An all-reduce prices the bytes of a reduce-scatter, as gloo runs one for it; an all-to-all was not seen."""
    fabric = Fabric(tiny_cluster(1, 2), [measured("all_reduce", (0, 1))])

    assert fabric.seconds("reduce_scatter", (0, 1), 1000) == pytest.approx(2e-3 - 1e-5 + 4e-8 * 1000)
    plain = Fabric(tiny_cluster(1, 2))
    assert plain.seconds("all_to_all", (0, 1), 1000) == fabric.seconds("all_to_all", (0, 1), 1000)


def test_a_measured_group_lies_on_the_cluster() -> None:
    """A slot that does not exist is named."""
    with pytest.raises(FactError, match=r"\(0, 9\)"):
        Fabric(tiny_cluster(2, 2), [measured("all_reduce", (0, 9))])


@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.floats(0, 1e7), st.booleans())
def test_the_bound_holds_for_every_group(seed: int, kind: Collective, size_bytes: float, with_fits: bool) -> None:
    """No group of any size, anywhere, in any order, is faster than the bound of its size."""
    fits = [measured(kind, (0, 1)), measured(kind, (0, 2), latency_s=1e-3)] if with_fits else []
    fabric = Fabric(uneven_cluster(seed), fits)
    for size in (2,) if kind == "send" else (2, 3, 4):
        groups = itertools.permutations(range(4), size)

        assert fabric.bound_s(kind, size, size_bytes) <= min(
            fabric.seconds(kind, group, size_bytes) for group in groups
        ) * (1 + 1e-12)


@pytest.mark.parametrize(("kind", "expected"), [("all_reduce", 6), ("all_gather", 3), ("all_to_all", 3), ("send", 1)])
def test_steps(kind: Collective, expected: int) -> None:
    """An all-reduce is a reduce-scatter and an all-gather."""
    assert num_steps(kind, 4) == expected
