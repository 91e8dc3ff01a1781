"""Files with which other launchers train a plan; the shell script runs in a real shell."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import yaml
from end_to_end.jobs import plan
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.errors import UsageError
from pipette_launch.facts import Layout
from pipette_launch.report.order import by_host, order_files, order_screen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipette_launch.facts import Plan

SHOW = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE ${CUDA_VISIBLE_DEVICES-all} $CUDA_DEVICE_MAX_CONNECTIONS"'


def planned(placement: Sequence[int], *, hosts: Sequence[str] = ("n0", "n1"), kind: str = "cuda") -> Plan:
    """A plan for some hosts of GPUs."""
    return replace(plan(Layout(dp=len(placement)), placement, hosts=hosts), device_kind=kind)


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command by rank.sh in a shell."""
    environ = {"PATH": os.environ["PATH"], **variables}
    words = ["sh", "-c", script, "rank.sh", "sh", "-c", SHOW]
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("target", "variable", "expected"),
    [
        # LOCAL_RANK is RANK modulo 2, and torch's descendants have given it already.
        ("ft_launcher", "LOCAL_RANK", ["2 0 4 2 1,0 1", "1 1 4 2 1,0 1", "0 0 4 2 0,1 1", "3 1 4 2 0,1 1"]),
        # mpirun and srun number the processes of a host by RANK.
        ("mpirun", "OMPI_COMM_WORLD_LOCAL_RANK", ["1 1 4 2 1,0 1", "2 0 4 2 1,0 1", "0 0 4 2 0,1 1", "3 1 4 2 0,1 1"]),
        ("slurm", "SLURM_LOCALID", ["1 1 4 2 1,0 1", "2 0 4 2 1,0 1", "0 0 4 2 0,1 1", "3 1 4 2 0,1 1"]),
    ],
)
def test_each_process_gets_the_rank_and_the_device_of_its_slot(target: str, variable: str, expected: list[str]) -> None:
    """Slot by slot: RANK, LOCAL_RANK, sizes, device order, and the variable that the layout needs."""
    script = order_files(planned([1, 2, 0, 3]), target, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})["rank.sh"]

    slots = [(node, slot) for node in ("n0", "n1") for slot in "01"]
    assert expected == [run(script, PIPETTE_NODE=node, **{variable: slot}).stdout.strip() for node, slot in slots]


def test_a_device_order_follows_the_devices_that_the_node_gave() -> None:
    """Names in CUDA_VISIBLE_DEVICES change places; a list that hides a device is an error."""
    script = order_files(planned([1, 0]), "ray", {})["rank.sh"]
    given = {"PIPETTE_NODE": "n0", "LOCAL_RANK": "0"}
    one = order_files(planned([1, 2, 0, 3]), "ray", {})["rank.sh"]

    assert "1 0 2 1 4 \n" == run(script, **given, CUDA_VISIBLE_DEVICES="4").stdout
    assert "2 0 4 2 GPU-b,GPU-a \n" == run(one, **given, CUDA_VISIBLE_DEVICES="GPU-a,GPU-b").stdout
    assert "no device 1 in 4" in run(one, **given, CUDA_VISIBLE_DEVICES="4").stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PIPETTE_NODE": "n7", "LOCAL_RANK": "0"}, "the plan has no host n7"),
        ({"PIPETTE_NODE": "n0", "LOCAL_RANK": "2"}, "the plan has no process 3 on n0"),
        ({"PIPETTE_NODE": "n0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "LOCAL_RANK: is not set"),
    ],
)
def test_a_process_without_a_slot_ends(variables: dict[str, str], message: str) -> None:
    """An unknown host, a process too many and another launcher are errors."""
    ended = run(order_files(planned([1, 2, 0, 3]), "ray", {})["rank.sh"], **variables)

    assert (2, "") == (ended.returncode, ended.stdout)
    assert message in ended.stderr


def test_hosts_in_the_order_of_ranks() -> None:
    """The file of hosts has a host for each RANK, and the processes meet on RANK 0's host."""
    found = order_files(planned([1, 2, 0, 3]), "mpirun", {})

    assert "n1\nn0\nn0\nn1\n" == found["hosts.txt"]


@pytest.mark.parametrize(
    ("target", "variables", "expected"),
    [
        ("mpirun", {}, "n1:29500"),
        ("ft_launcher", {"MASTER_ADDR": "n0", "MASTER_PORT": "7"}, "n1:7"),
        ("ft_launcher", {"MASTER_ADDR": "n0", "MASTER_PORT": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "n0:7"),
        ("kubernetes", {"MASTER_ADDR": "n0", "MASTER_PORT": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "n0:7"),
        ("kubernetes", {"TORCHELASTIC_USE_AGENT_STORE": "False"}, "rank.sh: unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
        ("ray", {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}, "10.0.0.1:7"),
    ],
)
def test_where_ranks_meet(target: str, variables: dict[str, str], expected: str) -> None:
    """RANK 0's host opens the store, unless torchrun or Ray's driver has one; a pod cannot know RANK 0's address."""
    script = order_files(planned([1, 2, 0, 3]), target, {})["rank.sh"]
    ended = run(
        script.replace('exec "$@"', "echo $MASTER_ADDR:$MASTER_PORT"),
        **{"PIPETTE_NODE": "n0", "LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", **variables},
    )

    assert expected == (ended.stdout + ended.stderr).strip()


@given(st.permutations(range(8)))
def test_whole_hosts_one_after_another(ranks: list[int]) -> None:
    """Each host has successive ranks, in the order in which its devices had ranks; such a plan stays as it is."""
    made = planned(ranks, hosts=["a", "b"], kind="cpu")
    found = by_host(made)

    for row, before in ((found[:4], ranks[:4]), (found[4:], ranks[4:])):
        assert sorted(row) in ([0, 1, 2, 3], [4, 5, 6, 7])
        assert sorted(range(4), key=lambda device: row[device]) == sorted(range(4), key=lambda device: before[device])
    assert found == by_host(planned(found, hosts=["a", "b"], kind="cpu"))


@pytest.mark.parametrize(
    ("target", "ranks", "steps_s", "expected"),
    [
        ("ray", [2, 3, 0, 1], None, "nothing is lost"),
        ("ray", [0, 2, 1, 3], (1.0, 1.5), "a step takes 1.50 s instead of 1.00 s, which loses 50% of the plan's gain"),
        ("kubernetes", [0, 2, 1, 3], None, "the loss is not priced: no file"),
        ("mpirun", [0, 2, 1, 3], None, "exactly the plan's order"),
    ],
)
def test_a_lost_gain_is_stated(target: str, ranks: list[int], steps_s: tuple[float, ...] | None, expected: str) -> None:
    """A launcher that can only order whole hosts loses a share of the gain over the user's own two seconds."""
    made = planned(ranks)
    made = replace(made, own=replace(made.own, step_time_s=2.0))
    drawn = order_screen(made, target, {"rank.sh": "exit\n"}, steps_s=steps_s, unpriced="no file", folder="")

    assert expected in " ".join(line.strip() for line in drawn.splitlines())
    assert "cat > rank.sh <<'END'\nexit\nEND\n" in drawn


def test_a_host_that_no_launcher_finds_is_refused() -> None:
    """Two launchers on one machine have an address in their names."""
    with pytest.raises(UsageError, match=r"n0@10\.0\.0\.1"):
        order_files(planned([0, 1], hosts=["n0@10.0.0.1", "n0@10.0.0.2"]), "slurm", {})


def test_a_pod_knows_its_node() -> None:
    """The part of the pod's spec names the plan's hosts and slots, and takes the node's name from the downward API."""
    spec = yaml.safe_load(order_files(planned([0, 1, 2, 3], hosts=["on", "1"]), "kubernetes", {})["pod.yaml"])

    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [["on"], ["1"]] == [term["matchFields"][0]["values"] for term in terms]
    (container,) = spec["containers"]
    assert "--nproc-per-node=2" in container["command"]
    assert "spec.nodeName" == container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"]


def test_kubernetes_accepts_the_pod() -> None:
    """The schema of Kubernetes knows each field of a pod with the printed parts."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    spec = yaml.safe_load(order_files(planned([0, 1, 2, 3]), "kubernetes", {})["pod.yaml"])
    spec["containers"][0]["image"] = "image"

    validator.validate({"apiVersion": "v1", "kind": "Pod", "spec": spec}, validator.latest_version(), strict=True)
