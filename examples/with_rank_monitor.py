"""Runs the `pretrain_gpt.py` beside this file, with a rank monitor of nvidia-resiliency-ext that watches this process.

Megatron-LM's `--enable-ft-package` looks for one beside each rank. ft_launcher starts them; pipette-launch and torchrun
do not. Copy this file into a checkout of Megatron-LM and launch it in the place of `pretrain_gpt.py`. The monitor kills
its rank when a section takes longer than its limit below, and the launcher starts the ranks again (`--max-restarts`).
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import tempfile
from pathlib import Path
from typing import Any

from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorServer

SCRIPT = Path(__file__).with_name("pretrain_gpt.py")
LIMITS = {
    # Megatron opens these three sections, and sends no heartbeats.
    "rank_section_timeouts": {"setup": 600.0, "step": 180.0, "checkpointing": 420.0},
    "rank_out_of_section_timeout": 300.0,
    "initial_rank_heartbeat_timeout": None,
    "rank_heartbeat_timeout": None,
}
"""In seconds; the other fields of FaultToleranceConfig may stand here too."""
START_S = 180.0
PR_SET_PDEATHSIG = 1


def serve(path: str, is_ready: Any) -> None:
    """Watch one rank until it ends."""
    # A signal that ends the launcher's workers is the rank's alone: it may save a checkpoint first, and is watched.
    os.setpgid(0, 0)
    # A rank that is killed takes its monitor along.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    RankMonitorServer.run(FaultToleranceConfig(**LIMITS), path, is_ready, is_restarter_logger=False)


def start_monitor() -> None:
    """Start the monitor of this process, and leave its address where RankMonitorClient looks for it."""
    # As ft_launcher does: a forked monitor has no second interpreter to start.
    fork = multiprocessing.get_context("fork")
    path = f"{tempfile.gettempdir()}/rank_monitor_{os.getpid()}.socket"
    is_ready = fork.Event()
    monitor = fork.Process(target=serve, args=(path, is_ready), daemon=True)
    monitor.start()
    # Before multiprocessing ends it by SIGTERM, upon which it prints a traceback that hides the rank's own.
    atexit.register(monitor.kill)
    if not is_ready.wait(START_S):
        raise RuntimeError(f"the rank monitor did not start within {START_S:.0f} s")
    os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = path


if __name__ == "__main__":
    start_monitor()
    runpy.run_path(str(SCRIPT), run_name="__main__")
