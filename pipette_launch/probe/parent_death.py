"""A warm-up worker does not outlive its agent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel end this process when its parent dies, however it dies; does nothing where it is not Linux.

    A launcher that is killed can end nobody, and a worker that goes on would hold devices, ports and memory.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It died meanwhile.
        os.kill(os.getpid(), signal.SIGKILL)
