"""Meetings of agents, at the start and after each failure: find lost agents and cut links, and share one decision."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NoReturn, TypeAlias

from torch.distributed import Store

from pipette_launch.agent.first_meeting import MeetingPlace
from pipette_launch.agent.peers import (
    GONE,
    MOST_KEPT,
    RETRY_S,
    SILENT,
    OpenConnections,
    PeerWatch,
    ReachSweep,
    answers,
    connected,
    why_unreachable,
)
from pipette_launch.agent.signature import Signer
from pipette_launch.agent.store import (
    BROKEN,
    AgentStore,
    Reader,
    RoundStore,
    StoreGone,
    growing_pauses,
    open_store,
    parent_of,
)
from pipette_launch.defaults import FIRST_ANSWER_S, HAND_ON_S, HOST_SILENCE_S, PEER_WAIT_S, PROBE_S, PROOF_S
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files
from pipette_launch.facts.messages import (
    Arrival,
    Decision,
    Invitation,
    Member,
    Members,
    NodeRecord,
    best_left_out,
    read_decision,
)

PARTED = "parted: "
"""First word of the answer to agents whose part of a divided network must end; the reason follows."""
REFUSING = "it refuses connections, as a firewall may do"
LEFT_OUT = "left out"
"""Answer to an agent if the other agents went on without that agent."""

MOST_AT_ONCE = 256
"""Most agents that an agent tries to reach at the same time."""

Decide: TypeAlias = "Callable[[Sequence[NodeRecord], Decision | None, Mapping[str, str]], Decision]"

logger = logging.getLogger(__name__)


class LeftOut(Exception):  # noqa: N818
    """The job goes on without this agent, or its leader was lost before this agent took part."""


class Membership:
    """One agent's knowledge of all agents of its job."""

    def __init__(
        self,
        token: str,
        address: str,
        node_rank: int,
        role: str = "default",
        *,
        name: str = "",
        signer: Signer | None = None,
    ) -> None:
        """Open this agent's store at `address`, by which other nodes reach this node.

        `name` is --local-addr, if it was given.
        """
        self.server = open_store(address)
        self._own = Member(
            token=token,
            address=address,
            port=self.server.port,
            node_rank=node_rank,
            role=role,
            name=name or socket.getfqdn(),
            pid=os.getpid(),
        )
        self._signer = signer or Signer()
        self._desk = AgentStore(self.server, "pipette", limit_s=None, signer=self._signer)
        """Store where other agents announce their arrival while this agent leads the meeting."""
        self._members: tuple[Member, ...] = ()
        self._place: MeetingPlace | None = None
        self._num_arrived = 0
        """Largest number of an introduction at the meeting place that a meeting has considered."""
        self._lost: dict[str, str] = {}
        """Reasons why members are believed lost, by token. The next meeting does not wait for lost members."""
        self._left: set[str] = set()
        """Lost members that reported their own end."""
        self._refusing: set[str] = set()
        """Lost members whose hosts refuse connections: the members have ended, or a firewall rejects this agent."""
        self._connections = OpenConnections()
        self._leader: Member | None = None
        """The agent that made the last decision."""
        self._leader_store: Store | None = None
        """Client of the store of the agent that made the last decision; None if this agent made the last decision."""
        self._round_store: RoundStore | None = None
        self._finders: tuple[PeerWatch | ReachSweep, ...] = ()
        """Threads that look for lost agents during the round."""
        self._out_of_reach: set[str] = set()
        """Tokens of agents to which this agent cannot connect."""
        self._num_meetings = 0
        self._last_arrivals: dict[str, int] = {}
        """Number of each agent's last meeting that this agent led, by token. An arrival at an older one is no news."""
        self._past: set[str] = set()
        """Names of all rounds that this agent has been in, which never come again."""

    def join(self, place: MeetingPlace) -> None:
        """Come into the job: find the leader of the next meeting, or become the leader of the first meeting.

        Raises ClusterError if the nodes cannot meet, or this node cannot take part.
        """
        # An old list of members would make other agents believe that this agent was left out.
        self._desk.drop("round")
        self._place = place
        self._lost, self._left, self._refusing = {}, set(), set()
        self._leader, self._leader_store, self._round_store = None, None, None
        introduced = self._signer.introduced(self._own)
        if place.arrive(introduced):
            self._members = self._first_members(place, introduced)
            return
        invitation = place.await_invitation()
        self._signer.admitted((invitation.leader,), is_signed=invitation.is_signed)
        self._members = (replace(invitation.leader, proof=""), self._own)

    def _first_members(self, place: MeetingPlace, introduced: Member) -> tuple[Member, ...]:
        """Wait for the nodes of the first meeting, and invite them; return them, this agent first."""
        there = place.gather(introduced)
        found = tuple(there.values())
        is_signed = self._signer.is_on or all(map(self._signer.is_proven, found))
        if len(found) > 1 and not is_signed:
            logger.warning("%s", self._signer.why_unsigned(found))
        try:
            admitted = self._signer.admitted(found, is_signed=is_signed)
        except ClusterError as error:
            place.refuse(str(error))
            raise
        others = [number for number, member in there.items() if member != introduced]
        place.invite(others, Invitation(leader=introduced, is_signed=is_signed))
        self._num_arrived = max(others, default=0)
        return tuple(replace(member, proof="") for member in admitted)

    @property
    def has_joined(self) -> bool:
        """True if this agent knows the leader of the next meeting."""
        return bool(self._members)

    def with_own_role(self, tokens: Sequence[str]) -> tuple[str, ...]:
        """Return the tokens of the agents whose workers have the same `--role` as this agent's workers."""
        own = {member.token for member in self._members if member.role == self._own.role}
        return tuple(token for token in tokens if token in own)

    def leave_behind(self, tokens: Sequence[str], why: str) -> None:
        """Mark agents as lost, so that the next meeting does not wait for these agents."""
        self._lost.update(dict.fromkeys(tokens, why))

    def say_leaving(self, why: str) -> None:
        """Report that this agent leaves, so that other agents go on while this agent's workers end."""
        if self._round_store is not None:
            self._round_store.say(f"left/{self._own.token}", why)
            self._round_store.say("alarm", why)

    def meet(self, record: NodeRecord, held: Decision | None, *, decide: Decide) -> tuple[Decision, RoundStore]:
        """Meet the other agents; return the decision for all agents, and the store of the new round.

        `held` is this node's decision of the last round. Only the first agent calls `decide`, with all nodes and the
        reasons why hosts are lost. Raises LeftOut if the other agents went on without this agent, which then has to
        join again. Raises ClusterError if too few agents can be reached.
        """
        self._stop_watching()
        self._num_meetings += 1
        if any(one.token not in self._lost for one in self._members[: self._members.index(self._own)]):
            # The first agent looks for missing agents itself, while it waits for the others.
            self._report_silent(self._check_reach(self._members))
        while True:
            leader = next(member for member in self._members if member.token not in self._lost)
            if leader == self._own:
                return self._lead(record, held, decide)
            try:
                if leader == self._leader and self._leader_store is not None and self._round_store is not None:
                    # If the leader did not answer during the round, this check avoids a second wait for the leader.
                    self._round_store.check_is_there()
                return self._follow(leader, record, held)
            except StoreGone as error:
                if self._round_store is None:
                    self._leave_first_leader(leader, error)
                known, self._leader_store = self._leader_store, None
                if known is not None and str(error) == BROKEN:
                    # Perhaps only the connection to the leader broke, so open a new connection.
                    continue
                logger.warning("the agent at %s no longer decides: %s", leader.address, error)
                self._lost[leader.token] = str(error)
                self._pass_over_unreachable()

    def _leave_first_leader(self, leader: Member, error: StoreGone) -> NoReturn:
        """Go back to the meeting place if the leader is gone: this agent knows no other agent that could lead."""
        self._members = ()
        if GONE not in str(error) and str(error) != BROKEN:
            raise ClusterError(
                f"this node does not reach the first node, {leader.address} port {leader.port}: {error}; the network "
                f"must let each node connect to all ports of the others"
            ) from error
        logger.warning(
            "the agent at %s is gone before this node took part; waiting for another meeting", leader.address
        )
        raise LeftOut(str(error)) from error

    def _pass_over_unreachable(self) -> None:
        """Mark the next leaders as lost if they are out of reach. More at a time, because a network may be cut."""
        before, number = self._members[: self._members.index(self._own)], 1
        while batch := [one for one in before if one.token not in self._lost][:number]:
            found = unreachable(batch, timeout_s=HOST_SILENCE_S)
            self._lost |= found
            self._refusing |= {token for token, why in found.items() if why == GONE}
            if len(found) < len(batch):
                return
            number = min(4 * number, MOST_AT_ONCE)

    # -- another agent decides ------------------------------------------------------------------------------------

    def _follow(self, leader: Member, record: NodeRecord, held: Decision | None) -> tuple[Decision, RoundStore]:
        store = self._store_of(leader)
        desk = AgentStore(store, "pipette", limit_s=HOST_SILENCE_S, signer=self._signer)
        if self._round_store is not None and leader == self._leader:
            # Call the first agent to the meeting, because it may not know why a meeting is needed.
            desk.put(f"{self._round_store.generation}/alarm", "a meeting")
        knows = held is None or leader.token in held.names
        arrival = Arrival(
            meeting=self._num_meetings,
            record=record,
            held="" if knows or held is None else files.dumps(held),
            out_of_reach=tuple(sorted(self._out_of_reach)),
        )
        desk.put(f"arrival/{self._own.token}", files.dumps(arrival))
        answer = self._answer(leader, desk)
        if answer.startswith(PARTED):
            raise ClusterError(answer.removeprefix(PARTED))
        if answer == LEFT_OUT:
            # Delete this agent's arrival, so that no later meeting takes it for a new arrival.
            desk.drop(f"arrival/{self._own.token}")
            self._members = ()
            raise LeftOut(answer)
        generation, place, size, address, port = answer.split()
        parent = replace(leader, address=address, port=int(port))
        reader = Reader(
            self.server,
            generation,
            int(place),
            lambda: connected(parent, within_s=HAND_ON_S),
            signer=self._signer,
        )
        round_store = RoundStore(
            store,
            int(size),
            is_coordinator=False,
            generation=generation,
            find_lost=self._find_lost,
            reader=reader,
            signer=self._signer,
        )
        decision = read_decision(reader.read("decision", round_store), "decision of the first node")
        known = files.loads(Members, reader.read("members", round_store), "list of nodes")
        self._desk.drop("round")
        self._leader, self._leader_store = leader, store
        return decision, self._begin(known, round_store)

    def _store_of(self, leader: Member) -> Store:
        if leader == self._leader and self._leader_store is not None:
            return self._leader_store
        why = why_unreachable(leader, timeout_s=HOST_SILENCE_S)
        if why == GONE:
            self._refusing.add(leader.token)
        if why:
            raise StoreGone(why)
        try:
            return connected(leader, within_s=HOST_SILENCE_S if self._round_store else FIRST_ANSWER_S)
        except (OSError, RuntimeError) as error:
            raise StoreGone(f"its agent does not answer ({error})") from error

    def _answer(self, leader: Member, desk: AgentStore) -> str:
        """Wait for the leader's answer: `LEFT_OUT`, `PARTED` with a reason, or the text of `answers_of`."""
        # The first agent waits PEER_WAIT_S for other agents, and may then search for a plan.
        ends_s = time.monotonic() + 2 * PEER_WAIT_S
        pauses_s = growing_pauses(self._place.most_nodes if self._place else 1)
        key = f"answer/{self._own.token}/{self._num_meetings}"
        reported: frozenset[str] = frozenset()
        while True:
            for token in (ended := self._connections.ended()) - reported:
                desk.put(f"ended/{token}", GONE)
            reported = ended
            # The leader stores all answers before the name of the round.
            now = desk.peek("round")
            if (answer := desk.peek(key)) is not None:
                return answer
            left = self._round_store and desk.peek(f"{self._round_store.generation}/left/{leader.token}")
            if left:
                self._left.add(leader.token)
                raise StoreGone(left)
            if now is not None and now not in self._past:
                # The leader may have answered an older arrival of this agent.
                text = desk.peek(f"{now}/members") or ""
                return answers_of(files.loads(Members, text, "list of nodes"), leader).get(self._own.token, LEFT_OUT)
            if time.monotonic() > ends_s:
                raise ClusterError(
                    f"waited {2 * PEER_WAIT_S:.0f} s in vain for the decision of the first node, {leader.address}; "
                    f"look at the log of that node"
                )
            time.sleep(next(pauses_s))

    # -- this agent decides ---------------------------------------------------------------------------------------

    def _lead(self, record: NodeRecord, held: Decision | None, decide: Decide) -> tuple[Decision, RoundStore]:
        if self._round_store is not None and self._leader == self._own:
            self._round_store.put("alarm", "a meeting")
        arrivals = self._gather(self._members)
        if why := self._proved_parted(len(arrivals)):
            self._answer_all(arrivals, dict.fromkeys(arrivals, f"{PARTED}{why}"))
            time.sleep(PROOF_S)  # Other agents read the answer in this agent's store, which ends with this agent.
            raise ClusterError(why)
        self._check_reach([member for member in self._members if member.token in arrivals])
        # A new agent must not find the last round, because it would believe that it was left out.
        self._desk.put("round", "")
        here = tuple(member for member in self._members if member == self._own or member.token in arrivals)
        if self._leader is not None:
            newcomers = self._invited(here)
            arrivals |= self._gather(newcomers, patience_s=HOST_SILENCE_S)
            here += tuple(member for member in newcomers if member.token in arrivals)
        in_order = sorted(here, key=lambda member: member.order)
        records = [record if member == self._own else arrivals[member.token].record for member in in_order]
        held = held or next((read_decision(one.held, "an arrival") for one in arrivals.values() if one.held), None)
        missed = {token: arrival.out_of_reach for token, arrival in arrivals.items()}
        missed[self._own.token] = tuple(self._out_of_reach)
        pairs = {(min(one, peer), max(one, peer)) for one, peers in missed.items() for peer in peers if peer in missed}
        cut = tuple(sorted(pairs))
        standby = [node.token for node in held.standby] if held else []
        lost = held.by_host(self._lost | out_of_reach(here, cut, standby=standby)) if held else {}
        decision = decide(records, held, lost)
        known = Members(
            generation=f"{self._own.token[:8]}-{self._num_meetings}",
            members=(self._own, *(member for member in here if member != self._own)),
            cut=cut,
            num_arrived=self._num_arrived,
        )
        round_store = RoundStore(
            self.server,
            len(here),
            is_coordinator=True,
            generation=known.generation,
            find_lost=self._find_lost,
            signer=self._signer,
        )
        round_store.put("decision", files.dumps(decision))
        round_store.put("members", files.dumps(known))
        self._answer_all(arrivals, answers_of(known, self._own))
        self._desk.put("round", known.generation)
        if self._place is not None:
            self._place.start([*decision.names.values()])
        self._leader, self._leader_store = self._own, None
        return decision, self._begin(known, round_store)

    def _invited(self, here: Sequence[Member]) -> tuple[Member, ...]:
        """Invite agents that came to the meeting place since the last meeting, and return them."""
        if self._place is None:
            return ()
        found, last = self._place.newcomers(self._num_arrived)
        tokens = {member.token for member in here}
        # An agent that was left out before has come again, under a new number.
        numbers = {member.token: number for number, member in found.items() if member.token not in tokens}
        fresh = sorted(numbers.values())
        invited = fresh[: max(self._place.most_nodes - len(here), 0)]
        self._num_arrived = min([last, *(number - 1 for number in fresh if number not in invited)])
        self._place.invite(invited, Invitation(leader=self._signer.introduced(self._own), is_signed=self._signer.is_on))
        # An agent without the secret refuses the invitation itself.
        admitted = self._signer.admitted([found[number] for number in invited], is_signed=self._signer.is_on)
        return tuple(replace(member, proof="") for member in admitted)

    def _gather(self, members: Sequence[Member], *, patience_s: float = PEER_WAIT_S) -> dict[str, Arrival]:
        """Wait until each other agent has come or is known to be lost; return the arrivals by token."""
        arrivals: dict[str, Arrival] = {}
        missed_s: dict[str, float] = {}
        began_s = time.monotonic()
        probed_s = began_s - PROBE_S
        for pause_s in growing_pauses():
            awaited = [one for one in members if one != self._own and one.token not in arrivals]
            for member in awaited:
                if (text := self._desk.peek(f"arrival/{member.token}")) is not None:
                    self._desk.drop(f"arrival/{member.token}")
                    arrival = files.loads(Arrival, text, f"record of {member.address}")
                    if arrival.meeting <= self._last_arrivals.get(member.token, 0):
                        continue
                    self._last_arrivals[member.token] = arrival.meeting
                    arrivals[member.token] = arrival
                    self._lost.pop(member.token, None)
            missing = [one for one in awaited if one.token not in arrivals and one.token not in self._lost]
            if not missing:
                break
            now_s = time.monotonic()
            if now_s - began_s > patience_s:
                self.leave_behind([member.token for member in missing], "its agent does not answer")
            elif now_s - probed_s > PROBE_S:
                probed_s = now_s
                # Agents that nobody suspects have just begun to end their workers.
                is_early = now_s - began_s < PROBE_S
                self._probe([one for one in missing if not is_early or self._is_suspected(one)], missed_s)
            time.sleep(pause_s)
        return arrivals

    def _probe(self, missing: Sequence[Member], missed_s: dict[str, float]) -> None:
        """Mark agents as lost after a long silence; `missed_s` maps a token to the begin (s) of the silence."""
        began_s = time.monotonic()
        with ThreadPoolExecutor(min(max(len(missing), 1), MOST_AT_ONCE)) as pool:
            found = list(pool.map(self._look_for, missing))
        now_s = time.monotonic()
        for member, (why, lost) in zip(missing, found, strict=True):
            left = self._reported(member, "left")
            if why == GONE or left:
                (self._left if left else self._refusing).add(member.token)
                self._lost[member.token] = left or why
            elif not (why or lost):
                missed_s.pop(member.token, None)
            elif now_s - missed_s.setdefault(member.token, began_s) > (PROOF_S if lost else HOST_SILENCE_S):
                self._lost[member.token] = lost or why

    def _is_suspected(self, member: Member) -> bool:
        return member.token in self._out_of_reach or bool(self._reported(member, "lost"))

    def _look_for(self, member: Member) -> tuple[str, str]:
        """Return why an agent is out of reach and why it is believed lost; both are empty if the agent answers."""
        why, lost = why_unreachable(member, timeout_s=PROBE_S), self._reported(member, "lost")
        if not lost and member.token in self._out_of_reach:
            lost = why
        # The kernel accepts connections for a stopped process, so check that the agent's store also answers.
        return why, lost if lost and (why or not answers(member, within_s=PROBE_S)) else ""

    def _reported(self, member: Member, what: str) -> str:
        """Return the report under `left` or `lost` (`what`) about a member; empty unless this agent led the round."""
        if self._round_store is None or self._leader != self._own:
            return ""
        return self._round_store.peek(f"{what}/{member.token}") or ""

    def _proved_parted(self, num_arrivals: int) -> str:
        """Return `_why_parted`, after a wait for proofs that lost agents have ended."""
        ends_s = time.monotonic() + PROOF_S
        while (why := self._why_parted(num_arrivals)) and time.monotonic() < ends_s:
            ended, gone = self._reported_ends(), self._surely_gone()
            unproved = (self._refusing | (ended & self._lost.keys())) - gone
            if not unproved:
                break
            # The kernel of a dying agent closes its connections before its port.
            again = unreachable([one for one in self._members if one.token in unproved], timeout_s=PROBE_S)
            self._refusing |= {token for token, reason in again.items() if reason == GONE}
            time.sleep(RETRY_S)
        return why

    def _reported_ends(self) -> set[str]:
        """Return the tokens of agents whose end an open connection of this agent or of an agent that came has shown."""
        ended = self._connections.ended()
        return {one.token for one in self._members if one.token in ended or self._desk.has(f"ended/{one.token}")}

    def _surely_gone(self) -> set[str]:
        """Return the tokens of lost members that have surely ended.

        A refused connection is a proof only after an open connection ended, because a firewall may refuse connections.
        """
        return self._left | (self._refusing & self._reported_ends())

    def _why_parted(self, num_arrivals: int) -> str:
        """Return why this part of a divided network must end; empty if only this part may continue the job."""
        came, gone = 1 + num_arrivals, self._surely_gone()
        possible = len(self._members) - len(gone)
        # Before the first meeting no agent has led. If the network is cut into halves then, only the half with the
        # first agent continues.
        keeps_store = self._own == (self._leader or self._members[0])
        if 2 * came > possible or (2 * came == possible and keeps_store):
            return ""
        reasons = {
            REFUSING if token in self._refusing else why for token, why in self._lost.items() if token not in gone
        }
        return (
            f"this node reaches {came} of {possible} nodes that may still run ({', '.join(sorted(reasons))}); "
            f"it ends here, so that two parts of the job do not train at once"
        )

    def _answer_all(self, arrivals: Mapping[str, Arrival], answer: Mapping[str, str]) -> None:
        for token, arrival in arrivals.items():
            self._desk.put(f"answer/{token}/{arrival.meeting}", answer[token])

    # -- the round ------------------------------------------------------------------------------------------------

    def _begin(self, known: Members, round_store: RoundStore) -> RoundStore:
        self._members, self._num_arrived = known.members, known.num_arrived
        self._lost, self._left, self._refusing = {}, set(), set()
        self._past.add(known.generation)
        self._out_of_reach |= {token for pair in known.cut if self._own.token in pair for token in pair}
        self._out_of_reach.discard(self._own.token)
        place = self._members.index(self._own)
        # PeerWatch observes the next agent in the list, and ReachSweep connects to all remaining agents in turn.
        turned = (*self._members[place + 1 :], *self._members[:place])
        others = [member for member in turned if member.token not in self._out_of_reach]
        self._connections.keep_only(others[: 1 + MOST_KEPT])
        watch, sweep = PeerWatch(others[:1], self._connections), ReachSweep(others[1:], self._connections)
        self._finders = (watch, sweep) if others else ()
        self._round_store = round_store
        return round_store

    def _find_lost(self) -> str:
        """Return which agent is gone or out of reach, and why; empty while all agents answer."""
        return next((self._report_lost(one.peer, one.lost) for one in self._finders if one.peer and one.lost), "")

    def _report_lost(self, peer: Member, why: str) -> str:
        if why == SILENT and peer.token not in self._out_of_reach:
            logger.warning("the agent at %s: %s; all agents meet", peer.address, why)
            self._out_of_reach.add(peer.token)
        if self._round_store is not None:
            self._round_store.put(f"lost/{peer.token}", why)
        return f"the agent at {peer.address}: {why}"

    def _stop_watching(self) -> None:
        """Stop the threads that look for lost agents. Suspect agents that have not answered; report silent agents."""
        late = [(one, peer) for one in self._finders if (peer := one.stop())]
        self._out_of_reach |= {peer.token for _, peer in late}
        # The kernel of a stopped process accepts connections, so its silence is the only sign.
        self._report_silent([peer for one, peer in late if one.is_silent])
        self._finders = ()

    def _report_silent(self, agents: Sequence[Member]) -> None:
        """Tell the first agent, which then waits for these agents for PROOF_S, not for HOST_SILENCE_S."""
        for one in agents:
            if self._round_store is not None and one != self._leader:
                self._round_store.say(f"lost/{one.token}", SILENT)

    def _check_reach(self, agents: Sequence[Member]) -> list[Member]:
        """Try again to reach suspected agents; return the agents that stay out of reach."""
        suspected = [one for one in agents if one.token in self._out_of_reach and one != self._own]
        self._out_of_reach = set(unreachable(suspected, timeout_s=PROOF_S))
        return [one for one in suspected if one.token in self._out_of_reach]


def answers_of(known: Members, leader: Member) -> dict[str, str]:
    """Return the leader's answer to each agent of a round: the round, the agent's place, the size, and the parent.

    The parent is the address and port of the agent that hands long texts on.
    """
    order = (leader, *(member for member in known.members if member != leader))
    parents = [order[parent_of(place)] for place in range(len(order))]
    return {
        member.token: f"{known.generation} {place} {len(order)} {parent.address} {parent.port}"
        for place, (member, parent) in enumerate(zip(order, parents, strict=True))
    }


def unreachable(agents: Sequence[Member], *, timeout_s: float) -> dict[str, str]:
    """Connect to agents at the same time; return the tokens of the agents that cannot be reached, with the reasons."""
    with ThreadPoolExecutor(max(len(agents), 1)) as pool:
        found = pool.map(lambda agent: why_unreachable(agent, timeout_s=timeout_s), agents)
        return {agent.token: why for agent, why in zip(agents, found, strict=True) if why}


def out_of_reach(
    agents: Sequence[Member], cut: Collection[tuple[str, str]], *, standby: Collection[str]
) -> dict[str, str]:
    """Return the tokens of the agents to leave out, each with a reason: an address that cannot reach the agent.

    `cut` are pairs of agents that cannot reach each other. Agents on `standby`, without workers, are left out first.
    """
    address = {agent.token: agent.address for agent in agents}
    left_out = best_left_out(cut, sorted(address, key=lambda token: token in standby))
    return {token: f"out of reach from {address[peer]}" for token, peer in left_out.items()}
