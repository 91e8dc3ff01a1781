"""What an agent does while a warm-up runs: it keeps the workers' output, and ends the phase when one of them fails.

The workers are looked at before torch does it: torch's own look would end the others at the first death, and with them
what they could have told.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from typing import TYPE_CHECKING, Literal

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsSpecs, Std

from pipette_launch.agent import failures
from pipette_launch.agent.agreement import MEETING_S

if TYPE_CHECKING:
    from collections.abc import Mapping
    from subprocess import Popen

    from pipette_launch.agent.conductor import Conductor
    from pipette_launch.agent.exchange import Exchange

State = Literal["running", "done", "failed"]


class Warmup:
    """The warm-up as one agent sees it."""

    def __init__(self, conductor: Conductor, address: str) -> None:
        self._conductor = conductor
        self._address = address
        self._logs = ""
        self._began_s = 0.0
        self.failure = ""
        """Why it failed, for all nodes alike; empty while it did not."""

    def begin(self) -> LogsSpecs:
        """Forget an earlier warm-up; returns where the workers of this one write."""
        self.failure = ""
        self._began_s = time.monotonic()
        self._logs = tempfile.mkdtemp(prefix="pipette_warmup_")
        return DefaultLogsSpecs(log_dir=self._logs, redirects=Std.ALL)

    def drop_logs(self) -> None:
        """Leave the warm-up's output only where there is something to read in it."""
        if self._logs and not self.failure:
            shutil.rmtree(self._logs, ignore_errors=True)
        self._logs = ""

    def look(self, exchange: Exchange, processes: Mapping[int, Popen[bytes]]) -> State:
        """Say how the warm-up stands; one that fails or hangs ends the phase on every node.

        Args:
            exchange: the keys of this round.
            processes: the workers of this node, by local rank.

        """
        codes = {local_rank: process.poll() for local_rank, process in processes.items()}
        dead = {local_rank: code for local_rank, code in codes.items() if code}
        waited_s = time.monotonic() - self._began_s
        if all(code == 0 for code in codes.values()):
            return "done"
        if dead:
            report = self._death_words(dead, processes)
        elif exchange.has("warmup-failed"):
            report = exchange.take("warmup-failed", what="why the warm-up failed elsewhere", deadline_s=MEETING_S)
        elif waited_s >= self._conductor.warmup_deadline_s:
            doing = self._conductor.warmup_report({local: process.pid for local, process in processes.items()})
            report = f"the warm-up hangs after {waited_s:.0f} s: {doing}; {self._output_words()}"
        else:
            return "running"
        self.failure = exchange.settle("warmup-failed", report, deadline_s=MEETING_S)
        return "failed"

    def _death_words(self, dead: Mapping[int, int], processes: Mapping[int, Popen[bytes]]) -> str:
        first, code = min(dead.items())
        where = self._conductor.warmup_report({first: processes[first].pid})
        return f"a warm-up worker died with {failures.exit_words(code)}: {where}; {self._output_words()}"

    def _output_words(self) -> str:
        return f"its output is in {self._logs} on {self._address}"
