"""A plan's order under torchrun, pipette-launch, mpirun and Ray: losses and step times of the same training.

`python -m benchmarks.bench_orders [--record] [--rounds 3]` makes four laboratory hosts (docs/netlab.md), lets
pipette-launch measure them and plan the order of the ranks for the user's own layout, and trains under each launcher
with the command that `pipette order` prints. It needs root, Open MPI and Ray (`pip install ray`).
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from benchmarks.netlab import Lab
from benchmarks.netlab.compare import TORCHRUN, Ended, ended, environment, launched, train
from benchmarks.netlab.suite.cases import SCRIPT, islands
from benchmarks.netlab.system import LabError
from benchmarks.stolen import processor_time
from benchmarks.telling import processor, shown
from pipette_launch.facts import Plan, files
from pipette_launch.report.order import Target, command_words, host_ranks, order_files

RESULT = Path(__file__).parent / "results" / "orders.md"
ARGUMENTS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 8 --vocab-size 256 --transformer-impl local --lr 1e-3 "
    "--attention-dropout 0 --hidden-dropout 0 --train-iters 8 --log-interval 1 --eval-iters 0 "
    "--distributed-backend gloo --pipeline-model-parallel-size 2"
).split()
SKIP = 3
"""First iterations whose step times do not count."""
RAY_PORT = 6379
DEADLINE_S = 180.0
ALL_ALIVE = (
    "import ray, sys, time; ray.init(logging_level='ERROR')\nwhile len(ray.nodes()) < int(sys.argv[1]): time.sleep(1)"
)


def variables() -> dict[str, str]:
    """Variables of the printed commands: `python` is this interpreter."""
    return {**environment(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def printed(lab: Lab, plan: Plan, target: Target, more: Mapping[str, str]) -> Ended:
    """Train by the files and the command of `pipette order`, from a folder of its own on the first host."""
    folder = lab.folder / target
    folder.mkdir(exist_ok=True)
    for name, body in order_files(plan, target, {}).items():
        (folder / name).write_text(body)
    command = command_words(plan, target).replace("ARGS", shlex.join(ARGUMENTS))
    output, began_s = folder / "output", time.monotonic()
    with output.open("w") as file:
        words = {**variables(), **more}
        job = lab.run("n0", ["sh", "-c", command], words, stdout=file, stderr=subprocess.STDOUT, cwd=folder)
        try:
            code = job.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            code = 124
    fault = f"exit code {code}" if code else ""
    return ended([command], [output], wall_s=time.monotonic() - began_s, fault=fault)


def mpirun_variables(lab: Lab, passed: Mapping[str, str]) -> dict[str, str]:
    """Variables with which mpirun reaches the hosts of a laboratory, and passes variables to all processes."""
    listed = ";".join(f"{name}={value}" for name, value in passed.items())
    own = {"mca_base_env_list": listed, "plm_rsh_agent": str(lab.remote_shell()), "oob_tcp_if_include": "10.77.0.0/24"}
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    return root | {f"OMPI_MCA_{name}": value for name, value in own.items()}


@contextmanager
def ray_cluster(lab: Lab) -> Iterator[dict[str, str]]:
    """Start Ray on each host; yield the variables of a job."""
    ray, head = Path(sys.executable).with_name("ray"), f"{lab.address('n0')}:{RAY_PORT}"
    # Sockets of Ray need a short path.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        has = {**variables(), "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0", "TMPDIR": folder}
        for host in lab.hosts:
            place = f"--head --port={RAY_PORT} --temp-dir={folder} --include-dashboard=false".split()
            enter: list[object] = []
            if host != "n0":
                place = [f"--address={head}"]
                # The hosts share a disk, but each host needs its own folder of sockets.
                enter = ["sh", "-c", 'mount --bind "$1" "$2" && shift 2 && exec "$@"', "sh", lab.folder / host, folder]
            own = [
                "--block",
                "--num-cpus=2",
                "--object-store-memory=80000000",
                f"--node-ip-address={lab.address(host)}",
            ]
            with (lab.folder / host / "ray").open("w") as file:
                words = [*enter, ray, "start", *own, *place]
                lab.run(host, words, has, stdout=file, stderr=subprocess.STDOUT)
            time.sleep(8 if host == "n0" else 0)
        has["RAY_ADDRESS"] = head
        lab.run("n0", [sys.executable, "-c", ALL_ALIVE, len(lab.hosts)], has).wait(DEADLINE_S)
        yield has
        for host in lab.hosts:
            lab.end(host)


def trainings(rounds: int, planned: list[Plan]) -> Iterator[tuple[str, Ended]]:
    """Yield launcher and result of each training, beginning with the start that measures and appends its plan."""
    words = (str(SCRIPT), *ARGUMENTS)
    with Lab(islands()) as lab:
        lab.check()
        launch = [*launched(lab.folder / "plans", 20, "--pipette-fix", "all"), *words]
        yield "pipette-launch, with warm-up", train(lab, launch)
        plan = files.read(next((lab.folder / "plans").glob("*/plan.json")), Plan)
        planned.append(plan)
        jobs: dict[str, Callable[[], Ended]] = {
            "torchrun": lambda: train(lab, [*TORCHRUN, *words]),
            "pipette-launch": lambda: train(lab, launch),
            "mpirun": lambda: printed(lab, plan, "mpirun", mpirun_variables(lab, variables())),
        }
        for _ in range(rounds):
            for name, job in jobs.items():
                yield name, job()
        with ray_cluster(lab) as more:
            for _ in range(rounds):
                yield "Ray", printed(lab, plan, "ray", more)


def report(rounds: int) -> Iterator[str]:
    """Yield the text of the result."""
    before = processor_time()
    found: dict[str, list[Ended]] = {}
    planned: list[Plan] = []
    for name, one in trainings(rounds, planned):
        found.setdefault(name, []).append(one)
        print(f"{name}: {one.steady_s(SKIP) * 1e3:.0f} ms a step", file=sys.stderr, flush=True)
    stock = found["torchrun"][0].losses
    stolen = processor_time().stolen_since(before)
    tools = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray"))
    mpi = subprocess.run(
        [shutil.which("mpirun") or "", "--version"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]
    yield f"`python -m benchmarks.bench_orders --rounds {rounds}` on {time.strftime('%Y-%m-%d')}: {processor()},"
    yield f"{os.cpu_count()} cores ({stolen:.0%} of the time stolen, load {os.getloadavg()[0]:.0f}),"
    yield f"Python {platform.python_version()}, {tools}, {mpi}. Network `islands` of the [suite](../../docs/netlab.md),"
    yield f"`examples/pretrain_gpt.py {shlex.join(ARGUMENTS)}`."
    yield ""
    yield f"| launcher | median ms a step after {SKIP} steps | losses equal torchrun's |"
    yield "|---|---|---|"
    for name, ran in found.items():
        steps = ", ".join(f"{one.steady_s(SKIP) * 1e3:.0f}" for one in ran)
        equal = all(one.losses == stock for one in ran)
        yield f"| {name} | {steps} | {f'all {len(stock)}, to the last digit' if equal else 'no'} |"
    yield ""
    (plan,) = planned
    hosts = ", ".join(one.host for one in host_ranks(plan, plan.chosen.placement))
    steps_ms = [f"{1e3 * step_s:.0f} ms" for step_s in (plan.chosen.step_time_s, plan.own.step_time_s)]
    yield f"The plan puts RANK 0 to 3 on {hosts}. Predicted: {steps_ms[0]}, in torchrun's order {steps_ms[1]}."
    yield ""
    yield f"Losses: {', '.join(stock)}."


def main() -> None:
    """Print the result, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    missing = [tool for tool in ("mpirun", Path(sys.executable).with_name("ray")) if not shutil.which(tool)]
    if missing:
        raise LabError(f"{missing[0]} is missing")
    text = shown(report(args.rounds))
    if args.record:
        RESULT.write_text(f"# A plan's order under other launchers\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
