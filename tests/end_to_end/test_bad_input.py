"""Bad input gets one clear sentence; the job trains as torchrun would have, or stops where torchrun would.

One case of each kind, whole; `launch/test_bad_input` has all of them without a process.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from end_to_end import jobs
from end_to_end.jobs import ECHO, HOST, MODEL, Done, finish, pipette, plan, plan_file, start, start_warm, warm_pipette

from pipette_launch.facts import Layout
from pipette_launch.probe.health.inventory import num_gpus

pytestmark = pytest.mark.processes
ONE_STEP = [*MODEL, "--train-iters", "1"]


def trained_as_torchrun(done: Done, nproc: int, argv: list[str]) -> bool:
    """Whether every rank ran with the user's own words."""
    return done.code == 0 and [" ".join(argv)] * nproc == [done.workers[rank]["argv"] for rank in range(nproc)]


def test_a_script_that_is_not_megatrons_runs_as_it_is(tmp_path: Path) -> None:
    """Without Megatron's flags there is nothing to plan: the reason is said, and the script runs untouched."""
    done = pipette(tmp_path, "--nproc-per-node=2", ECHO, "--epochs", "3")

    assert trained_as_torchrun(done, 2, ["--epochs", "3"]), done.err
    assert "--num-layers" in done.err
    assert "training with your own configuration as torchrun would" in done.err
    assert {False} == {worker["patched"] for worker in done.workers.values()}


def test_a_recipe_that_cannot_be_read_trains_as_it_is(tmp_path: Path) -> None:
    """Without Megatron-Bridge or a saved configuration, the reason names both, and the script runs untouched."""
    words = ["--recipe", "x", "model.seq_length=4096"]
    done = warm_pipette(tmp_path, "--nproc-per-node=2", ECHO, *words)

    assert trained_as_torchrun(done, 2, words), done.err
    assert "needs megatron-bridge here, or its saved configuration (--bridge-config FILE)" in done.err
    assert "training with your own configuration as torchrun would" in done.err


def test_contradictory_flags_are_named(tmp_path: Path) -> None:
    """The flag and its value stand in the message; with `fail` the launcher stops with exit code 1."""
    changes = ["--tensor-model-parallel-size", "3"]
    done = warm_pipette(tmp_path, "--nproc-per-node=2", "--pipette-on-error=fail", ECHO, *ONE_STEP, *changes)

    assert (1, {}) == (done.code, done.workers), done.err
    assert "tensor-model-parallel-size 3" in done.err
    assert "Traceback" not in done.err


def test_a_bad_plan_file_is_named(tmp_path: Path) -> None:
    """File and field are named in one sentence, and the exit code is that of a bad flag."""
    path = tmp_path / "mine.json"
    path.write_text('{"kind": "plan", "schema_version": 2, "hots": []}')

    done = pipette(tmp_path, "--nproc-per-node=1", f"--pipette-plan={path}", ECHO, *ONE_STEP)

    assert (2, {}) == (done.code, done.workers), done.err
    assert "pipette-launch: error: --pipette-plan" in done.err
    assert "mine.json: unknown field 'hots'" in done.err
    assert "Traceback" not in done.err


@pytest.mark.skipif(num_gpus() > 0, reason="there is a GPU")
def test_a_device_that_is_not_there_stops_the_job(tmp_path: Path) -> None:
    """It is the user's error, unless the user has said that errors must not stop the job."""
    words = ["--nproc-per-node=1", "--pipette-device=cuda"]

    stopped = warm_pipette(tmp_path, *words, ECHO, *ONE_STEP)
    trained = warm_pipette(tmp_path, *words, "--pipette-on-error=train", ECHO, *ONE_STEP)

    assert (2, {}) == (stopped.code, stopped.workers), stopped.err
    assert trained_as_torchrun(trained, 1, ONE_STEP), trained.err
    for done in (stopped, trained):
        assert "NVML shows no GPU to this process" in done.err
        assert "Traceback" not in done.err


def test_a_plan_for_other_hosts_is_refused(tmp_path: Path) -> None:
    """Both sets of hosts are named; training goes on where the user has said so."""
    path = plan_file(tmp_path, plan(Layout(pp=2), [0, 1], hosts=("elsewhere",)))

    words = ["--nproc-per-node=2", "--pipette-on-error=train", f"--pipette-plan={path}"]
    done = warm_pipette(tmp_path, *words, ECHO, *ONE_STEP)

    assert trained_as_torchrun(done, 2, ONE_STEP), done.err
    assert f"the plan is for the hosts elsewhere; this job runs on {HOST}" in done.err


def test_a_plan_is_written_into_argv_and_ranks(tmp_path: Path) -> None:
    """What the workers report is the plan: parallel sizes, micro-batch, pinned batch, and RANK per slot."""
    path = plan_file(tmp_path, plan(Layout(pp=2, micro_batch_size=4), [1, 0]))

    done = warm_pipette(tmp_path, "--nproc-per-node=2", f"--pipette-plan={path}", ECHO, *ONE_STEP)

    assert 0 == done.code, done.err
    argv = done.workers[0]["argv"]
    assert "--pipeline-model-parallel-size 2" in argv
    assert "--micro-batch-size 4" in argv
    assert "--global-batch-size 8" in argv
    assert {True} == {worker["patched"] for worker in done.workers.values()}
    assert {"1,0"} == {worker["CUDA_VISIBLE_DEVICES"] for worker in done.workers.values()}


def test_a_refused_plan_gives_way_with_the_reason(tmp_path: Path) -> None:
    """The script's own words reach the screen, and the user's own configuration trains."""
    path = plan_file(tmp_path, plan(Layout(pp=2), [1, 0]))

    done = warm_pipette(
        tmp_path,
        "--nproc-per-node=2",
        f"--pipette-plan={path}",
        ECHO,
        *ONE_STEP,
        REFUSE="--pipeline-model-parallel-size 2",
    )

    assert trained_as_torchrun(done, 2, ONE_STEP), done.err
    assert "this script refuses --pipeline-model-parallel-size 2" in done.err
    assert "that plan cannot start; going on with your own configuration" in done.err


@pytest.mark.parametrize(
    ("script", "starts", "why"),
    [
        ("open('/no/such/data')", 1, "the missing file or module is missing under every plan"),
        ("raise KeyError('text')", 2, "two layouts ended with the same exception"),
    ],
)
def test_a_fault_of_the_script_is_not_tried_under_every_plan(
    tmp_path: Path, script: str, starts: int, why: str
) -> None:
    """The job ends with torchrun's exit code, and says why the rest of the line is left out."""
    made = plan(Layout(pp=2), [1, 0])
    others = tuple(replace(made.chosen, layout=layout) for layout in (Layout(tp=2), Layout(dp=2, micro_batch_size=2)))
    path = plan_file(tmp_path, replace(made, alternatives=others))
    broken = tmp_path / "broken.py"
    broken.write_text(f"import os, pathlib\npathlib.Path('start' + os.environ['MASTER_PORT']).touch()\n{script}\n")

    done = warm_pipette(tmp_path, "--nproc-per-node=2", f"--pipette-plan={path}", broken, *ONE_STEP)

    assert (1, starts) == (done.code, len(list(tmp_path.glob("start*")))), done.err
    assert f"; no other plan is tried: {why}\n" in done.err
    assert "that plan cannot start" in done.err or starts == 1


def test_unequal_nodes_are_named(tmp_path: Path) -> None:
    """Each node's number of slots stands in the message, and the job runs as under torchrun."""
    flags = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{jobs.free_port()}"]
    agents = [start_warm(tmp_path, [*flags, f"--nproc-per-node={count}", ECHO, *ONE_STEP]) for count in (1, 2)]

    done = [finish(agent) for agent in agents]

    assert [0, 0] == [one.code for one in done], done[0].err + done[1].err
    text = done[0].err + done[1].err
    assert "different numbers of slots" in text
    assert {0, 1, 2} == {rank for one in done for rank in one.workers}


def test_an_unwritable_cache_is_said_once(tmp_path: Path) -> None:
    """The plan is used all the same; where its path would stand, the screen says why there is none and what to do."""
    blocked = tmp_path / "file"
    blocked.write_text("")

    words = ["--nproc-per-node=1", f"--pipette-cache={blocked / 'x'}", ECHO, *ONE_STEP]
    done = warm_pipette(tmp_path, *words, PYTHONPATH=jobs.WITHOUT_WARMUP)

    assert 0 == done.code, done.err
    said = " ".join(done.err.split())
    assert "Plan file not kept: " in said, done.err
    assert "cannot be written (Not a directory)" in said
    assert 1 == said.count("name a writable folder with --pipette-cache")


def test_a_damaged_cache_is_measured_anew(tmp_path: Path) -> None:
    """A cached plan that cannot be read is named and replaced."""
    words = ["--nproc-per-node=1", ECHO, *ONE_STEP]
    first = warm_pipette(tmp_path, *words, PYTHONPATH=jobs.WITHOUT_WARMUP)
    (path,) = (tmp_path / "cache").glob("pipette-launch/*/plan.json")
    whole = path.read_text()
    path.write_text(whole[:100])

    second = warm_pipette(tmp_path, *words, PYTHONPATH=jobs.WITHOUT_WARMUP)

    assert (0, 0) == (first.code, second.code), second.err
    assert "the cached plan cannot be used, so the machines are measured again" in second.err
    assert "plan" in path.read_text()


def test_a_probe_worker_that_dies_is_named(tmp_path: Path) -> None:
    """Where the warm-up cannot work at all, its own reason is shown and the job trains."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'pipette_launch.probe.run' in sys.orig_argv and os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    path = f"{broken}:{jobs.ROOT}:{jobs.ROOT / 'patches'}"

    done = warm_pipette(tmp_path, "--nproc-per-node=2", "--pipette-budget=5", ECHO, *ONE_STEP, PYTHONPATH=path)

    assert trained_as_torchrun(done, 2, ONE_STEP), done.err
    assert re.search(
        rf"the warm-up failed after .* s: {HOST}:1 \(pid \d+\) was killed by signal 9 in phase start", done.err
    )


def test_a_host_name_that_does_not_resolve_is_one_sentence(tmp_path: Path) -> None:
    """The host is named, with what to look at; the exit code is torchrun's."""
    endpoint = ["--rdzv-backend=c10d", "--rdzv-endpoint=nowhere.invalid:29400", "--rdzv-conf=read_timeout=3"]

    done = warm_pipette(tmp_path, "--nnodes=2", *endpoint, "--nproc-per-node=1", ECHO, *ONE_STEP)

    assert (1, {}) == (done.code, done.workers), done.err
    assert "pipette-launch: error: the nodes cannot meet: " in done.err
    assert "nowhere.invalid" in done.err
    assert "Traceback" not in done.err


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
"""As srun sets them for two tasks on one node."""
ONE_A_NODE = "start one per node with srun --ntasks-per-node=1, and give --node-rank=$SLURM_NODEID"


@pytest.mark.timeout(60)
def test_a_node_rank_beyond_the_nodes_is_one_sentence(tmp_path: Path) -> None:
    """As a task whose SLURM_PROCID was taken for its node's rank (Megatron-LM issue 1371)."""
    place = ["--node_rank=1", "--master_addr=127.0.0.1", f"--master_port={jobs.free_port()}"]

    done = warm_pipette(tmp_path, "--nnodes=1", *place, ECHO, *ONE_STEP, **SLURM)

    assert (2, {}) == (done.code, done.workers), done.err
    assert done.err.startswith(
        "pipette-launch: error: --node-rank 1 in a job of --nnodes 1: its only node has rank 0; "
    )
    assert done.err.endswith(f": {ONE_A_NODE}\n")
    assert 1 == done.err.count("\n")


@pytest.mark.timeout(60)
def test_a_second_launcher_of_one_node_is_one_sentence(tmp_path: Path) -> None:
    """Whichever comes first trains; the other says why it does not (pytorch issue 133380)."""
    port = jobs.free_port()
    waiter = tmp_path / "waiter.py"
    waiter.write_text(
        "import pathlib, time\nprint('trains', flush=True)\nwhile not pathlib.Path('go').exists(): time.sleep(0.1)\n"
    )
    words = ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", waiter]

    agents = [start(tmp_path, words, **SLURM) for _ in range(2)]
    while all(agent.poll() is None for agent in agents):
        time.sleep(0.1)
    (tmp_path / "go").touch()
    trained, other = sorted((finish(agent, timeout_s=50) for agent in agents), key=lambda one: one.code)

    assert [(0, "trains\n"), (1, "")] == [(trained.code, trained.out), (other.code, other.out)], other.err
    assert other.err.startswith(
        f"pipette-launch: error: the job at localhost:{port} with --rdzv-id none already has its one node ("
    )
    assert other.err.endswith(f": {ONE_A_NODE}\n")
    assert 1 == other.err.count("\n")


@pytest.mark.timeout(60)
def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    """The command that names its holder is in the sentence; the exit code is torchrun's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = pipette(tmp_path, "--nnodes=2", "--node-rank=0", f"--master-port={port}", ECHO, *ONE_STEP)

    assert (1, {}) == (done.code, done.workers), done.err
    assert done.err.startswith(f"pipette-launch: error: port {port} of this machine is held by another process (ss")
    assert done.err.endswith("; if not, end it, or give another port with --master-port, the same on every node\n")
    assert 1 == done.err.count("\n")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """SIGTERM to the launcher ends its workers, in one sentence; the exit code is torchrun's."""
    sleeper = tmp_path / "sleeper_of_this_test.py"
    # One write for the whole line: the workers share a console.
    sleeper.write_text("import sys, time\nsys.stdout.write('up\\n')\ntime.sleep(600)\n")
    agent = start(tmp_path, ["--nproc-per-node=2", sleeper])
    assert agent.stdout is not None
    assert ["up\n", "up\n"] == [agent.stdout.readline() for _ in range(2)]

    agent.terminate()
    done = finish(agent)

    assert 1 == done.code
    assert done.err.endswith("\npipette-launch: SIGTERM ended the job and its workers\n")
    assert "Traceback" not in done.err
    assert [] == jobs.left_behind("sleeper_of_this_test.py")


def test_ctrl_c_in_a_warmup_is_one_sentence(tmp_path: Path) -> None:
    """No traceback, no worker and no folder is left; the exit code is torchrun's once there are workers."""
    stand_in = tmp_path / "stand_in"
    stand_in.mkdir()
    (stand_in / "sitecustomize.py").write_text(
        "import os, pathlib, sys, time\n"
        "if 'pipette_launch.probe.run' in sys.orig_argv:\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'up' + os.environ['RANK']).touch()\n"
        "    time.sleep(600)\n"
    )
    path = f"{stand_in}:{jobs.ROOT}:{jobs.ROOT / 'patches'}"
    agent = start(tmp_path, ["--nproc-per-node=2", ECHO, *ONE_STEP], PYTHONPATH=path)
    while len(list(tmp_path.glob("up?"))) < 2:
        assert agent.poll() is None
        time.sleep(0.05)

    agent.send_signal(signal.SIGINT)
    done = finish(agent)

    assert (1, {}) == (done.code, done.workers)
    assert done.err.endswith("\npipette-launch: SIGINT ended the job and its workers\n")
    assert "Traceback" not in done.err
    assert [] == jobs.left_behind(str(tmp_path))
    assert [] == list(tmp_path.glob("pipette_*"))


def test_ctrl_c_before_there_are_workers_is_one_sentence(tmp_path: Path) -> None:
    """A launcher that waits for another node ends as Ctrl-C ends any process."""
    port = jobs.free_port()
    flags = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    agent = start(tmp_path, [*flags, "--nproc-per-node=1", ECHO, *ONE_STEP])
    while agent.poll() is None:
        with socket.socket() as knock:
            if knock.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)

    agent.send_signal(signal.SIGINT)
    done = finish(agent)

    assert 130 == done.code, done.err
    assert done.err.endswith("pipette-launch: SIGINT ended the job before workers started\n")
    assert "Traceback" not in done.err
