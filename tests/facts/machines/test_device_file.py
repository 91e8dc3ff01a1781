"""Devices that a file describes."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT, blocks

from pipette_launch.errors import FileFormatError
from pipette_launch.facts import files
from pipette_launch.facts.machines.device_file import DeviceFile, file_of
from pipette_launch.facts.machines.known_devices import known_devices

EXAMPLE = ROOT / "examples" / "mi300x.json"
FEW: dict[str, Any] = {
    "kind": "device",
    "schema_version": 1,
    "name": "A100-64GB",
    "source": "A rumour.",
    "like": "A100-80GB",
    "flops_per_s": {"bf16": 358e12},
    "memory_bytes": 68e9,
    "memory_bytes_per_s": 1640e9,
}


def read(**changes: Any) -> DeviceFile:
    """Read a short file with other fields."""
    return files.loads(DeviceFile, json.dumps(FEW | changes), "d.json")


def test_a_short_file_is_a_known_device_with_other_figures() -> None:
    """The source names what was taken over, by the names of the fields."""
    like, device = known_devices()["A100-80GB"], read().spec()

    assert device == replace(
        like,
        name="A100-64GB",
        flops_per_s={"bf16": 358e12},
        memory_bytes=68_000_000_000,
        memory_bytes_per_s=1640e9,
        source=device.source,
    )
    assert device.source.startswith("A rumour. As of A100-80GB, for want of own figures: within_host_bytes_per_s, ")
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
        ("compute_capability", 8.9, lambda one: one.compute_capability + 0.9),
        ("matmul_share", 0.5, lambda one: one.efficiency.share_of("bf16")),
        ("fp8_share", 0.4, lambda one: one.efficiency.share_of("fp8")),
        ("attention_share", 0.3, lambda one: one.efficiency.attention_share),
        ("memory_share", 0.2, lambda one: one.efficiency.memory_share),
    ],
)
def test_every_field_counts(field: str, value: float, found: Any) -> None:
    """A field that is given is the device's own, and is no longer named as taken over."""
    device = read(**{field: value}).spec()

    assert value == pytest.approx(found(device))
    assert field not in re.split(r"[ ,.]+", device.source)
    assert field in re.split(r"[ ,.]+", read().spec().source)


@pytest.mark.parametrize("name", sorted(known_devices()))
def test_a_known_device_as_a_file_is_the_same_device(name: str) -> None:
    """What `pipette devices NAME --json` prints is read back with the same figures, to a rounding."""
    known = known_devices()[name]
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
        ({"like": "H2O"}, "d.json: like: unknown device 'H2O'; did you mean H20, H20-3e or H200?"),
        ({"like": "A100"}, "d.json: like: 'A100' may be A100-40GB, "),
        ({"name": " "}, "d.json: name: a device needs a name"),
        ({"flops_per_s": {}}, "d.json: flops_per_s: at least one of fp32, fp16, bf16, fp8, fp4 is needed"),
        ({"flops_per_s": {"bfloat16": 1e12}}, "d.json: flops_per_s: 'bfloat16' is none of fp32, fp16, bf16, fp8, fp4"),
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
        ({"schema_version": 2}, "d.json: schema_version 2 is not 1"),
    ],
)
def test_a_bad_file_is_refused_by_the_field(changes: dict[str, Any], message: str) -> None:
    """File, field and value."""
    with pytest.raises(FileFormatError) as error:
        read(**changes)

    assert str(error.value).startswith(message)


@pytest.mark.parametrize("field", ["name", "source", "like", "flops_per_s", "memory_bytes", "memory_bytes_per_s"])
def test_six_fields_are_needed(field: str) -> None:
    """All others may be left out."""
    few = {name: value for name, value in FEW.items() if name != field}

    with pytest.raises(FileFormatError, match=f"d.json: field '{field}' is missing"):
        files.loads(DeviceFile, json.dumps(few), "d.json")


def test_the_example_and_the_page_can_be_read() -> None:
    """examples/mi300x.json, and the file that docs/planning.md shows."""
    shown = [block.text for block in blocks(ROOT / "docs" / "planning.md") if '"kind": "device"' in block.text]

    assert "MI300X" == files.read(EXAMPLE, DeviceFile).spec().name
    assert ["A100-64GB"] == [files.loads(DeviceFile, text, "planning.md").spec().name for text in shown]


def test_the_page_names_every_field() -> None:
    """The table of docs/planning.md."""
    page = (ROOT / "docs" / "planning.md").read_text()

    assert [] == [one.name for one in fields(DeviceFile) if f"`{one.name}`" not in page]
    assert Path(EXAMPLE).name in page
