"""A process that helps with a search: `python -m pipette_launch.launch.search_pool.worker ORDER.json`.

It says that it is ready, then reads batches of tasks from stdin, one a line, and writes what came of each to stdout,
until stdin ends. It sees no torch, and starts in half a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO

from pipette_launch.facts import files
from pipette_launch.launch.search_pool.messages import Batch, Done, SearchOrder, as_line
from pipette_launch.search.tasks import alone


def main(arguments: Sequence[str], lines: Iterable[str], out: TextIO, clock: Callable[[], float]) -> int:
    """Do what stdin asks for; returns the exit code, and says in its last line why it failed."""
    try:
        (path,) = arguments
        order = files.read(Path(path), SearchOrder)
        field = order.field()
        _say(out, Done(tried=()))
        for line in lines:
            batch = files.loads(Batch, line, "a batch of tasks")
            crew = alone(field, seed=order.seed, clock=clock, deadline_s=clock() + batch.left_s)
            _say(out, Done.of(crew(batch.read())))
    except Exception as error:  # noqa: BLE001
        # Whatever it is, the launcher needs one line.
        _say(out, Done(tried=(), trouble=f"{type(error).__name__}: {' '.join(str(error).split())}"))
        return 1
    return 0


def _say(out: TextIO, done: Done) -> None:
    out.write(as_line(done))
    out.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin, sys.stdout, time.monotonic))
