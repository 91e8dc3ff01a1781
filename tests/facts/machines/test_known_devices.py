"""Built-in devices, and what a device refuses to be."""

from dataclasses import replace

import pytest

from pipette_launch.errors import FactError
from pipette_launch.facts.machines.known_devices import (
    Efficiency,
    Link,
    device_named,
    device_of_driver,
    known_devices,
    peak_flops_per_s,
)


def test_names_are_found_in_any_case() -> None:
    """People write h100-sxm."""
    assert device_named("h100-sxm") == known_devices()["H100-SXM"]


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("AWS-P5-H100", "AWS-P5-H100"),
    ],
)
def test_a_device_is_found_by_its_drivers_name(driver: str, name: str) -> None:
    """Names of the driver are longer than ours; ours are found as they are."""
    assert device_named(name) == device_of_driver(driver)
    assert device_named(name).flops_per_s["bf16"] == peak_flops_per_s(driver, "bf16")


def test_an_unknown_device_has_no_peak() -> None:
    """Nothing is guessed from a name that resembles one."""
    for name in (
        "NVIDIA RTX A6000",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "Tesla V100-PCIE-32GB",
        "NVIDIA GeForce RTX 4090 D",
    ):
        assert device_of_driver(name) is None
    assert (0.0, 0.0) == (peak_flops_per_s("NVIDIA RTX A6000", "bf16"), peak_flops_per_s("H200", "int4"))


def test_unknown_name_gets_the_nearest() -> None:
    """The error names what there is, and the likeliest."""
    with pytest.raises(FactError, match=r"unknown device 'A100-8OGB'; known: .*H200.*Did you mean A100-80GB\?"):
        device_named("A100-8OGB")


@pytest.mark.parametrize("name", sorted({*known_devices()} - {"B300", "GB300-NVL72"}))
def test_no_process_gets_the_data_sheets_memory(name: str) -> None:
    """The driver keeps a part: what torch can have is 0.5 to 3 % less than nvidia-smi's total."""
    smi_mib = {
        "V100-SXM2-32GB": 32768,
        "V100-SXM2-16GB": 16384,
        "A100-40GB": 40960,
        "A100-80GB": 81920,
        "A100-80GB-PCIe": 81920,
        "H100-SXM": 81559,
        "AWS-P5-H100": 81559,
        "H200": 143771,
        "B200": 183359,
        "GB200-NVL72": 189471,
        "L40S": 46068,
        "RTX-4090": 24564,
        "RTX-4090-48GB": 49140,
    }

    assert 0.97 < known_devices()[name].memory_bytes / (smi_mib[name] << 20) < 0.997


@pytest.mark.parametrize("name", sorted(known_devices()))
def test_known_devices_say_where_they_come_from(name: str) -> None:
    """Every built-in figure has a source, and low precision is never slower."""
    device = known_devices()[name]

    assert "data sheet" in device.source
    assert device.peak_flops_per_s("fp32") < device.peak_flops_per_s("fp16")
    assert device.within_host.fair_bytes_per_s > device.between_hosts.fair_bytes_per_s


def test_missing_peak_is_an_error() -> None:
    """V100 has no bf16."""
    with pytest.raises(FactError, match="V100-SXM2-32GB has no known peak for bf16; known: fp16, fp32"):
        known_devices()["V100-SXM2-32GB"].peak_flops_per_s("bf16")


def test_shared_link_is_divided() -> None:
    """One card of 12 GB/s for 8 devices leaves 1.5 GB/s for each."""
    assert Link(latency_s=1e-5, bytes_per_s=12e9, shared_by=8).fair_bytes_per_s == 1.5e9


@pytest.mark.parametrize("share", [0.0, 1.01, float("nan")])
def test_shares_lie_between_0_and_1(share: float) -> None:
    """More than the peak is impossible."""
    with pytest.raises(FactError, match="matmul_share must be above 0 and at most 1"):
        Efficiency(matmul_share=share, half_size=1, attention_share=0.5, memory_share=0.5, launch_s=0)


def test_negative_figures_are_refused() -> None:
    """A negative latency, bandwidth, size or peak is an error that says so."""
    device = known_devices()["H200"]

    with pytest.raises(FactError, match="latency_s must be at least 0, got -1e-06"):
        Link(latency_s=-1e-6, bytes_per_s=1e9)
    with pytest.raises(FactError, match="half_size must be at least 0, got -1"):
        replace(device.efficiency, half_size=-1)
    with pytest.raises(FactError, match="step_s must be at least 0, got -1"):
        replace(device.efficiency, step_s=-1)
    with pytest.raises(FactError, match="memory_bytes must be above 0, got 0"):
        replace(device, memory_bytes=0)
    with pytest.raises(FactError, match="peaks above 0"):
        replace(device, flops_per_s={})


def test_the_beginning_of_a_name_is_enough_where_it_tells() -> None:
    """One device begins with H1; three begin with A100."""
    assert device_named("h1") == known_devices()["H100-SXM"]
    with pytest.raises(FactError, match="'A100' may be A100-40GB or A100-80GB or A100-80GB-PCIe; say which"):
        device_named("A100")


def test_only_rack_machines_have_a_domain_beyond_the_host() -> None:
    """NVL72: 18 trays of 4 devices share one NVLink domain."""
    wide = {name: one for name, one in known_devices().items() if one.domain_hosts > 1}

    assert ["GB200-NVL72", "GB300-NVL72"] == list(wide)
    assert {(18, 4)} == {(one.domain_hosts, one.devices_per_host) for one in wide.values()}
    with pytest.raises(FactError, match="domain_hosts must be at least 1, got 0"):
        replace(known_devices()["H200"], domain_hosts=0)
