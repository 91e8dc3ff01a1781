"""A trial on one node: count the iterations of a configuration, and end the workers after enough iterations.

The first node that sees the end of a trial publishes it in the store, with the reason if the trial failed. After the
end of a trial, every agent kills its workers, waits until its devices are free, and reports step times. The deciding
node then publishes the next decision. A failed trial does not count as a restart of the job.
"""

from __future__ import annotations

import getpass
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

from torch.distributed.elastic.multiprocessing.api import LogsSpecs

from pipette_launch import megatron
from pipette_launch.agent import workers
from pipette_launch.agent.phases import PhaseBeforeTraining
from pipette_launch.agent.store import RoundOver, RoundStore, reports
from pipette_launch.agent.streams import QuietLogs, Streams, WatchedLogs
from pipette_launch.defaults import FIRST_ITERATION_S, HUNG_S, NEXT_S, TRIAL_REPORT_S
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files
from pipette_launch.facts.co_location import DeviceBinding
from pipette_launch.facts.messages import Decision, Failure, RunTrial, TrialReport, read_decision
from pipette_launch.launch.node_controller import NodeController

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
HUNG_STEPS = 20
"""If this number of steps is predicted to take longer than `HUNG_S`, the trial waits for the predicted time instead."""


def patience_s(decision: RunTrial) -> tuple[float, float]:
    """Return how long to wait for the first iteration, and for each later iteration, before a trial counts as hung."""
    num_ranks = decision.num_ranks
    steps_s = HUNG_STEPS * (decision.choice or decision.plan.own).step_time_s
    return FIRST_ITERATION_S.of(num_ranks) + steps_s, max(HUNG_S, steps_s)


class TrialRun(PhaseBeforeTraining):
    """A trial, as one agent runs it on its node."""

    def __init__(self, controller: NodeController, round_store: RoundStore, decision: RunTrial, token: str) -> None:
        super().__init__(controller, round_store, decision, token)
        self._trial = decision
        self._streams: Streams | None = None
        self._heard_s = self._began_s
        """Time of the last iteration, or of the start of the trial."""
        self._step_s: list[float] = []
        self._next: Decision | None = None

    def open_logs(self) -> tuple[Streams, LogsSpecs]:
        """Return the reader of the workers' output, and log settings that discard the output."""
        self._logs = tempfile.mkdtemp(prefix="pipette_trial_")
        self._streams = Streams(self._hear)
        return self._streams, WatchedLogs(QuietLogs(log_dir=self._logs), self._streams, 0)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for folders of temporary files.

        Killed workers leave temporary files (multiprocessing alone makes a folder for each worker), so TMPDIR is a
        folder that is deleted after the trial. Inductor and Triton keep compiled kernels below TMPDIR by default;
        TORCHINDUCTOR_CACHE_DIR keeps compiled kernels in the folder where a training finds them.
        """
        try:
            user = getpass.getuser()
        except (KeyError, ModuleNotFoundError, OSError):
            user = f"uid_{os.getuid()}"
        # Compute Inductor's default folder without importing Inductor, because the import would take 3 s.
        kernels = Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
        return {"TMPDIR": self._logs, COMPILED: os.environ.get(COMPILED, str(kernels))}

    def _hear(self, line: str) -> None:
        step_s = self._controller.saw_line(line)
        if step_s is not None:
            self._step_s.append(step_s)
            self._heard_s = time.monotonic()

    def look(self, processes: Mapping[int, Popen[bytes]], bindings: Sequence[DeviceBinding]) -> bool:
        """Return whether the trial is over on all nodes."""
        store, key = self._round_store, self._decision.key
        try:
            store.check_goes_on()
            if not self._is_over(processes, bindings):
                return False
            self._end(processes)
            if store.is_coordinator:
                self._decide()
            next_s = NEXT_S.of(self._decision.num_ranks)
            what = "the decision after the trial"
            text = store.take(f"{key}/next", what=what, deadline_s=next_s, reader=store.reader)
        except RoundOver:
            self._kill(processes)
            raise
        self.absent = tuple((store.peek(f"{key}/absent") or "").split())
        self._next = None if self.absent else read_decision(text, "decision after the trial")
        return True

    def following(self) -> Decision:
        """Return the decision that the deciding node published."""
        if self._next is None:
            raise ClusterError("a trial ended without a decision on what comes next")
        return self._next

    def _is_over(self, processes: Mapping[int, Popen[bytes]], bindings: Sequence[DeviceBinding]) -> bool:
        """Return whether any node has published the end of the trial; publish the end if this node sees it."""
        store, decision = self._round_store, self._decision
        if store.glance(f"{decision.key}/end"):
            return True
        codes = {local: process.poll() for local, process in processes.items()}
        failure = None
        if len(self._step_s) < self._trial.iterations:
            if any(codes.values()):
                failure = self._describe(codes, bindings)
            elif self._is_late(bindings):
                waited_s = time.monotonic() - self._heard_s
                after = f"after {len(self._step_s)}"
                failure = Failure(cause=f"it hung: no iteration within {waited_s:.0f} s {after}")
            elif not codes or any(code is None for code in codes.values()) or self._has_ended:
                return False
            else:
                # The script ended by itself on this node. The last node where it ends publishes the end of the trial.
                self._has_ended = True
                if store.count(f"{decision.key}/ended") < len(decision.tokens):
                    return False
        store.settle(f"{decision.key}/end", files.dumps(TrialReport(step_s=(), failure=failure, took_s=0.0)))
        return True

    def _is_late(self, bindings: Sequence[DeviceBinding]) -> bool:
        """Return whether an iteration is overdue. Nodes without the last rank see no iterations and wait longer."""
        first_s, next_s = patience_s(self._trial)
        silent_s = time.monotonic() - self._heard_s
        if any(binding.rank == self._decision.num_ranks - 1 for binding in bindings):
            return silent_s > (next_s if self._step_s else first_s)
        return silent_s > first_s + self._trial.iterations * next_s

    def _describe(self, codes: Mapping[int, int | None], bindings: Sequence[DeviceBinding]) -> Failure:
        """Return the failure of a dead worker. A dead worker whose reason is known comes before other dead workers."""
        assert self._streams is not None
        # Close the streams first, because the reason of the death is in the last lines.
        self._streams.close()
        dead = [local for local, code in codes.items() if code]
        known = {local: megatron.explain_failure("\n".join(self._streams.tail(local))) for local in dead}
        local = max(dead, key=lambda one: known[one] is not None)
        why = known[local] or megatron.failure_of(workers.last_words(self._streams.tail(local)))
        return replace(why, rank=bindings[local].rank, exit_code=codes[local] or 0)

    def _end(self, processes: Mapping[int, Popen[bytes]]) -> None:
        """Remove this node's workers and their files, and report their step times."""
        self._kill(processes)
        if self._streams is not None:
            self._streams.close()
        self.drop_logs()
        if self._token in self._decision.tokens:
            self._controller.workers_are_gone()
            took_s = time.monotonic() - self._began_s
            report = TrialReport(step_s=tuple(self._step_s), failure=None, took_s=took_s)
            self._round_store.put(f"{self._decision.key}/report/{self._token}", files.dumps(report))

    def _decide(self) -> None:
        """Collect the reports of all nodes, and publish the next decision."""
        store, decision, key = self._round_store, self._decision, self._decision.key
        found, absent = reports(store, decision, TrialReport, prefix=f"{key}/report", patience_s=TRIAL_REPORT_S)
        following = ""
        if absent:
            store.put(f"{key}/absent", " ".join(absent))
        else:
            end = store.peek(f"{key}/end")
            whole = TrialReport(
                step_s=max((report.step_s for report in found), key=len),
                failure=files.loads(TrialReport, end, "how the trial ended").failure if end else None,
                took_s=max(report.took_s for report in found),
            )
            following = files.dumps(self._controller.after_trial(self._trial, whole))
        store.put(f"{key}/next", following)
