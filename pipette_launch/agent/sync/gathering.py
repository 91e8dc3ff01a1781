"""How the first agent waits for the others at a meeting, and finds out who will never come."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pipette_launch.agent.sync.agreement import PEER_WAIT_S
from pipette_launch.agent.sync.peer_watch import GONE, answers, why_unreachable
from pipette_launch.agent.sync.store import growing_pauses
from pipette_launch.defaults import HOST_SILENCE_S
from pipette_launch.facts import files
from pipette_launch.facts.messages import Arrival

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipette_launch.agent.sync.store import AgentStore
    from pipette_launch.facts.messages import Member

PROBE_S = 0.5
PROOF_S = 1.5


class Gathering:
    """The agents that have come to a meeting, and those that are lost."""

    def __init__(
        self, others: Sequence[Member], desk: AgentStore, lost: dict[str, str], told_of: Callable[[Member, str], str]
    ) -> None:
        """Begin.

        Args:
            others: who is to come.
            desk: where they leave word.
            lost: why some are believed lost already, by token; whoever comes is taken off it.
            told_of: what was said of an agent in the round before: that it `left`, or is `lost`; empty for nothing.

        """
        self.arrivals: dict[str, Arrival] = {}
        self.lost = lost
        self.surely_gone: set[str] = set()
        """Those of the lost that cannot train on somewhere else: their kernels say so, or they did."""
        self._others = others
        self._desk = desk
        self._told_of = told_of
        self._missed_s: dict[str, float] = {}

    def wait(self) -> None:
        """Wait until all have come, or are known to be lost."""
        began_s = probed_s = time.monotonic()
        for pause_s in growing_pauses():
            self._receive()
            missing = [one for one in self._others if one.token not in self.arrivals and one.token not in self.lost]
            if not missing:
                return
            now_s = time.monotonic()
            if now_s - began_s > PEER_WAIT_S:
                self.lost.update({member.token: "its agent does not answer" for member in missing})
            elif now_s - probed_s > PROBE_S:
                probed_s = now_s
                self._find_lost(missing)
            time.sleep(pause_s)

    def _receive(self) -> None:
        for member in self._others:
            text = None if member.token in self.arrivals else self._desk.peek(f"arrival/{member.token}")
            if text is not None:
                self._desk.drop(f"arrival/{member.token}")
                self.arrivals[member.token] = files.loads(Arrival, text, f"record of {member.address}")
                # Whoever comes is there, whatever others believed.
                self.lost.pop(member.token, None)

    def _find_lost(self, missing: Sequence[Member]) -> None:
        """Find out who of those that have not come will never come."""
        with ThreadPoolExecutor(min(len(missing), 32)) as pool:
            found = list(pool.map(self._look_for, missing))
        now_s = time.monotonic()
        for member, (why, lost) in zip(missing, found, strict=True):
            left = self._told_of(member, "left")
            if why == GONE or left:
                self.surely_gone.add(member.token)
                self.lost[member.token] = left or why
                continue
            if not (why or lost):
                self._missed_s.pop(member.token, None)
                continue
            # One that others saw to be silent, too, has but a moment to prove that it is not.
            if now_s - self._missed_s.setdefault(member.token, now_s) > (PROOF_S if lost else HOST_SILENCE_S):
                self.lost[member.token] = lost or why

    def _look_for(self, member: Member) -> tuple[str, str]:
        """Say why an agent cannot be reached, and why others believe it lost; both empty where it answers."""
        why, lost = why_unreachable(member, timeout_s=PROBE_S), self._told_of(member, "lost")
        # The kernel of a stopped process takes connections, too. A store answers while its agent waits for its workers.
        return why, lost if lost and (why or not answers(member, within_s=PROBE_S)) else ""
