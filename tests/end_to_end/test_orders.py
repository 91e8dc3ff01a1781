"""A plan's order under torchrun, mpirun and Ray: each rank is on the host of its slot, and all ranks meet."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import warm
import yaml
from end_to_end.jobs import ECHO, MODEL, WITHOUT_WARMUP, environment, free_port, plan
from labs import needs_lab

from benchmarks.netlab import Lab, compare, topology
from pipette_launch.facts import Layout
from pipette_launch.report.order import Target, command_words, order_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes]
MEET = Path(__file__).parent / "meet.py"
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed: openmpi-bin")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install ray")
PLACEMENT = (1, 2, 0, 3)
"""RANK of each slot of two hosts with two slots each; no launcher counts so by itself."""
PLACES = [["n1", 0], ["n0", 1], ["n0", 0], ["n1", 1]]
"""Host and LOCAL_RANK of each RANK: LOCAL_RANK is RANK modulo 2."""

VIRTUAL = Path(sys.executable).parent
OURS = ["--pipette-cache=off", "--pipette-device=cpu", str(ECHO), *MODEL]
WITHOUT = {**compare.environment(), "PYTHONPATH": WITHOUT_WARMUP}
ALL_RANKS = {(str(rank), "4") for rank in range(4)}
OUTPUT: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def mpirun_variables(lab: Lab, passed: Mapping[str, str]) -> dict[str, str]:
    """Variables with which mpirun reaches the hosts of a laboratory, and passes variables to all processes."""
    listed = ";".join(f"{name}={value}" for name, value in passed.items())
    own = {"mca_base_env_list": listed, "plm_rsh_agent": str(lab.remote_shell()), "oob_tcp_if_include": "10.77.0.0/24"}
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    return root | {f"OMPI_MCA_{name}": value for name, value in own.items()}


def written(folder: Path, target: Target) -> Path:
    """Write the files of an order."""
    made = plan(Layout(dp=len(PLACEMENT)), PLACEMENT, hosts=["n0", "n1"])
    for name, body in (order_files(made, target, {}) | {"command": command_words(made, target)}).items():
        (folder / name).write_text(body)
    return folder


def command(folder: Path, *words: object, instead_of: str = "python SCRIPT ARGS") -> list[str]:
    """Return the printed command, which runs in the folder of its files, with other words for the script."""
    printed = (folder / "command").read_text()
    assert instead_of in printed
    return ["sh", "-c", f"cd {folder} && {printed.replace(instead_of, shlex.join(map(str, words)))}"]


def ranks(output: str) -> set[tuple[str, str]]:
    """Return RANK and WORLD_SIZE of each worker of our launcher."""
    return set(re.findall(r'"RANK": "(\d)".*"WORLD_SIZE": "(\d)"', output))


def together(jobs: Iterable[subprocess.Popen[str]]) -> str:
    """Return the output of jobs that run at the same time."""
    return "".join(job.communicate(timeout=150)[0] for job in [*jobs])


def places(output: str) -> list[list[object]]:
    """Return what the job printed."""
    found = re.search(r"places (.*)", output)
    assert found, output
    return list(json.loads(found[1]))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two hosts with two slots each."""
    path = tmp_path_factory.mktemp("lab") / "two.toml"
    path.write_text("rate_mbit = 1000\nhosts = 2\nslots = 2\n")
    with Lab(topology.read(path)) as made:
        yield made


def test_torchrun_in_pods(tmp_path: Path) -> None:
    """Two pods with the operator's variables run the printed command; workers get ranks by the name of the node."""
    (pod,) = yaml.safe_load((written(tmp_path, "kubernetes") / "pod.yaml").read_text())["containers"]
    words = [*(word.replace("/order", str(tmp_path)) for word in pod["command"]), str(MEET)]
    operator = {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": "pods"}
    operator |= {"PET_RDZV_ENDPOINT": f"localhost:{free_port()}", "PATH": f"{VIRTUAL}:{os.environ['PATH']}"}
    output = together(
        subprocess.Popen(words, env=environment(tmp_path, PIPETTE_NODE=node, **operator), text=True, **OUTPUT)
        for node in ("n1", "n0")
    )

    assert PLACES == places(output)


def mpirun(lab: Lab, folder: Path, words: list[str], **variables: str) -> str:
    """Run the printed command on the hosts of a laboratory; return its output."""
    passed = environment(folder, SLURMD_NODENAME="", **variables)
    # The laboratory gives torchrun's flags as variables, which mpirun does not.
    without = [f"--unset={name}" for name in lab.environment("n0") if name.startswith("PET_")]
    return together([lab.run("n0", ["env", *without, *words], passed | mpirun_variables(lab, passed), **OUTPUT)])


@needs_lab
@needs_mpirun
def test_mpirun(lab: Lab, tmp_path: Path) -> None:
    """The printed command places each rank: mpirun's own rank is RANK."""
    job = '[ $RANK = $OMPI_COMM_WORLD_RANK ] && exec "$@"'
    words = command(written(tmp_path, "mpirun"), "sh", "-c", job, "sh", sys.executable, MEET)

    assert PLACES == places(mpirun(lab, tmp_path, words))


def test_our_launcher_in_an_indexed_job(tmp_path: Path) -> None:
    """Two pods take their place among the nodes from Kubernetes."""
    meet = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=localhost", f"--master-port={free_port()}"]
    output = together(
        subprocess.Popen(
            warm.command("pipette_launch", *meet, *OURS),
            env=environment(tmp_path, **WITHOUT, JOB_COMPLETION_INDEX=index, PIPETTE_NODE=f"node{index}"),
            text=True,
            **OUTPUT,
        )
        for index in "01"
    )

    assert "taken from JOB_COMPLETION_INDEX: --node-rank=1" in output, output
    assert ALL_RANKS == ranks(output)


@needs_ray
def test_ray(tmp_path: Path) -> None:
    """A task of Ray on this machine starts the ranks of its slots, in the plan's order."""
    from ray.cluster_utils import Cluster

    host = socket.gethostname()
    for name, body in order_files(plan(Layout(dp=2), (1, 0), hosts=[host]), "ray", {}).items():
        (tmp_path / name).write_text(body)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        done = subprocess.run(
            [sys.executable, tmp_path / "ray_job.py", sys.executable, MEET],
            env=environment(tmp_path, RAY_ADDRESS=cluster.address),
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        cluster.shutdown()

    assert [[host, 0], [host, 1]] == places(done.stdout + done.stderr)
