"""Tests of built-in devices, their names, and device files."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT, blocks
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.errors import FactError, FileFormatError
from pipette_launch.facts import files
from pipette_launch.facts.devices import (
    KNOWN_DEVICES,
    DeviceFile,
    Efficiency,
    Link,
    capability_named,
    device_named,
    devices_like,
    file_of,
    key_of,
    known_device,
)
from pipette_launch.facts.files import table

NAMES = {
    # As people write them.
    "h100-sxm": "H100-SXM",
    "H100SXM5": "H100-SXM",
    "DGX H100": "H100-SXM",
    "Grace Hopper Superchip GH200 96GB": "GH200-96GB",
    "h100-nvl": "H100-NVL",
    "H100 94GB": "H100-NVL",
    "H100_PCIe": "H100-PCIe",
    "a100-40g": "A100-40GB",
    "A100 80 GB PCI-E": "A100-80GB-PCIe",
    "A100-80GB": "A100-80GB",
    "rtx4090": "RTX-4090",
    "4090": "RTX-4090",
    "RTX 4090 48G": "RTX-4090-48GB",
    "RTX6000ADA": "RTX-6000-Ada",
    "A6000": "RTX-A6000",
    "h20": "H20",
    "H20 141GB": "H20-3e",
    "H20-3e": "H20-3e",
    "H200-NVL": "H200-NVL",
    "A800-40GB": "A800-40GB",
    "gb200": "GB200-NVL72",
    "GB200 NVL72": "GB200-NVL72",
    "p5.48xlarge": "AWS-P5-H100",
    # As drivers do.
    "NVIDIA H200": "H200",
    "NVIDIA H20": "H20",
    "NVIDIA H20-3e": "H20-3e",
    "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H800": "H800-SXM",
    "NVIDIA GH200 480GB": "GH200-96GB",
    "NVIDIA GH200 144G HBM3e": "GH200-144GB",
    "NVIDIA B300 SXM6 AC": "B300",
    "B300 270GB": "B300",
    "GB200-186GB": "GB200-NVL72",
    "GB300 279GB": "GB300-NVL72",
    "NVIDIA GB300": "GB300-NVL72",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-PCIE-40GB": "A100-40GB-PCIe",
    "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
    "NVIDIA A800-SXM4-80GB": "A800-80GB",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA RTX A6000": "RTX-A6000",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000-Server",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000-Workstation",
    "Tesla V100-SXM2-32GB": "V100-SXM2-32GB",
    "Tesla V100-PCIE-32GB": "V100-PCIe-32GB",
    "Tesla T4": "T4",
    # As Kubernetes does.
    "NVIDIA-H100-80GB-HBM3": "H100-SXM",
}
UNKNOWN = (
    # The beginning of a name, or a name that begins one.
    *("h", "h1", "H2", "A1", "B20", "L", "RTX", "V10", "GB20", "H2000", "A1000", "RTX 40900"),
    # Another chip, another memory, a part, a laptop.
    *("B100", "A100-SXM-64GB", "H100 96GB", "GB200 NVL4", "RTX 6000", "Quadro RTX 6000", "RTX 3090 Ti"),
    *("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
    *("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "GRID A100-40C", "NVIDIA L40-48Q", "NVIDIA A800 40GB Active"),
    *("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "NVIDIA GB10"),
    # Another vendor, and no name at all.
    *("MI300X", "AMD Instinct MI250X", "TPU v5p", "Gaudi 3", "Ascend 910B", "", " ", "NVIDIA"),
)


@pytest.mark.parametrize(("written", "name"), NAMES.items())
def test_a_device_is_found_by_names_of_people_and_drivers(written: str, name: str) -> None:
    """Case, punctuation and vendor are ignored; aliases of the table are found."""
    assert name == device_named(written).name
    assert KNOWN_DEVICES[name] == known_device(written)


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_other_chip_is_taken_for_an_unknown_one(name: str) -> None:
    """A name must be a whole name or alias."""
    with pytest.raises(FactError, match="unknown device"):
        device_named(name)
    assert known_device(name) is None


@given(st.sampled_from(sorted(KNOWN_DEVICES)), st.sampled_from("0123456789SXTG"), st.booleans())
def test_one_letter_more_or_less_never_names_another_chip(name: str, letter: str, longer: bool) -> None:
    """H20 is not H200, A10 is not A100, L4 is not L40. A changed name finds only a device that has this name."""
    chip, *rest = name.split("-")
    written = "-".join([chip + letter if longer else chip[:-1], *rest])

    found = known_device(written)

    assert found is None or key_of(found.name).startswith(key_of(written.split("-")[0]))


@pytest.mark.parametrize("name", sorted(KNOWN_DEVICES))
def test_each_device_is_found_by_its_own_name(name: str) -> None:
    """A name of the table is unique."""
    assert name == device_named(name.lower()).name


def test_no_two_devices_share_an_alias() -> None:
    """Each name and alias of the table belongs to one device."""
    names = [
        key_of(name)
        for row in table("pipette_launch.facts", "devices")
        for name in {row["name"], *row["aliases"].split(";")}
    ]

    assert sorted({*names}) == sorted(names)


@pytest.mark.parametrize(
    ("name", "taken"),
    [("H100", "H100-SXM"), ("H800", "H800-SXM"), ("A800", "A800-80GB"), ("GH200", "GH200-96GB"), ("B300", "B300")],
)
def test_a_chip_without_build_is_the_usual_build(name: str, taken: str) -> None:
    """The alias of a chip names the build that most hosts have."""
    assert taken == device_named(name).name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("A100", "; did you mean A100-40GB, A100-80GB, A100-40GB-PCIe, A100-80GB-PCIe?"),
        ("V100", "; did you mean V100-SXM2-32GB, V100-SXM2-16GB, V100-PCIe-32GB, V100-PCIe-16GB?"),
        ("A100-8OGB", "; did you mean A100-80GB, H100-SXM, A800-80GB, A100-40GB?"),
        ("h100-smx", "; did you mean H100-SXM, H800-SXM, H200?"),
        ("H2O", "; did you mean H20?"),
        ("RTX 3090 Ti", "; did you mean RTX-3090, RTX-5090, RTX-4090?"),
        ("MI300X", ""),
        ("TPUv5", ""),
        ("list", ""),
    ],
)
def test_an_unknown_name_gets_the_nearest_names(name: str, hint: str) -> None:
    """Names that begin with the given name come first. A very different name gets no hint."""
    with pytest.raises(FactError) as error:
        device_named(name)

    assert f"unknown device {name!r}{hint}" == str(error.value)
    assert known_device(name) is None


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("V100-SXM2-32GB", 7.0),
        ("Tesla T4", 7.5),
        ("NVIDIA A100-SXM4-80GB", 8.0),
        ("NVIDIA A10G", 8.6),
        ("NVIDIA L40S", 8.9),
        ("NVIDIA H100 80GB HBM3", 9.0),
        ("B200", 10.0),
        ("NVIDIA GB300", 10.3),
        ("NVIDIA GeForce RTX 5090", 12.0),
        ("AMD Instinct MI300X", None),
        ("", None),
    ],
)
def test_the_table_has_compute_capabilities(name: str, capability: float | None) -> None:
    """The number is CUDA's, with its minor digit."""
    assert capability == capability_named(name)


def test_builds_of_a_chip_are_alike() -> None:
    """A part of an A100 is most like an A100, and another vendor's device is like none."""
    assert "A100-40GB" == devices_like("NVIDIA A100-SXM4-40GB MIG 1g.5gb")[0].name
    assert () == devices_like("AMD Instinct MI300X")


@pytest.mark.parametrize("name", sorted({*KNOWN_DEVICES} - {"B300", "GB300-NVL72"}))
def test_no_process_gets_the_data_sheets_memory(name: str) -> None:
    """The driver uses 0.5 to 3 % of nvidia-smi's total."""
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
        "A800-40GB": 40960,
        "A800-80GB": 81920,
        "A800-80GB-PCIe": 81920,
        "A100-40GB-PCIe": 40960,
        "H100-PCIe": 81559,
        "H100-NVL": 95830,
        "H200-NVL": 143771,
        "H800-SXM": 81559,
        "H800-PCIe": 81559,
        "H20": 97871,
        "H20-3e": 143771,
        "GH200-96GB": 97871,
        "GH200-144GB": 146831,
        "V100-PCIe-32GB": 32768,
        "V100-PCIe-16GB": 16384,
        "T4": 15360,
        "A30": 24576,
        "A40": 46068,
        "A10": 23028,
        "A10G": 23028,
        "L4": 23034,
        "L20": 46068,
        "L40": 46068,
        "RTX-A6000": 49140,
        "RTX-6000-Ada": 49140,
        "RTX-3090": 24576,
        "RTX-5090": 32607,
        "RTX-PRO-6000-Server": 97887,
        "RTX-PRO-6000-Workstation": 97887,
        "L40S": 46068,
        "RTX-4090": 24564,
        "RTX-4090-48GB": 49140,
    }

    assert 0.97 < KNOWN_DEVICES[name].memory_bytes / (smi_mib[name] << 20) < 0.997


@pytest.mark.parametrize("name", sorted(KNOWN_DEVICES))
def test_known_devices_say_where_they_come_from(name: str) -> None:
    """Each device has a source, and a narrower format is never slower."""
    device = KNOWN_DEVICES[name]

    assert "data sheet" in device.source
    assert device.compute_capability
    assert device.peak_flops_per_s("fp32") < device.peak_flops_per_s("fp16")
    assert device.within_host.fair_bytes_per_s > device.between_hosts.fair_bytes_per_s


def test_missing_peak_is_an_error() -> None:
    """V100 has no bf16."""
    with pytest.raises(FactError, match="V100-SXM2-32GB has no known peak for bf16; known: fp16, fp32"):
        KNOWN_DEVICES["V100-SXM2-32GB"].peak_flops_per_s("bf16")


def test_shared_link_is_divided() -> None:
    """One card of 12 GB/s for 8 devices is 1.5 GB/s for each."""
    assert Link(latency_s=1e-5, bytes_per_s=12e9, shared_by=8).fair_bytes_per_s == 1.5e9


@pytest.mark.parametrize("share", [0.0, 1.01, float("nan")])
def test_shares_lie_between_0_and_1(share: float) -> None:
    """More than the peak is impossible."""
    with pytest.raises(FactError, match="matmul_share must be above 0 and at most 1"):
        Efficiency(matmul_share=share, half_size=1, attention_share=0.5, memory_share=0.5, launch_s=0)


def test_negative_figures_are_refused() -> None:
    """A negative latency, bandwidth, size or peak is an error that names it."""
    device = KNOWN_DEVICES["H200"]

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


def test_only_modules_have_nvlink() -> None:
    """A card has at most 16 lanes of PCIe 5 to its neighbours, and a module at least NVLink 2."""
    nvlink = {name: one.within_host.fair_bytes_per_s > 64e9 for name, one in KNOWN_DEVICES.items()}
    cards = {name for name, has_nvlink in nvlink.items() if not has_nvlink}

    assert {name for name in nvlink if "PCIe" in name or "NVL" in name.split("-")} <= cards
    assert {"A10G", "A30", "L4", "L20", "L40", "L40S", "RTX-4090", "RTX-5090", "RTX-PRO-6000-Server", "T4"} <= cards
    assert {"A800-80GB", "H20", "H800-SXM", "GH200-96GB", "B200"} <= nvlink.keys() - cards
    assert KNOWN_DEVICES["H800-SXM"].within_host.bytes_per_s < 200e9 < KNOWN_DEVICES["H20"].within_host.bytes_per_s


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "memory"),
    [
        ("H20", 148, 296, 4000),
        ("H100-PCIe", 756, 1513, 2000),
        ("H100-NVL", 835, 1671, 3900),
        ("H200-NVL", 835, 1671, 4800),
        ("GH200-96GB", 989, 1979, 4000),
        ("A10G", 70, 0, 600),
        ("A10", 125, 0, 600),
        ("A30", 165, 0, 933),
        ("A40", 149.7, 0, 696),
        ("RTX-A6000", 154.8, 0, 768),
        ("L4", 121, 242, 300),
        ("L20", 119.5, 239, 864),
        ("L40", 181, 362, 864),
        ("RTX-3090", 71, 0, 936),
        ("RTX-5090", 209.5, 419, 1792),
        ("RTX-PRO-6000-Server", 500, 1000, 1597),
    ],
)
def test_peaks_are_those_of_data_sheets_without_sparsity(name: str, bf16: float, fp8: float, memory: float) -> None:
    """TFLOP/s with accumulation in FP32, and GB/s of the memory; 0 = the chip lacks the format."""
    device = KNOWN_DEVICES[name]

    assert bf16 == pytest.approx(device.flops_per_s["bf16"] / 1e12)
    assert fp8 == pytest.approx(device.flops_per_s.get("fp8", 0) / 1e12)
    assert memory == pytest.approx(device.memory_bytes_per_s / 1e9)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("H100-SXM", 0.72),
        ("GH200-96GB", 0.72 * (560 / 700) ** 0.5),
        ("H200-NVL", 0.72 * (600 / 835 / (700 / 989)) ** 0.5),
        ("GB200-NVL72", 0.70 * (1200 / 2500 / (1000 / 2250)) ** 0.5),
        ("GB300-NVL72", 0.76 * (1400 / 2500 / (1100 / 2250)) ** 0.5),
    ],
)
def test_a_power_limit_lowers_the_rate_of_products(name: str, share: float) -> None:
    """The share of the peak grows with the square root of the watts for each FLOP/s."""
    assert share == pytest.approx(KNOWN_DEVICES[name].efficiency.matmul_share, abs=5e-4)


def test_superchips_of_a_host_are_joined_in_pairs() -> None:
    """Six of 18 NVLinks join each pair of GH200, and NVSwitches join the devices of all other hosts with NVLink."""
    paired = [one for one in KNOWN_DEVICES.values() if one.has_paired_links]

    assert ["GH200-96GB", "GH200-144GB"] == [one.name for one in paired]
    assert KNOWN_DEVICES["H100-SXM"].within_host.bytes_per_s / 3 == paired[0].within_host.bytes_per_s


def test_only_rack_machines_have_a_domain_beyond_the_host() -> None:
    """NVL72: 18 trays of 4 devices share one NVLink domain."""
    wide = {name: one for name, one in KNOWN_DEVICES.items() if one.domain_hosts > 1}

    assert ["GB200-NVL72", "GB300-NVL72"] == list(wide)
    assert {(18, 4)} == {(one.domain_hosts, one.devices_per_host) for one in wide.values()}
    with pytest.raises(FactError, match="domain_hosts must be at least 1, got 0"):
        replace(KNOWN_DEVICES["H200"], domain_hosts=0)


EXAMPLE = ROOT / "examples" / "mi300x.json"
FEW: dict[str, Any] = {
    "kind": "device",
    "schema_version": 2,
    "name": "A100-64GB",
    "source": "A rumour.",
    "like": "A100-80GB",
    "flops_per_s": {"bf16": 358e12},
    "memory_bytes": 68e9,
    "memory_bytes_per_s": 1640e9,
}


def read(**changes: Any) -> DeviceFile:
    """Read a short device file with changed fields."""
    return files.loads(DeviceFile, json.dumps(FEW | changes), "d.json")


def test_a_short_file_is_a_known_device_with_other_figures() -> None:
    """The source names the fields that come from the known device."""
    like, device = KNOWN_DEVICES["A100-80GB"], read().spec()

    assert device == replace(
        like,
        name="A100-64GB",
        flops_per_s={"bf16": 358e12},
        memory_bytes=68_000_000_000,
        memory_bytes_per_s=1640e9,
        source=device.source,
    )
    assert device.source.startswith("A rumour. Taken from A100-80GB: within_host_bytes_per_s, ")
    assert "flops_per_s" not in device.source


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("within_host_bytes_per_s", 100e9, lambda one: one.within_host.fair_bytes_per_s),
        ("within_host_latency_s", 3e-6, lambda one: one.within_host.latency_s),
        ("between_hosts_bytes_per_s", 5e9, lambda one: one.between_hosts.fair_bytes_per_s),
        ("between_hosts_latency_s", 0.0, lambda one: one.between_hosts.latency_s),
        ("host_bytes_per_s", 7e9, lambda one: one.host_bytes_per_s),
        ("devices_per_host", 4, lambda one: one.devices_per_host),
        ("domain_hosts", 9, lambda one: one.domain_hosts),
        ("compute_capability", 8.6, lambda one: one.compute_capability),
        ("matmul_share", 0.5, lambda one: one.efficiency.share_of("bf16")),
        ("fp8_share", 0.4, lambda one: one.efficiency.share_of("fp8")),
        ("attention_share", 0.3, lambda one: one.efficiency.attention_share),
        ("memory_share", 0.2, lambda one: one.efficiency.memory_share),
    ],
)
def test_every_field_counts(field: str, value: float, found: Any) -> None:
    """A given field replaces the known device's figure, and the source no longer names it."""
    device = read(**{field: value}).spec()

    assert value == pytest.approx(found(device))
    assert field not in re.split(r"[ ,.]+", device.source)
    assert field in re.split(r"[ ,.]+", read().spec().source)


@pytest.mark.parametrize("name", sorted(KNOWN_DEVICES))
def test_a_known_device_as_a_file_is_the_same_device(name: str) -> None:
    """The output of `pipette devices NAME --json` gives the same figures, except for rounding."""
    known = KNOWN_DEVICES[name]
    again = files.loads(DeviceFile, files.dumps(file_of(known)), "d.json").spec()

    assert known.flops_per_s == again.flops_per_s
    assert known.within_host.fair_bytes_per_s == again.within_host.fair_bytes_per_s
    assert known.between_hosts.latency_s == pytest.approx(again.between_hosts.latency_s)
    assert replace(again, between_hosts=known.between_hosts, within_host=known.within_host) == replace(
        known, efficiency=again.efficiency
    )
    assert known.efficiency.share_of("fp8") == again.efficiency.share_of("fp8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"like": "MI250"}, "d.json: like: unknown device 'MI250'"),
        ({"like": "H2O"}, "d.json: like: unknown device 'H2O'; did you mean H20?"),
        ({"like": "A100"}, "d.json: like: unknown device 'A100'; did you mean A100-40GB, "),
        ({"name": " "}, "d.json: name: a device needs a name"),
        ({"flops_per_s": {}}, "d.json: flops_per_s: at least one of fp32, fp16, bf16, fp8, fp4 is needed"),
        (
            {"flops_per_s": {"bfloat16": 1e12}},
            "d.json: flops_per_s: 'bfloat16' is not one of fp32, fp16, bf16, fp8, fp4",
        ),
        ({"flops_per_s": {"bf16": 0}}, "d.json: flops_per_s: bf16 must be at least 1e+10, got 0; units are FLOP/s"),
        ({"flops_per_s": {"bf16": 148}}, "d.json: flops_per_s: bf16 must be at least 1e+10, got 148; units are FLOP/s"),
        ({"flops_per_s": 148e12}, "d.json: flops_per_s: expected an object, found float"),
        ({"memory_bytes": 0}, "d.json: memory_bytes must be at least 1e+09, got 0"),
        ({"memory_bytes": 96}, "d.json: memory_bytes must be at least 1e+09, got 96"),
        ({"memory_bytes_per_s": 4000}, "d.json: memory_bytes_per_s must be at least 1e+09, got 4000"),
        ({"between_hosts_bytes_per_s": 400}, "d.json: between_hosts_bytes_per_s must be at least 1e+07, got 400"),
        ({"host_bytes_per_s": 64}, "d.json: host_bytes_per_s must be at least 1e+07, got 64"),
        ({"within_host_latency_s": 4}, "d.json: within_host_latency_s must be at most 0.1, got 4"),
        ({"compute_capability": 90}, "d.json: compute_capability must be at most 30, got 90"),
        ({"memory_bytes": "64 GB"}, "d.json: memory_bytes: expected float, found '64 GB'"),
        ({"memory_bytes_per_s": -1}, "d.json: memory_bytes_per_s must be at least 1e+09, got -1"),
        ({"within_host_bytes_per_s": 0}, "d.json: within_host_bytes_per_s must be at least 1e+07, got 0"),
        ({"between_hosts_latency_s": -1e-6}, "d.json: between_hosts_latency_s must be at least 0, got -1e-06"),
        ({"devices_per_host": 0}, "d.json: devices_per_host must be at least 1, got 0"),
        ({"matmul_share": 1.2}, "d.json: matmul_share must be above 0 and at most 1, got 1.2"),
        ({"fp8_share": 0}, "d.json: fp8 must be above 0 and at most 1, got 0"),
        ({"nvlink": 9e11}, "d.json: unknown field 'nvlink'"),
        ({"kind": "fabric"}, "d.json: expected a 'device' document, found 'fabric'"),
        ({"schema_version": 1}, "d.json: schema_version 1 is not 2"),
    ],
)
def test_a_bad_file_is_refused_by_the_field(changes: dict[str, Any], message: str) -> None:
    """The message names file, field and value."""
    with pytest.raises(FileFormatError) as error:
        read(**changes)

    assert str(error.value).startswith(message)


@pytest.mark.parametrize("field", ["name", "source", "like", "flops_per_s", "memory_bytes", "memory_bytes_per_s"])
def test_six_fields_are_needed(field: str) -> None:
    """All other fields are optional."""
    few = {name: value for name, value in FEW.items() if name != field}

    with pytest.raises(FileFormatError, match=f"d.json: field '{field}' is missing"):
        files.loads(DeviceFile, json.dumps(few), "d.json")


def test_the_example_and_the_page_can_be_read() -> None:
    """examples/mi300x.json and the file in docs/planning.md are valid."""
    shown = [block.text for block in blocks(ROOT / "docs" / "planning.md") if '"kind": "device"' in block.text]

    assert "MI300X" == files.read(EXAMPLE, DeviceFile).spec().name
    assert ["A100-64GB"] == [files.loads(DeviceFile, text, "planning.md").spec().name for text in shown]


def test_the_page_names_every_field() -> None:
    """The table of docs/planning.md has all fields."""
    page = (ROOT / "docs" / "planning.md").read_text()

    assert [] == [one.name for one in fields(DeviceFile) if f"`{one.name}`" not in page]
    assert Path(EXAMPLE).name in page
