"""What the driver tells of a real device is what torch tells of it, and what our tables say of its type."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job
from gpu.fresh import in_a_fresh_process, uuid

from pipette_launch.errors import ClusterError
from pipette_launch.facts import Layout
from pipette_launch.facts.devices import KNOWN_DEVICES
from pipette_launch.megatron import environment
from pipette_launch.probe.health import inventory
from pipette_launch.probe.health.inventory import conditions
from pipette_launch.probe.health.verdicts import judge

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def test_driver_and_torch_name_the_same_device() -> None:
    """UUID, name and memory agree; without CUDA_VISIBLE_DEVICES and with the UUID in it."""
    import torch

    device = inventory.host(name="here", address="", num_devices=1, device="auto").devices[0]
    properties = torch.cuda.get_device_properties(0)

    assert ("cuda", properties.name) == (device.kind, device.name)
    assert f"GPU-{properties.uuid}" == device.uuid
    # torch leaves out what the driver keeps for itself.
    assert 0.95 * device.memory_total_bytes < properties.total_memory <= device.memory_total_bytes
    assert {"uuid": device.uuid, "name": device.name} == in_a_fresh_process("binding", CUDA_VISIBLE_DEVICES=device.uuid)


def test_more_workers_than_devices_are_refused() -> None:
    """The error says how many there are."""
    with pytest.raises(ClusterError, match=f"1000 workers for {inventory.num_gpus()} visible GPUs"):
        inventory.host(name="here", address="", num_devices=1000, device="cuda")


def test_the_driver_tells_clocks_temperature_and_memory() -> None:
    """These every data centre GPU answers, and nothing of it makes an idle device sick."""
    host = inventory.host(name="here", address="", num_devices=1, device="cuda")
    told = conditions(host)

    assert told[0].used_bytes is not None
    assert told[0].sm_clock_hz is not None
    assert told[0].temperature_c is not None
    assert "driver" in inventory.versions()
    assert [] == [verdict for verdict in judge([host], [told]) if verdict.is_sick and verdict.kind != "busy"]


def test_tables_know_the_device() -> None:
    """Capability as torch says, memory within 3 % of the data sheet's, and Megatron's limit on connections."""
    import torch

    device = inventory.host(name="here", address="", num_devices=1, device="cuda").devices[0]
    major, minor = torch.cuda.get_device_capability()
    job = replace(tiny_job(2), compute_capability=device.compute_capability)
    sizes = [spec.memory_bytes for spec in KNOWN_DEVICES.values()]

    assert float(f"{major}.{minor}") == device.compute_capability
    assert min(abs(size / device.memory_total_bytes - 1) for size in sizes) < 0.03
    assert (major >= 10) == (not environment(job, Layout(tp=2), device_kind="cuda"))
    assert device.uuid == uuid()
