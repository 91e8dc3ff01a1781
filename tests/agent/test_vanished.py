"""An agent that vanishes in the middle of a warm-up: it is named, its workers end with it, and nobody waits for it."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from agent.test_elastic import ALONE, finish, free_port, start, two_nodes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
WARMUP = (
    "import os, time\n"
    "from pipette_launch.probe.lockstep import end_with_parent\n"
    "end_with_parent()\n"
    "open(f\"{os.environ['OUT']}/up-{os.environ['RANK']}-{os.getpid()}\", 'w').close()\n"
    "while not os.path.exists(os.environ['OUT'] + '/go'):\n"
    "    time.sleep(0.05)\n"
    "raise SystemExit(1)\n"
)


def workers(folder: Path) -> dict[int, int]:
    """Pids of warm-up workers by RANK, once all four are up."""
    ends_s = time.monotonic() + 100
    while time.monotonic() < ends_s:
        found = [path.name.split("-")[1:] for path in folder.glob("up-*")]
        if len(found) == 4:
            return {int(rank): int(pid) for rank, pid in found}
        time.sleep(0.05)
    raise AssertionError("the warm-up did not begin")


def store_host(port: int) -> int:
    """The process that hosts the rendezvous store."""
    (pid,) = {
        one.pid for one in psutil.net_connections() if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }
    assert pid is not None
    return pid


def test_an_agent_that_vanishes_is_named(tmp_path: Path) -> None:
    """A worker fails, and the other agent is stopped: the job ends where both are needed, and nobody waits for it."""
    port = free_port()
    table = {"warmup": WARMUP, "placements": [[3, 2, 1, 0]], "deadline_s": 150.0}
    agents = [start(tmp_path, table, ALONE, *two_nodes(port), node=node) for node in "ab"]
    pids = workers(tmp_path)
    host = store_host(port)
    gone, left = sorted(agents, key=lambda agent: agent.pid == host)

    gone.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    codes, text = finish(left)
    gone.kill()
    finish(gone)

    assert [1] == codes, text
    assert re.search(
        r"is lost \(its agent does not answer\).*--nnodes wants 2|reaches 1 of 2 nodes that may still run", text
    ), text
    ends_s = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids.values())) and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert [] == [pid for pid in pids.values() if psutil.pid_exists(pid)]
