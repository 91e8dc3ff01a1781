"""Ends the workers of a launcher that was killed, which torch leaves behind with their memory and their devices."""

from __future__ import annotations

import subprocess
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

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
