"""The endpoint before torch connects to it: who holds its port, whether its name resolves, whom a node waits for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch.distributed import DistStoreError, HashStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from pipette_launch.agent import rendezvous_handler
from pipette_launch.agent.rendezvous import ADDRESS, ENDPOINT, Endpoint, RendezvousSettings
from pipette_launch.agent.rendezvous_handler import (
    AgentStoreHandler,
    Waiting,
    advice,
    await_name,
    await_store,
    explained,
    first_meeting,
    note_unknown_address,
)
from pipette_launch.agent.store import StoreGone
from pipette_launch.errors import ClusterError


def client_of(port: int, *, connect_s: float = 5.0, **more: object) -> RendezvousSettings:
    """A node whose store is another process's."""
    facts = {"node_rank": -1, "may_host_store": False, "is_client": True, "connect_s": connect_s, "most_nodes": 2}
    return RendezvousSettings(endpoint=f"127.0.0.1:{port}", **{**facts, **more})  # type: ignore[arg-type]


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("fails", [1, 3])
def test_a_name_without_an_address_is_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: int
) -> None:
    """The first look already prints a line, and the wait ends as soon as the name has an address."""
    left = [socket.gaierror(socket.EAI_NONAME, "Name or service not known")] * fails
    said: list[str] = []

    def resolve(host: str, port: object) -> list[object]:
        said.append(capsys.readouterr().err)
        if left:
            raise left.pop()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(rendezvous_handler, "PAUSE_S", 0.0)

    await_name(Endpoint("late", 1, ADDRESS), patience_s=60)

    assert (
        "pipette-launch: --master-addr late: this node finds no address for that name (Name or service not known); "
        "waiting up to 60 s\n"
    ) == said[1]
    assert "pipette-launch: late has an address now\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "why"),
    [("nowhere.invalid", "has had no address"), ("a" * 70, "has had no address"), ("slow", "name service")],
)
def test_a_name_that_never_has_an_address_ends_the_wait(monkeypatch: pytest.MonkeyPatch, host: str, why: str) -> None:
    """Unknown, no name at all, or without an answer: after torch's own time one sentence."""
    if host == "slow":
        monkeypatch.setattr(rendezvous_handler, "NAME_S", 0.01)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(0.2))
    monkeypatch.setattr(rendezvous_handler, "PAUSE_S", 0.01)

    with pytest.raises(ClusterError, match=f"the nodes cannot meet: --rdzv-endpoint {host} .*{why}"):
        await_name(Endpoint(host, 1, ENDPOINT), patience_s=0.0)


def test_a_name_with_an_address_costs_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed for an address or a known name."""
    for host in ("127.0.0.1", "localhost", "::1"):
        await_name(Endpoint(host, 1, ADDRESS), patience_s=0.0)

    assert "" == capsys.readouterr().err


@pytest.mark.parametrize(("name", "is_noted"), [(None, False), ("127.0.0.1", False), ("nowhere.invalid", True)])
def test_an_own_address_that_nobody_knows_is_noted(
    capsys: pytest.CaptureFixture[str], name: str | None, is_noted: bool
) -> None:
    """The job goes on, as torch may not need it."""
    note_unknown_address(name)

    said = capsys.readouterr().err
    assert is_noted == said.startswith("pipette-launch: --local-addr nowhere.invalid: this node finds no")
    assert is_noted == bool(said)


def test_a_store_that_comes_late_is_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    """Once, with the reason, and then torch finds it there."""
    monkeypatch.setattr(rendezvous_handler, "SAY_AFTER_S", 0.1)
    stores: list[TCPStore] = []
    late = threading.Timer(
        0.6, lambda: stores.append(TCPStore("127.0.0.1", free_port, is_master=True, wait_for_workers=False))
    )
    late.start()

    await_store(client_of(free_port), {})

    late.join()
    assert 1 == len(stores)
    assert (
        f"pipette-launch: waiting up to 5 s for 127.0.0.1:{free_port}, where the nodes meet: Connection refused; "
        "127.0.0.1 is this machine itself, so other machines need --rdzv-endpoint with the first node's name\n"
    ) == capsys.readouterr().err


def test_a_store_that_never_comes_ends_the_wait(free_port: int) -> None:
    """After torch's own time, with what to do."""
    expected = (
        rf"the nodes cannot meet: waited 0 s for 127.0.0.1:{free_port}, where the nodes meet: Connection refused; "
        r"start the launcher of that node, or correct --rdzv-endpoint"
    )
    with pytest.raises(ClusterError, match=expected):
        await_store(client_of(free_port, connect_s=0.2), {})


def test_whoever_hosts_the_store_waits_for_nobody(free_port: int) -> None:
    """Torch opens it there."""
    await_store(client_of(free_port, is_client=False, connect_s=0.0), {})


def test_another_program_on_the_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers no question of torch's client, which would wait for it for ever."""
    monkeypatch.setattr(rendezvous_handler, "answers", lambda _peer, within_s: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        with pytest.raises(ClusterError) as caught:
            await_store(client_of(port, may_host_store=True), {})

    assert str(caught.value).startswith(f"port {port} of this machine is held by another process")
    assert str(caught.value).endswith("end it, or give another port with --rdzv-endpoint, the same on every node")


def test_another_program_that_is_no_rendezvous_is_noted_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line comes before the long pause until the next attempt."""
    monkeypatch.setattr(rendezvous_handler, "answers", lambda _peer, within_s: False)
    monkeypatch.setattr(rendezvous_handler, "FOREIGN_S", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = client_of(int(server.getsockname()[1]), connect_s=0.5)
        with pytest.raises(ClusterError, match="where the nodes meet: what listens there does not answer as a rend"):
            await_store(settings, {})

    said = capsys.readouterr().err
    assert 1 == said.count("what listens there does not answer as a rendezvous of torch")


@pytest.mark.parametrize(
    ("facts", "cure"),
    [
        ({"flag": ENDPOINT}, "end it, or give another port with --rdzv-endpoint"),
        ({"flag": ADDRESS, "node_rank": 0}, "if it is this job's first node, give this launcher another --node-rank"),
        ({"flag": ADDRESS, "node_rank": 0, "most_nodes": 1}, "a job of --nnodes 1 has one launcher"),
    ],
)
def test_a_port_in_use_is_no_matter_of_host_names(facts: dict[str, object], cure: str) -> None:
    """The cure depends on whether another launcher may hold the port; the advice of the surroundings follows."""
    error = RendezvousConnectionError()
    error.__cause__ = RuntimeError("The server socket has failed. port: 29500, code: -98, name: EADDRINUSE")

    found = explained(error, client_of(29500, **{"advice": "; SLURM", **facts}))  # type: ignore[arg-type]

    assert found.startswith(f"port 29500 of this machine is held by another process (ss -ltnp names it); {cure}")
    assert found.endswith("; SLURM")


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ("port: 80, code: -13, name: EACCES", "port 80 of this machine may be opened by root only; give a port above"),
        ("no route to host.\nmore", "the nodes cannot meet: no route to host; correct --rdzv-endpoint"),
    ],
)
def test_other_ends_of_a_connection(why: str, expected: str) -> None:
    """The reason is torch's."""
    assert explained(RendezvousConnectionError(why), client_of(80)).startswith(expected)


@pytest.mark.parametrize(("node_rank", "is_here", "is_said"), [(0, False, True), (0, True, False), (-1, False, False)])
def test_a_first_node_at_a_foreign_address_is_noted(
    capsys: pytest.CaptureFixture[str], node_rank: int, is_here: bool, is_said: bool
) -> None:
    """Only a note: a virtual address may lead here by a way that this machine does not know."""
    settings = client_of(1, flag=ADDRESS, is_client=False, node_rank=node_rank, is_here=is_here)

    await_store(settings, {})

    said = capsys.readouterr().err
    assert is_said == said.startswith(
        "pipette-launch: --master-addr 127.0.0.1 is no address of this machine, where --node"
    )
    assert is_said == bool(said)


@pytest.mark.parametrize(
    ("flag", "environ", "parts"),
    [
        (
            ADDRESS,
            {"MASTER_ADDR": "n0"},
            ("127.0.0.1 is this machine", "MASTER_ADDR=n0 is set, but torchrun's flags do"),
        ),
        (ADDRESS, {"MASTER_ADDR": "127.0.0.1"}, ("127.0.0.1 is this machine",)),
        (ENDPOINT, {"MASTER_ADDR": "n0"}, ("127.0.0.1 is this machine",)),
    ],
)
def test_what_else_may_keep_nodes_apart(flag: str, environ: dict[str, str], parts: tuple[str, ...]) -> None:
    """The variable that plain torch reads and torchrun does not; an address that is each machine's own."""
    found = advice(client_of(1, flag=flag), environ).split("; ")[1:]

    assert len(parts) == len(found)
    assert all(one.startswith(part) for one, part in zip(found, parts, strict=True)), found


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104  nothing is bound
def test_an_address_of_no_machine_is_noted(host: str) -> None:
    """Servers bind it; the nodes of a job cannot connect to it."""
    place = RendezvousSettings(endpoint=f"{host}:1", node_rank=-1, may_host_store=False, is_client=True)

    assert f"; {host} is the address of no machine, so give --rdzv-endpoint the first node's name" == advice(place, {})


@pytest.mark.parametrize(
    "host", ["127.0.1.1", "127.0.0.2", "127.255.0.1", "::1", "[::1]", "::ffff:127.0.0.1", "localhost"]
)
def test_every_loopback_address_is_this_machine(host: str) -> None:
    """Each machine means itself by 127.0.0.0/8 and ::1, so the nodes of a job cannot meet there."""
    place = settings(endpoint=f"{host}:29517")

    expected = f"; {host} is this machine itself, so other machines need --rdzv-endpoint with the first node's name"
    assert expected.replace("[::1]", place.host_and_port[0]) == advice(place, {})
    assert advice(replace(place, most_nodes=1), {}) == ""


def test_a_host_name_of_debians_line_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes `127.0.1.1 NAME` into /etc/hosts, so equally named machines would each wait alone."""
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answers)

    found = advice(settings(endpoint="node0:29517"), {})
    assert found.startswith("; node0 means 127.0.1.1 here, this machine itself, as a line of Debian's /etc/hosts says")
    assert found.endswith("give --rdzv-endpoint the first node's address")

    answers.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0)))
    assert advice(settings(endpoint="node0:29517"), {}) == ""


ALIKE = "each launcher needs the same --rdzv-endpoint and --rdzv-id"


class Participant(NamedTuple):
    """As torch names a node."""

    addr: str


class Meeting:
    """Stands for torch's dynamic rendezvous: its state, and how its call ends."""

    def __init__(self, *names: str, is_full: bool = False, is_late: bool = False, end: Exception | None = None) -> None:
        nodes = [Participant(name) for name in names]
        self._this_node = "spare" if is_full or is_late else nodes[0]
        self._store = HashStore()
        state = SimpleNamespace(
            participants=nodes,
            redundancy_list={"spare"} if is_full else set(),
            wait_list={"spare"} if is_late else set(),
        )
        self._state_holder = SimpleNamespace(state=state)
        self._end = end
        self.is_closed_by_us = False

    def get_backend(self) -> str:
        """Name torch's own."""
        return "c10d"

    def get_run_id(self) -> str:
        """Name the job."""
        return "7"

    def next_rendezvous(self) -> str:
        """End as told."""
        if self._end:
            raise self._end
        return "places"

    def shutdown(self) -> bool:
        """Take note."""
        self.is_closed_by_us = True
        return True


def settings(**more: Any) -> RendezvousSettings:
    """Two nodes that meet at n0."""
    facts = {"endpoint": "n0:29500", "node_rank": -1, "may_host_store": True, "least_nodes": 2, "most_nodes": 2}
    return RendezvousSettings(**{**facts, **more})


def lines(inner: Any, place: RendezvousSettings, seconds: tuple[float, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed by looks after so many seconds."""
    looks = Waiting(inner, place)
    looks.announce()
    for waited_s in seconds:
        looks.look(waited_s)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "names", "expected"),
    [
        (
            settings(),
            ("n0",),
            f"1 of 2 nodes have come to n0:29500 in 15 s (n0); {ALIKE} (none); waiting up to 600 s",
        ),
        (
            settings(node_rank=0, most_nodes=3, least_nodes=3, join_s=900, flag="--master-addr"),
            ("n0",),
            "1 of 3 nodes have come to n0:29500 in 15 s (n0); missing: --node-rank 1, 2; waiting up to 900 s",
        ),
        (
            settings(least_nodes=3, most_nodes=4, run_id="7", advice="; SLURM"),
            ("n1", "n0"),
            f"2 of 3 to 4 nodes have come to n0:29500 in 15 s (n0, n1); {ALIKE} (7); waiting up to 600 s; SLURM",
        ),
    ],
    ids=["c10d", "static", "elastic"],
)
def test_missing_nodes_are_named(
    place: RendezvousSettings, names: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By rank where ranks are given, else by number, with what all must have alike."""
    assert f"pipette-launch: {expected}\n" == lines(Meeting(*names), place, (1.0, 15.0, 16.0), capsys)


@pytest.mark.parametrize(
    ("place", "names", "seconds", "num_lines"),
    [
        (settings(), ("n0",), (1.0, 14.0), 0),
        (settings(), ("n0", "n1"), (15.0,), 0),
        (settings(), ("n0",), (15.0, 59.0, 60.0, 239.0, 240.0), 3),
        (settings(may_host_store=False), ("n1",), (15.0,), 1),
        (settings(may_host_store=False, least_nodes=100, most_nodes=100), ("n1",), (15.0, 60.0), 0),
        (settings(least_nodes=100, most_nodes=100), ("n0",), (15.0,), 1),
    ],
    ids=["early", "all there", "rarer and rarer", "few nodes", "many nodes", "host of many"],
)
def test_when_a_line_is_printed(
    place: RendezvousSettings,
    names: tuple[str, ...],
    seconds: tuple[float, ...],
    num_lines: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not while nodes may just be starting, ever more rarely, and in a large job on the first node alone."""
    assert num_lines == lines(Meeting(*names), place, seconds, capsys).count("\n")


def test_names_of_many_nodes_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight, and how many more."""
    said = lines(Meeting(*[f"n{i}" for i in range(20)]), settings(least_nodes=64, most_nodes=64), (15.0,), capsys)

    assert "20 of 64 nodes have come to n0:29500 in 15 s (n0, n1, n10, n11, n12, n13, n14, n15 and 12 more)" in said


def test_nodes_that_come_during_a_look_disturb_nothing() -> None:
    """Torch's thread adds them to the same dictionary."""

    class Coming:
        @property
        def addr(self) -> str:
            participants[Participant(f"n{len(participants)}")] = 0
            return "n0"

    participants: dict[Any, int] = {Coming(): 0, Coming(): 1}
    meeting = Meeting("n0")
    meeting._state_holder.state.participants = participants

    Waiting(meeting, settings()).look(1.0)  # type: ignore[arg-type]

    assert 4 == len(participants)


def test_a_launcher_too_many_waits_for_a_lost_node_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    """Once: it may be meant as a replacement."""
    said = lines(Meeting("n1", "n0", is_full=True), settings(advice="; SLURM"), (1.0, 2.0, 100.0), capsys)

    assert (
        "pipette-launch: the job at n0:29500 with --rdzv-id none already has all its 2 nodes (n0, n1), so this "
        "launcher is one too many; raise --nnodes if it belongs to that job, or give another --rdzv-endpoint "
        "if it is another job; waiting to take the place of a lost node; SLURM\n"
    ) == said


def test_a_launcher_that_comes_after_the_start_prints_once_that_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    """A node that rejoins is on torch's waiting list for a moment, and prints nothing."""
    place = settings(least_nodes=1, most_nodes=3, advice="; SLURM")
    said = lines(Meeting("n1", "n0", is_late=True), place, (1.0, 15.0, 100.0), capsys)

    assert (
        "pipette-launch: the job at n0:29500 with --rdzv-id none has started without this launcher, on n0, n1; "
        "waiting up to 600 s until its nodes meet again after a failure; SLURM\n"
    ) == said
    assert "" == lines(Meeting("n1", "n0", is_late=True), place, (1.0, 14.0), capsys)


def test_a_second_launcher_of_one_node_ends_at_once() -> None:
    """A job of one node replaces nobody, so it would wait in vain."""
    looks = Waiting(Meeting("n0", is_full=True), settings(least_nodes=1, most_nodes=1, advice="; SLURM"))  # type: ignore[arg-type]

    with pytest.raises(
        ClusterError, match=r"already has its one node \(n0\), so this launcher is one too many.*; SLURM$"
    ):
        looks.look(0.1)


def test_a_rendezvous_of_another_kind_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The handler of etcd has no such state."""
    assert "" == lines(SimpleNamespace(), settings(), (15.0,), capsys)
    assert "0 of 2 nodes have come" in Waiting(SimpleNamespace(), settings()).missing(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "is_full", "expected"),
    [
        (RendezvousTimeoutError(), False, "the nodes cannot meet: 1 of 2 nodes have come to n0:29500 in 0 s"),
        (RendezvousTimeoutError(), True, "the job went on without this launcher for 0 s, as long as --rdzv-conf join_"),
        (RendezvousGracefulExitError(), True, "the job has ended with its own nodes, and this launcher took no part"),
        (RendezvousConnectionError(), True, "the job has ended with its own nodes, and this launcher took no part"),
        (
            RendezvousGracefulExitError(),
            False,
            "the job with --rdzv-id 7 has ended before this launcher joined it",
        ),
        (
            RendezvousClosedError(),
            False,
            "the job with --rdzv-id 7 has ended before this launcher joined it",
        ),
    ],
)
def test_an_end_without_a_round_is_a_sentence(end: Exception, is_full: bool, expected: str) -> None:
    """Where stock torchrun ends with a traceback of its own code (pytorch issue 133380)."""
    handler = AgentStoreHandler(Meeting("n0", end=end), settings(), is_round_over=bool)  # type: ignore[arg-type]
    handler._waiting.look(0.0)
    handler._waiting.is_spare = is_full

    with pytest.raises(ClusterError, match=expected):
        handler.next_rendezvous()


@pytest.mark.parametrize("is_spare", [False, True])
def test_a_launcher_too_many_closes_nobodys_job(is_spare: bool) -> None:
    """Torch closes the rendezvous for all when an agent ends."""
    meeting = Meeting("n0")
    handler = AgentStoreHandler(meeting, settings(), is_round_over=bool)  # type: ignore[arg-type]
    handler._waiting.is_spare = is_spare

    assert (not is_spare, not is_spare) == (handler.shutdown(), meeting.is_closed_by_us)


def test_a_spare_that_is_taken_in_is_one_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the job from then on."""
    monkeypatch.setattr(rendezvous_handler, "GLANCE_S", 0.01)
    handler = AgentStoreHandler(Meeting("n0"), settings(), is_round_over=bool)  # type: ignore[arg-type]
    handler._waiting.is_spare = True

    assert "places" == handler.next_rendezvous()
    assert not handler._waiting.is_spare


def test_the_first_line_leaves_time_to_start() -> None:
    """Torch's imports alone take seconds."""
    assert 15.0 == rendezvous_handler.FIRST_LINE_S


def failing(error: Exception) -> Callable[[], None]:
    """A call that raises."""

    def fail() -> None:
        raise error

    return fail


def test_torchs_places_are_passed_on() -> None:
    """And then the agents learn of each other."""
    done: list[str] = []

    assert 7 == first_meeting(lambda: 7, lambda: done.append("joined"))
    assert ["joined"] == done


@pytest.mark.parametrize(
    ("assign", "join", "why"),
    [
        (failing(DistStoreError("wait timeout after 60000ms\nmore")), lambda: None, "wait timeout after 60000ms; look"),
        (lambda: 7, failing(StoreGone("silent for 5 s")), "silent for 5 s; look at the host of the rendezvous"),
        (lambda: time.sleep(1.0), lambda: None, "no answer within 0.1 s; look"),
    ],
)
def test_a_rendezvous_that_breaks_off_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, assign: Callable[[], int], join: Callable[[], None], why: str
) -> None:
    """Whether its store fails, hangs, or is gone for the agents."""
    monkeypatch.setattr(rendezvous_handler, "PLACES_S", 0.1)

    with pytest.raises(ClusterError, match=f"the nodes have met, and then lost each other: {why}"):
        first_meeting(assign, join)


HERE = RendezvousSettings(endpoint="localhost:0", node_rank=-1, may_host_store=True)
ELSEWHERE = RendezvousSettings(endpoint="10.0.0.1:29500", node_rank=-1, may_host_store=False)


class Rendezvous:
    """Stands for torch's: its answer comes after so many seconds."""

    def __init__(self, seconds: float, backend: str = "c10d") -> None:
        self.seconds = seconds
        self.backend = backend

    def get_backend(self) -> str:
        """Name torch's own."""
        return self.backend

    def next_rendezvous(self) -> str:
        """Answer late."""
        time.sleep(self.seconds)
        return "places"


@pytest.mark.parametrize(
    ("settings", "backend", "there"),
    [
        (HERE, "c10d", [False]),
        (ELSEWHERE, "etcd-v2", [False]),
        (ELSEWHERE, "c10d", [True]),
        (ELSEWHERE, "c10d", [False, True]),
    ],
    ids=["own", "no store of torch's", "there", "there again"],
)
def test_a_long_wait_for_other_nodes_goes_on(
    monkeypatch: pytest.MonkeyPatch, settings: RendezvousSettings, backend: str, there: list[bool]
) -> None:
    """While the store answers, now and then."""
    looks = iter([*there, *there[-1:] * 99])
    monkeypatch.setattr(rendezvous_handler, "answers", lambda _host, within_s: next(looks))
    monkeypatch.setattr(rendezvous_handler, "LOOK_S", 0.02)
    monkeypatch.setattr(rendezvous_handler, "HOST_GONE_S", 0.1)
    handler = AgentStoreHandler(Rendezvous(0.3, backend), settings, is_round_over=bool)

    assert "places" == handler.next_rendezvous()


def test_a_store_that_is_gone_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own call waits for ever on a connection whose wire was cut."""
    monkeypatch.setattr(rendezvous_handler, "answers", lambda _host, within_s: False)
    monkeypatch.setattr(rendezvous_handler, "LOOK_S", 0.02)
    monkeypatch.setattr(rendezvous_handler, "HOST_GONE_S", 0.1)
    handler = AgentStoreHandler(Rendezvous(2.0), ELSEWHERE, is_round_over=bool)
    began_s = time.monotonic()

    with pytest.raises(RendezvousConnectionError, match=r"10.0.0.1:29500 was there, and has not answered for 0 s"):
        handler.next_rendezvous()

    assert time.monotonic() - began_s < 1
