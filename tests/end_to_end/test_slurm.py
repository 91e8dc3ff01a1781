"""The sbatch scripts of examples/slurm under a real SLURM, whose nodes are network namespaces of this machine.

All jobs are submitted at once, and what happens to them happens at once: most of their time they wait for SLURM's
clocks. Each test then waits for its own job.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from end_to_end.jobs import MODEL, ROOT, WITHOUT_WARMUP, environment
from end_to_end.test_orders import MEET, PLACES, command, places, written
from labs import needs_slurm

from benchmarks.netlab import system
from pipette_launch.launch import outer_launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

pytestmark = [pytest.mark.timeout(150), pytest.mark.processes, needs_slurm]
TRAINING = Path(__file__).parent / "slurm_training.py"
NUM_NODES = 9
PATIENCE_S = 100.0
ITERATIONS = ("--train-iters", "1")
STARTS = re.compile(r"^start (\d+): rank (\d+) of (\d+) on (n\d)(, resumed)?$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """A job that was submitted."""

    number: str
    folder: Path
    """Of its output, and what its workers leave."""
    environ: Mapping[str, str]

    @property
    def output(self) -> str:
        """What batch script, launchers and workers have said up to now."""
        return (self.folder / "output").read_text() if (self.folder / "output").exists() else ""

    def seen(self) -> Counter[tuple[str, str, str]]:
        """Number of processes by start of the job, size of the world, and node."""
        return Counter((start, size, node) for start, _, size, node, _ in STARTS.findall(self.output))

    def field(self, name: str) -> str:
        """One of SLURM's own figures of this job."""
        found = re.search(rf"\b{name}=(\S+)", slurm_words(self.environ, "scontrol", "show", "job", self.number))
        assert found
        return found[1]

    def await_files(self, pattern: str, count: int) -> None:
        """Wait until the workers have left so many files."""
        self.wait_for(lambda: len(list(self.folder.glob(pattern))) >= count)

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        ends_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < ends_s, f"{self.field('JobState')}: {self.output}"
            time.sleep(0.2)

    def end(self) -> tuple[str, str]:
        """Wait for the job's end; return its state and exit code."""
        self.wait_for(lambda: self.field("JobState") not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"))
        return self.field("JobState"), self.field("ExitCode")


def slurm_words(environ: Mapping[str, str], *words: str) -> str:
    """Run one of SLURM's programs."""
    return subprocess.run(words, env=environ, check=True, capture_output=True, text=True, timeout=30).stdout


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables with which this machine sees a SLURM with nodes n0 to n8."""
    number = str(10 + os.getpid() % 90)
    script = ROOT / "scripts" / "slurm-lab"
    owned = {**os.environ, "SLURM_LAB": number, "SLURM_LAB_OWNER": str(os.getpid())}
    folder = tmp_path_factory.mktemp("slurm")
    try:
        done = subprocess.run([script, "up", str(NUM_NODES)], env=owned, check=True, capture_output=True, text=True)
        name, _, value = done.stdout.strip().removeprefix("export ").partition("=")
        path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        yield {**environment(folder), "PATH": path, "SLURM_LAB": number, name: value}
    finally:
        subprocess.run([script, "down"], env=owned, check=True)


@pytest.fixture(scope="module")
def jobs(lab: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """All jobs by the name of their script; time limits are near, and a node is gone."""

    def submit(name: str, nodes: int, awaited: str, *words: str, flags: str = "", **variables: str) -> Job:
        folder = tmp_path_factory.mktemp(name)
        command = ["sbatch", "--parsable", f"--nodes={nodes}", "--gpus-per-node=2", f"--output={folder}/output"]
        environ = {**lab, **variables}
        script = ROOT / "examples" / "slurm" / f"{name}.sbatch"
        launcher = [
            "--pipette-device=cpu",
            f"--pipette-cache={folder}/cache",
            *flags.split(),
            TRAINING,
            folder,
            awaited,
        ]
        number = slurm_words(
            environ, *command, *" ".join(words[:1]).split(), str(script), *map(str, launcher), *words[1:]
        )
        return Job(number.strip(), folder, lab)

    patience = "last_call_timeout=4,keep_alive_interval=3"
    # The first two fit beside each other, the others follow the first two.
    made = {
        "one_task_per_node": submit("one_task_per_node", 3, "nothing"),
        "spare_node": submit("spare_node", 4, "loss", flags=f"--nproc-per-node=1 --rdzv-conf={patience}"),
        # A plan is kept for its hosts.
        "requeue": submit(
            "requeue", 2, "save", "--signal=B:USR1@110 --nodelist=n0,n1", *MODEL, *ITERATIONS, PYTHONPATH=WITHOUT_WARMUP
        ),
        "time_limit": submit("time_limit", 2, "save", "--signal=USR2@110"),
    }
    for name in ("spare_node", "requeue", "time_limit"):
        made[name].await_files("up-0-*", 4)
    shorten(made["requeue"])
    shorten(made["time_limit"])
    lost = outer_launcher.parse(made["spare_node"].field("NodeList"))[-1]
    system.kill_all([f"psl{lab['SLURM_LAB']}-{lost}"])
    (made["spare_node"].folder / "gone").touch()
    return made


def shorten(job: Job) -> None:
    """Set a time limit that is nearly reached: SLURM looks at limits twice a minute, and warns 30 s early."""
    minutes = int(job.field("RunTime").split(":")[1])
    slurm_words(job.environ, "scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes + 2}")


def test_one_task_per_node(jobs: dict[str, Job]) -> None:
    """Without any flag for nodes, three launchers meet on the first node and start a process for each GPU."""
    job = jobs["one_task_per_node"]

    assert ("COMPLETED", "0:0") == job.end(), job.output
    nodes = outer_launcher.parse(job.field("NodeList"))
    assert {("0", "6", node): 2 for node in nodes} == job.seen()
    assert (
        f"taken from SLURM step {job.number}.0: --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint={nodes[0]}:"
        f"{20000 + int(job.number)} --rdzv-id={job.number}.0.0 --rdzv-conf=is_host=true --nproc-per-node=2 "
        f"--local-addr=10.78."
    ) in job.output
    assert 1 == job.output.count("taken from SLURM")


def test_a_training_saves_before_the_time_limit(jobs: dict[str, Job]) -> None:
    """SIGUSR2 before the limit reaches all processes; they save and exit with 0, and so does the job, in time."""
    job = jobs["time_limit"]

    assert ("COMPLETED", "0:0") == job.end(), job.output
    assert 4 == len(list(job.folder.glob("saved-*")))


def test_a_job_saves_and_is_queued_again(jobs: dict[str, Job]) -> None:
    """The batch script has the training save, requeues its job, and the second start goes on with the plan at hand."""
    job = jobs["requeue"]
    job.wait_for(lambda: job.field("Restarts") == "1" and job.field("JobState") == "PENDING")
    # SLURM would wait two minutes.
    slurm_words(job.environ, "scontrol", "update", f"JobId={job.number}", "StartTime=now", "TimeLimit=60")

    assert ("COMPLETED", "0:0") == job.end(), job.output
    assert [("0", "")] * 4 + [("1", ", resumed")] * 4 == sorted(
        (start, resumed) for start, _, _, _, resumed in STARTS.findall(job.output)
    )
    assert 1 == job.output.count("pipette-launch: measuring 4 slots"), job.output


def test_a_job_goes_on_without_a_lost_node(jobs: dict[str, Job]) -> None:
    """When the last of four nodes dies, the three others meet again, train on, and the job ends well."""
    job = jobs["spare_node"]

    assert ("COMPLETED", "0:0") == job.end(), job.output
    left = outer_launcher.parse(job.field("NodeList"))
    before = {node for _, size, node in job.seen() if size == "4"}
    assert (4, 3) == (len(before), len(before.intersection(left)))
    assert {("0", "4", node): 1 for node in before} | {("0", "3", node): 1 for node in left} == job.seen()


def test_srun_trains_in_the_order_of_a_plan(lab: dict[str, str], tmp_path: Path) -> None:
    """The printed command places each rank of `test_orders`, and srun's own rank is RANK."""
    job = '[ $RANK = $SLURM_PROCID ] && exec "$@"'
    words = command(written(tmp_path, "slurm"), "sh", "-c", job, "sh", sys.executable, MEET)
    variables = lab | {"SLURMD_NODENAME": ""}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert PLACES == places(done.stdout + done.stderr)


@pytest.mark.parametrize("words", ["n1", "a[1-3,07],b", "n[08-11],m1", "r[1-2]n[01-03],z[001]", "n[0-2,5,9-10]"])
def test_lists_of_nodes_are_read_as_scontrol_reads_them(lab: dict[str, str], words: str) -> None:
    """Where there is no scontrol, as in many containers, our own reading gives the same names."""
    assert tuple(slurm_words(lab, "scontrol", "show", "hostnames", words).split()) == outer_launcher.parse(words)
