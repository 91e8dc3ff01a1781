"""What an agent does while a configuration is tried: it counts iterations, and ends the workers after enough of them.

Whoever sees the end of a trial first says so through the store, with the reason if it is a bad one; then every agent
ends its workers, waits until its devices are free, and says that. The node that decides answers all of them with what
comes next. A trial that fails costs no restart.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, LogsSpecs

from pipette_launch import megatron
from pipette_launch.agent import failures, worker_health
from pipette_launch.agent.logs import WatchedLogs
from pipette_launch.agent.streams import Streams
from pipette_launch.agent.sync.agreement import reports
from pipette_launch.agent.sync.store import RoundOver
from pipette_launch.facts import files
from pipette_launch.facts.messages import Decision, Failure, TrialReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from subprocess import Popen

    from pipette_launch.agent.controller import Policy, WorkerCommands
    from pipette_launch.agent.device_binding import DeviceBinding
    from pipette_launch.agent.sync.store import RoundStore

REPORT_S = 75.0
"""How long an agent may take to end its workers and to see its devices free again."""
NEXT_S = REPORT_S + 45.0
COMPILED = "TORCHINDUCTOR_CACHE_DIR"


class QuietLogs(DefaultLogsSpecs):
    """Error files in a folder of its own; what workers say goes nowhere."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose where each worker writes."""
        destinations = super().reify(envs)
        for streams in (destinations.stdouts, destinations.stderrs):
            streams.update(dict.fromkeys(streams, os.devnull))
        return destinations


class TrialRun:
    """One trial after the other, as one agent sees them."""

    def __init__(self, commands: WorkerCommands, policy: Policy) -> None:
        self._commands = commands
        self._policy = policy
        self._logs = ""
        self._streams: Streams | None = None
        self._began_s = self._started_s = self._heard_s = 0.0
        self._num_heard = 0
        self._has_ended = False
        self.following: Decision | None = None
        """What comes after the trial that is over; None where it cannot be known without the absent."""
        self.absent: tuple[str, ...] = ()
        """Hosts that are gone from the round."""

    def begin(self) -> None:
        """Forget an earlier trial."""
        self.drop_logs()
        self.following, self.absent = None, ()
        self._num_heard, self._has_ended, self._streams = 0, False, None
        self._began_s = self._heard_s = time.monotonic()
        self._started_s = time.time()

    def open_logs(self) -> tuple[Streams, LogsSpecs]:
        """Return who reads the workers' output, and where they write."""
        self._logs = tempfile.mkdtemp(prefix="pipette_trial_")
        self._streams = Streams(self._hear)
        return self._streams, WatchedLogs(QuietLogs(log_dir=self._logs), self._streams, 0)

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the workers: killed ones leave temporary files, multiprocessing alone a folder for each.

        Compiled kernels stay where a training finds them: inductor keeps them below TMPDIR otherwise, Triton's too.
        """
        return {"TMPDIR": self._logs, COMPILED: os.environ.get(COMPILED, _compiled())}

    def drop_logs(self) -> None:
        """Leave nothing on disk."""
        if self._logs:
            shutil.rmtree(self._logs, ignore_errors=True)
        self._logs = ""

    def _hear(self, line: str) -> None:
        if self._commands.saw_line(line):
            self._num_heard += 1
            self._heard_s = time.monotonic()

    def look(
        self,
        round_store: RoundStore,
        decision: Decision,
        token: str,
        processes: Mapping[int, Popen[bytes]],
        bindings: Sequence[DeviceBinding],
    ) -> bool:
        """Whether the trial is over; then `following` says what comes next on all nodes.

        Args:
            round_store: the keys of this round.
            decision: what is tried, and who takes part.
            token: this agent's.
            processes: the workers of this node, by local rank.
            bindings: their ranks, by local rank.

        Raises:
            RoundOver: another agent is lost, or the one that holds the store is.

        """
        try:
            round_store.check_goes_on()
            if not self._is_over(round_store, decision, processes, bindings):
                return False
            self._end(round_store, decision, token, processes)
            if round_store.is_coordinator:
                self._decide(round_store, decision)
            text = round_store.take(f"{decision.key}/next", what="what follows the trial", deadline_s=NEXT_S)
        except RoundOver:
            self._kill(processes)
            raise
        self.absent = tuple((round_store.peek(f"{decision.key}/absent") or "").split())
        self.following = None if self.absent else files.loads(Decision, text, "what follows the trial")
        return True

    def _is_over(
        self,
        round_store: RoundStore,
        decision: Decision,
        processes: Mapping[int, Popen[bytes]],
        bindings: Sequence[DeviceBinding],
    ) -> bool:
        """Whether some node has seen the end; this one's own news are told on the way."""
        if round_store.has(f"{decision.key}/end"):
            return True
        codes = {local: process.poll() for local, process in processes.items()}
        if self._num_heard >= decision.iterations:
            _publish_end(round_store, decision, None)
        elif any(codes.values()):
            _publish_end(round_store, decision, self._describe(codes, bindings))
        elif self._is_late(decision, bindings):
            waited_s = time.monotonic() - self._heard_s
            missing, after = ("answer", "") if decision.checks_order else ("iteration", f" after {self._num_heard}")
            hung = Failure(cause=f"it hung: no {missing} within {waited_s:.0f} s{after}")
            _publish_end(round_store, decision, hung)
        elif codes and all(code == 0 for code in codes.values()):
            return self._all_have_ended(round_store, decision)
        else:
            return False
        return True

    def _all_have_ended(self, round_store: RoundStore, decision: Decision) -> bool:
        """Whether the script has ended by itself on every node, before the trial did."""
        ended = round_store.count(f"{decision.key}/ended", 0 if self._has_ended else 1)
        self._has_ended = True
        if ended < len(decision.tokens):
            return False
        _publish_end(round_store, decision, None)
        return True

    def _is_late(self, decision: Decision, bindings: Sequence[DeviceBinding]) -> bool:
        """Whether the next iteration is overdue; whoever cannot hear them allows for all of them together."""
        first_s, next_s = self._commands.trial_patience_s
        silent_s = time.monotonic() - self._heard_s
        if any(binding.rank == sum(decision.num_slots) - 1 for binding in bindings):
            return silent_s > (next_s if self._num_heard else first_s)
        return silent_s > first_s + decision.iterations * next_s

    def _describe(self, codes: Mapping[int, int | None], bindings: Sequence[DeviceBinding]) -> Failure:
        """Say which worker died, and why; of several one whose words are known."""
        assert self._streams is not None
        # The reason is among the last words.
        self._streams.close()
        dead = [local for local, code in codes.items() if code]
        known = {local: megatron.explain_failure("\n".join(self._streams.tail(local))) for local in dead}
        local = max(dead, key=lambda one: known[one] is not None)
        why = known[local] or megatron.failure_of(failures.last_words(self._streams.tail(local)))
        return replace(why, rank=bindings[local].rank, exit_code=codes[local] or 0)

    def _end(
        self, round_store: RoundStore, decision: Decision, token: str, processes: Mapping[int, Popen[bytes]]
    ) -> None:
        """Leave nothing behind of this node's workers, and tell what they printed."""
        self._kill(processes)
        if self._streams is not None:
            self._streams.close()
        self.drop_logs()
        if token not in decision.tokens:
            return
        step_s = self._commands.trial_is_over()
        report = TrialReport(step_s=step_s, failure=None, took_s=time.monotonic() - self._began_s)
        round_store.put(f"{decision.key}/report/{token}", files.dumps(report))

    def _kill(self, processes: Mapping[int, Popen[bytes]]) -> None:
        # Without workers there is no folder that tells their children from other processes.
        if self._logs:
            worker_health.end(processes, began_s=self._started_s, mark=self._logs)

    def _decide(self, round_store: RoundStore, decision: Decision) -> None:
        """Hear all nodes, and tell them what comes next."""
        told, absent = reports(round_store, decision, TrialReport, prefix=f"{decision.key}/report", patience_s=REPORT_S)
        following = ""
        if absent:
            round_store.put(f"{decision.key}/absent", " ".join(absent))
        else:
            end = round_store.peek(f"{decision.key}/end")
            whole = TrialReport(
                step_s=max((report.step_s for report in told), key=len),
                failure=files.loads(TrialReport, end, "how the trial ended").failure if end else None,
                took_s=max(report.took_s for report in told),
            )
            following = files.dumps(self._policy.after_trial(decision, whole))
        round_store.put(f"{decision.key}/next", following)


def _compiled() -> str:
    """Inductor's default folder of kernels, without the 3 s import of `torch._inductor.runtime.cache_dir_utils`."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return str(Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)))


def _publish_end(round_store: RoundStore, decision: Decision, failure: Failure | None) -> None:
    """Tell all nodes that the trial is over, and why if it failed; the first to say so counts."""
    report = TrialReport(step_s=(), failure=failure, took_s=0.0)
    round_store.settle(f"{decision.key}/end", files.dumps(report))
