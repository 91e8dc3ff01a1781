"""Workers that the kernel ended for want of memory, and workers that are stopped and will never go on."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pipette_launch.facts.messages import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from subprocess import Popen

STOPPED_S = 30.0
"""After how long a stopped worker (SIGSTOP, SIGTSTP) counts as dead: the others wait for it in a collective."""
LOOK_S = 1.0
COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
ROOT = Path("/")


def oom_kills(root: Path = ROOT) -> int:
    """How many processes the kernel has killed so far for want of memory: of this cgroup, else of this machine."""
    groups = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                # Inside a container its own cgroup is mounted as the root of all.
                folders = [groups / kinds / path.lstrip("/"), groups / kinds]
                names = ["memory.events" if kinds == "" else "memory.oom_control"]
                for file in (folder / name for folder in folders for name in names):
                    if (found := _count(file)) is not None:
                        return found
    return _count(root / "proc/vmstat") or 0


def _count(file: Path) -> int | None:
    try:
        match = COUNT.search(file.read_text())
    except OSError:
        return None
    return int(match.group(1)) if match else None


def as_oom_kill(failure: Failure | None, *, kills: int) -> Failure | None:
    """Name the cause of a worker's silent SIGKILL where the kernel has killed so many processes since it started."""
    if failure is None or failure.exit_code != -signal.SIGKILL or failure.kind != "other" or kills == 0:
        return failure
    cause = "out of memory: the kernel killed a process, for the memory of the host or of its cgroup is exhausted"
    return replace(failure, kind="out-of-host-memory", cause=cause)


class StoppedWorkers:
    """Ends workers that stay stopped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = 0.0
        self._since_s: dict[int, float] = {}

    def end(self, processes: Mapping[int, Popen[bytes]]) -> list[int]:
        """Look once a second, and end by SIGKILL who was stopped each time for long; returns their pids."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return []
        self._looked_s = now_s
        stopped = {process.pid for process in processes.values() if _is_stopped(process.pid)}
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in stopped}
        ended = [pid for pid, since_s in self._since_s.items() if now_s - since_s > STOPPED_S]
        for pid in ended:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        return ended


def _is_stopped(pid: int) -> bool:
    try:
        # A debugger holds a process in another state.
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
