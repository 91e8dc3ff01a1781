"""What a SLURM step's variables say, read from what SLURM 22.05 really sets."""

from __future__ import annotations

import pytest

from pipette_launch.errors import UsageError
from pipette_launch.launch.slurm.step import parse, read, several_launchers, tasks_on

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
    "CUDA_VISIBLE_DEVICES": "0,1",
}
ONE_TASK = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}


def test_the_nodes_of_the_step_meet_on_its_first() -> None:
    """Number, endpoint and id are those of the step, not of the whole job; the port follows from job and step."""
    step = read(VARIABLES | {"SLURM_RESTART_COUNT": "3"}, parse)
    assert step is not None

    assert {
        "nnodes": "2",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "address of n1:21021",
        "rdzv_id": "10012.1.3",
        "rdzv_conf": "is_host=false",
    } == step.flags(lambda node: f"address of {node}")
    assert ("n2", 1, 2) == (step.node, step.local_id, step.num_tasks)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2),
        (ONE_TASK, 2),
        (ONE_TASK | {"SLURM_GPUS_ON_NODE": "8"}, 8),
        (ONE_TASK | {"SLURM_GPUS_ON_NODE": ""}, None),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 2),
    ],
)
def test_processes(changes: dict[str, str], expected: int | None) -> None:
    """One task starts a process for each GPU, several tasks one for each task; without GPUs as torchrun."""
    step = read(VARIABLES | changes, parse)
    assert step is not None

    assert expected == step.processes()


def test_tasks_that_see_one_gpu_each_are_refused() -> None:
    """Where SLURM hides the other GPUs from each task, the error says how to start the job."""
    step = read(VARIABLES | {"CUDA_VISIBLE_DEVICES": "1"}, parse)
    assert step is not None

    with pytest.raises(UsageError, match=r"sees only GPU 1; .*srun --gpus-per-node=2 without --gpus-per-task"):
        step.processes()


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
    assert read(VARIABLES | changes, parse) is None


def test_one_node_keeps_torchruns_own_rendezvous() -> None:
    """A step on one node needs no endpoint."""
    step = read(VARIABLES | {"SLURM_STEP_NODELIST": "n2", "SLURM_NODEID": "0"}, parse)
    assert step is not None

    assert {} == step.flags(str)


@pytest.mark.parametrize(("index", "expected"), [*enumerate([2, 2, 1, 3, 3, 1])])
def test_tasks_of_each_node(index: int, expected: int) -> None:
    """Repeats are counted in SLURM's notation; a node beyond its end has one task."""
    assert expected == tasks_on(index, "2(x2),1,3(x2)")


@pytest.mark.parametrize("words", ["x[1-2]-ib[", "a[1-2", "a]b", "a[x]"])
def test_what_is_no_list_of_nodes(words: str) -> None:
    """A list that cannot be read is an error with the way around it."""
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
