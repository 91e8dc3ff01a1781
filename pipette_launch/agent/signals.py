"""SIGUSR1 and SIGUSR2 to the launcher: they ask the training to save, and must not end the launcher by default.

Under SLURM with proctrack/cgroup `scancel --signal` and `sbatch --signal` reach the launcher alone, not its workers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import SignalException

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import FrameType

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def passed_on(is_training: Callable[[], bool], workers: Callable[[], Collection[int]]) -> Iterator[None]:
    """While the block runs, send SIGUSR1 and SIGUSR2 on to the training's workers.

    Before the training there is nothing to save: then they end the launcher and its workers as SIGTERM would. The
    workers alone get the signal, not the processes that they started: those may not expect it. A signal that the
    launcher was told to ignore stays ignored; one that --signals-to-handle names is torch's from the first start of
    workers on.

    Args:
        is_training: whether the workers are those of the training.
        workers: process ids of the workers.

    """
    launcher = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != launcher:
            # A forked child that has no handler of its own yet; it must not signal its siblings.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        if not is_training():
            raise SignalException(f"{name} came before the training", sigval=signal.Signals(number))
        sys.stderr.write(f"pipette-launch: {name} goes on to the workers\n")
        for pid in workers():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    if threading.current_thread() is not threading.main_thread():
        # Python sets handlers in the main thread only.
        yield
        return
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
