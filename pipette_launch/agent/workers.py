"""The worker processes of one node: the devices, deaths and end of these processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

import psutil
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pipette_launch import megatron
from pipette_launch.defaults import END_S, STOPPED_S
from pipette_launch.facts.co_location import DeviceBinding
from pipette_launch.facts.messages import Failure
from pipette_launch.megatron.logs import OUT_OF_MEMORY

OUTPUT_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable that torch sets in every worker, with a path inside the folder of the worker's output."""
UNINTERRUPTIBLE = "disk-sleep"
"""psutil's name for a process that waits inside the kernel and takes no signal."""
LOOK_S = 1.0
OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
MOST_CHARACTERS = 300


# -- devices ------------------------------------------------------------------------------------------------------


def visible_devices(inherited: str | None, bound: Sequence[DeviceBinding]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES such that LOCAL_RANK i finds its device at index i; empty if nothing changes.

    An inherited list with fewer entries than workers stays unchanged, because on a CPU the slots are not devices.
    """
    order = [one.device for one in bound]
    if order == list(range(len(order))):
        return {}
    names = [str(index) for index in range(max(order) + 1)] if inherited is None else inherited.split(",")
    if len(names) <= max(order):
        return {}
    others = [name for index, name in enumerate(names) if index not in order]
    return {"CUDA_VISIBLE_DEVICES": ",".join(name.strip() for name in [*(names[index] for index in order), *others])}


# -- the end of processes -----------------------------------------------------------------------------------------


def processes(context: PContext | None) -> dict[int, Popen[bytes]]:
    """Return the worker processes that torch has started, by local rank."""
    # torch starts functions (--run-path) in another context, but a warm-up never runs a function.
    assert isinstance(context, SubprocessContext)
    return {local: handler.proc for local, handler in context.subprocess_handlers.items()}


def own_sessions(processes: Iterable[Popen[bytes]]) -> set[int]:
    """Return the ids of the sessions (and process groups) that these workers lead.

    The kernel gives the id of a worker that was waited for to another process, but not while the worker's session has
    a process. So a process with the id of such a worker leads another session.
    """
    return {one.pid for one in processes if one.returncode is None or not psutil.pid_exists(one.pid)}


def end_children(context: PContext | None) -> None:
    """Kill processes that ended workers left in their sessions, for example a writer of checkpoints."""
    if not isinstance(context, SubprocessContext):
        return
    for process in processes(context).values():
        # Each session is checked directly before the signal.
        for session in own_sessions([process]):
            with contextlib.suppress(OSError):
                os.killpg(session, signal.SIGKILL)


def end(processes: Mapping[int, Popen[bytes]], *, began_s: float, mark: str) -> tuple[int, ...]:
    """Kill the workers of a warm-up or trial and their children; return process ids that the kernel could not end.

    The signal is SIGKILL, because a stopped process takes no other signal and a warm-up has nothing to save. SIGTERM
    would not protect other clients of CUDA's MPS: NVIDIA's manual asks for synchronised GPU work before any signal,
    and after a failure that work may never end. Each worker leads its own session, so a worker's children can be found
    after the worker's death. `began_s` is the start of the workers, by `time.time`. A child that left the session has
    `mark`, the folder of the workers' output, in its environment.
    """
    ends_s = time.monotonic() + END_S
    while True:
        # A process whose first thread has ended looks like a zombie while its other threads still hold memory.
        unreaped = {process.pid for process in processes.values() if process.poll() is None}
        sessions = own_sessions(processes.values())
        left = []
        for pid in {*unreaped, *psutil.pids()}:
            if pid in unreaped or _belongs(pid, sessions, began_s, mark):
                # The signal follows directly, because the id of a process that ends may soon belong to another one.
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                left.append(pid)
        if not left or time.monotonic() > ends_s:
            return tuple(left)
        time.sleep(0.02)


def _belongs(pid: int, sessions: Collection[int], began_s: float, mark: str) -> bool:
    """Return whether a process is alive and was started by these workers."""
    try:
        is_alive = status_of(pid) not in ("gone", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        if not is_alive or (pid != os.getpid() and os.getsid(pid) in sessions):
            return is_alive
        process = psutil.Process(pid)
        # Reading the environment of a process that waits inside the kernel could block this process too.
        if process.create_time() < began_s - 1 or process.status() == UNINTERRUPTIBLE:
            return False
        return process.uids().real == os.getuid() and mark in process.environ().get(OUTPUT_VARIABLE, "")
    except (psutil.Error, OSError):
        return False


def status_of(pid: int) -> str:
    """Return the state of a process in psutil's words, or `gone`."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


class StoppedWorkers:
    """Kills workers that stay stopped (SIGSTOP, SIGTSTP) for `STOPPED_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = 0.0
        self._since_s: dict[int, float] = {}

    def end(self, processes: Mapping[int, Popen[bytes]]) -> list[int]:
        """Look at the workers once a second; return the process ids of killed workers."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return []
        self._looked_s = now_s
        # A process under a debugger has another status, so it is not killed.
        running = [one.pid for one in processes.values() if one.returncode is None]
        stopped = {pid for pid in running if status_of(pid) == psutil.STATUS_STOPPED}
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in stopped}
        ended = [pid for pid, since_s in self._since_s.items() if now_s - since_s > STOPPED_S]
        for pid in ended:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        return ended


# -- why a worker died --------------------------------------------------------------------------------------------


def oom_kills(root: Path = Path("/")) -> int:
    """Count the processes that the kernel has killed for lack of memory, in this cgroup or else on this machine."""
    groups, files = root / "sys/fs/cgroup", []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                name = "memory.events" if kinds == "" else "memory.oom_control"
                # Inside a container the cgroup of the container is mounted as the root.
                files += [groups / kinds / path.lstrip("/") / name, groups / kinds / name]
    for file in (*files, root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            if match := OOM_KILLS.search(file.read_text()):
                return int(match[1])
    return 0


def as_oom_kill(failure: Failure | None, *, kills: int) -> Failure | None:
    """Explain a SIGKILL without known cause by a lack of memory, if the kernel has killed `kills` > 0 processes."""
    if failure is None or failure.exit_code != -signal.SIGKILL or failure.kind != "other" or kills == 0:
        return failure
    cause = f"{OUT_OF_MEMORY}: the kernel killed a process, because the memory of the host or of its cgroup was full"
    return replace(failure, kind="out-of-host-memory", cause=cause)


def first_failure(result: RunResult, ranks: Sequence[int], tail: Callable[[int], Sequence[str]]) -> Failure | None:
    """Return why the first worker of a node died; None if no worker died.

    `ranks` has each worker's RANK by LOCAL_RANK, and `tail` returns the last lines of stderr of one LOCAL_RANK.
    """
    if not result.failures:
        return None
    # After the earliest failure torch ends the other workers by SIGTERM.
    first = min(result.failures.values(), key=lambda one: (one.exitcode == -signal.SIGTERM, one.timestamp))
    lines = tail(first.local_rank)
    # A killed worker cannot report the cause, so its last line is ignored.
    said = "" if first.exitcode == -signal.SIGKILL else first_line(first) or last_words(lines)
    why = megatron.explain_failure("\n".join(lines)) or megatron.failure_of(said)
    return replace(why, rank=ranks[first.local_rank], exit_code=first.exitcode)


def first_line(failure: ProcessFailure) -> str:
    """Return the first line of a worker's error file; empty if the worker left no error file."""
    message: object = failure.message
    if isinstance(message, dict):
        # A worker whose main function has torch's @record writes a dictionary into its error file.
        message = message.get("message", "")
    lines = [line.strip() for line in str(message).splitlines() if line.strip()]
    # If the worker left no error file, torch sets `failure.message` to "Signal 9 (SIGKILL) received by PID 1".
    return lines[0] if lines and not lines[0].startswith(("Signal", "To enable")) else ""


def last_words(lines: Sequence[str]) -> str:
    """Return the exception that ended a worker, or else its last line, cut at `MOST_CHARACTERS`."""
    said = [line.strip() for line in lines if line.strip()]
    # The last line may be a warning that a library printed while it was unloaded, after the exception.
    return (megatron.exception_in("\n".join(said)) or said[-1])[:MOST_CHARACTERS] if said else ""
