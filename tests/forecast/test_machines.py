"""Which machines a prediction is for, from what the user says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements

from pipette_launch.errors import ClusterError, FactError, FileFormatError, PipetteError, UsageError
from pipette_launch.facts import files
from pipette_launch.forecast.machines import machines_of
from pipette_launch.units import GIB

MEASURED = tiny_measurements(tiny_cluster(2, 4))


@pytest.mark.parametrize(
    ("sizes", "hosts", "devices"),
    [
        ({"world_size": 4}, 1, 4),
        ({"world_size": 16}, 2, 8),
        ({"world_size": 12}, 2, 6),
        ({"world_size": 13}, 13, 1),
        ({"world_size": 16, "num_hosts": 4}, 4, 4),
        ({"world_size": 16, "devices_per_host": 16}, 1, 16),
        ({"world_size": None, "num_hosts": 3, "devices_per_host": 4}, 3, 4),
    ],
)
def test_sizes_are_completed(sizes: dict[str, int], hosts: int, devices: int) -> None:
    """What is not said follows from the rest, and a host has up to eight devices."""
    found = machines_of(**sizes)  # type: ignore[arg-type]

    assert (hosts, devices) == (found.num_hosts, found.devices_per_host)


def test_an_assumed_host_is_said() -> None:
    """Where links between hosts matter, the guess is a note; on a single host there is none."""
    note = "Hosts of 8 devices each are assumed; --gpus-per-node says it otherwise."

    assert (note,) == machines_of(world_size=16, gpu="H100").notes
    assert () == machines_of(world_size=8, gpu="H100").notes == machines_of(world_size=16).notes


def test_a_measured_cluster_tells_everything(tmp_path: Path) -> None:
    """Sizes, kind, name, memory and what the warm-up found beside the model, from the file or from its contents."""
    path = tmp_path / "cluster.json"
    files.write(path, MEASURED)
    found = machines_of(world_size=None, cluster=path)

    assert machines_of(world_size=8, cluster=MEASURED) == found
    assert (2, 4, "cpu", "test cpu", 8 << 30, 0) == (
        found.num_hosts,
        found.devices_per_host,
        found.kind,
        found.device_name,
        found.capacity_bytes,
        found.overhead_bytes,
    )
    assert found.measurements(tiny_job(8)) is found.measured


def test_a_device_type_is_imagined() -> None:
    """Its memory is the capacity, nothing of it was measured, and a step can be priced."""
    found = machines_of(world_size=16, gpu="h100-sxm")
    measurements = found.measurements(tiny_job(16))

    assert ("cuda", "H100-SXM", int(79.1 * GIB), None) == (
        found.kind,
        found.device_name,
        found.capacity_bytes,
        found.overhead_bytes,
    )
    assert measurements is not None
    assert 16 == measurements.cluster.num_slots


def test_of_unknown_machines_nothing_is_known() -> None:
    """No capacity, no name, no measurements."""
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
        ({}, UsageError, "on how many ranks does it run"),
        ({"num_hosts": 2}, UsageError, "Say --world-size N, or --nodes N and --gpus-per-node N"),
        ({"world_size": 0}, UsageError, "--world-size must be at least 1, got 0"),
        ({"world_size": -8}, UsageError, "--world-size must be at least 1, got -8"),
        ({"world_size": 8, "num_hosts": -1}, UsageError, "--nodes must be at least 1, got -1"),
        ({"world_size": 8, "num_hosts": 3}, UsageError, "--world-size 8 is not what --nodes 3 give"),
        ({"world_size": 4, "devices_per_host": 8}, UsageError, "--world-size 4 is not what --gpus-per-node 8 give"),
        (
            {"world_size": 8, "num_hosts": 2, "devices_per_host": 2},
            UsageError,
            "--world-size 8 is not what --nodes 2 and --gpus-per-node 2 give",
        ),
        ({"world_size": 8, "gpu": "Voodoo 2"}, FactError, "unknown device 'Voodoo 2'; known: V100"),
        ({"world_size": 8, "gpu": "H200", "device_kind": "cpu"}, UsageError, "exclude each other"),
        ({"world_size": 8, "gpu": "H200", "cluster": MEASURED}, UsageError, "either imagined or measured"),
        (
            {"world_size": 16, "cluster": MEASURED},
            ClusterError,
            "the measured cluster has 2 hosts x 4 devices = 8 ranks, but --world-size says 16",
        ),
        ({"num_hosts": 1, "cluster": MEASURED}, ClusterError, "but --nodes says 1"),
        ({"devices_per_host": 8, "cluster": MEASURED}, ClusterError, "but --gpus-per-node says 8"),
        ({"cluster": Path("/nowhere/cluster.json")}, FileFormatError, "/nowhere/cluster.json: cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_refused(said: dict[str, object], error: type[PipetteError], message: str) -> None:
    """One sentence names the value and what to do."""
    with pytest.raises(error) as caught:
        machines_of(**{"world_size": None, **said})  # type: ignore[arg-type]

    assert message in str(caught.value)
