"""What an agent does while a warm-up runs: it watches the workers, and ends the phase when one of them fails.

The workers are looked at before torch does it: torch's own look would end the others at the first death, and with them
what they could have told. At an alarm every agent says how its workers are, through one key each, and the agent of
RANK 0 judges.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsSpecs, Std

from pipette_launch.agent import worker_health
from pipette_launch.agent.failure_attribution import NodeReport, WarmupFailure, judge
from pipette_launch.agent.sync.agreement import reports
from pipette_launch.agent.sync.store import RoundOver
from pipette_launch.agent.worker_health import WorkerHealth
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from subprocess import Popen

    from pipette_launch.agent.controller import WarmupView
    from pipette_launch.agent.sync.store import RoundStore
    from pipette_launch.facts.messages import Decision

logger = logging.getLogger(__name__)

State = Literal["running", "done", "failed"]
SETTLE_S = 0.3
"""Between an alarm and the reports: a worker that broke a connection as it died may not have ended yet."""
REPORT_S = 5.0
"""How long an agent may take to answer an alarm; it looks at its workers several times a second."""
VERDICT_S = REPORT_S + 5.0


class Warmup:
    """The warm-up as one agent sees it."""

    def __init__(self, view: WarmupView, address: str) -> None:
        self._view = view
        self._address = address
        self._logs = ""
        self._began_s = self._started_s = 0.0
        self._health: WorkerHealth | None = None
        self._has_ended = False
        self._is_done = False
        self.failure = ""
        """Why it failed, for all nodes alike; empty while it did not."""
        self.absent: tuple[str, ...] = ()
        """Hosts that are gone from the round."""

    def begin(self) -> LogsSpecs:
        """Forget an earlier warm-up; returns where the workers of this one write."""
        self.failure, self.absent, self._health = "", (), None
        self._has_ended = self._is_done = False
        self._began_s, self._started_s = time.monotonic(), time.time()
        self._logs = tempfile.mkdtemp(prefix="pipette_warmup_")
        return DefaultLogsSpecs(log_dir=self._logs, redirects=Std.ALL)

    def drop_logs(self) -> None:
        """Leave the warm-up's output only where there is something to read in it."""
        if self._logs and not (self.failure and self._has_output()):
            shutil.rmtree(self._logs, ignore_errors=True)
        self._logs = ""

    def _has_output(self) -> bool:
        return any(path.is_file() and path.stat().st_size for path in Path(self._logs).rglob("*"))

    def look(
        self, round_store: RoundStore, decision: Decision, token: str, processes: Mapping[int, Popen[bytes]]
    ) -> State:
        """Say how the warm-up stands; one that fails or hangs ends the phase on every node.

        Args:
            round_store: the keys of this round.
            decision: what is measured, and who takes part.
            token: this agent's.
            processes: the workers of this node, by local rank.

        Raises:
            RoundOver: another agent is lost, or the one that holds the store is.

        """
        if self._health is None:
            self._health = WorkerHealth(processes, look_up=self._view.warmup_sign)
        self._health.sample()
        self._view.warmup_goes_on(leads=token == decision.tokens[0])
        try:
            failure = self._judge(round_store, decision, token, self._health)
        except RoundOver:
            self._end(processes)
            raise
        if failure is None and not self._is_done:
            return "running"
        left = self._end(processes)
        if failure is None:
            if left:
                logger.warning("%s", left)
            return "done"
        self.failure, self.absent = "; ".join(filter(None, (failure.words, left))), failure.absent
        return "failed"

    def _judge(
        self, round_store: RoundStore, decision: Decision, token: str, watched: WorkerHealth
    ) -> WarmupFailure | None:
        """Return why the warm-up fails; None while it does not, and once all nodes are done."""
        round_store.check_goes_on()
        codes = watched.exit_codes()
        if any(codes) or watched.is_hung or self._is_late() or round_store.has("warmup-alarm"):
            return self._find_out(round_store, decision, token, watched)
        if all(code == 0 for code in codes):
            # Whoever is done still answers alarms: only when all are, the phase is over.
            done = round_store.count("warmup-done", 0 if self._has_ended else 1)
            self._has_ended = True
            self._is_done = done == len(decision.tokens)
        return None

    def _end(self, processes: Mapping[int, Popen[bytes]]) -> str:
        """Leave nothing behind: no worker, nor what it has started; returns what the kernel would not end."""
        left = worker_health.end(processes, began_s=self._started_s, mark=self._logs)
        self._view.warmup_is_over()
        return f"the kernel cannot end process {', '.join(map(str, left))} of the warm-up" if left else ""

    def _is_late(self) -> bool:
        return self._waited_s() > self._view.warmup_deadline_s

    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def _find_out(
        self, round_store: RoundStore, decision: Decision, token: str, watched: WorkerHealth
    ) -> WarmupFailure:
        """Tell all how this node's workers are; returns what the first agent makes of it."""
        waited_s = self._waited_s()
        round_store.put("warmup-alarm", "yes")
        time.sleep(SETTLE_S)
        states = watched.states(
            host=decision.hosts[decision.tokens.index(token)], first_slot=min(decision.ranks_of(token))
        )
        report = NodeReport(workers=states, output=f"{self._logs} on {self._address}" if self._has_output() else "")
        round_store.put(f"warmup-report/{token}", files.dumps(report))
        if token == decision.tokens[0]:
            found = reports(round_store, decision, NodeReport, prefix="warmup-report", patience_s=REPORT_S)
            failure = judge(*found, waited_s=waited_s)
            round_store.put("warmup-failed", failure.words)
            round_store.put("warmup-verdict", files.dumps(failure))
            return failure
        with contextlib.suppress(ClusterError):
            text = round_store.take("warmup-verdict", what="why the warm-up failed", deadline_s=VERDICT_S)
            return files.loads(WarmupFailure, text, "verdict of the first agent")
        return judge([report], decision.hosts[:1], waited_s=waited_s)
