"""The monitor beside a rank: it outlives what ends the rank's group, and never the rank."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = Path(__file__).parents[2] / "examples" / "with_rank_monitor.py"
PATIENCE_S = 20.0
PACKAGE = """
import signal
import socket

class FaultToleranceConfig:
    def __init__(self, **limits):
        assert 180.0 == limits["rank_section_timeouts"]["step"]

class RankMonitorServer:
    @staticmethod
    def run(cfg, ipc_socket_path, rank_monitor_ready_event, is_restarter_logger):
        server = socket.socket(socket.AF_UNIX)
        server.bind(ipc_socket_path)
        server.listen()
        rank_monitor_ready_event.set()
        signal.signal(signal.SIGTERM, lambda *_: print("a traceback", flush=True))
        while True:
            signal.pause()
"""
"""A stand-in for nvidia-resiliency-ext: run has the parameters that all its releases from 0.3 on share."""
RANK = """
import multiprocessing, os, signal, socket, sys

assert __name__ == "__main__"
# A signal may interrupt the print below, in which Python refuses another print.
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told\\n"))
client = socket.socket(socket.AF_UNIX)
client.connect(os.environ["FT_RANK_MONITOR_IPC_SOCKET"])
print(multiprocessing.active_children()[0].pid, *sys.argv[1:], flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A rank that prints which process watches it, prints a line at SIGTERM, and waits for a line."""
    (tmp_path / "nvidia_resiliency_ext").mkdir()
    (tmp_path / "nvidia_resiliency_ext" / "fault_tolerance.py").write_text(PACKAGE)
    (tmp_path / "pretrain_gpt.py").write_text(RANK)
    with subprocess.Popen(
        [sys.executable, shutil.copy(EXAMPLE, tmp_path), "--lr", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as started:
        yield started
        started.kill()


def told(rank: subprocess.Popen[str]) -> str:
    """The next line of a rank."""
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def watched(rank: subprocess.Popen[str]) -> psutil.Process:
    """The monitor of a rank that has started."""
    pid, *words = told(rank).split()
    assert ["--lr", "1"] == words
    return psutil.Process(int(pid))


@pytest.mark.timeout(60)
def test_a_signal_to_the_group_leaves_it(rank: subprocess.Popen[str]) -> None:
    """A rank that saves a checkpoint when it is told to end is watched until then, and a killed one takes it along."""
    monitor = watched(rank)

    os.killpg(rank.pid, signal.SIGTERM)
    assert "told" == told(rank)
    time.sleep(0.2)
    assert monitor.is_running()
    assert ("", None) == rank.communicate("\n", timeout=PATIENCE_S)
    assert 0 == rank.returncode
    monitor.wait(PATIENCE_S)


@pytest.mark.timeout(60)
def test_a_killed_rank_takes_it_along(rank: subprocess.Popen[str]) -> None:
    """Nobody else would end it."""
    monitor = watched(rank)

    os.killpg(rank.pid, signal.SIGKILL)

    monitor.wait(PATIENCE_S)
    rank.communicate(timeout=PATIENCE_S)
