"""SIGUSR1 and SIGUSR2 to the launcher: they ask the training to save, and must not end the launcher by default.

Under SLURM `scancel --signal` and `sbatch --signal` reach the launcher alone where processes are tracked by
proctrack/cgroup or pgid, and the workers, too, under proctrack/linuxproc.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import SignalException

STORE_THREAD = "pipette-store"
"""Threads whose names begin so call torch's stores, and may wait there for a host that never answers."""


def end_at_once() -> None:
    """End the process with the exit code that is on its way, where threads call torch's stores.

    Python lets no thread return to it once it ends by itself: whoever comes back from C++ then is unwound by force,
    and the process aborts, with SIGABRT for an exit code.
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
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


LIMIT_S = 5.0
"""Without its configuration, as in a container, scontrol tries again for a minute."""


def scontrol(*words: str) -> str:
    """Return what `scontrol` prints.

    Raises:
        OSError: there is none here.
        subprocess.SubprocessError: it failed, or took too long.

    """
    done = subprocess.run(
        ["scontrol", *words],  # noqa: S607 - SLURM's own, wherever the cluster has put it
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return done.stdout


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

LOOK_S = 1.0
# It reads which workers there are, the last line counts, until the launcher's end of the pipe is closed.
PROGRAM = 'pids=; while read -r line; do pids=$line; done; for pid in $pids; do kill -9 "-$pid"; done'


@contextmanager
def ended(workers: Callable[[], Collection[int]]) -> Iterator[None]:
    """While the block runs, keep a shell that ends the workers as soon as this process is gone.

    Args:
        workers: process ids of those that run now; each leads a session of its own.

    """
    shell = subprocess.Popen(
        ["/bin/sh", "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        # What ends the launcher's whole session must not end it first.
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
                    print(*now, file=shell.stdin, flush=True)

    teller = threading.Thread(target=tell, name="pipette-orphans", daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()
        with suppress(OSError):
            shell.communicate("\n")


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from types import FrameType

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def passed_on(is_training: Callable[[], bool], workers: Callable[[], Collection[int] | None]) -> Iterator[None]:
    """While the block runs, send SIGUSR1 and SIGUSR2 on to the training's workers.

    Before the training there is nothing to save: then they end the launcher and its workers, as SIGTERM would. The
    workers alone get the signal, not the processes that they started: those may not expect it. A signal that the
    launcher was told to ignore stays ignored; one that --signals-to-handle names is torch's from the first start of
    workers on.

    Args:
        is_training: whether the workers are those of the training.
        workers: process ids of the workers; None before any were started.

    """
    if threading.current_thread() is not threading.main_thread():
        # Python sets handlers in the main thread only.
        yield
        return
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _handler(is_training, workers))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handler(
    is_training: Callable[[], bool], workers: Callable[[], Collection[int] | None]
) -> Callable[[int, FrameType | None], None]:
    launcher = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        name, pids = signal.Signals(number).name, workers()
        # A forked child has inherited this handler, and must not signal its siblings.
        is_child = os.getpid() != launcher
        if is_child or pids is None:
            # No exception: who describes a machine or a network takes any for a trouble of theirs.
            if not is_child:
                sys.stderr.write(f"pipette-launch: ended by {name}, before there were workers\n")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not is_training():
            raise SignalException(f"{name} came before the training", sigval=signal.Signals(number))
        # Not twice: Python dies of a signal that comes when it has begun to exit.
        elif not slurm_signals_workers(os.environ):
            sys.stderr.write(f"pipette-launch: {name} goes on to the workers\n")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    return handle


def slurm_signals_workers(environ: Mapping[str, str]) -> bool:
    """Whether SLURM signals all processes of a step, not just those that srun has started."""
    if "SLURM_STEP_ID" not in environ:
        return False
    try:
        return "proctrack/linuxproc" in scontrol("show", "config")
    except (OSError, subprocess.SubprocessError):
        return False
