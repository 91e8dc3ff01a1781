"""Cores that never sleep, for as long as a laboratory is there.

A virtual processor that halts gives its place to other machines and comes back with cold caches. On the machine on
which this was written a pass of a layer took 20 to 45 % more processor time after waiting for a message than in a loop
that never waits, which no host with a processor of its own would see. What keeps the cores busy runs in the scheduler's
idle class, so it takes nothing from anyone.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from benchmarks.netlab.system import LabError

TOOLS = ("setpriv", "chrt", "taskset")


@contextmanager
def awake(cores: Iterable[int]) -> Iterator[None]:
    """Keep these cores busy while the block runs; the kernel ends what does so with this process, however that ends.

    Raises:
        LabError: a tool of util-linux is missing.

    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise LabError(f"cores_per_slot needs {', '.join(missing)}, of util-linux")
    busy: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores:
            words = ["setpriv", "--pdeathsig", "KILL", "chrt", "--idle", "0", "taskset", "-c", str(core)]
            busy.append(subprocess.Popen([*words, "sh", "-c", "while :; do :; done"], stdin=subprocess.DEVNULL))
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
