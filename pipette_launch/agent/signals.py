"""The end of the launcher process, and the signals that the launcher receives.

SIGUSR1 and SIGUSR2 request a checkpoint of the training. SLURM's `scancel --signal` and `sbatch --signal` reach only
the launcher under proctrack/cgroup and proctrack/pgid, and also the workers under proctrack/linuxproc.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

from pipette_launch.launch.outer_launcher import scontrol
from pipette_launch.text import say

STORE_THREAD = "pipette-store"
"""Prefix of the names of threads that call torch's stores. A call of a store may wait for a host that never answers."""


def end_at_once() -> None:
    """End the process with its exit code now, if threads wait in torch's stores.

    In a normal exit, Python would unwind a thread that returns from torch's C++, and the process would end by SIGABRT.
    """
    if not any(thread.name.startswith(STORE_THREAD) for thread in threading.enumerate()):
        return
    kind, error, trace = sys.exc_info()
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    elif kind is not None and error is not None:
        sys.excepthook(kind, error, trace)
        code = 1
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


LOOK_S = 1.0
ORPHANS_END = r"""
# Each line names all running workers as PID:START. The last line counts when the launcher's end of the pipe closes.
known=
while read -r line; do known=$line; done
for worker in $known; do
    # The words of the file after the name of the program; word 20 is the start. The file is missing after a worker's
    # end, but the worker's session may have processes. Another start means that another process has the id now.
    stat=; read -r stat <"/proc/${worker%:*}/stat"; set -- ${stat##*) }
    if [ "${20:-${worker#*:}}" = "${worker#*:}" ]; then kill -9 "-${worker%:*}"; fi
done
"""
"""Program of the shell that kills the workers of a launcher that is gone."""


def started(pid: int) -> str:
    """Return when a process started, in clock ticks since the machine's start; empty if the process is gone."""
    try:
        # The name of the program, in brackets, may contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()[19]
    except (OSError, IndexError):
        return ""


@contextmanager
def ended(workers: Callable[[], Collection[int]]) -> Iterator[None]:
    """While the block runs, keep a shell that kills the workers when this process is gone.

    `workers` returns the process ids of the running workers, each the leader of its session.
    """
    shell = subprocess.Popen(
        ["/bin/sh", "-c", ORPHANS_END],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        # A signal to the launcher's session must not end the shell first.
        start_new_session=True,
    )
    assert shell.stdin is not None
    is_over = threading.Event()

    def tell() -> None:
        known: Collection[int] = ()
        while not is_over.wait(LOOK_S):
            now = workers()
            if now != known:
                known = now
                with suppress(OSError):
                    print(*(f"{pid}:{started(pid)}" for pid in now), file=shell.stdin, flush=True)

    teller = threading.Thread(target=tell, name="pipette-orphans", daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()
        with suppress(OSError):
            shell.communicate("\n")


class Termination:
    """The signal that told the launcher to end.

    torch's handler raises an exception. Python drops an exception that a callback of a deleted object or a log handler
    raises. So the agent also calls `check` whenever it looks at its workers.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self.held_by = 0
        """This process while torch starts workers: an exception would make torch lose workers that run already."""

    def install(self) -> None:
        """Handle the signals of --signals-to-handle, as torch does after the first start of workers."""
        for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(","):
            if threading.current_thread() is threading.main_thread() and hasattr(signal, name):
                signal.signal(getattr(signal, name), self.handle)

    def handle(self, number: int, _frame: FrameType | None = None) -> None:
        """Remember a signal and raise SignalException, as torch's handler does."""
        self._number = number
        # A worker that is forked meanwhile (--run-path) must end by its signal.
        if os.getpid() != self.held_by:
            self.check()

    def check(self) -> None:
        """Raise SignalException if a signal has come."""
        if self._number is not None:
            name = signal.Signals(self._number)
            raise SignalException(f"Process {os.getpid()} got signal: {self._number}", sigval=name)


PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def passed_on(is_training: Callable[[], bool], workers: Callable[[], Collection[int] | None]) -> Iterator[None]:
    """While the block runs, forward SIGUSR1 and SIGUSR2 to the workers of the training, but not to their children.

    Before the training, SIGUSR1 and SIGUSR2 end the launcher and its workers, as SIGTERM does, because there is nothing
    to save. An ignored signal stays ignored. torch handles a signal of --signals-to-handle after the first start of
    workers. `workers` returns the workers' process ids; None before the first start.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python sets handlers in the main thread only.
        yield
        return
    launcher = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        name, pids = signal.Signals(number).name, workers()
        # A forked child of the launcher inherits this handler, but must not signal the workers.
        is_child = os.getpid() != launcher
        if is_child or pids is None:
            # Do not raise an exception here, because the launcher would report the exception as a fault of the machine.
            if not is_child:
                say(f"{name} ended the job before workers started")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not is_training():
            raise SignalException(f"{name} came before the training", sigval=signal.Signals(number))
        # Workers must not get the signal twice, because a second signal kills a Python that is exiting.
        elif not slurm_signals_workers(os.environ):
            say(f"{name} goes on to the workers")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    before = {one: old for one in PASSED_ON if (old := signal.getsignal(one)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def slurm_signals_workers(environ: Mapping[str, str]) -> bool:
    """Return True if SLURM signals all processes of a step, not only those that srun started."""
    if "SLURM_STEP_ID" not in environ:
        return False
    try:
        return "proctrack/linuxproc" in scontrol("show", "config")
    except (OSError, subprocess.SubprocessError):
        return False
