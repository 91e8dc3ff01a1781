"""Run one command on every host of a laboratory and join the output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, TextIO

from benchmarks.netlab.lab import Lab

POLL_S = 0.05
TIME_IS_UP = 124
PLACE = re.compile(r"\{(host|address|index|slots|nnodes|head|port|folder)\}")
"""Nothing else in braces is touched: commands may hold JSON."""


def filled(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Put a host's own values in place of `{host}`, `{address}` and their kin."""
    return [PLACE.sub(lambda match: values[match[1]], word) for word in words]


def run(
    lab: Lab, words: Sequence[str], *, env: Mapping[str, str] | None = None, patience_s: float = 60.0
) -> tuple[int, str]:
    """Run a command on every host; each line of output begins with the host's name.

    Args:
        lab: where.
        words: the command, with places to fill.
        env: changes to the environment of all.
        patience_s: how long the others may go on after one has failed; then they are killed.

    Returns:
        The exit code of the host that failed first and its name; 0 and no name if none did.

    """
    processes = {
        host: lab.run(host, filled(words, lab.values(host)), env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for host in lab.hosts
    }
    readers = [
        threading.Thread(target=_copy, args=(stream, host, target), daemon=True)
        for host, process in processes.items()
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    ]
    for reader in readers:
        reader.start()
    code, blamed = finish(processes, patience_s)
    for reader in readers:
        # A child that outlives its command may keep a stream open; it ends with the laboratory.
        reader.join(timeout=2)
    return code, blamed


def finish(
    processes: Mapping[str, subprocess.Popen[str]], patience_s: float, limit_s: float = float("inf")
) -> tuple[int, str]:
    """Wait for all, then end those left: so long after a failure, or so long from now on.

    Returns:
        The first failure's exit code and host; where time was up 124, as timeout(1) has it, and no host.

    """
    code, blamed, deadline_s = 0, "", time.monotonic() + limit_s
    running = dict(processes)
    while running:
        for host, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[host]
            if process.returncode != 0 and code == 0:
                # A shell's convention for a death by signal.
                code = process.returncode if process.returncode > 0 else 128 - process.returncode
                blamed, deadline_s = host, min(deadline_s, time.monotonic() + patience_s)
        if running and time.monotonic() > deadline_s:
            code = code or TIME_IS_UP
            for process in running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return code, blamed


def _copy(stream: IO[str] | None, host: str, target: TextIO) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            target.write(f"[{host}] {line.rstrip()}\n")
            target.flush()
