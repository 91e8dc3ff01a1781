"""Tests of a host's inventory and condition, with a stand-in for NVIDIA's library."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
from facts_for_tests import tiny_cluster
from gpu_rules.nvml import GIB, HEALTHY, FakeNvml, install

from pipette_launch.defaults import MEMORY_FREE_S
from pipette_launch.errors import ClusterError, UsageError
from pipette_launch.facts import Device, Host, files
from pipette_launch.facts.health import DeviceCondition, Holder
from pipette_launch.probe.health import inventory
from pipette_launch.probe.health.inventory import BUSY_TOLERANCE_BYTES, await_memory

ROOT = Path(__file__).parents[3]


def uuids(num_devices: int) -> list[str]:
    """Return the UUIDs of the devices of this host."""
    host = inventory.host(name="n", address="10.0.0.1", num_devices=num_devices, device="cuda")
    return [device.uuid for device in host.devices]


def test_a_cpu_host_shares_its_memory_equally() -> None:
    """Two workers get half of the memory each, and all cores count once."""
    host = inventory.host(name="n", address="10.0.0.1", num_devices=2, device="cpu")
    first, second = host.devices

    assert ("cpu-0", "cpu-1") == (first.uuid, second.uuid)
    assert 0 < first.memory_total_bytes <= psutil.virtual_memory().total // 2
    assert len(os.sched_getaffinity(0)) == host.cores


def test_a_container_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Each of two workers gets half of a control group's 1 GiB; `max` means no limit."""
    limit = tmp_path / "memory.max"  # type: ignore[operator]
    monkeypatch.setattr(inventory, "CGROUP_LIMIT", limit)
    limit.write_text(f"{GIB}\n")

    assert GIB // 2 == _memory_of_a_share()
    limit.write_text("max\n")
    assert psutil.virtual_memory().total // 2 == _memory_of_a_share()


def _memory_of_a_share() -> int:
    host = inventory.host(name="n", address="10.0.0.1", num_devices=2, device="cpu")
    return host.devices[0].memory_total_bytes


def test_auto_takes_gpus_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU the host is a CUDA host, without one a CPU host, and NVML is closed again."""
    nvml = install(monkeypatch, FakeNvml(1))
    with_gpu = inventory.host(name="n", address="a", num_devices=1)
    install(monkeypatch, FakeNvml(0))
    without = inventory.host(name="n", address="a", num_devices=1)

    assert ("cuda", "Test GPU", 80 * GIB) == (
        with_gpu.devices[0].kind,
        with_gpu.devices[0].name,
        with_gpu.devices[0].memory_total_bytes,
    )
    assert "cpu" == without.devices[0].kind
    assert 0 == nvml.open


def test_the_driver_reports_the_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number does not depend on the GPU's name, and an old driver without the function reports no number."""
    nvml = install(monkeypatch, FakeNvml(2))
    nvml.answers = {("ComputeCapability", 1): nvml.NVMLError}
    found = inventory.host(name="n", address="a", num_devices=2)

    assert [8, None] == [device.compute_capability for device in found.devices]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aaaa-0", "GPU-bbbb-1", "GPU-aaaa-2"]),
        ("2,0", ["GPU-aaaa-2", "GPU-aaaa-0"]),
        ("GPU-bbbb-1, 0", ["GPU-bbbb-1", "GPU-aaaa-0"]),
        ("GPU-b", ["GPU-bbbb-1"]),
        ("1,-1,2", ["GPU-bbbb-1"]),
        ("1,9,2", ["GPU-bbbb-1"]),
    ],
)
def test_visible_devices_are_taken_as_cuda_takes_them(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    """Order, indices, UUIDs and their prefixes, and nothing after the first bad entry."""
    install(monkeypatch, FakeNvml(3), visible)

    assert expected == uuids(len(expected))


@pytest.mark.parametrize("visible", ["", "GPU-a", "-1"])
def test_no_visible_gpu_is_an_error_when_gpus_are_asked_for(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    """An empty list, an ambiguous prefix, or -1 hides all GPUs; the error shows the variable."""
    install(monkeypatch, FakeNvml(3), visible)

    with pytest.raises(UsageError, match=f"CUDA_VISIBLE_DEVICES is {visible!r}"):
        uuids(1)


def test_too_few_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers cannot share two GPUs."""
    install(monkeypatch, FakeNvml(2))

    with pytest.raises(ClusterError, match="n: 4 workers for 2 visible GPUs"):
        uuids(4)


def test_versions_name_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only installed packages and an existing driver have a version."""
    install(monkeypatch, FakeNvml(1))
    found = inventory.versions()

    assert {"pipette-launch", "torch", "megatron-core", "driver"} <= set(found)
    assert "580.1" == found["driver"]
    assert set(found) <= {"pipette-launch", "driver", *inventory.PACKAGES}


def test_the_inventory_needs_no_torch() -> None:
    """Agents call this before anything heavy is imported."""
    code = (
        "import sys; from pipette_launch.probe import run; from pipette_launch.probe.health import inventory; "
        "inventory.versions(); "
        "inventory.host(name='n', address='a', num_devices=1); sys.exit('torch' in sys.modules)"
    )

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode


@pytest.mark.parametrize(
    ("environ", "hostname", "switches"),
    [
        ({}, "node17", ()),
        ({"SLURM_TOPOLOGY_ADDR": "spine.leaf3.node17"}, "node17.cluster.local", ("spine", "leaf3")),
        (
            {"SLURM_TOPOLOGY_ADDR": "spine.leaf3.node17.local", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"},
            "node17",
            ("spine", "leaf3"),
        ),
        ({"SLURM_TOPOLOGY_ADDR": "node17", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, "node17", ()),
        ({"SLURM_TOPOLOGY_ADDR": "spine.leaf3.node17"}, "node18", ()),
    ],
)
def test_slurm_names_the_switches_above_a_node(
    environ: dict[str, str], hostname: str, switches: tuple[str, ...]
) -> None:
    """Switches come from the address, unless the environment was copied from another node."""
    assert switches == inventory.switches(environ, hostname)


def told(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceCondition, ...]:
    """Return the conditions of all GPUs of a machine."""
    install(monkeypatch, nvml)
    host = inventory.host(name="n", address="a", num_devices=nvml.num_gpus, device="cuda")
    return inventory.conditions(host)


def test_everything_that_nvml_tells_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle, healthy GPU in SI units."""
    (found,) = told(FakeNvml(1), monkeypatch)

    assert replace(HEALTHY, used_bytes=2 * GIB) == found


def test_what_a_device_does_not_support_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsupported figure is None, never 0, and the others are kept."""
    nvml = FakeNvml(1)
    nvml.answers = {(name, 0): nvml.NVMLError for name in ("EccVolatile", "EccAggregate", "RemappedRows", "NvLinks")}
    (found,) = told(nvml, monkeypatch)

    assert (None, None, None, None) == (
        found.ecc_volatile,
        found.rows_pending,
        found.nvlinks_up,
        found.nvlinks_total,
    )
    assert 16 == found.pcie_width


def test_what_a_binding_lacks_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old nvidia-ml-py has no temperature, and clock reasons under their former name."""

    class OldNvml(FakeNvml):
        """A binding of 2020."""

        nvmlDeviceGetTemperature = None
        nvmlDeviceGetCurrentClocksEventReasons = None

        def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
            """Hot, by hardware and by driver."""
            return 0x60 + handle

    (found,) = told(OldNvml(1), monkeypatch)

    assert None is found.temperature_c
    assert ("SwThermalSlowdown", "HwThermalSlowdown") == found.clock_reasons


def test_others_are_named_and_we_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pid, name and size of other processes; the size is None if a container hides it."""
    parent = os.getppid()
    nvml = FakeNvml(
        1,
        {
            0: [
                SimpleNamespace(pid=parent, usedGpuMemory=3 * GIB),
                SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None),
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=9 * GIB),
            ]
        },
    )
    (found,) = told(nvml, monkeypatch)

    assert found.holders == (
        Holder(pid=parent, name=psutil.Process(parent).name(), used_bytes=3 * GIB),
        Holder(pid=2**22 + 1, name="name unknown", used_bytes=None),
    )


def test_a_link_that_sleeps_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """State 2 is power saving; state 0 is down."""
    nvml = FakeNvml(1)
    monkeypatch.setattr(
        FakeNvml, "nvmlDeviceGetNvLinkState", lambda self, handle, link: {0: 0, 1: 1, 2: 2}[link], raising=True
    )
    monkeypatch.setattr(inventory.driver, "MAX_NVLINKS", 3)
    (found,) = told(nvml, monkeypatch)

    assert (2, 3) == (found.nvlinks_up, found.nvlinks_total)


def test_a_cpu_host_tells_nothing() -> None:
    """Only the names of its devices."""
    host = inventory.host(name="n", address="a", num_devices=2, device="cpu")

    assert (DeviceCondition(uuid="cpu-0"), DeviceCondition(uuid="cpu-1")) == inventory.conditions(host)


def test_a_driver_that_went_away_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host had GPUs a moment ago."""
    install(monkeypatch, FakeNvml(1))
    host = inventory.host(name="n", address="a", num_devices=1, device="cuda")
    install(monkeypatch, FakeNvml(0))

    with pytest.raises(ClusterError, match="n: NVML no longer answers"):
        inventory.conditions(host)


def test_a_condition_survives_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons and None are equal after writing and reading."""
    nvml = FakeNvml(1)
    nvml.answers = {("EccVolatile", 0): nvml.NVMLError}
    (found,) = told(nvml, monkeypatch)

    assert found == files.from_plain(DeviceCondition, files.to_plain(found), "here")


def test_reading_conditions_needs_no_torch() -> None:
    """Agents and the doctor call this before anything heavy is imported."""
    code = "import sys; from pipette_launch.probe.health import inventory, verdicts; sys.exit('torch' in sys.modules)"

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode


@dataclass
class Machine:
    """A host whose GPUs report memory in use as listed, the last value for ever; time passes only in sleep."""

    host: Host
    used: dict[str, Sequence[int]]
    now_s: float = 0.0
    asked: dict[str, int] = field(default_factory=dict)

    def used_bytes(self, uuid: str) -> int:
        """Answer as the driver."""
        turn = self.asked.get(uuid, 0)
        self.asked[uuid] = turn + 1
        return self.used[uuid][min(turn, len(self.used[uuid]) - 1)]

    def conditions(self, host: Host) -> tuple[DeviceCondition, ...]:
        """Name a process on every device."""
        holders = (Holder(pid=7, name="python", used_bytes=None),)
        return tuple(DeviceCondition(uuid=device.uuid, holders=holders) for device in host.devices)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def wait(self) -> tuple[str, ...]:
        """Wait for this machine's memory."""
        with mock.patch.multiple(inventory, device_used_bytes=self.used_bytes, conditions=self.conditions):
            return await_memory(self.host, clock=lambda: self.now_s, sleep=self.sleep)


def gpu_host(num_devices: int) -> Host:
    """Return a host of idle GPUs."""
    names = [f"GPU-{index}" for index in range(num_devices)]
    devices = tuple(
        Device(kind="cuda", uuid=name, name="H100", memory_total_bytes=80 * GIB, memory_free_bytes=80 * GIB)
        for name in names
    )
    return Host(name="node0", address="10.0.0.1", cores=8, devices=devices)


def filled(*used: Sequence[int]) -> Machine:
    """Return a host with these readings of used memory for each GPU."""
    host = gpu_host(len(used))
    return Machine(host, {device.uuid: values for device, values in zip(host.devices, used, strict=True)})


def test_free_memory_is_not_waited_for() -> None:
    """Each device is queried once, and no time passes; memory from before the warm-up counts as free."""
    idle = filled([0], [BUSY_TOLERANCE_BYTES])

    assert () == idle.wait()
    assert 0 == idle.now_s
    assert [1, 1] == list(idle.asked.values())


def test_memory_that_comes_back_late_is_waited_for() -> None:
    """The memory is free after two more queries, and only the full device is queried again."""
    slow = filled([0], [4 * GIB, 2 * GIB, 0])

    assert () == slow.wait()
    assert 0 < slow.now_s < 5
    assert [1, 3] == list(slow.asked.values())


def test_memory_that_never_comes_back_is_named_with_its_holder() -> None:
    """After the deadline: the device, the missing memory and the process; the free device is not named."""
    stuck = filled([0], [3 * GIB])
    free, full = (device.uuid for device in stuck.host.devices)
    said = stuck.wait()

    assert MEMORY_FREE_S <= stuck.now_s < MEMORY_FREE_S + 1
    assert 2 == len(said)
    assert f"{full} still holds 3.00 GiB more than before the warm-up, 50 s after it" in said[0]
    assert f"node0: process 7 (python) holds memory of {full}" == said[1]
    assert not any(free in sentence for sentence in said)


def test_a_cpu_has_nothing_to_give_back() -> None:
    """The driver is not called."""
    host = tiny_cluster(1, 2).hosts[0]

    with mock.patch.object(inventory, "device_used_bytes", pytest.fail):
        assert () == await_memory(host, sleep=pytest.fail)


def test_a_driver_that_no_longer_answers_is_one_sentence() -> None:
    """The training is not delayed."""

    def dead(uuid: str) -> int:
        raise ClusterError(f"NVML no longer answers for {uuid}")

    host = gpu_host(1)
    with mock.patch.object(inventory, "device_used_bytes", dead):
        assert (f"NVML no longer answers for {host.devices[0].uuid}",) == await_memory(host)
