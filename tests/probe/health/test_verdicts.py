"""Tests of what is said of devices, hosts and links: who is accused of what, and who is left in peace."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from gpu_rules.nvml import GIB, HEALTHY

from pipette_launch.facts import Device, Host
from pipette_launch.facts.health import DeviceCondition, Holder, Verdict
from pipette_launch.probe.health.suspects import SlowSlot
from pipette_launch.probe.health.verdicts import device_verdicts, faults_first, judge, link_verdicts


def hosts(count: int = 3, devices: int = 2) -> tuple[Host, ...]:
    """Hosts of equal GPUs with 80 GiB."""
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
    """Verdicts on healthy hosts of which some devices, (host, device), tell something else."""
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
    """The same change of all devices."""
    return {(h, d): change for h in range(count) for d in range(devices)}


def test_idle_machines_are_well() -> None:
    """Power saving, PCIe generation 1, an idle clock and a display's memory are nobody's fault."""
    assert () == judged({})


@pytest.mark.parametrize("reason", ["ApplicationsClocksSetting", "SwPowerCap", "SyncBoost", "DisplayClockSetting"])
def test_a_wished_for_clock_is_no_sickness(reason: str) -> None:
    """Somebody's setting, or a GPU at the power that it is allowed."""
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
    """Host, UUID, figure, peers' figure and what to do, in one sentence."""
    (verdict,) = judged({(1, 1): change})

    assert (kind, "node1", "GPU-11", True) == (verdict.kind, verdict.host, verdict.device, verdict.is_sick)
    assert f"node1 GPU-11: {words}" == verdict.words()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ecc_aggregate": 2}, "2 uncorrected memory errors in its life, none since its driver was loaded"),
        ({"nic_distance": "across"}, "reaches its nearest NIC (mlx5_0) across the sockets, its peers theirs by a PCIe"),
        (
            {"holders": (Holder(pid=7, name="dcgm", used_bytes=GIB),), "used_bytes": GIB},
            "process 7 (dcgm) holds 1.00 GiB",
        ),
    ],
)
def test_what_is_only_odd_is_a_note(change: dict[str, object], words: str) -> None:
    """It is told, and nobody acts upon it."""
    (verdict,) = judged({(1, 1): change})

    assert words in verdict.words()
    assert not verdict.is_sick


def test_what_all_share_is_how_the_machines_are() -> None:
    """A rack that is hot, slots with 8 lanes, fewer NVLinks, far NICs: no device is worse than its peers."""
    hot = judged(everywhere(clock_reasons=("SwThermalSlowdown",)))
    narrow = judged(everywhere(pcie_width=8))

    assert {False} == {verdict.is_sick for verdict in hot + narrow}
    assert 12 == len(hot + narrow)
    assert () == judged(everywhere(nvlinks_up=12))
    assert () == judged(everywhere(nic_distance="across"))
    assert () == judged(everywhere(pcie_width=8, pcie_width_max=8, pcie_generation_max=4))


def test_a_hosts_devices_may_lie_differently_by_design() -> None:
    """Half of each host's GPUs are far from the NIC: as everywhere else."""
    assert () == judged({(host, 1): {"nic_distance": "across"} for host in range(3)})


def test_unlike_devices_are_no_peers() -> None:
    """An older GPU has fewer links than a newer one by nature."""
    first, second = hosts(2, 1)
    old = replace(second, devices=(replace(second.devices[0], name="Old GPU"),))
    fewer = replace(HEALTHY, nvlinks_up=12, pcie_generation_max=4, pcie_width=8, pcie_width_max=8)

    assert () == judge((first, old), [[HEALTHY], [fewer]])


def test_nothing_told_is_nothing_amiss() -> None:
    """A CPU host, or a driver that says nothing: no verdict, and no error."""
    bare = [[DeviceCondition(uuid=device.uuid) for device in host.devices] for host in hosts()]

    assert () == judge(hosts(), bare) == judge(hosts(), [(), (), ()])


def test_a_lone_device_is_held_against_what_it_could_be() -> None:
    """Without peers lanes count against the slot's own, and fewer NVLinks cannot be told."""
    (verdict,) = judged({(0, 0): {"pcie_width": 4, "nvlinks_up": 6}}, count=1, devices=1)

    assert ("pcie", True, "") == (verdict.kind, verdict.is_sick, verdict.peers)


def test_one_slow_direction_is_named_as_such() -> None:
    """Sender, receiver, both figures, and that the way back is well."""
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
    """The slower one leads."""
    rates = np.full((5, 5), 10e9)
    again = np.full((5, 5), math.nan)
    for pair, rate in (((1, 2), 5e9), ((2, 1), 4e9)):
        rates[pair] = again[pair] = rate
    (verdict,) = link_verdicts("abcde", rates, again)

    assert ("c", "b", "sends 4 GB/s, and 5 GB/s the other way") == (verdict.host, verdict.other_host, verdict.figure)


def test_a_host_with_slow_links_is_one_verdict() -> None:
    """Not one for each link of it."""
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
    """All devices of node1 are slow: a power limit, or a fan."""
    slow = [SlowSlot(slot=slot, seconds=0.0125, peers_seconds=0.01) for slot in (2, 3)]
    (verdict,) = device_verdicts(hosts(), slow)

    assert ("slow-host", "node1", "") == (verdict.kind, verdict.host, verdict.device)
    assert verdict.figure.startswith("each of its 2 devices takes 12.5 ms")


def test_the_sick_come_first_and_once() -> None:
    """Notes follow, each in the order found; what was said twice is said once."""
    sick = Verdict(kind="ecc", host="a", figure="x")
    note = Verdict(kind="nic", host="b", figure="y", is_sick=False)

    assert (sick, note) == faults_first([note, sick, note])
