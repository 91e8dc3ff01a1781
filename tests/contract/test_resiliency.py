"""What NVIDIA's nvidia-resiliency-ext and Megatron-LM's `--enable-ft-package` expect of a launcher, and set around one.

Read in nvidia-resiliency-ext 0.4.1 and d8686d9 and in Megatron-LM 0.14 to d98e8a6; OUTER was seen in a worker of 0.4.1.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from end_to_end.jobs import environment, pipette
from megatron_lines import SMALL, job

from pipette_launch.megatron import exception_in, explain_failure, write_arguments

FT = "--enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters 3 --save /ckpt".split()
PACKAGE = importlib.util.find_spec("nvidia_resiliency_ext")
needs_package = pytest.mark.skipif(PACKAGE is None, reason="needs nvidia-resiliency-ext")
EXAMPLE = Path(__file__).parents[2] / "examples" / "with_rank_monitor.py"
MONITOR, FT_LAUNCHER = "FT_RANK_MONITOR_IPC_SOCKET", "FT_LAUNCHER_IPC_SOCKET"
OUTER = {
    FT_LAUNCHER: "/no/such/launcher.socket",
    MONITOR: "/no/such/monitor.socket",
    "MASTER_ADDR": "no-such-host",
    "ROLE_NAME": "outer",
    "TORCHELASTIC_ERROR_FILE": "/no/such/folder/error.json",
    "TORCHELASTIC_RUN_ID": "outer",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_PORT"), "5"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "8"),
    **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "3"),
}
"""What a worker of ft_launcher has in its environment."""
WORKER = """
import json, os, socket, sys
port = int(os.environ["MASTER_PORT"])
asked = (port + 1, port + 2) if os.environ["RANK"] == "0" else ()
ports = [socket.create_server(("", one)).getsockname()[1] - port for one in asked]
sys.stdout.write(json.dumps({**os.environ, "ports": ports}) + "\\n")
"""
HANGS_ONCE = """
import os, time
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

client = RankMonitorClient()
client.init_workload_monitoring()
client.start_section("setup")
client.end_section("setup")
client.start_section("step")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
client.end_section("step")
client.shutdown_workload_monitoring()
print("trained")
"""


def test_the_flags_leave_plans_alone() -> None:
    """They change neither what is planned nor what is written, and stay in the command line."""
    own = job(*SMALL)
    asked = job(*SMALL, *FT)

    assert own == asked
    assert set(FT) < set(write_arguments((*SMALL, *FT), job=asked, layout=replace(asked.own, micro_batch_size=2)))


@needs_package
@pytest.mark.timeout(60)
def test_what_a_client_says_without_a_monitor() -> None:
    """Its words are those by which the launcher knows that no plan would help."""
    alone = {name: value for name, value in os.environ.items() if name != MONITOR}
    words = "from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient as C; C().init_workload_monitoring()"

    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, env={**alone, "RANK": "0"}, check=False
    )
    failure = explain_failure(exception_in(done.stderr))

    assert failure is not None
    assert "missing" == failure.kind


@pytest.mark.timeout(120)
@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_launcher_that_ft_launcher_runs(tmp_path: Path, num_workers: int) -> None:
    """Workers see their own job; one alone gets the outer monitor, which cannot watch several."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    # Without a flag that sets where nodes meet, the launcher would join the job that the variables describe.
    done = pipette(tmp_path, "--standalone", f"--nproc-per-node={num_workers}", "--max-restarts=1", script, **OUTER)

    assert 0 == done.code, done.err
    seen = done.workers
    assert list(range(num_workers)) == sorted(seen)
    inner = {name: {one.get(name) for one in seen.values()} for name in OUTER}
    assert {str(num_workers)} == inner["WORLD_SIZE"] == inner["LOCAL_WORLD_SIZE"]
    assert {"0"} == inner["GROUP_RANK"] == inner["TORCHELASTIC_RESTART_COUNT"]
    changed = {name for name, value in OUTER.items() if inner[name] != {value}}
    kept = {FT_LAUNCHER, "TORCH_NCCL_ASYNC_ERROR_HANDLING"} | ({MONITOR} if num_workers == 1 else set())
    assert set(OUTER) - kept == changed
    assert (num_workers > 1) == ("FT_RANK_MONITOR_IPC_SOCKET is not passed on" in done.err)
    # Where in-process restart puts its stores.
    assert [1, 2] == seen[0]["ports"]


@needs_package
@pytest.mark.timeout(200)
@pytest.mark.processes
def test_a_monitor_ends_a_hung_rank_and_the_job_goes_on(tmp_path: Path) -> None:
    """Started as the example does, NVIDIA's monitor kills a rank whose step takes too long."""
    script = tmp_path / EXAMPLE.name
    script.write_text(EXAMPLE.read_text().replace('"step": 180.0', '"step": 1.0'))
    (tmp_path / "pretrain_gpt.py").write_text(HANGS_ONCE)

    path = {"PYTHONPATH": f"{environment(tmp_path)['PYTHONPATH']}:{':'.join(sys.path)}"}
    done = pipette(tmp_path, "--nproc-per-node=2", "--max-restarts=1", script, **path)

    assert (0, 2) == (done.code, done.out.count("trained")), done.err
    assert "Timeout is 1.00 seconds" in done.err
