"""How the launcher ends while a thread of it is inside torch's C++."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading

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
