"""A plan's order under torchrun, mpirun and Ray: each rank is on the host of its slot, and all ranks meet."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.netlab import Lab, topology
from pipette_launch.facts import Layout
from pipette_launch.report.order import order_files
from tests.end_to_end.jobs import ECHO, MODEL, WITHOUT_WARMUP, environment, free_port, plan
from tests.labs import needs_lab, remote_shell

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes]
MEET = Path(__file__).parent / "meet.py"
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed: openmpi-bin")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install ray")
PLACEMENT = (1, 2, 0, 3)
"""RANK of each slot of two hosts with two slots each; no launcher counts so by itself."""
PLACES = [["n1", 0], ["n0", 1], ["n0", 0], ["n1", 1]]
"""Host and LOCAL_RANK of each RANK: LOCAL_RANK is RANK modulo 2."""


def written(folder: Path, target: str) -> Path:
    """Write the files of an order."""
    made = plan(Layout(dp=len(PLACEMENT)), PLACEMENT, hosts=["n0", "n1"])
    for name, body in order_files(made, target, {}).items():
        (folder / name).write_text(body)
    return folder


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
    """Two pods with the operator's variables start torchrun, whose workers take their ranks by the name of the node."""
    command = [sys.executable, "-m", "torch.distributed.run", "--no-python", "sh", written(tmp_path, "kubernetes")]
    command[-1] /= "rank.sh"
    operator = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": "pods"}
    operator["PET_RDZV_ENDPOINT"] = f"localhost:{free_port()}"
    pods = [
        subprocess.Popen(
            [*map(str, command), sys.executable, str(MEET)],
            env=environment(tmp_path, PIPETTE_NODE=node, **operator),
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in ("n1", "n0")
    ]

    assert PLACES == places("".join(pod.communicate()[0] for pod in pods))


def mpirun(lab: Lab, folder: Path, *words: object, **variables: str) -> str:
    """Run a command under mpirun on the hosts of a laboratory; return its output."""
    variables = environment(folder, SLURMD_NODENAME="", **variables)
    given = [word for name in (*variables, "GLOO_SOCKET_IFNAME") for word in ("-x", name)]
    hosts = ["--mca", "plm_rsh_agent", remote_shell(lab), "--mca", "oob_tcp_if_include", "10.77.0.0/24"]
    where = ["-np", "4", "--hostfile", folder / "hosts.txt", "--map-by", "seq", "--bind-to", "none"]
    # The laboratory gives torchrun's flags as variables, which mpirun does not.
    without = [f"--unset={name}" for name in lab.environment("n0") if name.startswith("PET_")]
    command = ["env", *without, "mpirun", "--allow-run-as-root", *hosts, *where, *given, *words]
    ended = lab.run("n0", command, variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return str(ended.communicate(timeout=150)[0])


@needs_lab
@needs_mpirun
def test_mpirun(lab: Lab, tmp_path: Path) -> None:
    """The printed command places each rank: mpirun's own rank is RANK."""
    written(tmp_path, "mpirun")
    job = '[ $RANK = $OMPI_COMM_WORLD_RANK ] && exec "$@"'
    output = mpirun(lab, tmp_path, "sh", tmp_path / "rank.sh", "sh", "-c", job, "sh", sys.executable, MEET)

    assert PLACES == places(output)


@needs_lab
@needs_mpirun
def test_our_launcher_under_mpirun(lab: Lab, tmp_path: Path) -> None:
    """Four processes of mpirun become two launchers with two workers each, which meet without a flag."""
    written(tmp_path, "mpirun")
    launcher = [sys.executable, "-m", "pipette_launch", "--pipette-cache=off", "--pipette-device=cpu", ECHO, *MODEL]
    output = mpirun(lab, tmp_path, *launcher, PYTHONPATH=WITHOUT_WARMUP, MASTER_ADDR="n0")

    assert 1 == output.count("taken from Open MPI: --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n0:29500"), output
    assert {(str(rank), "4") for rank in range(4)} == set(re.findall(r'"RANK": "(\d)".*"WORLD_SIZE": "(\d)"', output))


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
