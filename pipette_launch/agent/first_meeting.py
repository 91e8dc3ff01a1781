"""The meeting place of a job: a store at the endpoint of the rendezvous, where agents come into the job.

Each agent adds one to a counter, and puts its address under the number that it got. The leader reads all
introductions, and invites agents by its own address. So N agents send O(N) messages. The agents meet at the leader
(`membership`), now and after each failure, when the leader invites the agents that came meanwhile.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import compress

from torch.distributed import Store

from pipette_launch.agent.endpoint import advice
from pipette_launch.agent.peers import answers, why_unreachable
from pipette_launch.agent.rendezvous import RendezvousSettings
from pipette_launch.agent.store import AgentStore, StoreGone, growing_pauses
from pipette_launch.defaults import FIRST_ANSWER_S, HOST_SILENCE_S, PROBE_S, PROOF_S
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files
from pipette_launch.facts.messages import Invitation, Member
from pipette_launch.text import listed, say

FIRST_LINE_S = 15.0
"""Seconds until a node prints the first line about missing nodes."""
LINE_GROWTH = 4
"""Factor between the waiting times at which two successive lines are printed."""
MOST_SPEAKERS = 8
"""Largest number of nodes that all print the missing nodes. In larger jobs only the leader prints."""
MOST_NAMES = 8
LOOK_S = 1.0
"""Seconds between two looks of a waiting agent at the state of the job."""
NO_LEADER_S = 3.0
"""Seconds after which an agent leads, if no agent holds the store. An agent that holds the store leads at once."""
MOST_AT_ONCE = 256
HOLDER = "the holder of the store"
"""Text under `leader` if an agent holds the store; else the token of the first agent."""
ENDED = "ended"
"""Text under `ended` after the regular end of a job. Any other text is the reason why the nodes cannot meet."""

logger = logging.getLogger(__name__)


class MeetingPlace:
    """One agent's view of the store at the endpoint of the rendezvous."""

    def __init__(self, store: Store, settings: RendezvousSettings, *, holds_store: bool) -> None:
        """Use the store; `holds_store` is true if this process holds it, so that it always answers."""
        prefix = f"pipette/{settings.run_id}"
        self._patient = AgentStore(store, prefix, limit_s=None if holds_store else FIRST_ANSWER_S)
        self._quick = AgentStore(store, prefix, limit_s=None if holds_store else PROOF_S)
        """The store as later meetings use it, which must not wait for a host that is lost."""
        self._store = self._patient
        self._settings = settings
        self._holds_store = holds_store
        if holds_store:
            # Other agents may come before this agent has described its node.
            self._store.settle("leader", HOLDER)
        self._next_line_s = FIRST_LINE_S
        self._began_s = 0.0
        self._number = 0
        """Number of this agent's introduction, from 1."""
        self._is_late = False
        """True if the job had started when this agent came."""

    # -- every agent ----------------------------------------------------------------------------------------------

    def arrive(self, own: Member) -> bool:
        """Introduce this agent; return whether it leads the first meeting of the job.

        Raises ClusterError if the job has ended, or the store is gone.
        """
        self._began_s, self._next_line_s, self._is_late = time.monotonic(), FIRST_LINE_S, False
        self._store = self._patient
        try:
            if why := self._store.peek("ended"):
                raise ClusterError(why if why != ENDED else self._ended_before())
            self._number = self._store.count("arrived")
            self._store.put(f"member/{self._number}", files.dumps(own))
            while (leader := self._store.peek("leader")) is None:
                if self._waited_s() > NO_LEADER_S:
                    self._store.settle("leader", own.token)
                time.sleep(PROBE_S)
            leads = self._holds_store if leader == HOLDER else leader == own.token
            return leads and not self._store.exists("started")
        except StoreGone as error:
            raise ClusterError(self._lost_words(error)) from error

    def await_invitation(self) -> Invitation:
        """Wait until a leader invites this agent.

        Raises ClusterError if the nodes do not meet in time, the job has ended, or its nodes do not need this agent.
        """
        looked_s = time.monotonic()
        for pause_s in growing_pauses(self._settings.most_nodes):
            time.sleep(pause_s)
            try:
                if invitation := self._invitation():
                    return invitation
                if time.monotonic() - looked_s > LOOK_S:
                    looked_s = time.monotonic()
                    self._look()
            except StoreGone as error:
                words = self._lost_words(error)
                if self._is_late:
                    words = "the job has ended with its own nodes, and this launcher took no part in it"
                raise ClusterError(words) from error
        raise AssertionError

    def _invitation(self) -> Invitation | None:
        text = self._store.peek(f"invitation/{self._number}")
        return files.loads(Invitation, text, "invitation to the job") if text else None

    def _look(self) -> None:
        """Raise ClusterError if this agent waits in vain; print a line if one is due."""
        if why := self._store.peek("ended"):
            words = "the job has ended with its own nodes, and this launcher took no part in it"
            raise ClusterError(why if why != ENDED else words if self._is_late else self._ended_before())
        # The leader stores all invitations before the names of its nodes.
        names = self._store.peek("started")
        if names and not self._is_late and not self._invitation():
            self._note_late(names.splitlines())
        waited_s = self._waited_s()
        if self._is_late and waited_s > self._settings.join_s:
            raise ClusterError(
                f"the job went on without this launcher for {waited_s:.0f} s, as long as --rdzv-conf join_timeout "
                "allows"
            )
        if not self._is_late and self._settings.most_nodes <= MOST_SPEAKERS:
            self._speak(self._introductions(after=0))
        if waited_s > self._settings.join_s + LOOK_S + PROOF_S:
            # The leader ends earlier, with the names of the missing nodes.
            raise ClusterError(self._cannot_meet(self._introductions(after=0)))

    def _note_late(self, names: Sequence[str]) -> None:
        """Print that the job has started without this agent; raise ClusterError if the job can never need it."""
        settings, there = self._settings, listed(names, MOST_NAMES)
        job = f"the job at {settings.endpoint} with --rdzv-id {settings.run_id}"
        self._is_late = True
        if len(names) < settings.most_nodes:
            say(
                f"{job} has started without this launcher, on {there}; waiting up to {settings.join_s:.0f} s until "
                f"its nodes meet again after a failure{settings.advice}"
            )
            return
        nodes = "its one node" if settings.most_nodes == 1 else f"all its {settings.most_nodes} nodes"
        words = (
            f"{job} already has {nodes} ({there}), so this launcher is one too many; raise --nnodes if it belongs to "
            f"that job, or give another --rdzv-endpoint if it is another job"
        )
        if settings.least_nodes == settings.most_nodes:
            # The loss of a node ends such a job.
            raise ClusterError(f"{words}{settings.advice}")
        say(f"{words}; waiting to take the place of a lost node{settings.advice}")

    def end(self, why: str = ENDED) -> None:
        """Tell agents that still come that the job has ended."""
        with suppress(StoreGone):
            self._store.put("ended", why)

    def refuse(self, why: str) -> None:
        """Tell waiting agents why the nodes cannot meet, before this agent ends."""
        self.end(why)
        time.sleep(PROOF_S)  # Other agents read the reason in this store, which may end with this agent.

    # -- the leader -----------------------------------------------------------------------------------------------

    def gather(self, own: Member) -> dict[int, Member]:
        """Wait for the nodes of the first meeting; return their introductions by number, this agent's first.

        The wait ends when MAX nodes of --nnodes are there, or `last_call_s` after MIN nodes. Nodes that can
        no longer be reached do not count. Raises ClusterError if fewer than MIN nodes came in time.
        """
        settings, there = self._settings, {self._number: own}
        last, last_call_ends_s, looked_s = 0, math.inf, -LOOK_S
        for pause_s in growing_pauses():
            found, last = self._newcomers(last, there)
            there |= found
            waited_s = self._waited_s()
            if len(there) >= settings.least_nodes:
                last_call_ends_s = min(last_call_ends_s, waited_s + settings.last_call_s)
            is_over = waited_s > last_call_ends_s
            if (is_over or len(there) >= settings.most_nodes) and waited_s - looked_s > LOOK_S:
                looked_s = waited_s
                others = {number: one for number, one in there.items() if number != self._number}
                # One connection to each node is enough: an answer would need a look at the name service of every node.
                reached = {self._number: own} | _such(others, lambda one: not why_unreachable(one, timeout_s=PROBE_S))
                if len(reached) >= (settings.least_nodes if is_over else settings.most_nodes):
                    return dict(list(reached.items())[: settings.most_nodes])
            self._speak(there)
            if self._waited_s() > settings.join_s:
                why = self._cannot_meet(there)
                self.refuse(why)
                raise ClusterError(why)
            time.sleep(pause_s)
        raise AssertionError

    @property
    def most_nodes(self) -> int:
        """MAX of --nnodes."""
        return self._settings.most_nodes

    def newcomers(self, after: int) -> tuple[dict[int, Member], int]:
        """Return the introductions of agents that came later, by number, and the number of the last one.

        `after` is the largest number that earlier meetings know. Nothing is found if the store is gone.
        """
        self._store = self._quick
        try:
            found, last = self._newcomers(after, {})
        except StoreGone as error:
            logger.info("new nodes cannot come: the store at %s is gone: %s", self._settings.endpoint, error)
            return {}, after
        return _such(found, lambda one: answers(one, within_s=HOST_SILENCE_S)), last

    def invite(self, numbers: Sequence[int], invitation: Invitation) -> None:
        """Invite the agents with these numbers to a meeting."""
        with suppress(StoreGone):
            for number in numbers:
                self._store.put(f"invitation/{number}", files.dumps(invitation))

    def start(self, names: Sequence[str]) -> None:
        """Publish the names of the job's nodes, for agents that come too late."""
        with suppress(StoreGone):
            self._store.put("started", "\n".join(names))

    def _newcomers(self, after: int, known: dict[int, Member]) -> tuple[dict[int, Member], int]:
        found = self._introductions(after=after, but=known)
        last = after
        # An agent has its number before its introduction is in the store.
        while last + 1 in found or last + 1 in known:
            last += 1
        return found, last

    # -- words ----------------------------------------------------------------------------------------------------

    def _introductions(self, *, after: int, but: dict[int, Member] | None = None) -> dict[int, Member]:
        found = {}
        for number in range(after + 1, self._store.count("arrived", 0) + 1):
            if but and number in but:
                continue
            if text := self._store.peek(f"member/{number}"):
                found[number] = files.loads(Member, text, f"introduction of node {number}")
        return found

    def _speak(self, there: dict[int, Member]) -> None:
        """Print the missing nodes, if a line is due."""
        if len(there) < self._settings.least_nodes and self._waited_s() >= self._next_line_s:
            self._next_line_s *= LINE_GROWTH
            hints = advice(self._settings, os.environ)
            say(f"{self._missing(there)}; waiting up to {self._settings.join_s:.0f} s{hints}")

    def _cannot_meet(self, there: dict[int, Member]) -> str:
        return f"the nodes cannot meet: {self._missing(there)}{advice(self._settings, os.environ)}"

    def _missing(self, there: dict[int, Member]) -> str:
        """Return a sentence about the missing nodes, with their ranks if known, else with their number."""
        settings, least, most = self._settings, self._settings.least_nodes, self._settings.most_nodes
        nodes = f"{least} nodes" if least == most else f"{least} to {most} nodes"
        names = sorted(one.name for one in there.values())
        where = (
            f"{len(names)} of {nodes} have come to {settings.endpoint} in {self._waited_s():.0f} s "
            f"({listed(names, MOST_NAMES)})"
        )
        if settings.node_rank >= 0:
            ranks = {one.node_rank for one in there.values()}
            missing = [str(rank) for rank in range(most) if rank not in ranks]
            return f"{where}; missing: --node-rank {listed(missing, MOST_NAMES)}"
        return f"{where}; each launcher needs the same --rdzv-endpoint and --rdzv-id ({settings.run_id})"

    def _ended_before(self) -> str:
        return (
            f"the job with --rdzv-id {self._settings.run_id} has ended before this launcher joined it, and its id "
            "cannot be used again; start all launchers of a job together, and give each job an id of its own"
        )

    def _lost_words(self, error: StoreGone) -> str:
        return (
            f"the nodes cannot meet: the store at {self._settings.endpoint} was there, and is gone ({error}); look at "
            f"the launcher on that host, and at the network between it and the other nodes"
        )

    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s


def _such(found: Mapping[int, Member], test: Callable[[Member], bool]) -> dict[int, Member]:
    """Return the agents that pass a test, which is made for many agents at the same time."""
    with ThreadPoolExecutor(min(max(len(found), 1), MOST_AT_ONCE)) as pool:
        return dict(compress(found.items(), list(pool.map(test, found.values()))))
