"""A trial on one node: count the iterations of a configuration, and end the workers after enough iterations.

The first node that sees the end of a trial publishes it in the store, with the reason if the trial failed. Then every
agent kills its workers, waits until its devices are free, and reports. The deciding node answers with the next
decision. A failed trial costs no restart.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, LogsSpecs

from pipette_launch import megatron
from pipette_launch.agent import workers
from pipette_launch.agent.controller import Controller
from pipette_launch.agent.store import RoundOver, RoundStore, reports
from pipette_launch.agent.streams import Streams, WatchedLogs
from pipette_launch.agent.workers import DeviceBinding
from pipette_launch.facts import files
from pipette_launch.facts.messages import Decision, Failure, TrialReport
from pipette_launch.probe.messages import START_S, wait_s

REPORT_S = 75.0
"""Seconds that an agent gets to end its workers and to wait until its devices are free."""
NEXT_S = REPORT_S + 45.0
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
FIRST_ITERATION_S = 600.0
"""Longest wait (s) for the first iteration, which follows imports, data loading, a checkpoint and compilation."""
HUNG_S = 120.0
"""Longest wait (s) between two iterations; a validation may run between two iterations."""
HUNG_STEPS = 20
"""If this number of predicted steps takes longer than `HUNG_S`, the trial waits for that time instead."""


class QuietLogs(DefaultLogsSpecs):
    """Log settings that keep error files in a private folder, and discard the workers' output."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose where each worker writes."""
        destinations = super().reify(envs)
        for streams in (destinations.stdouts, destinations.stderrs):
            streams.update(dict.fromkeys(streams, os.devnull))
        return destinations


def patience_s(decision: Decision) -> tuple[float, float]:
    """Return how long to wait for the first iteration, and for each later one, before a trial counts as hung."""
    if decision.checks_order:
        # Imports and opening communicators take seconds, while the order check itself takes milliseconds.
        return wait_s(sum(decision.num_slots), START_S), 0.0
    runs = decision.choice or (decision.plan.own if decision.plan else None)
    steps_s = HUNG_STEPS * runs.step_time_s if runs else 0.0
    return FIRST_ITERATION_S + steps_s, max(HUNG_S, steps_s)


class TrialRun:
    """The trials of one agent, which run one after the other."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._logs = ""
        self._streams: Streams | None = None
        self._began_s = self._started_s = self._heard_s = 0.0
        self._step_s: list[float] = []
        self._has_ended = False
        self.following: Decision | None = None
        """Decision after the trial; None while the trial runs, and if hosts are absent."""
        self.absent: tuple[str, ...] = ()
        """Hosts that have left the round."""

    def begin(self) -> None:
        """Forget the state of an earlier trial."""
        self.drop_logs()
        self.following, self.absent = None, ()
        self._step_s, self._has_ended, self._streams = [], False, None
        self._began_s = self._heard_s = time.monotonic()
        self._started_s = time.time()

    def open_logs(self) -> tuple[Streams, LogsSpecs]:
        """Return the reader of the workers' output, and torch's log settings."""
        self._logs = tempfile.mkdtemp(prefix="pipette_trial_")
        self._streams = Streams(self._hear)
        return self._streams, WatchedLogs(QuietLogs(log_dir=self._logs), self._streams, 0)

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of the workers.

        Killed workers leave temporary files (multiprocessing alone makes a folder each), so TMPDIR is a folder that is
        deleted. Inductor and Triton keep compiled kernels below TMPDIR by default; here they stay where a training
        finds them.
        """
        return {"TMPDIR": self._logs, COMPILED: os.environ.get(COMPILED, _compiled())}

    def drop_logs(self) -> None:
        """Delete everything that the trial wrote."""
        if self._logs:
            shutil.rmtree(self._logs, ignore_errors=True)
        self._logs = ""

    def _hear(self, line: str) -> None:
        step_s = self._controller.saw_line(line)
        if step_s is not None:
            self._step_s.append(step_s)
            self._heard_s = time.monotonic()

    def look(
        self,
        round_store: RoundStore,
        decision: Decision,
        token: str,
        processes: Mapping[int, Popen[bytes]],
        bindings: Sequence[DeviceBinding],
    ) -> bool:
        """Return whether the trial is over; then `following` is the next decision for all nodes.

        Args:
            processes: workers of this node, by local rank.
            bindings: ranks of these workers, by local rank.

        Raises:
            RoundOver: another agent is lost.

        """
        try:
            round_store.check_goes_on()
            if not self._is_over(round_store, decision, processes, bindings):
                return False
            self._end(round_store, decision, token, processes)
            if round_store.is_coordinator:
                self._decide(round_store, decision)
            text = round_store.take(f"{decision.key}/next", what="the decision after the trial", deadline_s=NEXT_S)
        except RoundOver:
            self._kill(processes)
            raise
        self.absent = tuple((round_store.peek(f"{decision.key}/absent") or "").split())
        self.following = None if self.absent else files.loads(Decision, text, "decision after the trial")
        return True

    def _is_over(
        self,
        round_store: RoundStore,
        decision: Decision,
        processes: Mapping[int, Popen[bytes]],
        bindings: Sequence[DeviceBinding],
    ) -> bool:
        """Return whether any node has published the end of the trial; publish the end if this node sees it."""
        if round_store.has(f"{decision.key}/end"):
            return True
        codes = {local: process.poll() for local, process in processes.items()}
        failure = None
        if len(self._step_s) < decision.iterations:
            if any(codes.values()):
                failure = self._describe(codes, bindings)
            elif self._is_late(decision, bindings):
                waited_s = time.monotonic() - self._heard_s
                missing = "answer" if decision.checks_order else "iteration"
                after = "" if decision.checks_order else f" after {len(self._step_s)}"
                failure = Failure(cause=f"it hung: no {missing} within {waited_s:.0f} s{after}")
            elif not codes or any(code is None for code in codes.values()):
                return False
            else:
                # The script ended by itself on this node. The trial ends when the script has ended on every node.
                ended = round_store.count(f"{decision.key}/ended", 0 if self._has_ended else 1)
                self._has_ended = True
                if ended < len(decision.tokens):
                    return False
        report = TrialReport(step_s=(), failure=failure, took_s=0.0)
        round_store.settle(f"{decision.key}/end", files.dumps(report))
        return True

    def _is_late(self, decision: Decision, bindings: Sequence[DeviceBinding]) -> bool:
        """Return whether an iteration is overdue. Nodes without the last rank see no iterations and wait longer."""
        first_s, next_s = patience_s(decision)
        silent_s = time.monotonic() - self._heard_s
        if any(binding.rank == sum(decision.num_slots) - 1 for binding in bindings):
            return silent_s > (next_s if self._step_s else first_s)
        return silent_s > first_s + decision.iterations * next_s

    def _describe(self, codes: Mapping[int, int | None], bindings: Sequence[DeviceBinding]) -> Failure:
        """Return which worker died and why; of several dead workers, one with a known reason."""
        assert self._streams is not None
        # Close the streams first, because the reason of the death is in the last lines.
        self._streams.close()
        dead = [local for local, code in codes.items() if code]
        known = {local: megatron.explain_failure("\n".join(self._streams.tail(local))) for local in dead}
        local = max(dead, key=lambda one: known[one] is not None)
        why = known[local] or megatron.failure_of(workers.last_words(self._streams.tail(local)))
        return replace(why, rank=bindings[local].rank, exit_code=codes[local] or 0)

    def _end(
        self, round_store: RoundStore, decision: Decision, token: str, processes: Mapping[int, Popen[bytes]]
    ) -> None:
        """Remove this node's workers and their files, and report their step times."""
        self._kill(processes)
        if self._streams is not None:
            self._streams.close()
        self.drop_logs()
        if token not in decision.tokens:
            return
        self._controller.workers_are_gone()
        report = TrialReport(step_s=tuple(self._step_s), failure=None, took_s=time.monotonic() - self._began_s)
        round_store.put(f"{decision.key}/report/{token}", files.dumps(report))

    def _kill(self, processes: Mapping[int, Popen[bytes]]) -> None:
        # A node without workers has no output folder by which to recognise the workers' children.
        if self._logs:
            workers.end(processes, began_s=self._started_s, mark=self._logs)

    def _decide(self, round_store: RoundStore, decision: Decision) -> None:
        """Collect the reports of all nodes, and publish the next decision."""
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
            following = files.dumps(self._controller.after_trial(decision, whole))
        round_store.put(f"{decision.key}/next", following)


def _compiled() -> str:
    """Return Inductor's default folder of kernels without importing Inductor, which would take 3 s."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return str(Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)))
