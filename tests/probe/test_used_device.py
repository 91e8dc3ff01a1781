"""Tests of the device of a warm-up worker: CUDA and NVML may count a host's devices in different orders."""

from __future__ import annotations

import re

import pytest
from gpu_rules import cuda_devices

from pipette_launch.errors import ProbeError
from pipette_launch.probe.run import use_device

BY_BUS = ("GPU-old", "GPU-new", "GPU-other")
SPEEDS = (1.0, 3.0, 2.0)


def test_the_device_that_nvml_described_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bus order each local rank finds its device; a single visible device is taken."""
    taken = cuda_devices.install(
        monkeypatch, cuda_devices.enumerated(BY_BUS, SPEEDS, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    )
    for local_rank, uuid in enumerate(BY_BUS):
        use_device(local_rank, uuid)
    assert [0, 1, 2] == taken

    taken = cuda_devices.install(monkeypatch, ["GPU-other"])
    use_device(2, "GPU-other")
    assert [0] == taken


def test_equal_devices_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own order changes nothing if no device is faster."""
    cuda_devices.install(monkeypatch, cuda_devices.enumerated(BY_BUS, (1.0, 1.0, 1.0), {}))
    for local_rank, uuid in enumerate(BY_BUS):
        use_device(local_rank, uuid)


def test_another_device_than_nvmls_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fastest device first, the worker would use another device than the one NVML reads."""
    cuda_devices.install(monkeypatch, cuda_devices.enumerated(BY_BUS, SPEEDS, {}))
    words = (
        "CUDA's device 0 is GPU-new, and NVML's is GPU-old: they count in different orders; set "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the devices by UUID in CUDA_VISIBLE_DEVICES"
    )

    with pytest.raises(ProbeError, match=re.escape(words)):
        use_device(0, "GPU-old")
