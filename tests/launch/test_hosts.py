"""The hosts of a round, from the nodes' descriptions, and the policy for sick hosts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Literal

import pytest
from facts_for_tests import tiny_cluster
from hypothesis import given
from hypothesis import strategies as st
from launch.worlds import records

from pipette_launch.errors import ClusterError
from pipette_launch.facts import Host
from pipette_launch.facts.health import Verdict
from pipette_launch.launch.cache import machines_of
from pipette_launch.launch.hosts import Policy, Ruling, hosts_of, hosts_to_leave, unique_names

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


HOSTS = ("node0", "node1", "node2")


def verdict(host: str, **changes: Any) -> Verdict:
    """Something is amiss with a host."""
    return Verdict(**{"kind": "busy", "host": host, "figure": "61 GB of 80 GB are held", **changes})


def link(host: str, other: str) -> Verdict:
    """The link between two hosts is slow."""
    return verdict(host, kind="slow-link", figure="1 GB/s", other_host=other)


def ruled(*verdicts: Verdict, policy: Any = "exclude", least: int = 2, hinders: str = "", **more: Any) -> Ruling:
    """Return the ruling for three hosts."""
    return Policy(on_sick=policy, least_nodes=least, **more).rule(verdicts, HOSTS, lambda _: hinders)


def test_healthy_hosts_and_notes_change_nothing() -> None:
    """A verdict that is only worth a note is nobody's fault, and neither is one about a host that is not there."""
    for policy in ("warn", "exclude", "fail"):
        assert Ruling() == ruled(verdict("node1", is_sick=False), verdict("node9"), policy=policy)


def test_by_default_it_is_said() -> None:
    """The job goes on with all hosts."""
    assert Ruling(reasons=("node1: 61 GB of 80 GB are held",)) == ruled(verdict("node1"), policy="warn")


def test_fail_stops() -> None:
    """With the sentence."""
    ruling = ruled(verdict("node1"), policy="fail")

    assert (True, ()) == (ruling.stops, ruling.leave_out)
    assert "node1: 61 GB of 80 GB are held" == ruling.reasons[0]


def test_exclude_leaves_the_sick_out() -> None:
    """As far as --nnodes allows."""
    ruling = ruled(verdict("node1"))

    assert (("node1",), False) == (ruling.leave_out, ruling.stops)
    assert "node1 runs no workers and waits on standby, because of --pipette-on-sick=exclude" == ruling.reasons[-1]


@pytest.mark.parametrize(
    ("verdicts", "more", "expected"),
    [
        (
            [verdict("node1")],
            {"least": 3},
            (
                "node1 cannot be excluded: 2 of 3 nodes would be left, and --nnodes needs at least 3; "
                "start with --nnodes 2:3, or keep it out of the job with sbatch --exclude=node1; "
                "the job goes on with it"
            ),
        ),
        (
            [verdict("node1")],
            {"least": 3, "is_static": True},
            "start with --rdzv-backend c10d --nnodes 2:3, or keep it out",
        ),
        (
            [verdict("node1"), verdict("node2")],
            {},
            (
                "node1, node2 cannot be excluded: 1 of 3 nodes would be left, and --nnodes needs at least 2; "
                "start with --nnodes 1:3, or keep them out of the job with sbatch --exclude=node1,node2"
            ),
        ),
        (
            [verdict(host) for host in HOSTS],
            {"least": 1},
            "no healthy node would be left; add a spare node, or keep them out",
        ),
        (
            [verdict("node1")],
            {"hinders": "--global-batch-size 9 is no multiple of 2"},
            "node1 cannot be excluded: --global-batch-size 9 is no multiple of 2; add a spare node, or",
        ),
    ],
)
def test_where_nothing_can_be_left_out_it_is_said_why(verdicts: list[Verdict], more: Any, expected: str) -> None:
    """The sentence says what to do at the next start; the job goes on as under `warn`."""
    ruling = ruled(*verdicts, **more)

    assert ((), False) == (ruling.leave_out, ruling.stops)
    assert expected in ruling.reasons[-1]
    assert len(verdicts) + 1 == len(ruling.reasons)


def test_of_a_slow_link_one_end_is_left_out() -> None:
    """The end of the most slow links; no second one where the first is out for another reason."""
    assert ("node1",) == hosts_to_leave([link("node0", "node1"), link("node1", "node2"), link("node2", "node1")], HOSTS)
    assert ("node2",) == hosts_to_leave([link("node0", "node2"), link("node2", "node0")], HOSTS)
    assert ("node0",) == hosts_to_leave([link("node0", "node2"), verdict("node0")], HOSTS)


@given(st.sets(st.sampled_from([*itertools.permutations("abcdef", 2)])), st.sets(st.sampled_from("abcdef")))
def test_no_slow_link_is_left(slow: set[tuple[str, str]], sick: set[str]) -> None:
    """Every sick host is out, and one end of every slow link."""
    out = hosts_to_leave([*map(verdict, sorted(sick)), *(link(*ends) for ends in sorted(slow))], [*"abcdef"])

    assert sick <= {*out}
    assert all({*ends} & {*out} for ends in slow)
    assert len(out) == len({*out}) <= len(sick) + len({frozenset(ends) for ends in slow})
