"""Find laboratories that live, and remove the remains of dead laboratories.

A lab owns a folder whose lock it holds while it lives; the kernel drops the lock with the process, however that ends,
so a process id that was given anew cannot make a dead lab look alive.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.netlab import system
from benchmarks.netlab.brake import release

FOLDER = Path("/run/pipette-netlab")
"""Fixed, so that labs of different environments see each other; /run is where namespaces have their names, too."""
PREFIX = "pnl"
LOCK = "lock"
NAME = re.compile(rf"({PREFIX}\d+x\d+-).*")
_serial = itertools.count()


@contextmanager
def claim() -> Iterator[tuple[Path, str]]:
    """Take a folder and a prefix for a new lab's namespaces, and hold them."""
    prefix = f"{PREFIX}{os.getpid()}x{next(_serial)}-"
    folder, new = FOLDER / prefix, FOLDER / f".{prefix}"
    new.mkdir(parents=True)
    with (new / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # It gets its name when it is locked, so nobody ever sees a living lab without its lock.
        new.rename(folder)
        yield folder, prefix


def clear(folder: Path, prefix: str) -> None:
    """Remove a lab: processes, namespaces and with them their wires, brakes, files."""
    homes = system.namespaces(prefix)
    try:
        system.kill_all(homes)
    finally:
        system.batch("ip", [f"netns del {home}" for home in homes])
        release(prefix)
        shutil.rmtree(folder, ignore_errors=True)


def remove() -> list[str]:
    """Remove every lab whose process is gone; returns their prefixes."""
    found = {match[1] for name in system.namespaces(PREFIX) if (match := NAME.fullmatch(name))}
    with suppress(FileNotFoundError):
        found |= {path.name for path in FOLDER.iterdir() if NAME.fullmatch(path.name)}
    dead = sorted(prefix for prefix in found if not _lives(prefix))
    for prefix in dead:
        clear(FOLDER / prefix, prefix)
    return dead


def _lives(prefix: str) -> bool:
    try:
        with (FOLDER / prefix / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
