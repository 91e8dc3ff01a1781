"""Base class of the phases before the training, and the first iteration of an attempt at training.

The agent that holds the store of the round may run no workers.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from subprocess import Popen

from torch.distributed.elastic.multiprocessing.api import LogsSpecs

from pipette_launch.agent import workers
from pipette_launch.agent.store import RoundOver, RoundStore
from pipette_launch.agent.streams import Streams
from pipette_launch.facts.co_location import DeviceBinding
from pipette_launch.facts.messages import AttemptEnd, Decision, Failure
from pipette_launch.launch.node_controller import NodeController


class PhaseBeforeTraining(ABC):
    """A warm-up or a trial, as one agent runs it on its node."""

    def __init__(self, controller: NodeController, round_store: RoundStore, decision: Decision, token: str) -> None:
        """Begin the phase; `token` names this agent."""
        self._controller = controller
        self._round_store = round_store
        self._decision = decision
        self._token = token
        self._began_s, self._started_s = time.monotonic(), time.time()
        self._logs = ""
        """Folder of the workers' output; empty on a node without workers."""
        self._has_ended = False
        self.absent: tuple[str, ...] = ()
        """Hosts that have left the round. If a host has left, the round ends with this phase."""

    @abstractmethod
    def open_logs(self) -> tuple[Streams | None, LogsSpecs]:
        """Return the reader of the workers' output (None if no reader is needed), and torch's log settings."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the workers get in addition to the variables of the controller's command."""
        return {}

    @abstractmethod
    def look(self, processes: Mapping[int, Popen[bytes]], bindings: Sequence[DeviceBinding]) -> bool:
        """Return whether the phase is over on all nodes, also by a failure or a hang.

        `processes` and `bindings` describe this node's workers by local rank. Raises RoundOver if an agent is lost.
        """

    @abstractmethod
    def following(self) -> Decision:
        """Return the next decision for all nodes."""

    def drop_logs(self) -> None:
        """Delete the folder of the workers' output."""
        if self._logs:
            shutil.rmtree(self._logs, ignore_errors=True)
        self._logs = ""

    def _kill(self, processes: Mapping[int, Popen[bytes]]) -> tuple[int, ...]:
        """Kill the workers and all processes that they started; return the process ids that the kernel cannot end."""
        # A node without workers has no output folder by which to recognise the workers' children.
        return workers.end(processes, began_s=self._started_s, mark=self._logs) if self._logs else ()


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

    def __init__(self, round_store: RoundStore, *, proven: bool) -> None:
        """Begin a new attempt; `proven` is true if this plan has trained before."""
        self._round_store, self._proven = round_store, proven
        self._seen = self._published = False

    def see(self) -> None:
        """Note that this node's workers printed an iteration; called by the thread that reads their output."""
        self._seen = True

    def share(self) -> None:
        """If this node saw the first iteration, publish that in the store; else read whether another node saw it."""
        if self._published:
            return
        if self._seen:
            self._round_store.put("iterated", "yes")
        else:
            self._seen = self._round_store.glance("iterated")
        self._published = self._seen

    def has_trained(self, *, wait_s: float = 0.0) -> bool:
        """Return whether any node saw an iteration under this plan; wait at most `wait_s` for another node's report."""
        end = time.monotonic() + (wait_s if self._round_store.group_size > 1 else 0.0)
        # If the store is gone, only the observation of this node counts.
        with contextlib.suppress(RoundOver):
            while not (known := self._proven or self._seen or self._round_store.has("iterated")):
                if time.monotonic() >= end:
                    break
                time.sleep(0.1)
            return known
        return False

    def settle(self, *, trained: bool) -> AttemptEnd:
        """Agree with all nodes on how the attempt ended; the first answer in the store counts."""
        mine: AttemptEnd = "after-first-iteration" if trained else "before-first-iteration"
        with contextlib.suppress(RoundOver):
            self.share()
            settled = self._round_store.settle("verdict", mine)
            return "before-first-iteration" if settled == "before-first-iteration" else "after-first-iteration"
        return mine
