"""The nodes of a round, from their own descriptions."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from facts_for_tests import tiny_cluster
from launch.worlds import records

from pipette_launch.errors import ClusterError
from pipette_launch.facts import Host
from pipette_launch.launch.cache import machines_of
from pipette_launch.launch.nodes import hosts_of, unique_names

GIB = 1 << 30


def host(name: str, address: str, kind: Literal["cpu", "cuda"] = "cpu", gpus: str = "") -> Host:
    """Return a host of two slots with 8 GiB each, 6 of them free."""
    (plain,) = tiny_cluster(hosts=1).hosts
    devices = tuple(
        replace(device, kind=kind, uuid=gpus + device.uuid, memory_total_bytes=8 * GIB, memory_free_bytes=6 * GIB)
        for device in plain.devices
    )
    return replace(plain, name=name, address=address, devices=devices)


def test_equal_host_names_are_told_apart() -> None:
    """The address is added, or a number if addresses are equal too."""
    hosts = [host("a", "10.0.0.1"), host("a", "10.0.0.2"), host("b", "10.0.0.1"), host("b", "10.0.0.1")]
    told = [replace(record, host=one) for record, one in zip(records(4), hosts, strict=True)]

    assert ("a@10.0.0.1", "a@10.0.0.2", "b@10.0.0.1#1", "b@10.0.0.1#2") == unique_names(told)


def test_a_loss_renames_no_other_host() -> None:
    """Earlier hosts keep their names, and a new host gets a free name."""
    equal = [replace(record, host=host("b", "10.0.0.1")) for record in records(4)]
    held = dict(zip((record.token for record in equal[:3]), unique_names(equal[:3]), strict=True))

    assert ("b@10.0.0.1#2", "b@10.0.0.1#3", "b@10.0.0.1#3#2") == unique_names(equal[1:], held)


@pytest.mark.parametrize(
    ("others", "is_refused"),
    [
        ([host("a", "1", "cuda")], True),
        ([host("b", "2", "cuda"), host("a", "1", "cuda")], True),
        ([host("a", "2", "cuda")], False),
        ([host("a", "1", "cuda", "other-")], False),
    ],
    ids=["two launchers", "two of three", "two machines", "other GPUs"],
)
def test_launchers_that_share_a_gpu_are_refused(others: list[Host], is_refused: bool) -> None:
    """For example several SLURM tasks on one node, each with a launcher for all GPUs."""
    hosts = [host("a", "1", "cuda"), *others]
    told = [replace(record, host=one) for record, one in zip(records(len(hosts)), hosts, strict=True)]
    names = [f"node{index}" for index in range(len(hosts))]

    if not is_refused:
        assert len(hosts) == len(hosts_of(told, names))
        return
    with pytest.raises(
        ClusterError, match=r"^2 launchers on a use cpu-0; start one launcher per machine \(srun --ntasks"
    ):
        hosts_of(told, names)


@pytest.mark.parametrize(
    ("hosts", "expected_gib"),
    [
        ([host("a", "1"), host("a", "1")], [(4, 3), (4, 3)]),
        ([host("a", "1"), host("b", "2"), host("a", "1")], [(4, 3), (8, 6), (4, 3)]),
        ([host("a", "1"), host("a", "2")], [(8, 6), (8, 6)]),
        ([host("a", "1", "cuda"), host("a", "1", "cuda", "other-")], [(8, 6), (8, 6)]),
    ],
    ids=["two agents", "two of three", "one name, two machines", "GPUs"],
)
def test_agents_on_one_machine_share_its_memory(hosts: list[Host], expected_gib: list[tuple[int, int]]) -> None:
    """Each agent reported all of the host's memory. GPU memory is not shared."""
    told = [replace(record, host=one) for record, one in zip(records(len(hosts)), hosts, strict=True)]
    found = hosts_of(told, [f"node{index}" for index in range(len(hosts))])

    assert expected_gib == [
        (device.memory_total_bytes // GIB, device.memory_free_bytes // GIB)
        for one in found
        for device in one.devices[:1]
    ]
    assert [f"node{index}" for index in range(len(hosts))] == [one.name for one in found]
    # What earlier jobs came to is looked up by the shared host, and was kept by the agent's own.
    assert [machines_of(one) for one in hosts] == [machines_of(one) for one in found]
