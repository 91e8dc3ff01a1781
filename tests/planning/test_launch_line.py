"""Launch lines that users paste are split into launcher, script and variables, and state the sizes of the job."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.errors import UsageError
from pipette_launch.planning.launch_line import SWITCHES, LaunchLine, read_launch_line


def read(line: str, *, is_module: bool = False) -> LaunchLine:
    """Read a line as a shell would split it."""
    return read_launch_line(shlex.split(line), is_module=is_module)


def sizes(line: str, **given_sizes: int) -> tuple[int | None, ...]:
    """Return nodes, processes of a node, and ranks."""
    found = read(line).merged(is_measured=False, **given_sizes)
    return found["nodes"], found["gpus_per_node"], found["world_size"]


LINES = (
    ("x.py --bf16", (None, None, None)),
    ("python3.11 -u -X faulthandler x.py --bf16", (None, None, None)),
    ("torchrun --nnodes 4 --nproc_per_node 8 x.py --bf16", (4, 8, None)),
    ("/opt/bin/torchrun --nnode=4 --nproc=8 --node_rank 3 x.py --bf16", (4, 8, None)),
    ("torchrun --nnodes 2:4 --nproc-per-node gpu x.py --bf16", (4, None, None)),
    ("torchrun --standalone x.py --bf16", (1, None, None)),
    ("torchrun --nproc-per-node 4 --rdzv-conf timeout=900,is_host=1 x.py --bf16", (1, 4, None)),
    ("python -u -m torch.distributed.run --nnodes 4 --nproc_per_node 8 x.py --bf16", (4, 8, None)),
    ("python -m torch.distributed.launch --use_env --nproc_per_node 2 x.py --bf16", (1, 2, None)),
    ("pipette-launch --pipette-margin 0.1 --nnodes 2 --nproc-per-node 8 x.py --bf16", (2, 8, None)),
    ("srun -N4 --ntasks-per-node=8 -l --output x.log python -u x.py --bf16", (4, 8, None)),
    ("srun -N 4 --ntasks-per-node 1 torchrun --nnodes 4 --nproc_per_node 8 x.py --bf16", (4, 8, None)),
    ("srun --nodes=4 torchrun --nproc_per_node 8 x.py --bf16", (4, 8, None)),
    ("srun -n 32 --gpus-per-node=8 ./bind.sh python x.py --bf16", (None, None, 32)),
    (
        "srun -N 2 bash -c 'cd /w; torchrun --nnodes 2 --nproc-per-node 8 x.py --bf16 2>&1'",
        (2, 8, None),
    ),
    (
        "mpirun -np 16 -mca btl tcp -x A=1 --allow-run-as-root python x.py --bf16",
        (None, None, 16),
    ),
    ("mpirun -np 16 --map-by ppr:8:node:PE=4 python x.py --bf16", (None, 8, 16)),
    ("mpiexec -n 96 --ppn 12 --depth=8 python x.py --bf16", (None, 12, 96)),
    ("deepspeed --hostfile h --num_nodes 2 --num_gpus 8 x.py --bf16", (2, 8, None)),
    ("accelerate launch --multi_gpu --num_machines 2 --num_processes 16 x.py --bf16", (2, None, 16)),
    (
        "env A=1 numactl --membind 0 nsys profile -w true -t cuda,nvtx torchrun --nnodes 2 x.py --bf16",
        (2, None, None),
    ),
    (
        "srun apptainer exec --nv --bind a:b x.sif torchrun --nnodes 2 --nproc_per_node 4 x.py --bf16",
        (2, 4, None),
    ),
    ("./with_env.sh torchrun --nnodes 2 x.py --bf16", (2, None, None)),
    ("debugpy-run -p :5678 -m torch.distributed.run -- --nnodes 2 --nproc_per_node 4 x.py --bf16", (2, 4, None)),
    ("python /env/bin/torchrun --nnodes 2 --nproc_per_node 4 x.py --bf16", (2, 4, None)),
    ("python -m debugpy --listen 5678 x.py --bf16", (None, None, None)),
    ("spindle --fast srun -n 8 my-env python x.py --bf16", (None, None, 8)),
)


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line.split()[0] for line, _ in LINES])
def test_launchers_state_the_sizes_of_a_job(line: str, expected: tuple[int | None, ...]) -> None:
    """Nodes, processes of a node and ranks come from the launcher; the script's words are all that follows it."""
    found = read(line)

    assert expected == sizes(line)
    assert ("x.py", ("--bf16",)) == (found.script, found.arguments)


@pytest.mark.parametrize(
    "line",
    [
        "-m trainers.gpt --bf16",
        "python -m trainers.gpt --bf16",
        "python -um trainers.gpt --bf16",
        "torchrun --nnodes 2 -m trainers.gpt --bf16",
        "python -m torch.distributed.run --nnodes 2 --module trainers.gpt --bf16",
    ],
)
def test_a_module_may_stand_for_the_script(line: str) -> None:
    """The name after `-m` is the script, unless the module is a launcher."""
    is_module = line.startswith("-m ")
    found = read(line.removeprefix("-m "), is_module=is_module)

    assert ("trainers.gpt", ("--bf16",)) == (found.script, found.arguments)


def test_a_module_after_pipettes_own_flag_may_be_a_launcher() -> None:
    """`pipette predict -m torch.distributed.run ...` reads torch's launcher, as Python would run it."""
    found = read("torch.distributed.run --nnodes 2 --nproc_per_node 4 pretrain_gpt.py --bf16", is_module=True)

    assert ("pretrain_gpt.py", 2) == (found.script, found.sizes["nodes"].value)


def test_variables_of_a_line_reach_the_workers() -> None:
    """Assignments before the launcher, after env, and behind flags of mpirun or docker are kept."""
    line = "A=1 env B=2 docker run -e C=3 x/y:1 bash -c 'D=4 mpirun -n 2 -x E=5 python pretrain_gpt.py F=6'"

    assert {"A": "1", "B": "2", "C": "3", "D": "4", "E": "5"} == read(line).environment
    assert ("F=6",) == read(line).arguments


@pytest.mark.parametrize(
    ("given_sizes", "message"),
    [
        ({"nodes": 1}, "--nodes 1 contradicts torchrun --nnodes 4 in the launch line"),
        ({"gpus_per_node": 4}, "--gpus-per-node 4 contradicts torchrun --nproc_per_node=8 in the launch line"),
    ],
)
def test_sizes_beside_the_line_may_not_contradict_it(given_sizes: dict[str, int], message: str) -> None:
    """A size that the user gives twice must be equal, or both statements are named."""
    line = "torchrun --nnodes 4 --nproc_per_node=8 pretrain_gpt.py"

    assert (4, 8, None) == sizes(line, nodes=4, gpus_per_node=8)
    with pytest.raises(UsageError, match=message):
        sizes(line, **given_sizes)


def test_an_elastic_job_may_have_any_number_in_its_range() -> None:
    """`--nnodes 2:4` allows 3 nodes, and no 5."""
    assert (3, None, None) == sizes("torchrun --nnodes 2:4 pretrain_gpt.py", nodes=3)
    with pytest.raises(UsageError, match="--nodes 5 contradicts torchrun --nnodes 2:4"):
        sizes("torchrun --nnodes 2:4 pretrain_gpt.py", nodes=5)


def test_a_file_of_measurements_has_the_number_of_hosts() -> None:
    """Torchrun's default of one node does not contradict a measured cluster."""
    found = read("torchrun --nproc_per_node 8 pretrain_gpt.py").merged(is_measured=True)

    assert found["nodes"] is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("srun -N 2 torchrun --nnodes 4 pretrain_gpt.py", "srun -N 2 contradicts torchrun --nnodes 4"),
        (
            "torchrun --nnodes --nproc_per_node 8 x.py",
            "torchrun --nnodes: a number above 0 is needed; an unset variable",
        ),
        ("torchrun --nnodes x.py", "torchrun --nnodes: a number above 0 is needed; an unset variable"),
        ("torchrun --nnodes= x.py", "torchrun --nnodes=: a number above 0 is needed; an unset variable"),
        ("mpiexec -n 0 python x.py", "mpiexec -n 0: a number above 0 is needed"),
        ("torchrun --nproc_per_node '$N' x.py", "the shell did not replace the variable"),
        ("bash run.sh 1", "bash run.sh: shell scripts are not read; give the line that starts Python"),
        ("sbatch -N 4 run.sh", "run.sh is a shell script, which is not read"),
        ("./run.sh", "run.sh is a shell script, which is not read"),
        ("python -c 'import x'", "python -c runs a text, not a script"),
        ("bash -c 'echo \"a'", "the shell's quotes do not match"),
        ("torchrun --nnodes 2", "torchrun starts no script"),
        ("A=1", "the launch line starts no script"),
    ],
)
def test_a_line_without_a_readable_script_is_refused(line: str, message: str) -> None:
    """The error names the words, and what to give instead."""
    with pytest.raises(UsageError, match=message):
        read(line)


def test_torchs_own_switches_are_known() -> None:
    """A script whose name is not FILE.py may follow any flag of the installed torchrun that has no value."""
    run = pytest.importorskip("torch.distributed.run")
    switches = {
        option for action in run.get_args_parser()._actions if action.nargs == 0 for option in action.option_strings
    }

    assert {one.replace("_", "-") for one in switches} - {"-h", "--help", "-m", "--module"} <= set(SWITCHES)


@given(
    st.lists(
        st.sampled_from((*shlex.split(LINES[8][0]), *shlex.split(LINES[19][0]), "", "-", "--", "=", "-m", "-c", "bash"))
    )
)
def test_any_words_are_read_or_refused(words: list[str]) -> None:
    """Cut, shuffled and doubled lines raise no other error than UsageError."""
    try:
        found = read_launch_line(words)
    except UsageError:
        return
    assert len(found.arguments) < len(words)
