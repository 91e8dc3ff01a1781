"""Jobs that tests compare with: their processes are forked from one interpreter that has imported megatron-core."""

from __future__ import annotations

import atexit
import os
from functools import cache
from typing import TYPE_CHECKING

from benchmarks.netlab import compare
from benchmarks.netlab.warm import WarmPython

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PATCHED = ("-m", "pipette_patches.run", "--patch", "cpu_backend", "--")
"""Words before a script whose process is to be forked with megatron-core."""


@cache
def python() -> WarmPython:
    """Start the interpreter once; it ends with this process."""
    made = WarmPython()
    atexit.register(made.__exit__, None, None, None)
    made.__enter__()
    return made


def command(module: str, *words: str) -> list[str]:
    """Return the command line of a launcher, all of whose processes are forked."""
    return [python().path, "-m", module, *words]


def torchrun(*flags: str, script: Sequence[str | Path]) -> list[str]:
    """Return the command line of torchrun for a script on megatron-core."""
    return command("torch.distributed.run", *flags, *PATCHED, *map(str, script))


def environment(folders: Sequence[Path]) -> dict[str, str]:
    """Return the variables of such a job, with these folders on its path."""
    return {**os.environ, **compare.environment(), "PYTHONPATH": os.pathsep.join(map(str, folders))}
