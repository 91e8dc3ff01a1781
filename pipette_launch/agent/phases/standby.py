"""A node that is in the round and runs no workers: it follows the others, and may take part in the next round.

All nodes stay in one round: the store of the round may live in the very agent that runs nothing, and a node that stands
by takes the place of one that is lost.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from pipette_launch.agent.sync.agreement import PEER_WAIT_S
from pipette_launch.agent.sync.store import MOST_BYTES, pack, unpack
from pipette_launch.errors import ClusterError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from pipette_launch.agent.controller import Policy, WarmupView
    from pipette_launch.agent.sync.store import RoundStore
    from pipette_launch.facts.messages import Decision


class NoLogs(LogsSpecs):
    """Where no worker writes."""

    @property
    def root_log_dir(self) -> str:
        """Nowhere."""
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:  # noqa: ARG002
        """Name no file but the one that torch opens for lines that it picks from all workers."""
        destinations = LogsDest()
        for name in ("filtered_stdout", "filtered_stderr"):
            if hasattr(destinations, name):
                setattr(destinations, name, os.devnull)
        return destinations


def run_nothing(spec: WorkerSpec) -> NoLogs:
    """Prepare a start of no workers, which is torch's own start: from then on the agent hears signals."""
    # No function: torch starts those in ways that want at least one worker.
    spec.entrypoint, spec.args = sys.executable, ()
    return NoLogs()


class Relay:
    """Brings what the warm-up measured from the node of RANK 0 to the one that decides, if that one took no part."""

    def __init__(
        self, round_store: RoundStore, decision: Decision, token: str, *, policy: Policy, view: WarmupView
    ) -> None:
        self._round_store = round_store
        self._decision = decision
        self._policy = policy
        self._view = view
        self._stood_by = token in decision.standby
        # In torchrun's order the node that decides comes first, unless it stands by.
        self._gives = not round_store.is_coordinator and token == decision.tokens[0]

    def hand_over(self) -> None:
        """Give the measurements away where they are not known to whoever decides."""
        if not self._gives:
            return
        packed = pack(self._view.measured())
        pieces = [packed[start : start + MOST_BYTES] for start in range(0, len(packed), MOST_BYTES)]
        for index, piece in enumerate(pieces):
            self._round_store.put(f"measured/{index}", piece)
        self._round_store.put("measured", str(len(pieces)))

    def plan(self, failure: str) -> Decision:
        """Let the node that decides make the plan.

        Args:
            failure: why the warm-up failed, as far as this node knows.

        """
        if self._stood_by:
            # It has watched no workers.
            failure = self._round_store.peek("warmup-failed") or self._take_over()
        return self._policy.after_warmup(self._decision, failure)

    def _take_over(self) -> str:
        """Take the measurements from the other node; returns why they could not be had, or nothing."""
        try:
            what = "what the warm-up measured"
            count = int(self._round_store.take("measured", what=what, deadline_s=PEER_WAIT_S))
            text = unpack("".join(self._round_store.peek(f"measured/{index}") or "" for index in range(count)))
        except (ClusterError, ValueError) as error:
            return str(error)
        if not text:
            return "the first worker of the warm-up left no measurements"
        self._view.receive(text)
        return ""
