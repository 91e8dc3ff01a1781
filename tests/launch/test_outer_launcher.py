"""The variables of SLURM 22.05, Open MPI 4.1, torch and Kubernetes."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from pipette_launch.cli import launcher
from pipette_launch.errors import ClusterError, UsageError
from pipette_launch.launch.outer_launcher import (
    current_step,
    drop_outer_flags,
    given_flags,
    parse,
    several_launchers,
    take_flags,
    tasks_on,
)

# Of the second task on the second node of `srun -N2 --ntasks-per-node=2 --gpus-per-node=2` in a job of four nodes.
VARIABLES = {
    "SLURM_JOB_ID": "10012",
    "SLURM_JOB_NODELIST": "n[0-3]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "3",
    "SLURMD_NODENAME": "n2",
    "SLURM_GPUS_ON_NODE": "2",
}
ONE_TASK = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}


def test_the_nodes_of_the_step_meet_on_its_first() -> None:
    """Number, endpoint and id come from the step and not from the whole job. The port follows from job and step."""
    step = current_step(VARIABLES | {"SLURM_RESTART_COUNT": "3"}, parse)
    assert step is not None

    assert {
        "nnodes": "2",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "address of n1:21021",
        "rdzv_id": "10012.1.3",
        "rdzv_conf": "is_host=false",
        "nproc_per_node": "2",
    } == step.flags(lambda node: f"address of {node}")
    assert ("n2", 1, 2) == (step.node, step.local_id, step.num_tasks)


@pytest.mark.parametrize(("gpus", "expected"), [("8", {"nproc_per_node": "8"}), ("", {})])
def test_a_worker_for_each_gpu(gpus: str, expected: dict[str, str]) -> None:
    """One task starts a worker for each GPU of its node; without GPUs, torchrun's default stays."""
    step = current_step(VARIABLES | ONE_TASK | {"SLURM_GPUS_ON_NODE": gpus, "SLURM_STEP_NODELIST": "n2"}, parse)
    assert step is not None

    assert expected == step.flags(str)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": ""},
        {"SLURM_STEP_ID": "4294967291"},
        {"SLURM_STEP_NODELIST": ""},
        {"SLURM_PTY_PORT": "45621"},
        {"SLURM_HET_SIZE": "2"},
    ],
)
def test_what_is_no_step(changes: dict[str, str]) -> None:
    """A batch script, a shell on a terminal and a part of a heterogeneous job say nothing about the job's nodes."""
    assert current_step(VARIABLES | changes, parse) is None


def test_one_node_keeps_torchruns_own_rendezvous() -> None:
    """A step on one node needs no endpoint."""
    step = current_step(VARIABLES | {"SLURM_STEP_NODELIST": "n2", "SLURM_NODEID": "0"}, parse)
    assert step is not None

    assert {"nproc_per_node": "2"} == step.flags(str)


@pytest.mark.parametrize(("index", "expected"), [*enumerate([2, 2, 1, 3, 3, 1])])
def test_tasks_of_each_node(index: int, expected: int) -> None:
    """Repeats are counted in SLURM's notation; a node beyond its end has one task."""
    assert expected == tasks_on(index, "2(x2),1,3(x2)")


@pytest.mark.parametrize("words", ["x[1-2]-ib[", "a[1-2", "a]b", "a[x]"])
def test_what_is_no_list_of_nodes(words: str) -> None:
    """A list that cannot be read is an error with a remedy."""
    with pytest.raises(UsageError, match="give --nnodes and --rdzv-endpoint"):
        parse(words)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        (VARIABLES, 2),
        (VARIABLES | {"SLURM_STEP_TASKS_PER_NODE": "1,8"}, 8),
        (VARIABLES | ONE_TASK, 0),
        (VARIABLES | {"SLURM_STEP_ID": "4294967291"}, 0),
        ({"SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": "8", "SLURM_PROCID": "0"}, 0),
        ({}, 0),
    ],
    ids=["two tasks", "eight on the second", "one task", "batch script", "no step", "no SLURM"],
)
def test_several_launchers_of_a_node_are_known(environ: dict[str, str], count: int) -> None:
    """The tasks of a step count, not those that the job may start."""
    expected = (
        f"; SLURM starts {count} tasks on this node, each with a launcher: start one per node with "
        "srun --ntasks-per-node=1, and give --node-rank=$SLURM_NODEID"
    )

    assert (expected if count else "") == several_launchers(environ)


if TYPE_CHECKING:
    from argparse import Namespace

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "localhost,node-without-address.invalid",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "localhost",
    "SLURM_GPUS_ON_NODE": "4",
    "PATH": "",
}
TAKEN = ("2", "4", "c10d", "localhost:20007", "7.0.0")
TORCHRUNS = ("1:1", "1", "static", "", "none")


def filled(monkeypatch: pytest.MonkeyPatch, *flags: str, **variables: str) -> Namespace:
    """Return the flags of a job whose first task runs here."""
    for name, value in (STEP | variables).items():
        monkeypatch.setenv(name, value)
    words = [*flags, "train.py"]
    args = launcher.parser().parse_args(words)
    environ = STEP | variables
    take_flags(args, given_flags(launcher.parser(), words, environ), environ)
    return args


def values(args: Namespace) -> tuple[str, ...]:
    """Return the flags of the rendezvous."""
    return args.nnodes, args.nproc_per_node, args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id


def test_a_step_fills_in_what_is_not_given(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All five flags come from the step, and the first node prints them on one line."""
    assert TAKEN == values(filled(monkeypatch, "--max-restarts=2"))
    assert (
        "pipette-launch: taken from SLURM step 7.0: --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:20007 "
        "--rdzv-id=7.0.0 --rdzv-conf=is_host=true --nproc-per-node=4\n"
    ) == capsys.readouterr().err


def test_a_given_number_of_processes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """--nproc-per-node and --local-addr may be given beside the flags from SLURM."""
    args = filled(monkeypatch, "--nproc-per-node=3", PET_LOCAL_ADDR="10.1.1.1")

    assert ("2", "3", "10.1.1.1") == (args.nnodes, args.nproc_per_node, args.local_addr)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--nnodes", "1:1"),
        ("--rdzv-backend", "static"),
        ("--rdzv-endpoint", "a:1"),
        ("--rdzv_id", "x"),
        ("--rdzv-conf", "read_timeout=3"),
        ("--node-rank", "0"),
        ("--master-addr", "127.0.0.1"),
        ("--master-port", "29500"),
    ],
)
def test_nothing_is_taken_beside_a_flag_for_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    """With one such flag or PET_ variable, even with its default value, the job runs as under torchrun."""
    expected = launcher.parser().parse_args([flag, value, "train.py"])

    assert vars(expected) == vars(filled(monkeypatch, flag, value))
    name = f"PET_{flag[2:].replace('-', '_').upper()}"
    assert vars(expected) == vars(filled(monkeypatch, **{name: value}))
    assert "" == capsys.readouterr().err


def test_standalone_and_no_step_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """--standalone is a rendezvous of its own; a batch script is no step."""
    assert TORCHRUNS == values(filled(monkeypatch, "--standalone"))
    assert TORCHRUNS == values(filled(monkeypatch, SLURM_STEP_ID=""))


def test_a_port_in_use_is_an_error_with_the_flags_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other nodes could not know of another port, so the first says how to name one."""
    with (
        socket.create_server(("", 20007)),
        pytest.raises(ClusterError, match=r"port 20007 of localhost.* give another"),
    ):
        filled(monkeypatch)


MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
RAY = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
TASKS = STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "0"}


def taken(environ: dict[str, str], *flags: str) -> Namespace:
    """Return the flags of a job in an environment."""
    words = [*flags, "train.py"]
    args = launcher.parser().parse_args(words)
    take_flags(args, given_flags(launcher.parser(), words, environ), environ)
    return args


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TASKS, "SLURM starts 4 tasks on a node, .*: srun --ntasks-per-node=1"),
        (MPI, "mpirun started 4 launchers, 2 of them on this node; .* mpirun -npernode 1, with --nnodes"),
        (RAY, "torchrun, ft_launcher or Ray started 4 launchers"),
        (TASKS | MPI, "mpirun started 4 launchers"),
    ],
    ids=["SLURM", "mpirun", "torch", "mpirun in a SLURM step"],
)
def test_several_launchers_are_one_error(environ: dict[str, str], message: str) -> None:
    """The first task of the job names the way to start one launcher on each node."""
    with pytest.raises(UsageError, match=message):
        taken(environ)


@pytest.mark.parametrize(
    "environ",
    [TASKS | {"SLURM_LOCALID": "1"}, TASKS | {"SLURMD_NODENAME": "b", "SLURM_STEP_NODELIST": "a,b"}],
    ids=["second task", "second node"],
)
def test_the_other_tasks_are_silent(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Thousands of tasks would print the same sentence."""
    with pytest.raises(SystemExit) as caught:
        taken(environ)

    assert (2, "") == (caught.value.code, capsys.readouterr().err)


@pytest.mark.parametrize("environ", [TASKS, MPI, RAY], ids=["SLURM", "mpirun", "torch"])
def test_the_users_flags_let_each_task_be_a_launcher(environ: dict[str, str]) -> None:
    """Flags that set where nodes meet count more than variables, as under torchrun."""
    given = taken(environ, "--nnodes=3", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1")

    assert ("3", "1", "c10d", "a:1", "none") == values(given)


def test_a_pod_of_an_indexed_job_knows_its_node_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """The index of the pod is the node rank beside --master-addr, unless the user gives another."""
    index = {"JOB_COMPLETION_INDEX": "2"}
    flags = ("--nnodes=3", "--master-addr=a")

    assert (2, 1) == (taken(index, *flags).node_rank, taken(index, *flags, "--node-rank=1").node_rank)
    assert "pipette-launch: taken from JOB_COMPLETION_INDEX: --node-rank=2\n" == capsys.readouterr().err
    assert 0 == taken(index).node_rank


@pytest.mark.parametrize(("is_worker", "expected"), [(True, None), (False, "2")])
def test_the_flags_of_an_outer_torchrun_are_not_ours(expected: str | None, *, is_worker: bool) -> None:
    """A worker of torchrun inherits variables that name torchrun's own rendezvous, where a second job would wait."""
    environ = {"PET_NNODES": "2", **({"TORCHELASTIC_RUN_ID": "outer"} if is_worker else {})}
    drop_outer_flags(environ)

    assert expected == environ.get("PET_NNODES")
