"""Tests of verdicts on devices, hosts and links, on networks and devices with known faults."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from gpu_rules.nvml import GIB, HEALTHY
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipette_launch.facts import Device, Host
from pipette_launch.facts.health import DeviceCondition, Holder, Verdict
from pipette_launch.probe.health.verdicts import (
    SlowSlot,
    confirmed_hosts,
    confirmed_links,
    confirmed_slots,
    device_verdicts,
    faults_first,
    judge,
    link_verdicts,
    suspect_links,
    suspect_slots,
)

RATE = 10e9
TYPICAL_NOISE = 0.05
BAD_NOISE = 0.1


def flat(num_hosts: int) -> NDArray[np.float64]:
    """Return equal links."""
    return np.full((num_hosts, num_hosts), RATE)


def test_one_slow_direction_is_suspected() -> None:
    """Only the throttled direction, one of twelve, is measured again, and confirmed."""
    rates = flat(4)
    rates[1, 2] *= 0.5
    again = np.full((4, 4), np.nan)
    again[1, 2] = RATE / 2

    assert ((1, 2),) == suspect_links(rates)
    (link,) = confirmed_links(rates, again)
    assert (1, 2, RATE / 2) == (link.source, link.target, pytest.approx(link.bytes_per_s))
    assert RATE == pytest.approx(link.peers_bytes_per_s)


def test_a_second_measurement_clears() -> None:
    """A link that is slow only the first time gets no verdict."""
    rates = flat(4)
    rates[1, 2] *= 0.5
    again = np.full((4, 4), np.nan)
    again[1, 2] = RATE

    assert () == confirmed_links(rates, again)


def test_a_slow_host_is_one_finding_each_way() -> None:
    """All links of host 2 at half the rate: the host is named, not the links."""
    rates = flat(5)
    rates[2], rates[:, 2] = RATE / 2, RATE / 2
    again = np.full((5, 5), np.nan)
    for pair in suspect_links(rates):
        again[pair] = RATE / 2

    assert {2} == {host for host in range(5) if all(host in pair for pair in suspect_links(rates))}
    assert [(2, "sends"), (2, "receives")] == [(slow.host, slow.direction) for slow in confirmed_hosts(rates, again)]
    assert () == confirmed_links(rates, again)


def test_a_slow_slot_is_found_among_its_own_kind() -> None:
    """Another device type may be slower; a slower device of the same type is named."""
    seconds = np.array([1.0, 1.0, 1.3, 1.0, 2.0, 2.0])
    names = ["new"] * 4 + ["old"] * 2
    again = np.array([math.nan, math.nan, 1.3, math.nan, math.nan, math.nan])

    assert {2: 1.0} == suspect_slots(seconds, alike_S=names)
    (slow,) = confirmed_slots(seconds, again, alike_S=names)
    assert (2, pytest.approx(1.3), 1.0) == (slow.slot, slow.seconds, slow.peers_seconds)


def islands(num_hosts: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return two islands of at least two hosts, joined by slower links."""
    inside = rng.permutation(np.arange(num_hosts) < rng.integers(2, num_hosts - 1))
    return np.where(inside[:, None] == inside, RATE, RATE * rng.uniform(0.1, 0.8))


def fat_tree(num_hosts: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return leaves of two to eight hosts, two leaves in a pod, each tier slower than the one below."""
    leaf = np.arange(num_hosts) // rng.integers(2, 9)
    leaf[leaf == leaf.max()] = max(0, leaf.max() - 1)
    leaf = rng.permutation(leaf)
    pod = leaf // 2
    up, top = rng.uniform(0.3, 0.9, 2)
    return RATE * np.where(leaf[:, None] == leaf, 1.0, np.where(pod[:, None] == pod, up, up * top))


def measured(
    truth: NDArray[np.float64], noise: float, rng: np.random.Generator
) -> tuple[set[tuple[int, int]], set[int]]:
    """Return the links and hosts with a verdict after two measurements."""
    first = truth * np.exp(rng.normal(0, noise, truth.shape))
    again = np.full_like(truth, np.nan)
    for pair in suspect_links(first):
        again[pair] = truth[pair] * math.exp(rng.normal(0, noise))
    links = confirmed_links(first, again)
    return {(link.source, link.target) for link in links}, {slow.host for slow in confirmed_hosts(first, again)}


@st.composite
def trees(draw: st.DrawFn) -> NDArray[np.float64]:
    """Draw a random tree with unequal NICs: the narrowest point on the only path decides."""
    count = draw(st.integers(2, 10))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    groups, rates = [[host] for host in range(count)], np.zeros((count, count))
    for rate in np.sort(rng.uniform(0.01, 1.0, count - 1))[::-1]:
        one, other = (groups.pop(int(rng.integers(len(groups)))) for _ in range(2))
        rates[np.ix_(one, other)] = rates[np.ix_(other, one)] = rate
        groups.append(one + other)
    # A NIC may send faster than it receives, but of two hosts nothing then explains either direction.
    sends, receives = rng.uniform(0.2, 1.0, (2, count)) if count > 2 else np.ones((2, 2))
    return RATE * np.minimum(np.minimum.outer(sends, receives), rates)


@given(trees())
@settings(max_examples=60, deadline=None)
def test_no_link_of_a_tree_is_accused(rates: NDArray[np.float64]) -> None:
    """Unequal tiers, islands and NICs are not faults of links."""
    assert () == confirmed_links(rates, rates)


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 8, 16])
def test_a_healthy_uniform_cluster_raises_no_alarm(num_hosts: int) -> None:
    """12 clusters with typical and 12 with bad noise have no verdict."""
    rng = np.random.default_rng(num_hosts)

    for noise in (TYPICAL_NOISE, BAD_NOISE):
        assert [(set(), set())] * 12 == [measured(flat(num_hosts), noise, rng) for _ in range(12)]


@pytest.mark.parametrize("network", [islands, fat_tree])
def test_islands_and_tiers_raise_no_alarm(network: object) -> None:
    """20 networks of 4 to 24 hosts with typical noise have no verdict."""
    rng = np.random.default_rng(5)
    truths = [network(int(count), rng) for count in rng.integers(4, 25, 20)]  # type: ignore[operator]

    assert [(set(), set())] * 20 == [measured(truth, TYPICAL_NOISE, rng) for truth in truths]


@pytest.mark.parametrize("num_hosts", [3, 4, 5, 8, 16])
def test_a_slow_link_is_found(num_hosts: int) -> None:
    """A link at half of its peers' rate is always found with typical noise, and no other link."""
    rng = np.random.default_rng(num_hosts)
    for _ in range(20):
        truth = flat(num_hosts)
        pair = tuple(int(place) for place in rng.choice(num_hosts, 2, replace=False))
        truth[pair] *= 0.5

        assert ({pair}, set()) == measured(truth, TYPICAL_NOISE, rng)


def test_a_slow_link_inside_an_island_is_found() -> None:
    """At 0.6 of its island's rate it is still faster than all links between the islands."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        inside = np.arange(12) < 6
        truth = np.where(inside[:, None] == inside, RATE, RATE * 0.3)
        truth[2, 4] = truth[4, 2] = 0.6 * RATE

        assert ({(2, 4), (4, 2)}, set()) == measured(truth, TYPICAL_NOISE, rng)


def test_links_that_differ_at_random_accuse_nobody() -> None:
    """If every link has its own rate, as on the internet, none is an exception (from 5 hosts on)."""
    rng = np.random.default_rng(9)
    for count in rng.integers(5, 20, 30):
        truth = RATE * np.exp(rng.uniform(math.log(0.2), 0, (count, count)))

        assert (set(), set()) == measured(truth, TYPICAL_NOISE, rng)


def test_of_two_hosts_only_the_directions_can_be_compared() -> None:
    """A slow pair has no peers; a slow direction has the other direction."""
    both = np.array([[0, 1e9], [1e9, 0]])
    one = np.array([[0, 1e9], [4e9, 0]])

    assert () == suspect_links(both)
    assert ((0, 1),) == suspect_links(one)
    assert [(0, 1)] == [(link.source, link.target) for link in confirmed_links(one, one)]


def test_of_three_hosts_a_slow_pair_and_a_slow_host_differ() -> None:
    """If the detour over the third host is faster, the link is slow; otherwise the host is."""
    pair, host = flat(3), flat(3)
    pair[0, 1] = pair[1, 0] = RATE / 2
    host[0] = host[:, 0] = RATE / 2

    assert {(0, 1), (1, 0)} == {(link.source, link.target) for link in confirmed_links(pair, pair)}
    assert () == confirmed_hosts(pair, pair)
    assert () == confirmed_links(host, host)
    assert {0} == {slow.host for slow in confirmed_hosts(host, host)}


def test_many_slow_links_are_how_the_network_is() -> None:
    """A tenth of all links at half the rate is a property of the network."""
    rng = np.random.default_rng(1)
    truth = np.where(rng.random((16, 16)) < 0.1, 0.5, 1.0) * RATE

    assert () == confirmed_links(truth, truth)


def test_only_a_few_hosts_can_be_exceptions() -> None:
    """If half of the hosts have slower NICs, they are another type of host."""
    nics = np.array([1.0] * 4 + [0.4] * 4) * RATE

    assert () == confirmed_hosts(np.minimum.outer(nics, nics), np.minimum.outer(nics, nics))


@pytest.mark.parametrize(("kind", "speed", "noise"), [("cuda", 0.85, 0.01), ("cpu", 0.6, 0.05)])
def test_a_slow_slot_is_found_and_healthy_ones_are_not(kind: str, speed: float, noise: float) -> None:
    """One of 2 to 32 slots at the speed limit, among slots with typical scatter."""
    rng = np.random.default_rng(7)
    for count in rng.integers(2, 33, 100):
        truth = np.ones(count)
        for sick in (False, True):
            truth[0] = 1 / speed if sick else 1.0
            first, second = truth * np.exp(rng.normal(0, noise, (2, count)))
            suspects = suspect_slots(first, device_kind=kind)  # type: ignore[arg-type]
            again = np.where(np.isin(np.arange(count), list(suspects)), second, np.nan)
            slow = confirmed_slots(first, again, device_kind=kind)  # type: ignore[arg-type]

            assert [0] * sick == [one.slot for one in slow]


def test_a_second_timing_clears_a_slot() -> None:
    """A short disturbance is over; a slot that was not timed again gets no verdict."""
    first = np.array([1.0, 1.0, 1.0, 1.4])

    for again in (1.0, math.nan):
        assert () == confirmed_slots(first, np.array([math.nan] * 3 + [again]))


def test_a_slot_that_was_not_timed_is_not_suspected() -> None:
    """Only the slow slot is suspected."""
    seconds = np.array([1.0, 1.0, 1.0, 1.15, math.nan])

    assert [3] == list(suspect_slots(seconds))


def test_what_was_not_measured_is_not_judged() -> None:
    """A link without a detour gets no verdict."""
    rates = np.full((4, 4), np.nan)
    rates[0, 1], rates[2, 3] = RATE / 3, RATE

    assert () == suspect_links(rates)
    assert () == suspect_links(np.full((4, 4), np.nan))


def test_a_large_cluster_is_judged_in_a_moment() -> None:
    """1,280 hosts with 30 links each, and one bad direction whose hosts share a third host."""
    rng = np.random.default_rng(2)
    rates = np.full((1280, 1280), np.nan)
    for step in range(1, 31):
        to = (np.arange(1280) + step) % 1280
        rates[np.arange(1280), to] = rates[to, np.arange(1280)] = RATE * np.exp(rng.normal(0, 0.02, 1280))
    rates[100, 102] = RATE / 2

    assert ((100, 102),) == suspect_links(rates)


def hosts(count: int = 3, devices: int = 2) -> tuple[Host, ...]:
    """Return hosts of equal GPUs with 80 GiB."""
    return tuple(
        Host(
            name=f"node{index}",
            address="a",
            cores=8,
            devices=tuple(
                Device(
                    kind="cuda",
                    uuid=f"GPU-{index}{device}",
                    name="Test GPU",
                    memory_total_bytes=80 * GIB,
                    memory_free_bytes=79 * GIB,
                )
                for device in range(devices)
            ),
        )
        for index in range(count)
    )


def judged(
    changes: dict[tuple[int, int], dict[str, object]], *, count: int = 3, devices: int = 2
) -> tuple[Verdict, ...]:
    """Return the verdicts on healthy hosts, with changed conditions of some devices (host, device)."""
    allocation = hosts(count, devices)
    conditions = [
        [
            replace(HEALTHY, uuid=device.uuid, **changes.get((h, d), {}))  # type: ignore[arg-type]
            for d, device in enumerate(host.devices)
        ]
        for h, host in enumerate(allocation)
    ]
    return judge(allocation, conditions)


def everywhere(count: int = 3, devices: int = 2, **change: object) -> dict[tuple[int, int], dict[str, object]]:
    """Return the same change for all devices."""
    return {(h, d): change for h in range(count) for d in range(devices)}


def test_idle_machines_are_well() -> None:
    """Power saving, PCIe generation 1, an idle clock and a display's memory are not faults."""
    assert () == judged({})


@pytest.mark.parametrize("reason", ["ApplicationsClocksSetting", "SwPowerCap", "SyncBoost", "DisplayClockSetting"])
def test_a_wished_for_clock_is_no_sickness(reason: str) -> None:
    """A user's clock setting, or a GPU at its power limit."""
    assert () == judged({(1, 1): {"clock_reasons": (reason,)}})


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            {"clock_reasons": ("GpuIdle", "HwThermalSlowdown"), "temperature_c": 91},
            "throttled",
            (
                "its clock is held down at 345 MHz of 1.98 GHz (too hot, by the hardware, 91 °C), its peers "
                "run freely; check its cooling and power supply, or start without it (sbatch --exclude=node1)"
            ),
        ),
        (
            {"ecc_volatile": 3},
            "ecc",
            (
                "3 uncorrected memory errors since its driver was loaded, its peers usually 0; drain the "
                "node and reset the device, or start without it (sbatch --exclude=node1)"
            ),
        ),
        (
            {"rows_failed": True, "rows_pending": True},
            "remapped-rows",
            (
                "a faulty row of its memory could not be replaced; have the device replaced, and start "
                "without it (sbatch --exclude=node1)"
            ),
        ),
        (
            {"rows_pending": True},
            "remapped-rows",
            (
                "a faulty row of its memory waits to be replaced; drain the node and reset the device "
                "(nvidia-smi --gpu-reset), or start without it (sbatch --exclude=node1)"
            ),
        ),
        (
            {"nvlinks_up": 17},
            "nvlink",
            "17 of 18 NVLinks are up, its peers have 18; start without it (sbatch --exclude=node1)",
        ),
        (
            {"pcie_width": 8},
            "pcie",
            (
                "uses 8 of 16 PCIe lanes, its peers use 16; reseat or reset it, "
                "or start without it (sbatch --exclude=node1)"
            ),
        ),
        (
            {"pcie_generation_max": 4},
            "pcie",
            (
                "its slot allows PCIe generation 4 at most, its peers generation 5; check the slot and the "
                "BIOS, or start without it (sbatch --exclude=node1)"
            ),
        ),
        (
            {"holders": (Holder(pid=7, name="python", used_bytes=9 * GIB),), "used_bytes": 10 * GIB},
            "busy",
            (
                "process 7 (python) holds 9.00 GiB; end it, take the device out of CUDA_VISIBLE_DEVICES, or "
                "start without it (sbatch --exclude=node1)"
            ),
        ),
        (
            {"used_bytes": 9 * GIB},
            "busy",
            (
                "9.00 GiB are held by a process that NVML does not name (another container?); end it, take "
                "the device out of CUDA_VISIBLE_DEVICES, or start without it (sbatch --exclude=node1)"
            ),
        ),
        (
            {"utilisation": 0.4},
            "busy",
            (
                "others keep it busy 40% of the time; end it, take the device out of CUDA_VISIBLE_DEVICES, "
                "or start without it (sbatch --exclude=node1)"
            ),
        ),
    ],
)
def test_a_sick_device_is_named(change: dict[str, object], kind: str, words: str) -> None:
    """One sentence has host, UUID, figure, peers' figure and advice."""
    (verdict,) = judged({(1, 1): change})

    assert (kind, "node1", "GPU-11", True) == (verdict.kind, verdict.host, verdict.device, verdict.is_sick)
    assert f"node1 GPU-11: {words}" == verdict.words()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ecc_aggregate": 2}, "2 uncorrected memory errors in its life, none since its driver was loaded"),
        (
            {"holders": (Holder(pid=7, name="dcgm", used_bytes=GIB),), "used_bytes": GIB},
            "process 7 (dcgm) holds 1.00 GiB",
        ),
    ],
)
def test_what_is_only_odd_is_a_note(change: dict[str, object], words: str) -> None:
    """It is shown, but changes nothing."""
    (verdict,) = judged({(1, 1): change})

    assert words in verdict.words()
    assert not verdict.is_sick


def test_what_all_share_is_how_the_machines_are() -> None:
    """A hot rack, 8 lanes, fewer NVLinks: no fault if all devices share it."""
    hot = judged(everywhere(clock_reasons=("SwThermalSlowdown",)))
    narrow = judged(everywhere(pcie_width=8))

    assert {False} == {verdict.is_sick for verdict in hot + narrow}
    assert 12 == len(hot + narrow)
    assert () == judged(everywhere(nvlinks_up=12))
    assert () == judged(everywhere(pcie_width=8, pcie_width_max=8, pcie_generation_max=4))


def test_unlike_devices_are_no_peers() -> None:
    """An older GPU type may have fewer links."""
    first, second = hosts(2, 1)
    old = replace(second, devices=(replace(second.devices[0], name="Old GPU"),))
    fewer = replace(HEALTHY, nvlinks_up=12, pcie_generation_max=4, pcie_width=8, pcie_width_max=8)

    assert () == judge((first, old), [[HEALTHY], [fewer]])


def test_nothing_told_is_nothing_amiss() -> None:
    """A CPU host, or a driver without figures, has no verdict and no error."""
    bare = [[DeviceCondition(uuid=device.uuid) for device in host.devices] for host in hosts()]

    assert () == judge(hosts(), bare) == judge(hosts(), [(), (), ()])


def test_a_lone_device_is_held_against_what_it_could_be() -> None:
    """Without peers, lanes are compared with the slot's own, and NVLinks cannot be judged."""
    (verdict,) = judged({(0, 0): {"pcie_width": 4, "nvlinks_up": 6}}, count=1, devices=1)

    assert ("pcie", True, "") == (verdict.kind, verdict.is_sick, verdict.peers)


def test_one_slow_direction_is_named_as_such() -> None:
    """Sender, receiver, both figures, and that the other direction is healthy."""
    rates = np.full((4, 4), 10e9)
    rates[1, 2] = 5e9
    again = np.full((4, 4), math.nan)
    again[1, 2] = 5e9
    (verdict,) = link_verdicts([f"node{index}" for index in range(4)], rates, again)

    assert ("slow-link", "node1", "node2") == (verdict.kind, verdict.host, verdict.other_host)
    assert (
        "node1 -> node2: sends 5 GB/s this way only, its peers 10 GB/s; check cable and port, or start without it "
        "(sbatch --exclude=node1 or --exclude=node2)"
    ) == verdict.words()


def test_both_directions_of_a_pair_are_one_verdict() -> None:
    """The slower direction leads."""
    rates = np.full((5, 5), 10e9)
    again = np.full((5, 5), math.nan)
    for pair, rate in (((1, 2), 5e9), ((2, 1), 4e9)):
        rates[pair] = again[pair] = rate
    (verdict,) = link_verdicts("abcde", rates, again)

    assert ("c", "b", "sends 4 GB/s, and 5 GB/s the other way") == (verdict.host, verdict.other_host, verdict.figure)


def test_a_host_with_slow_links_is_one_verdict() -> None:
    """Not one verdict for each link."""
    rates = np.full((5, 5), 10e9)
    rates[3] = rates[:, 3] = 4e9
    (verdict,) = link_verdicts("abcde", rates, rates)

    assert ("slow-host", "d", "") == (verdict.kind, verdict.host, verdict.other_host)
    assert "sends at most 4 GB/s and receives at most 4 GB/s, its peers 10 GB/s" in verdict.words()


def test_a_slow_device_is_named_by_host_and_uuid() -> None:
    """With its time and its peers' time."""
    (verdict,) = device_verdicts(hosts(), [SlowSlot(slot=3, seconds=0.0125, peers_seconds=0.01)])

    assert (
        "node1 GPU-11: takes 12.5 ms for the same layer, 0.80 of its peers' speed, its peers take 10 ms; start without "
        "it (sbatch --exclude=node1)"
    ) == verdict.words()


def test_a_host_of_slow_devices_is_one_verdict() -> None:
    """All devices of node1 are slow, as with a power limit."""
    slow = [SlowSlot(slot=slot, seconds=0.0125, peers_seconds=0.01) for slot in (2, 3)]
    (verdict,) = device_verdicts(hosts(), slow)

    assert ("slow-host", "node1", "") == (verdict.kind, verdict.host, verdict.device)
    assert verdict.figure.startswith("each of its 2 devices takes 12.5 ms")


def test_the_sick_come_first_and_once() -> None:
    """Notes follow faults, each in the order found, and duplicates are dropped."""
    sick = Verdict(kind="ecc", host="a", figure="x")
    note = Verdict(kind="busy", host="b", figure="y", is_sick=False)

    assert (sick, note) == faults_first([note, sick, note])
