"""Tests of a device's condition, with a stand-in for NVIDIA's library and a made-up sysfs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from gpu_rules.nvml import GIB, HEALTHY, FakeNvml, install

from pipette_launch.errors import ClusterError
from pipette_launch.facts import files
from pipette_launch.facts.health import DeviceCondition, Holder
from pipette_launch.probe.health import condition, inventory

ROOT = Path(__file__).parents[3]


def told(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, sysfs: Path = Path("/nowhere")
) -> tuple[DeviceCondition, ...]:
    """Conditions of all GPUs of such a machine."""
    install(monkeypatch, nvml)
    host = inventory.host(name="n", address="a", num_devices=nvml.num_gpus, device="cuda")
    return condition.conditions(host, sysfs=sysfs)


def machine(tmp_path: Path, gpus: dict[str, str], nics: dict[str, str], nodes: dict[str, int]) -> Path:
    """Make a sysfs: GPUs (address to way) and InfiniBand ports (name to way), and the NUMA nodes of root complexes."""
    for address, way in gpus.items():
        device = _device(tmp_path, f"{way}/{address}", nodes)
        link = tmp_path / "bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    for name, way in nics.items():
        device = _device(tmp_path, way, nodes)
        port = tmp_path / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (port.parents[1] / "device").symlink_to(device)
    return tmp_path


def _device(root: Path, way: str, nodes: dict[str, int]) -> Path:
    device = root / "devices" / way
    device.mkdir(parents=True, exist_ok=True)
    (device / "numa_node").write_text(f"{nodes[way.split('/', maxsplit=1)[0]]}\n")
    return device


def test_everything_that_nvml_tells_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle, healthy GPU, in SI units; without a sysfs there is no NIC to be near."""
    (found,) = told(FakeNvml(1), monkeypatch)
    address = "0000:10:00.0"

    assert replace(HEALTHY, used_bytes=2 * GIB, pci_address=address, nic="", nic_distance=None) == found


def test_what_a_device_does_not_support_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is None, never 0, and the rest is told all the same."""
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
    """nvidia-ml-py of another year: no temperature, and the clock's reasons under their former name."""

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
    """Pid, name and size; a size that a container hides is None."""
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
    monkeypatch.setattr(condition.driver, "MAX_NVLINKS", 3)
    (found,) = told(nvml, monkeypatch)

    assert (2, 3) == (found.nvlinks_up, found.nvlinks_total)


def test_the_nearest_nic_is_found_by_the_way_to_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four GPUs: below one switch with a NIC, at its root, in its NUMA node, and across the sockets."""
    sysfs = machine(
        tmp_path,
        gpus={
            "0000:10:00.0": "pci0000:0f/0000:0f:01.0/0000:0e:00.0",
            "0000:20:00.0": "pci0000:0f/0000:0f:02.0",
            "0000:30:00.0": "pci0000:2f/0000:2f:01.0",
            "0000:40:00.0": "pci0000:8f/0000:8f:01.0",
        },
        nics={"mlx5_0": "pci0000:0f/0000:0f:01.0/0000:0e:01.0/0000:11:00.0"},
        nodes={"pci0000:0f": 0, "pci0000:2f": 0, "pci0000:8f": 1},
    )
    found = told(FakeNvml(4), monkeypatch, sysfs)

    assert ["switch", "root", "node", "across"] == [one.nic_distance for one in found]
    assert {"mlx5_0"} == {one.nic for one in found}
    assert [0, 0, 0, 1] == [one.numa_node for one in found]


def test_a_port_that_is_down_is_no_nic(tmp_path: Path) -> None:
    """Its neighbour counts, however far; without InfiniBand an interface that is up does."""
    sysfs = machine(
        tmp_path,
        gpus={"0000:10:00.0": "pci0000:0f/0000:0f:01.0"},
        nics={"mlx5_0": "pci0000:0f/0000:0f:01.0/0000:11:00.0", "mlx5_1": "pci0000:8f/0000:8f:01.0/0000:91:00.0"},
        nodes={"pci0000:0f": 0, "pci0000:8f": 1},
    )
    (sysfs / "class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    assert ("mlx5_1", "across") == condition.nearest_nic("0000:10:00.0", sysfs)

    (sysfs / "class/infiniband/mlx5_1/ports/1/state").write_text("1: DOWN\n")
    for name, state in (("eth0", "up"), ("eth1", "down"), ("lo", "up")):
        (sysfs / "class/net" / name).mkdir(parents=True)
        (sysfs / "class/net" / name / "operstate").write_text(state)
    (sysfs / "class/net/eth0/device").symlink_to(sysfs / "devices/pci0000:0f/0000:0f:01.0/0000:11:00.0")
    assert ("eth0", "switch") == condition.nearest_nic("0000:10:00.0", sysfs)


def test_without_numa_nodes_the_distance_is_not_told(tmp_path: Path) -> None:
    """A virtual machine writes -1 for all; another root may be next door or across."""
    sysfs = machine(
        tmp_path,
        gpus={"0000:10:00.0": "pci0000:0f/0000:0f:01.0"},
        nics={"mlx5_0": "pci0000:8f/0000:8f:01.0/0000:91:00.0"},
        nodes={"pci0000:0f": -1, "pci0000:8f": -1},
    )

    assert ("mlx5_0", None) == condition.nearest_nic("0000:10:00.0", sysfs)


def test_a_cpu_host_tells_nothing() -> None:
    """Only the names of its shares."""
    host = inventory.host(name="n", address="a", num_devices=2, device="cpu")

    assert (DeviceCondition(uuid="cpu-0"), DeviceCondition(uuid="cpu-1")) == condition.conditions(host)


def test_a_driver_that_went_away_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """There were GPUs a moment ago: no silence."""
    install(monkeypatch, FakeNvml(1))
    host = inventory.host(name="n", address="a", num_devices=1, device="cuda")
    install(monkeypatch, FakeNvml(0))

    with pytest.raises(ClusterError, match="n: NVML no longer answers"):
        condition.conditions(host)


def test_a_condition_survives_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is read back, names of reasons and None included."""
    nvml = FakeNvml(1)
    nvml.answers = {("EccVolatile", 0): nvml.NVMLError}
    (found,) = told(nvml, monkeypatch)

    assert found == files.from_plain(DeviceCondition, files.to_plain(found), "here")


def test_reading_conditions_needs_no_torch() -> None:
    """Agents and the doctor ask before anything heavy is imported."""
    code = "import sys; from pipette_launch.probe.health import condition, verdicts; sys.exit('torch' in sys.modules)"

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode
