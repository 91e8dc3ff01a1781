"""The phases of a round on one node: warm-up, trials, training, or standby without workers.

All nodes stay in one round. The store of the round may live in an agent that runs no workers, and a node on standby
takes the place of a lost one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from subprocess import Popen

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from pipette_launch.agent.controller import Controller
from pipette_launch.agent.store import MOST_BYTES, PEER_WAIT_S, RoundOver, RoundStore, pack, plan_of_first, unpack
from pipette_launch.agent.streams import Streams
from pipette_launch.agent.trial import TrialRun
from pipette_launch.agent.warmup import Warmup
from pipette_launch.agent.workers import DeviceBinding
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files
from pipette_launch.facts.messages import AttemptEnd, Decision, Failure

NEWS_S = 1.0
"""Seconds that a node with a dead worker waits to learn whether another node saw an iteration. The agent of the last
rank looks once per monitoring interval."""


# -- an attempt at training ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Last attempt at training on this node; the node reports the attempt in the next round."""

    index: int = -1
    """Number of the attempt (`Decision.attempt`); -1 if the last phase was not a training."""
    began_s: float = 0.0
    ended: AttemptEnd = "none"
    failure: Failure | None = None


class FirstIteration:
    """First iteration of an attempt, seen by this agent or published by another agent."""

    def __init__(self) -> None:
        self._round_store: RoundStore | None = None
        self._proven = False
        self._seen = False
        self._published = False

    def begin(self, round_store: RoundStore, *, proven: bool) -> None:
        """Begin a new attempt; `proven` is true if this plan has trained before."""
        self._round_store, self._proven, self._seen, self._published = round_store, proven, False, False

    def see(self) -> None:
        """Note an iteration; called by the thread that reads the workers' output."""
        self._seen = True

    def share(self) -> None:
        """Publish the first iteration if this node saw it; else read whether another node did."""
        if self._published or self._round_store is None:
            return
        if self._seen:
            self._round_store.put("iterated", "yes")
        else:
            self._seen = self._round_store.has("iterated")
        self._published = self._seen

    def has_trained(self, *, wait_s: float = 0.0) -> bool:
        """Return whether any node saw an iteration under this plan; wait up to `wait_s` for news."""
        if self._proven or self._seen or self._round_store is None:
            return self._proven or self._seen
        end = time.monotonic() + (wait_s if self._round_store.group_size > 1 else 0.0)
        # If the store is gone, only the observation of this node counts.
        with contextlib.suppress(RoundOver):
            while not (known := self._round_store.has("iterated")) and time.monotonic() < end:
                time.sleep(0.1)
            return known
        return False

    def settle(self, *, trained: bool) -> AttemptEnd:
        """Agree with all nodes on how the attempt ended; the answer of the first node counts."""
        mine: AttemptEnd = "after-first-iteration" if trained else "before-first-iteration"
        if self._round_store is None:
            return mine
        with contextlib.suppress(RoundOver):
            self.share()
            settled = self._round_store.settle("verdict", mine)
            return "before-first-iteration" if settled == "before-first-iteration" else "after-first-iteration"
        return mine


# -- standby ------------------------------------------------------------------------------------------------------


class NoLogs(LogsSpecs):
    """Log settings of a node without workers."""

    @property
    def root_log_dir(self) -> str:
        """Return the null device."""
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:  # noqa: ARG002
        """Name no file except the null device, which torch opens for lines filtered from all workers."""
        destinations = LogsDest()
        for name in ("filtered_stdout", "filtered_stderr"):
            if hasattr(destinations, name):
                setattr(destinations, name, os.devnull)
        return destinations


def run_nothing(spec: WorkerSpec) -> NoLogs:
    """Let torch start zero workers, so that torch's agent installs its signal handlers."""
    # A program and not a function: torch starts functions in ways that need at least one worker.
    spec.entrypoint, spec.args = sys.executable, ()
    return NoLogs()


class Relay:
    """Sends the measurements from the node of RANK 0 to a deciding node that ran no warm-up workers."""

    def __init__(self, round_store: RoundStore, decision: Decision, token: str, controller: Controller) -> None:
        self._round_store = round_store
        self._decision = decision
        self._controller = controller
        self._stood_by = token in decision.standby
        # The deciding node comes first in torchrun's order, unless it is on standby.
        self._gives = not round_store.is_coordinator and token == decision.tokens[0]

    def hand_over(self) -> None:
        """Publish the measurements, if this node made them and another node decides."""
        if not self._gives:
            return
        path = self._controller.measured_path
        packed = pack(path.read_text() if path.exists() else "")
        pieces = [packed[start : start + MOST_BYTES] for start in range(0, len(packed), MOST_BYTES)]
        for index, piece in enumerate(pieces):
            self._round_store.put(f"measured/{index}", piece)
        self._round_store.put("measured", str(len(pieces)))

    def plan(self, failure: str) -> Decision:
        """Make the plan on the deciding node; `failure` is why the warm-up failed, or empty if not known."""
        if self._stood_by:
            failure = self._round_store.peek("warmup-failed") or self._take_over()
        return self._controller.after_warmup(self._decision, failure)

    def _take_over(self) -> str:
        """Fetch the measurements from the store; return why the transfer failed, or an empty text."""
        try:
            what = "the measurements of the warm-up"
            count = int(self._round_store.take("measured", what=what, deadline_s=PEER_WAIT_S))
            text = unpack("".join(self._round_store.peek(f"measured/{index}") or "" for index in range(count)))
        except (ClusterError, ValueError) as error:
            return str(error)
        if not text:
            return "the first worker of the warm-up left no measurements"
        files.write_text(self._controller.measured_path, text)
        return ""


# -- before the training ------------------------------------------------------------------------------------------


class PhasesBeforeTraining:
    """Warm-up and trials on the node of one agent."""

    def __init__(self, controller: Controller, address: str) -> None:
        self._controller = controller
        self._warmup = Warmup(controller, address)
        self._trial = TrialRun(controller)

    def begin(self, decision: Decision) -> None:
        """Forget an earlier trial; called on every node, with or without workers."""
        if decision.phase == "trial":
            self._trial.begin()

    def open_logs(self, decision: Decision) -> tuple[Streams | None, LogsSpecs]:
        """Return the reader of the workers' output (None if no reader is needed), and torch's log settings."""
        return (None, self._warmup.begin()) if decision.phase == "warmup" else self._trial.open_logs()

    def variables(self, decision: Decision) -> dict[str, str]:
        """Return environment variables that workers of this phase get besides the variables in the decision."""
        return self._trial.variables if decision.phase == "trial" else {}

    def drop_logs(self) -> None:
        """Delete the workers' output, except after a failed warm-up."""
        self._warmup.drop_logs()
        self._trial.drop_logs()

    def is_over(
        self,
        round_store: RoundStore,
        decision: Decision,
        token: str,
        *,
        processes: Mapping[int, Popen[bytes]],
        bindings: Sequence[DeviceBinding],
    ) -> bool:
        """Return whether the phase is over on all nodes, also by a failure or a hang."""
        if decision.phase == "warmup":
            return self._warmup.look(round_store, decision, token, processes) != "running"
        return self._trial.look(round_store, decision, token, processes, bindings)

    def absent(self, decision: Decision) -> tuple[str, ...]:
        """Return the hosts that are gone. If a host is gone, the round ends with the phase."""
        return self._warmup.absent if decision.phase == "warmup" else self._trial.absent

    def following(self, round_store: RoundStore, decision: Decision, token: str) -> Decision:
        """Return the next decision for all nodes."""
        if decision.phase != "warmup":
            if self._trial.following is None:
                raise ClusterError("a trial ended without a decision on what comes next")
            return self._trial.following
        relay = Relay(round_store, decision, token, self._controller)
        relay.hand_over()
        return plan_of_first(
            round_store,
            make=lambda: relay.plan(self._warmup.failure),
            deadline_s=PEER_WAIT_S + self._controller.warmup_deadline_s,
        )
