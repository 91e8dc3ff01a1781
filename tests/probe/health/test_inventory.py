"""Tests of what a host says of itself, with a stand-in for NVIDIA's library where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from gpu_rules.nvml import GIB, FakeNvml, install

from pipette_launch.errors import ClusterError, UsageError
from pipette_launch.probe.health import inventory

ROOT = Path(__file__).parents[3]


def uuids(num_devices: int) -> list[str]:
    """UUIDs of the devices that this host would lend."""
    host = inventory.host(name="n", address="10.0.0.1", num_devices=num_devices, device="cuda")
    return [device.uuid for device in host.devices]


def test_a_cpu_host_shares_its_memory_equally() -> None:
    """Two workers get half each of what the machine has, and all cores are counted once."""
    host = inventory.host(name="n", address="10.0.0.1", num_devices=2, device="cpu")
    first, second = host.devices

    assert ("cpu-0", "cpu-1") == (first.uuid, second.uuid)
    assert 0 < first.memory_total_bytes <= psutil.virtual_memory().total // 2
    assert len(os.sched_getaffinity(0)) == host.cores


def test_a_container_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """A control group of 1 GiB leaves half of it for each of two workers; `max` means no limit."""
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
    """With a GPU the host is a CUDA host, without it is a CPU host, and NVML is closed again."""
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
    """An empty list, an ambiguous prefix, or -1 hides all; the error shows the variable."""
    install(monkeypatch, FakeNvml(3), visible)

    with pytest.raises(UsageError, match=f"CUDA_VISIBLE_DEVICES is {visible!r}"):
        uuids(1)


def test_too_few_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers cannot share two GPUs."""
    install(monkeypatch, FakeNvml(2))

    with pytest.raises(ClusterError, match="n: 4 workers for 2 visible GPUs"):
        uuids(4)


def test_versions_name_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that are there with their versions, the driver where there is one, and nothing else."""
    install(monkeypatch, FakeNvml(1))
    found = inventory.versions()

    assert {"pipette-launch", "torch", "megatron-core", "driver"} <= set(found)
    assert "580.1" == found["driver"]
    assert set(found) <= {"pipette-launch", "driver", *inventory.PACKAGES}


def test_the_inventory_needs_no_torch() -> None:
    """Agents take stock before anything heavy is imported."""
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
    """They are read from the address, unless it is another node's, whose environment was handed on."""
    assert switches == inventory.switches(environ, hostname)
