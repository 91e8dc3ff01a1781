"""Calls to the operating system: iproute2, namespaces, and processes in them."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

NETNS = Path("/run/netns")
CLONE_NEWNET = 0x40000000
TOOLS = ("ip", "tc", "nsenter", "unshare", "taskset")
KILL_DEADLINE_S = 10.0

T = TypeVar("T")


class LabError(RuntimeError):
    """The laboratory could not do the requested change."""


def missing() -> str:
    """Why this machine can have no laboratory; empty where it can."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in TOOLS if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)} not found: apt-get install -y iproute2 util-linux"
    # Containers may be root and still not be allowed to.
    name = f"pnltry{os.getpid()}"
    try:
        batch("ip", [f"netns add {name}", f"netns del {name}"])
    except LabError as error:
        return f"network namespaces are not allowed here: {error}"
    return ""


def batch(tool: str, lines: Sequence[str], *, namespace: str = "") -> None:
    """Run many commands of `ip` or `tc` in one process.

    Raises:
        LabError: one of them failed; the text names it.

    """
    if not lines:
        return
    command = [tool, *(["-n", namespace] if namespace else []), "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        where = f" in {namespace}" if namespace else ""
        raise LabError(f"{tool}{where}: {' '.join(done.stderr.split())}; commands: {'; '.join(lines)[:300]}")


def namespaces(prefix: str) -> list[str]:
    """Names of the network namespaces that begin so, sorted."""
    with suppress(FileNotFoundError):
        return sorted(path.name for path in NETNS.iterdir() if path.name.startswith(prefix))
    return []


def inhabitants(namespace: str) -> list[int]:
    """Return the processes in a network namespace, including children."""
    with suppress(OSError):
        home = (NETNS / namespace).stat()
        return [pid for pid in _pids() if _lives_in(pid, home)]
    return []


def _pids() -> Iterable[int]:
    return (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())


def _lives_in(pid: int, home: os.stat_result) -> bool:
    with suppress(OSError):
        there = Path(f"/proc/{pid}/ns/net").stat()
        return (there.st_dev, there.st_ino) == (home.st_dev, home.st_ino)
    return False


def kill_all(wanted: Iterable[str]) -> None:
    """End every process of these namespaces at once and wait until they are gone.

    Raises:
        LabError: some would not go.

    """
    names = list(wanted)
    # Zombies have left their namespace, so they do not count.
    kill_until_gone(lambda: [pid for name in names for pid in inhabitants(name)])


def kill_until_gone(processes: Callable[[], list[int]], *, pause_s: float = 0.02) -> None:
    """Kill the listed processes until the list is empty; LabError after KILL_DEADLINE_S."""
    deadline_s = time.monotonic() + KILL_DEADLINE_S
    while left := processes():
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            raise LabError(f"processes {left} survive SIGKILL")
        time.sleep(pause_s)


def within(namespace: str, action: Callable[[], T]) -> T:
    """Do something in a thread of its own that has entered the namespace; sockets made there stay there."""
    found: list[T] = []
    failed: list[BaseException] = []

    def act() -> None:
        try:
            _enter(namespace)
            found.append(action())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _enter(namespace: str) -> None:
    """Move the calling thread; os.setns is there from Python 3.12 on."""
    with (NETNS / namespace).open() as home:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(home.fileno(), CLONE_NEWNET) != 0:
            raise LabError(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")
