"""How the processes of a warm-up are: who still gives signs or computes, and that none of them is left in the end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

import psutil
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

from pipette_launch.agent.failure_attribution import STUCK, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from subprocess import Popen

    from pipette_launch.probe.messages import Sign

SAMPLE_S = 1.0
BUSY_SHARE = 0.03
"""Of a second: who computes more than that is slow, not hung."""
AWAY_S = 5.0
"""An agent that did not look for so long was stopped itself, and cannot know what its workers did."""
END_S = 10.0
MARKED = "TORCHELASTIC_ERROR_FILE"
"""The variable by which torch tells a worker where its output lies."""


class _Pulse(NamedTuple):
    """What was last seen of a worker."""

    sign_at_s: float
    computed_s: float
    alive_s: float
    """When it last gave a sign or computed."""


class WorkerHealth:
    """The warm-up workers of one node; time is the machine's monotonic clock, which signs carry too."""

    def __init__(
        self,
        processes: Mapping[int, Popen[bytes]],
        *,
        look_up: Callable[[int], tuple[Sign | None, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = processes
        self._look_up = look_up
        self._clock = clock
        self._looked_s = clock()
        self._pulses = {local: _Pulse(0.0, 0.0, clock()) for local in processes}
        self._overdue: frozenset[int] = frozenset()
        self.is_hung = False
        """Whether some worker is overdue that does not say that it waits for others."""

    def sample(self) -> None:
        """Feel all pulses, once a second."""
        now_s = self._clock()
        since_s = now_s - self._looked_s
        if since_s < SAMPLE_S:
            return
        self._looked_s = now_s
        overdue, hung = set(), set()
        for local, process in self._processes.items():
            sign, _ = self._look_up(local)
            pulse = self._pulses[local] = self._feel(process, sign, self._pulses[local], now_s, since_s)
            # Before its first sign it starts an interpreter, and a disk may be slow: the whole deadline bounds that.
            if sign is not None and process.poll() is None and now_s - pulse.alive_s > sign.limit_s:
                overdue.add(local)
                hung |= set() if sign.waits_for else {local}
        self._overdue, self.is_hung = frozenset(overdue), bool(hung)

    def _feel(self, process: Popen[bytes], sign: Sign | None, last: _Pulse, now_s: float, since_s: float) -> _Pulse:
        sign_at_s = sign.at_s if sign else 0.0
        computed_s = _computed_s(process.pid)
        alive = sign_at_s > last.sign_at_s or computed_s - last.computed_s > BUSY_SHARE * since_s
        alive_s = now_s if alive else last.alive_s + (since_s if since_s > AWAY_S else 0.0)
        return _Pulse(sign_at_s, computed_s, alive_s)

    def exit_codes(self) -> list[int | None]:
        """Of all workers; None for each that lives."""
        return [process.poll() for process in self._processes.values()]

    def states(self, *, host: str, first_slot: int) -> tuple[WorkerState, ...]:
        """Say how all workers are."""
        return tuple(self._state(local, host, first_slot) for local in sorted(self._processes))

    def _state(self, local: int, host: str, first_slot: int) -> WorkerState:
        process = self._processes[local]
        sign, error = self._look_up(local)
        return WorkerState(
            slot=first_slot + local,
            name=f"{host}:{local}",
            pid=process.pid,
            exit_code=process.poll(),
            status=_status(process.pid),
            where=sign.where() if sign else "start",
            advance=1000 * len(sign.ended) + sign.done if sign else 0,
            silent_s=max(self._clock() - sign.at_s, 0.0) if sign else 0.0,
            idle_s=max(self._clock() - self._pulses[local].alive_s, 0.0),
            is_overdue=local in self._overdue,
            waits_for=sign.waits_for if sign else "",
            peers=sign.peers if sign else (),
            error=error,
        )


def processes(context: PContext | None) -> dict[int, Popen[bytes]]:
    """Return the workers that torch has started, by local rank."""
    # Programs, not functions: probe workers are started as such.
    assert isinstance(context, SubprocessContext)
    return {local: handler.proc for local, handler in context.subprocess_handlers.items()}


def end_children(context: PContext | None) -> None:
    """End what workers that have ended left in their sessions: a process that saves checkpoints, for one."""
    if not isinstance(context, SubprocessContext):
        return
    for process in processes(context).values():
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


def end(
    processes: Mapping[int, Popen[bytes]], *, began_s: float, mark: str, within_s: float = END_S
) -> tuple[int, ...]:
    """End warm-up workers and all that they have started.

    By SIGKILL: a stopped process takes no other signal, and a warm-up has nothing to save. SIGTERM would not spare
    other clients of CUDA's MPS: NVIDIA's manual wants the GPU's work synchronised before any signal, and after a
    failure that work may never end.

    Each worker leads a session of its own, so its children are found even after its death. A child that has left the
    session still has the environment, which names the folder of the output.

    Args:
        processes: the workers.
        began_s: when they were started, by `time.time`.
        mark: a folder that no other process has in its environment.
        within_s: how long to wait for the kernel.

    Returns:
        The pids of those that the kernel cannot end.

    """
    leaders = {process.pid for process in processes.values()}
    ends_s = time.monotonic() + within_s
    while True:
        # A process whose first thread has ended looks like a zombie while others still hold its memory.
        unreaped = {process.pid for process in processes.values() if process.poll() is None}
        left = tuple(unreaped | {pid for pid in psutil.pids() if _belongs(pid, leaders, began_s, mark)})
        if not left or time.monotonic() > ends_s:
            return left
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _belongs(pid: int, leaders: Collection[int], began_s: float, mark: str) -> bool:
    """Whether a process lives and is of the warm-up."""
    try:
        if pid != os.getpid() and os.getsid(pid) in leaders:
            return _is_alive(pid)
        process = psutil.Process(pid)
        # The environment of a process that the kernel holds fast may hold whoever reads it.
        is_candidate = process.create_time() >= began_s - 1 and process.status() != STUCK and _is_alive(pid)
        return is_candidate and process.uids().real == os.getuid() and mark in process.environ().get(MARKED, "")
    except (psutil.Error, OSError):
        return False


def _is_alive(pid: int) -> bool:
    return _status(pid) not in ("gone", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def _computed_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
