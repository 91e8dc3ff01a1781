"""On the path of a job's processes: a warm-up worker that comes to grief in a phase, as FAULT says.

FAULT is `PHASE SIGNAL`: the last worker sends itself the signal at its first step in that phase.
"""

import os
import sys
from typing import Any

if "pipette_launch.probe.run" in sys.orig_argv:
    from pipette_launch.probe.progress import Progress

    phase, signal = os.environ["FAULT"].split()
    show = Progress._show

    def show_and_fall(progress: Progress, sign: Any) -> None:
        """Come to grief once the agent can read where."""
        # The last worker, before it waits for anyone.
        progress.limit_s = min(progress.limit_s, 6.0)
        show(progress, sign)
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if is_last and sign.phase == phase and (sign.total or phase != "links"):
            os.kill(os.getpid(), int(signal))

    Progress._show = show_and_fall  # type: ignore[method-assign]
