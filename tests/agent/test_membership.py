"""Whoever has not come to a meeting is waited for as long as it lives."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
from facts_for_tests import nodes
from launch.worlds import records
from torch.distributed import HashStore, TCPStore

from pipette_launch.agent import membership
from pipette_launch.agent import store as agent_store
from pipette_launch.agent.first_meeting import MeetingPlace
from pipette_launch.agent.membership import PROBE_S, PROOF_S, LeftOut, Membership, out_of_reach
from pipette_launch.agent.peers import GONE, SILENT, why_unreachable
from pipette_launch.agent.rendezvous import RendezvousSettings
from pipette_launch.agent.signature import Signer
from pipette_launch.agent.store import AgentStore, RoundStore
from pipette_launch.defaults import HAND_ON_S, HOST_SILENCE_S
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files
from pipette_launch.facts.messages import Arrival, Decision, Member, NodeRecord, RunTraining


@contextmanager
def answering() -> Iterator[int]:
    """The store of an agent that is well, and whose workers take long to end."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield store.port


@contextmanager
def stopped() -> Iterator[int]:
    """A kernel that takes connections for a process that never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


@contextmanager
def ended() -> Iterator[int]:
    """A port that nobody holds any more."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    yield port


@pytest.mark.parametrize(("agent", "expected"), [(answering, ""), (stopped, SILENT), (ended, GONE)])
def test_who_is_said_to_be_silent_is_asked(agent: type, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbour may not reach it for a cut wire; until its workers have ended it does not come itself."""
    with agent() as port:
        member = Member(token="t", address="127.0.0.1", port=port, node_rank=-1)  # noqa: S106, it is a name
        leader = Membership("leader", "127.0.0.1", -1)
        monkeypatch.setattr(leader, "_reported", lambda _, what: SILENT if what == "lost" else "")
        missed_s: dict[str, float] = {}
        ends_s = time.monotonic() + 2 * PROOF_S + 2 * PROBE_S
        while not leader._lost and time.monotonic() < ends_s:
            leader._probe([member], missed_s)
            time.sleep(PROBE_S)

        assert ({"t": expected} if expected else {}) == leader._lost


pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


def place(store: HashStore, number: int, count: int, *, most: int = 0) -> MeetingPlace:
    """The meeting place of a job of so many nodes, as the agent with this number sees it."""
    settings = RendezvousSettings(
        endpoint="localhost:29400",
        node_rank=-1,
        may_host_store=number == 0,
        least_nodes=count,
        most_nodes=most or count,
        last_call_s=0.2,
        join_s=20.0,
    )
    return MeetingPlace(store, settings, holds_store=number == 0)


class Agents:
    """Some agents of one process, each with its own store."""

    def __init__(self, count: int) -> None:
        self.records = records(count)
        signers = [Signer(b"the secret of this job") for _ in self.records]
        pairs = zip(self.records, signers, strict=True)
        self.all = [Membership(record.token, "127.0.0.1", -1, signer=signer) for record, signer in pairs]
        self.held: list[Decision | None] = [None] * count
        self.lost: Mapping[str, str] = {}
        self.join()

    def join(self) -> None:
        """Let them all find each other at a meeting place, which the first one holds."""
        self.store, count = HashStore(), len(self.all)
        before = self.store.add("pipette/none/arrived", 0)
        with ThreadPoolExecutor(count) as pool:
            joining = []
            for number, one in enumerate(self.all):
                joining.append(pool.submit(one.join, place(self.store, number, count)))
                while not self.store.check([f"pipette/none/member/{before + number + 1}"]):
                    time.sleep(0.01)
            list(map(Future.result, joining))

    def meet(self, *numbers: int) -> list[tuple[Decision, RoundStore]]:
        """Let these agents meet; returns what each goes by afterwards."""
        with ThreadPoolExecutor(len(numbers)) as pool:
            return list(pool.map(self.come, numbers))

    def come(self, number: int) -> tuple[Decision, RoundStore]:
        """Let one agent come to a meeting."""
        found = self.all[number].meet(self.records[number], self.held[number], decide=self.decide)
        self.held[number] = found[0]
        return found

    def decide(self, some: Sequence[NodeRecord], _held: Decision | None, lost: Mapping[str, str]) -> Decision:
        """Let all that came train, and remember who is lost."""
        self.lost = lost
        tokens = [record.token for record in some]
        return RunTraining(nodes=nodes(*(token.removeprefix("token-") for token in tokens), tokens=tokens), plan=None)


@pytest.fixture
def cut_wires(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes ports unreachable, for all agents of this process."""

    def cut(*ports: int, reason: str = SILENT) -> None:
        def why(peer: Member, *, timeout_s: float) -> str:
            return reason if peer.port in ports else why_unreachable(peer, timeout_s=timeout_s)

        monkeypatch.setattr(membership, "why_unreachable", why)

    return cut


def test_all_go_by_the_decision_of_the_first() -> None:
    """Each of them knows it, and nobody is lost."""
    agents = Agents(3)
    decisions = [decision for decision, _ in agents.meet(0, 1, 2)]

    assert [decisions[0]] * 3 == decisions
    assert 3 == len(decisions[0].tokens)


def test_when_the_first_is_gone_the_next_one_decides() -> None:
    """The others still know what they went by."""
    agents = Agents(3)
    agents.meet(0, 1, 2)
    agents.all[1].leave_behind(["token-node0"], SILENT)
    agents.all[2].leave_behind(["token-node0"], SILENT)
    after = agents.meet(1, 2)

    assert ("token-node1", "token-node2") == after[0][0].tokens == after[1][0].tokens
    assert {"node0": SILENT} == agents.lost


def test_of_two_that_do_not_reach_each_other_one_is_left_out(cut_wires: Any) -> None:
    """Both reach the first, to which one says so; when the wire is mended nobody is."""
    agents = Agents(3)
    agents.meet(0, 1, 2)
    peer = agents.all[2]._own
    cut_wires(peer.port)
    agents.all[1]._report_lost(peer, SILENT)
    agents.meet(0, 1, 2)
    told = agents.lost
    cut_wires()
    agents.meet(0, 1, 2)

    assert {"node2": "out of reach from 127.0.0.1"} == told
    assert {} == agents.lost


def test_hosts_that_fall_silent_together_are_waited_for_together(cut_wires: Any) -> None:
    """The first silence calls the meeting; agents that found another silence report it when they come."""
    agents = Agents(5)
    agents.meet(*range(5))
    cut_wires(agents.all[3]._own.port, agents.all[4]._own.port)
    agents.all[1]._report_lost(agents.all[3]._own, SILENT)
    found: Any = SimpleNamespace(stop=lambda: agents.all[4]._own, is_silent=False)
    agents.all[2]._finders = (found,)
    began_s = time.monotonic()
    agents.meet(0, 1, 2)

    assert {"node3": SILENT, "node4": SILENT} == agents.lost
    assert time.monotonic() - began_s < HOST_SILENCE_S


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_process_that_is_stopped_is_reported_although_its_kernel_answers(is_silent: bool) -> None:
    """The first agent waits two minutes for an agent that nobody reports. A late answer alone is no report."""
    agents = Agents(3)
    agents.meet(0, 1, 2)
    one, peer = agents.all[2], agents.all[1]._own
    one._stop_watching()
    one._finders = (SimpleNamespace(stop=lambda: peer, is_silent=is_silent),)  # type: ignore[assignment]
    one._stop_watching()

    assert (SILENT if is_silent else None) == one._round_store.peek(f"lost/{peer.token}")  # type: ignore[union-attr]


def test_the_smaller_part_of_a_cut_network_ends_together(cut_wires: Any) -> None:
    """The first of them answers all. With one leader after the other, a thousand agents would need many minutes."""
    agents = Agents(7)
    agents.meet(*range(7))
    cut_wires(*(agents.all[number]._own.port for number in range(4)))
    for number in (4, 5, 6):
        agents.all[number].leave_behind([f"token-node{other}" for other in range(4)], SILENT)
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(agents.come, number) for number in (4, 5, 6)]

    assert ["this node reaches 3 of 7"] * 3 == [str(end.exception())[:24] for end in ends]


@pytest.mark.parametrize(("comes", "expected"), [((4, 5, 6), "reaches 3 of 7 nodes"), ((2, 3), "reaches 2 of 4 nodes")])
def test_a_part_that_a_firewall_rejects_ends(
    cut_wires: Any, comes: tuple[int, ...], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A firewall refuses connections as the kernel of an ended agent does, but ends no open connection with FIN."""
    agents = Agents(comes[-1] + 1)
    agents.meet(*range(comes[-1] + 1))
    cut_wires(*(one._own.port for one in agents.all[: comes[0]]), reason=GONE)
    for number in comes:
        agents.all[number].leave_behind([f"token-node{other}" for other in range(comes[0])], GONE)
        agents.all[number]._refusing = {f"token-node{other}" for other in range(comes[0])}
    with ThreadPoolExecutor(len(comes)) as pool:
        ends = [pool.submit(agents.come, number) for number in comes]

    words = f"this node {expected} that may still run (it refuses connections, as a firewall may do)"
    assert [words] * len(comes) == [str(end.exception()).partition(";")[0] for end in ends], caplog.text


@pytest.mark.parametrize("witness", [0, 1])
def test_a_small_part_continues_if_any_agent_proves_the_end_of_the_others(cut_wires: Any, witness: int) -> None:
    """The first agent waits for the proofs of all agents that came: open connections that ended."""
    agents = Agents(5)
    agents.meet(*range(5))
    cut_wires(*(one._own.port for one in agents.all[2:]), reason=GONE)
    agents.all[witness]._connections._ended = {"token-node2", "token-node3", "token-node4"}
    # An agent that is lost while its port is still open is asked again.
    agents.all[0].leave_behind(["token-node2"], "its agent does not answer")
    met = agents.meet(0, 1)

    assert [("token-node0", "token-node1")] * 2 == [decision.tokens for decision, _ in met]


def test_an_agent_that_is_cut_off_tries_several_agents_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, an agent would need an hour in a large job."""
    agents = Agents(7)
    agents.meet(*range(7))
    last = agents.all[6]
    began, together = Barrier(4), []

    def silent(peer: Member, *, timeout_s: float) -> str:
        if timeout_s == HOST_SILENCE_S and peer not in (agents.all[0]._own, agents.all[1]._own):
            began.wait(20.0)
            together.append(peer)
        return SILENT

    monkeypatch.setattr(membership, "why_unreachable", silent)
    last._round_store.gone = SILENT  # type: ignore[union-attr]
    with pytest.raises(ClusterError, match="reaches 1 of 7"):
        agents.come(6)

    assert {agents.all[number]._own for number in (2, 3, 4, 5)} == set(together)


def test_whoever_finds_another_silent_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """The workers start again even if all come to the meeting: without this nobody would know why."""
    agents = Agents(2)
    agents.meet(0, 1)
    for _ in range(2):
        agents.all[1]._report_lost(agents.all[0]._own, SILENT)

    assert [f"the agent at 127.0.0.1: {SILENT}; all agents meet"] == caplog.messages


def test_an_arrival_that_nobody_received_is_taken_back() -> None:
    """The others went on without a late agent, and it came back: what it had said before is no arrival any more.

    Its answer would bear the number of a meeting that is long over, and it would wait for another in vain.
    """
    agents = Agents(3)
    agents.meet(0, 1, 2)
    agents.all[0].leave_behind(["token-node2"], SILENT)
    with ThreadPoolExecutor(3) as pool:
        on_time = [pool.submit(agents.come, number) for number in (0, 1)]
        list(map(Future.result, on_time))
        with pytest.raises(LeftOut):
            agents.come(2)
        agents.held[2] = None
        late = pool.submit(agents.all[2].join, place(agents.store, 2, 3))
        while not agents.store.check(["pipette/none/member/4"]):
            time.sleep(0.01)
        coming = [pool.submit(agents.come, number) for number in (0, 1)]
        late.result(10.0)
        # The first has time to read whatever lies there.
        time.sleep(0.5)

        assert 3 == len(agents.come(2)[0].tokens)
        list(map(Future.result, coming))


def test_an_old_arrival_is_no_arrival() -> None:
    """The first agent waits for the arrival at this meeting, and not for a copy of the last one."""
    agents = Agents(2)
    agents.meet(0, 1)
    late, desk = agents.all[1]._own.token, agents.all[0]._desk
    old = Arrival(meeting=1, record=agents.records[1], held="")
    desk.put(f"arrival/{late}", files.dumps(old))
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(agents.come, 0)
        while desk.peek(f"arrival/{late}") is not None:
            time.sleep(0.01)
        time.sleep(0.2)
        assert not early.done()

        agents.come(1)
        assert 2 == len(early.result(10.0)[0].tokens)


def test_who_is_in_a_round_needs_no_answer() -> None:
    """A new first agent may have taken an old arrival for this one, and answered that."""
    agents = Agents(2)
    agents.meet(0, 1)
    agents.all[0]._last_arrivals.clear()
    late = agents.all[1]._own.token
    desk = agents.all[0]._desk
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(agents.come, 1)
        while (text := desk.peek(f"arrival/{late}")) is None:
            time.sleep(0.01)
        desk.put(f"arrival/{late}", text.replace('"meeting": 2', '"meeting": 1'))
        pool.submit(agents.come, 0).result(10.0)

        assert 2 == len(early.result(10.0)[0].tokens)


def test_an_old_round_does_not_come_again() -> None:
    """A stranger copies the signed name of an earlier round, whose decision is still in the store."""
    agents = Agents(2)
    agents.meet(0, 1)
    server = agents.all[0].server
    name = server.get("pipette/round")
    agents.meet(0, 1)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(agents.come, 1)
        server.set("pipette/round", name)  # type: ignore[arg-type]
        time.sleep(0.5)
        assert not early.done()
        _, round_store = agents.come(0)

        assert round_store.generation == early.result(10.0)[1].generation


def test_a_stranger_at_the_meeting_place_takes_no_part() -> None:
    """It introduces itself while the job runs; the agents of a signed job go on without it."""
    agents = Agents(2)
    agents.meet(0, 1)
    stranger = Membership("stranger", "127.0.0.1", -1)
    for one in agents.all:
        one._place = place(agents.store, 0, 2, most=3)
    agents.store.set("pipette/none/member/3", files.dumps(stranger._own))
    agents.store.add("pipette/none/arrived", 1)

    decisions = [decision for decision, _ in agents.meet(0, 1)]
    assert [("token-node0", "token-node1")] * 2 == [decision.tokens for decision in decisions]


def test_a_late_node_takes_part_in_the_next_meeting() -> None:
    """The leader invites it, then also a new leader knows it; a node that no longer runs costs no wait."""
    agents = Agents(2)
    agents.meet(0, 1)
    late = Membership("token-node2", "127.0.0.1", -1, signer=Signer(b"the secret of this job"))
    agents.all.append(late)
    agents.records, agents.held = records(3), [*agents.held, None]
    for one in agents.all[:2]:
        one._place = place(agents.store, 1, 2, most=3)
    dead = replace(late._own, token="dead", port=1)  # noqa: S106, it is a name
    agents.store.set("pipette/none/member/3", files.dumps(dead))
    agents.store.add("pipette/none/arrived", 1)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(late.join, place(agents.store, 2, 2, most=3))
        while not agents.store.check(["pipette/none/member/4"]):
            time.sleep(0.01)
        coming = pool.submit(lambda: joining.result() or agents.come(2))
        began_s = time.monotonic()
        first = agents.meet(0, 1)
        assert time.monotonic() - began_s < PROOF_S + HOST_SILENCE_S
        assert 3 == len(first[0][0].tokens) == len(coming.result(10.0)[0].tokens)
    for one in (agents.all[1], late):
        one.leave_behind(["token-node0"], SILENT)
    after = agents.meet(1, 2)

    assert ("token-node1", "token-node2") == after[0][0].tokens == after[1][0].tokens


def test_a_node_without_the_secret_cannot_join_a_signed_job() -> None:
    """It gets a reason, and the others meet without it."""
    agents = Agents(2)
    agents.meet(0, 1)
    late = Membership("late", "127.0.0.1", -1, signer=Signer(b"the secret of another home"))
    for one in agents.all:
        one._place = place(agents.store, 0, 2, most=3)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(late.join, place(agents.store, 2, 2, most=3))
        while not agents.store.check(["pipette/none/member/3"]):
            time.sleep(0.01)
        assert 2 == len(agents.meet(0, 1)[0][0].tokens)
        with pytest.raises(ClusterError, match="this node cannot join: the job's messages are signed"):
            joining.result(10.0)


def test_a_name_that_is_just_deleted_is_no_round() -> None:
    """An agent gets an empty text from torch if it reads while the first agent deletes."""
    agents = Agents(2)
    agents.meet(0, 1)
    desk = agents.all[0]._desk
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(agents.come, 1)
        desk.put("round", "")
        time.sleep(0.5)
        agents.come(0)

        assert 2 == len(early.result(10.0)[0].tokens)


@pytest.mark.parametrize(("why", "expected"), [(SILENT, ClusterError), (GONE, LeftOut)])
def test_a_node_that_does_not_reach_the_first_node(cut_wires: Any, why: str, expected: type[Exception]) -> None:
    """It knows no other agent. If the first node is gone, it goes back to the meeting place."""
    agents = Agents(2)
    cut_wires(agents.all[0]._own.port, reason=why)

    with pytest.raises(expected, match=why):
        agents.come(1)


def test_who_waits_for_an_answer_does_not_read_the_list_of_all_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 1,000 nodes it is 150 KB long, and each of them looks five times a second."""
    agents = Agents(2)
    agents.meet(0, 1)
    read: list[str] = []
    pieces = AgentStore.pieces

    def noted(store: AgentStore, key: str) -> list[bytes]:
        read.append(key)
        return pieces(store, key)

    monkeypatch.setattr(AgentStore, "pieces", noted)
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(agents.come, 1)
        time.sleep(1.0)
        pool.submit(agents.come, 0).result(10.0)
        early.result(10.0)

    assert 1 == sum("members" in key for key in read), read


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Let two agents read in each store; returns who reads the decision in the first agent's store, and elsewhere."""
    monkeypatch.setattr(agent_store, "FAN_OUT", 2)
    found: dict[str, list[str]] = {"first": [], "parents": []}
    pieces = AgentStore.pieces

    def noted(store: AgentStore, key: str) -> list[bytes]:
        if key == "decision":
            found["first" if isinstance(store, RoundStore) else "parents"].append(store._prefix)
        return pieces(store, key)

    monkeypatch.setattr(AgentStore, "pieces", noted)
    return found


def test_decisions_reach_all_agents_through_a_tree(readers: dict[str, list[str]]) -> None:
    """The first agent's store sends a decision to two agents, and these send it to two more each."""
    agents = Agents(12)
    rounds = [agents.meet(*range(12)) for _ in range(2)]

    assert all([rounds[0][0][0]] * 12 == [decision for decision, _ in met] for met in rounds)
    assert [4, 18] == [len(readers["first"]), len(readers["parents"])]


def test_a_lost_agent_is_no_parent(readers: dict[str, list[str]]) -> None:
    """An agent that has not come to the meeting has no text to hand on."""
    agents = Agents(8)
    agents.meet(*range(8))
    agents.all[0].leave_behind(["token-node1", "token-node2"], SILENT)
    began_s = time.monotonic()
    agents.meet(0, *range(3, 8))

    assert [4, 8] == [len(readers["first"]), len(readers["parents"])]
    assert time.monotonic() - began_s < HAND_ON_S


@pytest.mark.parametrize(("parent", "waits_s"), [(answering, HAND_ON_S), (stopped, HAND_ON_S), (ended, 0.0)])
def test_a_parent_that_hands_nothing_on_delays_only_its_children(
    readers: dict[str, list[str]], parent: type, waits_s: float
) -> None:
    """They read in the first agent's store, and their own children still read in theirs."""
    with parent() as port:
        agents = Agents(12)
        agents.meet(*range(12))
        for read in readers.values():
            read.clear()
        one = agents.all[1]
        one._stop_watching()
        # The other agents connect to this port from now on, as if the agent had ended, or were stopped.
        broken = replace(one._own, port=port)
        for other in agents.all:
            other._members = tuple(broken if member == one._own else member for member in other._members)
        one._own = broken
        began_s = time.monotonic()
        met = agents.meet(*range(12))

        assert 1 == len({store.generation for _, store in met})
        assert [2 + 2, 9 - 2] == [len(readers["first"]), len(readers["parents"])]
        assert waits_s <= time.monotonic() - began_s < waits_s + HAND_ON_S


def member(name: str) -> Member:
    """An agent that nobody has started."""
    return Member(token=name, address=name, port=1, node_rank=-1)


def test_who_stands_by_is_left_out_first() -> None:
    """It costs the training nothing; else it is the later one."""
    agents = [member(name) for name in "abc"]

    assert {"b": "out of reach from c"} == out_of_reach(agents, [("b", "c")], standby=["b"])
    assert {"c": "out of reach from b"} == out_of_reach(agents, [("b", "c")], standby=[])
