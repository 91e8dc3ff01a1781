"""The agent with real processes over gloo: two phases in one round, permuted ranks, restarts, bad plans."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm

from benchmarks.netlab import compare
from pipette_launch.agent import job

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
pytestmark = pytest.mark.processes
ALONE = {"alone": True}
"""Workers that join nobody, where the test is not about what they have to say to each other."""

WARMUP = "import os; open(os.environ['OUT'] + '/warmup-' + os.environ['RANK'], 'w').write(os.environ['MASTER_PORT'])"


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(
    folder: Path,
    table: dict[str, Any],
    orders: dict[str, Any],
    *flags: str,
    node: str = "a",
    script: str = "",
    is_warm: bool = False,
) -> subprocess.Popen[str]:
    """Start one agent, of the usual worker or of a script given as text.

    Its processes may be forked from a warm interpreter, where the test is not about how processes end.
    """
    (folder / "table.json").write_text(json.dumps(table))
    python = warm.python().path if is_warm else sys.executable
    command = [python, str(HERE / "drive.py"), str(folder / "table.json"), *flags]
    if script:
        (folder / "script.py").write_text(script)
    command += [str(folder / "script.py" if script else HERE / "worker.py"), str(folder), json.dumps(orders)]
    environment = {
        **os.environ,
        **(compare.environment() if is_warm else {}),
        "OUT": str(folder),
        "TMPDIR": str(folder),
        "NODE": node,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'patches'}:{ROOT / 'tests'}",
        "CUDA_VISIBLE_DEVICES": "4,5",
    }
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def await_end(agent: subprocess.Popen[str], *, most_s: float) -> None:
    """Wait for an agent; one that hangs ends with the stacks of its threads."""
    try:
        agent.wait(timeout=most_s)
    except subprocess.TimeoutExpired:
        agent.send_signal(signal.SIGABRT)
        out, err = agent.communicate(timeout=20)
        raise AssertionError(f"still running after {most_s:g} s\n{out}\n{err}") from None


def finish(*agents: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Wait for agents; returns exit codes and all that they wrote."""
    outputs = [agent.communicate(timeout=200) for agent in agents]
    return [agent.returncode for agent in agents], "".join(text for pair in outputs for text in pair)


def seen(folder: Path) -> dict[str, dict[str, Any]]:
    """What the training workers wrote, by `rank-start`."""
    return {path.name.removeprefix("train-"): json.loads(path.read_text()) for path in folder.glob("train-*")}


def two_nodes(port: int) -> list[str]:
    """Flags of two agents on this machine."""
    return ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]


def test_warms_up_then_trains_with_permuted_ranks(tmp_path: Path) -> None:
    """Both phases run in one round, and each slot gets the RANK of the plan, RANK 0 wherever it lies."""
    agent = start(tmp_path, {"warmup": WARMUP, "placements": [[1, 0]]}, {}, "--nproc-per-node=2", is_warm=True)

    codes, text = finish(agent)

    assert [0] == codes, text
    assert ["warmup-0", "warmup-1"] == sorted(path.name for path in tmp_path.glob("warmup-*"))
    assert {"0-0", "1-0"} == set(seen(tmp_path))
    # LOCAL_RANK follows RANK, and the devices are reordered underneath: rank 0 sits on the second device.
    assert ("0", "5,4") == (seen(tmp_path)["0-0"]["LOCAL_RANK"], seen(tmp_path)["0-0"]["CUDA_VISIBLE_DEVICES"])
    assert "iteration 0" in text


def test_two_nodes_with_rank_0_on_the_second(tmp_path: Path) -> None:
    """Two agents meet over c10d, and the store of training follows RANK 0 to its node."""
    flags = two_nodes(free_port())
    table = {"warmup": WARMUP, "placements": [[3, 2, 1, 0]]}
    agents = [start(tmp_path, table, {}, *flags, node=node, is_warm=True) for node in "ab"]

    codes, text = finish(*agents)

    assert [0, 0] == codes, text
    got = seen(tmp_path)
    assert {"0-0", "1-0", "2-0", "3-0"} == set(got)
    assert got["0-0"]["node"] == got["1-0"]["node"] != got["2-0"]["node"] == got["3-0"]["node"]
    assert {6} == {entry["sum"] for entry in got.values()}


@pytest.mark.parametrize(("num_nodes", "restarts"), [(1, 1), (2, 0)])
def test_a_plan_that_cannot_start_gives_way(tmp_path: Path, num_nodes: int, restarts: int) -> None:
    """The next plan and at last the user's own configuration are started, and no restart is spent on it."""
    flags = two_nodes(free_port()) if num_nodes == 2 else ["--nproc-per-node=2"]
    slots = 2 * num_nodes
    placements = [list(range(slots))[::-1], list(range(slots))]
    orders = {"refuse": ["0", "1"], "iterations": 5, **({"die_once": 0, **ALONE} if restarts else {})}
    agents = [
        start(
            tmp_path, {"placements": placements}, orders, *flags, f"--max-restarts={restarts}", node=node, is_warm=True
        )
        for node in "ab"[:num_nodes]
    ]

    codes, text = finish(*agents)

    assert [0] * num_nodes == codes, text
    assert {f"{rank}-{begun}" for rank in range(slots) for begun in range(restarts + 1)} == set(seen(tmp_path))
    assert {"2"} == {entry["ATTEMPT"] for entry in seen(tmp_path).values()}
    assert "SHOW train attempt=2 reason=rank 0 ended with exit code 1: REFUSED: no such layout" in text


def test_a_killed_worker_comes_back_under_the_same_plan(tmp_path: Path) -> None:
    """A restart keeps placement and plan, on a fresh store."""
    agent = start(
        tmp_path,
        {"placements": [[1, 0]]},
        {"die_once": 0, "iterations": 5},
        "--nproc-per-node=2",
        "--max-restarts=2",
        is_warm=True,
    )

    codes, text = finish(agent)

    assert [0] == codes, text
    got = seen(tmp_path)
    assert {"0-0", "1-0", "0-1", "1-1"} == set(got)
    assert {"0"} == {entry["ATTEMPT"] for entry in got.values()}
    assert {"5,4"} == {entry["CUDA_VISIBLE_DEVICES"] for entry in got.values()}


def test_a_plan_that_has_trained_is_not_blamed_for_a_bad_restart(tmp_path: Path) -> None:
    """A restart that dies at once costs another restart, and the plan stays."""
    agent = start(
        tmp_path,
        {"placements": [[1, 0]]},
        {"die_once": 0, "iterations": 5, "refuse_start": 1, **ALONE},
        "--nproc-per-node=2",
        "--max-restarts=2",
        is_warm=True,
    )

    codes, text = finish(agent)

    assert [0] == codes, text
    assert {"0"} == {entry["ATTEMPT"] for entry in seen(tmp_path).values()}
    assert {0, 1, 2} == {int(path.name[-1]) for path in tmp_path.glob("started-0-*")}


def test_the_code_by_which_megatron_asks_for_a_restart_is_no_plans_fault(tmp_path: Path) -> None:
    """Exit code 16 before the first iteration ends the job, as under torchrun."""
    agent = start(
        tmp_path, {"placements": [[1, 0]]}, {}, "--nproc-per-node=2", script="import sys; sys.exit(16)", is_warm=True
    )

    codes, text = finish(agent)

    assert [1] == codes
    assert "exitcode  : 16" in text
    assert "attempt=1" not in text


def test_a_failure_after_the_first_iteration_ends_as_under_torchrun(tmp_path: Path) -> None:
    """Once training has begun, a dead worker without restarts ends the job with exit code 1."""
    orders = {"die_once": 0, "iterations": 5, **ALONE}
    agent = start(tmp_path, {"placements": [[1, 0]]}, orders, "--nproc-per-node=2", is_warm=True)

    codes, text = finish(agent)

    assert [1] == codes
    assert "ChildFailedError" in text


@pytest.mark.parametrize(
    ("warmup", "report"),
    [
        (
            "import os, sys; sys.stderr.write('bye'); sys.exit(3 if os.environ['RANK'] == '1' else 0)",
            r"\S+:1 \(pid \d+\) died with exit code 3 in phase start; its output is in \S+ on ",
        ),
        ("import time; time.sleep(600)", r"\S+:0 \(pid \d+\) is in phase start, in state sleeping; "),
    ],
    ids=["dies", "hangs"],
)
def test_a_bad_warmup_does_not_cost_the_job(tmp_path: Path, warmup: str, report: str) -> None:
    """A warm-up worker that dies or hangs is named, and training goes on without a plan."""
    table = {"warmup": warmup, "placements": [[1, 0]], "deadline_s": 3.0}
    agent = start(tmp_path, table, ALONE, "--nproc-per-node=2")

    codes, text = finish(agent)

    assert [0] == codes, text
    assert re.search(
        rf"SHOW train attempt=own reason=the warm-up failed after \d\.\d s(, its deadline)?: {report}", text
    )
    assert {"0-0", "1-0"} == set(seen(tmp_path))


def test_the_reason_of_a_recorded_exception_is_told(tmp_path: Path) -> None:
    """A script under torch's @record gives its exception as the reason, and its error file to whoever asks for it."""
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "def main():\n    raise RuntimeError('boom')\n"
        "record(main)()\n"
    )

    codes, text = finish(start(tmp_path, {"placements": [[0]]}, {}, script=script, is_warm=True))

    assert [1] == codes
    assert "SHOW train attempt=1 reason=rank 0 ended with exit code 1: RuntimeError: boom" in text
    assert "RuntimeError: boom" in text.split("Root Cause")[1]


@pytest.mark.parametrize("is_starting", [False, True])
def test_a_signal_reaches_the_workers_before_the_launcher_leaves(tmp_path: Path, is_starting: bool) -> None:
    """What workers do and say after the signal (Megatron saves a checkpoint) is waited for and shown.

    Even where the signal comes before torch knows the worker that it has started.
    """
    script = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.5)\n    print('saved')\n    print('really', file=sys.stderr)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('up')\n"
        "pathlib.Path(sys.argv[1], 'up').touch()\n"
        "time.sleep(60)\n"
    )
    moment = {"signal_when": str(tmp_path / "up")} if is_starting else {"warmup": WARMUP}
    agent = start(tmp_path, {"placements": [[0]], **moment}, {}, script=script)
    if not is_starting:
        assert agent.stdout is not None
        assert "up\n" == agent.stdout.readline()
        agent.terminate()

    codes, text = finish(agent)

    assert [1] == codes
    assert "saved\n" in text
    assert "really\n" in text
    assert "got signal: 15" in text
    # torch's own log folder stays, as under torchrun; ours do not.
    assert [] == [path.name for path in tmp_path.glob("pipette*")]


def test_a_script_run_as_a_function(tmp_path: Path) -> None:
    """`--run-path` works as under torchrun; its streams are left alone."""
    agent = start(
        tmp_path,
        {"warmup": WARMUP, "placements": [[1, 0]]},
        {},
        "--nproc-per-node=2",
        "--run-path",
        script="import os; print('rank', os.environ['RANK'])",
    )

    codes, text = finish(agent)

    assert [0] == codes, text
    assert ["rank 0", "rank 1"] == sorted(line for line in text.splitlines() if line.startswith("rank"))


def test_a_node_that_was_done_comes_back_for_one_that_failed(tmp_path: Path) -> None:
    """Workers need their peers: when one node tries the next plan, those that had finished start again too."""
    script = (
        "import os, sys, time, pathlib\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "first = os.environ['ATTEMPT'] == '0'\n"
        "(out / ('ran-' + os.environ['RANK'] + '-' + os.environ['ATTEMPT'])).touch()\n"
        "if os.environ['RANK'] == '1' and first:\n"
        "    time.sleep(2)\n"
        "    sys.exit('too late')\n"
    )
    flags = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    agents = [
        start(tmp_path, {"placements": [[1, 0]]}, {}, *flags, node=node, script=script, is_warm=True) for node in "ab"
    ]

    codes, text = finish(*agents)

    assert [0, 0] == codes, text
    assert {"ran-0-0", "ran-1-0", "ran-0-1", "ran-1-1"} == {path.name for path in tmp_path.glob("ran-*")}
    assert "SHOW train attempt=1 reason=rank 1 ended with exit code 1: too late" in text


def test_a_bad_warmup_ends_on_every_node(tmp_path: Path) -> None:
    """One dead warm-up worker ends the phase on the other node too, within the same round."""
    warmup = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '3' else time.sleep(600)"
    flags = two_nodes(free_port())
    began_s = time.monotonic()
    agents = [
        start(tmp_path, {"warmup": warmup, "placements": [[3, 2, 1, 0]]}, ALONE, *flags, is_warm=True) for _ in range(2)
    ]

    codes, text = finish(*agents)

    assert [0, 0] == codes, text
    assert {"0-0", "1-0", "2-0", "3-0"} == set(seen(tmp_path))
    assert time.monotonic() - began_s < 120


def test_a_dry_run_stops_before_training(tmp_path: Path) -> None:
    """The job ends well after the warm-up, and no training worker was started."""
    agent = start(
        tmp_path, {"warmup": WARMUP, "placements": [[1, 0]], "dry_run": True}, {}, "--nproc-per-node=2", is_warm=True
    )

    codes, text = finish(agent)

    assert [0] == codes, text
    assert {} == seen(tmp_path)


def test_static_rendezvous_keeps_its_order(tmp_path: Path) -> None:
    """`--node-rank` orders the nodes, whatever their addresses."""
    flags = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    agents = [start(tmp_path, {}, {}, *flags, f"--node-rank={rank}", node=f"n{rank}", is_warm=True) for rank in (1, 0)]

    codes, text = finish(*agents)

    assert [0, 0] == codes, text
    assert [("n0", "0", 1), ("n1", "1", 1)] == [
        (one["node"], one["GROUP_RANK"], one["sum"]) for one in (seen(tmp_path)[f"{rank}-0"] for rank in range(2))
    ]


def test_what_a_killed_worker_had_started_ends_with_it(tmp_path: Path) -> None:
    """A process that saves checkpoints, for one, would hold memory and devices through the next start."""
    script = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "print('iteration 1')\n"
        "if not list(out.glob('child-*')):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    (out / f'child-{child.pid}').touch()\n"
        "    time.sleep(1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    agent = start(tmp_path, {"placements": [[0]]}, {}, "--max-restarts=1", script=script)

    codes, text = finish(agent)

    assert [0] == codes, text
    (child,) = tmp_path.glob("child-*")
    with contextlib.suppress(psutil.NoSuchProcess):
        # Where nobody collects it, it stays as a name.
        assert psutil.STATUS_ZOMBIE == psutil.Process(int(child.name.partition("-")[2])).status()


@pytest.mark.parametrize(
    ("limits", "expected"), [((1024, 20000), 12544), ((1024, 2000), 2000), ((16000, 20000), 16000)]
)
def test_a_large_job_may_open_more_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limits: tuple[int, int], expected: int
) -> None:
    """The soft limit rises to the need of 1,024 nodes, at most to the hard limit, which a line then names."""
    now = [limits]
    monkeypatch.setattr(job.resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(job.resource, "setrlimit", lambda _, wanted: now.append(wanted))

    job.allow_connections(1024, 8)

    assert (expected, limits[1]) == now[-1]
    assert ("may need 12544 open files" in capsys.readouterr().err) == (limits[1] < 12544)
