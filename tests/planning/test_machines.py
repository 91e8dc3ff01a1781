"""`machines_of` finds the machines that options name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from doc_pages import ROOT
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements

from pipette_launch.errors import ClusterError, FactError, FileFormatError, PipetteError, UsageError
from pipette_launch.facts import files
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.devices import device_named, file_of
from pipette_launch.planning.machines import machines_of
from pipette_launch.planning.predict import predict
from pipette_launch.text import GIB

EXAMPLES = ROOT / "examples"
MEASURED = tiny_measurements(tiny_cluster(2, 4))


@pytest.mark.parametrize(
    ("sizes", "hosts", "devices"),
    [
        ({"world_size": 4}, 1, 4),
        ({"world_size": 16}, 2, 8),
        ({"world_size": 12}, 2, 6),
        ({"world_size": 13}, 13, 1),
        ({"world_size": 16, "nodes": 4}, 4, 4),
        ({"world_size": 16, "gpus_per_node": 16}, 1, 16),
        ({"world_size": None, "nodes": 3, "gpus_per_node": 4}, 3, 4),
    ],
)
def test_sizes_are_completed(sizes: dict[str, int], hosts: int, devices: int) -> None:
    """Missing sizes follow from the others; a host has up to eight devices."""
    found = machines_of(**sizes)  # type: ignore[arg-type]

    assert (hosts, devices) == (found.num_hosts, found.devices_per_host)


def test_an_assumed_host_is_said() -> None:
    """The assumed number of devices is a note, except on a single host."""
    note = "Assumed: 8 devices per host."

    assert (note,) == machines_of(world_size=16, gpu="H200").notes
    assert () == machines_of(world_size=8, gpu="H200").notes == machines_of(world_size=16).notes


def test_a_measured_cluster_tells_everything(tmp_path: Path) -> None:
    """The file, or its contents, gives sizes, kind, name, memory and measurements."""
    path = tmp_path / "cluster.json"
    files.write(path, MEASURED)
    found = machines_of(world_size=None, cluster=path)

    assert machines_of(world_size=8, cluster=MEASURED) == found
    assert (2, 4, "cpu", "test cpu", 8 << 30) == (
        found.num_hosts,
        found.devices_per_host,
        found.kind,
        found.device_name,
        found.capacity_bytes,
    )
    assert found.measurements(tiny_job(8)) is found.measured


def test_a_device_type_is_imagined() -> None:
    """A device type gives the capacity, and imagined measurements that price a step."""
    found = machines_of(world_size=16, gpu="h100-sxm")
    measurements = found.measurements(tiny_job(16))

    assert ("cuda", "H100-SXM", int(79.1 * GIB)) == (
        found.kind,
        found.device_name,
        found.capacity_bytes,
    )
    assert measurements is not None
    assert 16 == measurements.cluster.num_slots


def test_of_unknown_machines_nothing_is_known() -> None:
    """There is no capacity, no name and no measurement."""
    found = machines_of(world_size=8)

    assert (None, "", None, "unknown") == (
        found.capacity_bytes,
        found.device_name,
        found.measurements(tiny_job(8)),
        found.origin,
    )


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({}, UsageError, "world_size is missing: give this number, or the number of hosts and of devices"),
        ({"nodes": 2}, UsageError, "world_size is missing"),
        ({"world_size": 0}, UsageError, "world_size must be at least 1, got 0"),
        ({"world_size": -8}, UsageError, "world_size must be at least 1, got -8"),
        ({"world_size": 8, "nodes": -1}, UsageError, "nodes must be at least 1, got -1"),
        ({"world_size": 8, "nodes": 3}, UsageError, "world_size 8 does not agree with 3 hosts; correct"),
        ({"world_size": 4, "gpus_per_node": 8}, UsageError, "world_size 4 does not agree with 8 devices per host"),
        (
            {"world_size": 8, "nodes": 2, "gpus_per_node": 2},
            UsageError,
            "world_size 8 does not agree with 2 hosts and 2 devices per host",
        ),
        ({"world_size": 8, "gpu": "Voodoo 2"}, FactError, "unknown device 'Voodoo 2'; pipette devices lists"),
        ({"world_size": 8, "gpu": "H2O"}, FactError, "did you mean H20? pipette devices lists"),
        (
            {"world_size": 8, "gpu": "A100"},
            FactError,
            "did you mean A100-40GB, A100-80GB, A100-40GB-PCIe, A100",
        ),
        ({"world_size": 8, "gpu": "H200", "device_kind": "cpu"}, UsageError, "exclude each other"),
        ({"world_size": 8, "gpu": "H200", "cluster": MEASURED}, UsageError, "either imagined or measured"),
        (
            {"world_size": 16, "cluster": MEASURED},
            ClusterError,
            "the measured cluster has 2 hosts x 4 devices = 8 ranks, but the job has 16 ranks",
        ),
        ({"nodes": 1, "cluster": MEASURED}, ClusterError, "but the job has 1 host;"),
        ({"gpus_per_node": 8, "cluster": MEASURED}, ClusterError, "but the job has 8 devices per host"),
        ({"cluster": Path("/nowhere/cluster.json")}, FileFormatError, "/nowhere/cluster.json: cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_refused(said: dict[str, object], error: type[PipetteError], message: str) -> None:
    """The message names the value and a remedy."""
    with pytest.raises(error) as caught:
        machines_of(**{"world_size": None, **said})  # type: ignore[arg-type]

    assert message in str(caught.value)


def test_a_device_is_read_from_a_file_too(tmp_path: Path) -> None:
    """A device file, given as path, text or contents, sets hosts, memory, capability and links."""
    described = replace(file_of(device_named("L40S")), name="X", devices_per_host=4, within_host_bytes_per_s=99e9)
    path = tmp_path / "x.json"
    files.write(path, described)
    found = machines_of(world_size=None, nodes=2, gpu=path)

    assert found == machines_of(world_size=None, nodes=2, gpu=str(path))
    assert found == machines_of(world_size=None, nodes=2, gpu=described)
    assert (2, 4, "X", 8.9) == (found.num_hosts, found.devices_per_host, found.device_name, found.capability)
    assert found.spec is not None
    assert 99e9 == found.spec.within_host.bytes_per_s


def test_a_known_name_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known device name wins over a file with this name; other names are read as files."""
    monkeypatch.chdir(tmp_path)
    files.write(Path("H200"), replace(file_of(device_named("L4")), name="other"))
    files.write(Path("mine"), replace(file_of(device_named("L4")), name="mine"))

    assert ("H200", "mine") == tuple(machines_of(world_size=8, gpu=gpu).device_name for gpu in ("H200", "mine"))
    assert "other" == machines_of(world_size=8, gpu=Path("H200")).device_name


@pytest.mark.parametrize("name", ["x" * 5000, "H\0", "\ud800"])
def test_a_name_that_no_file_can_have_is_an_unknown_device(name: str) -> None:
    """The name is too long, or has a character that no file name has."""
    with pytest.raises(FactError, match="unknown device"):
        machines_of(world_size=8, gpu=name)


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("no.json", "no.json: cannot be read (No such file or directory)"),
        ("./no", "no: cannot be read"),
        (str(EXAMPLES / "fat-tree.json"), "fat-tree.json: expected a 'device' document, found 'fabric'"),
    ],
)
def test_what_is_no_file_of_a_device_is_refused(gpu: str, message: str) -> None:
    """The error names the file."""
    with pytest.raises(FileFormatError) as caught:
        machines_of(world_size=8, gpu=gpu)

    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["GB200-NVL72", "A100-80GB"])
def test_a_described_device_is_priced_as_one_that_is_known(name: str) -> None:
    """A known device in a file under another name has the same memory, step time and MFU."""
    described = replace(file_of(device_named(name)), name="Gaudi 9")
    words = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1".split()
    words += "--max-position-embeddings 1024 --vocab-size 32000 --tokenizer-type NullTokenizer --bf16".split()
    words += "--global-batch-size 64 --train-iters 10 --tensor-model-parallel-size 8".split()

    words += ["--transformer-impl", "transformer_engine"]
    known, other = (predict(words, nodes=4, gpu=gpu, megatron_version="0.16.1") for gpu in (name, described))

    assert known.rate is not None
    assert other.rate is not None
    assert known.rate.mfu == pytest.approx(other.rate.mfu)
    assert known.step_time_s == pytest.approx(other.step_time_s)
    assert [one.peak_bytes for one in known.stages] == [one.peak_bytes for one in other.stages]


def test_a_described_device_has_the_domains_of_the_known_one() -> None:
    """Four hosts of a described rack are one NVLink domain."""
    described = replace(file_of(device_named("GB200-NVL72")), name="Gaudi 9")
    imagined = machines_of(world_size=None, nodes=4, gpu=described).measurements(tiny_job(16))

    assert imagined is not None
    assert ((0, 1, 2, 3),) == Domains.of(imagined.cluster).domains
