"""The store of the rendezvous: whether its name resolves, who holds its port, and how long a node waits for it."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from pipette_launch.agent import endpoint
from pipette_launch.agent.endpoint import (
    advice,
    await_name,
    await_store,
    explained,
    note_unknown_address,
    open_store,
)
from pipette_launch.agent.rendezvous import ADDRESS, ENDPOINT, Endpoint, RendezvousSettings
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
    monkeypatch.setattr(endpoint, "PAUSE_S", 0.0)

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
        monkeypatch.setattr(endpoint, "NAME_S", 0.01)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(0.2))
    monkeypatch.setattr(endpoint, "PAUSE_S", 0.01)

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
    monkeypatch.setattr(endpoint, "SAY_AFTER_S", 0.1)
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


def test_one_launcher_opens_the_store_and_the_others_connect_to_it(free_port: int) -> None:
    """Also if both launchers of a machine found the port free."""
    settings = client_of(free_port, is_client=False, may_host_store=True)
    first, first_holds = open_store(settings)
    second, second_holds = open_store(settings)
    second.set("key", "text")

    assert (True, False) == (first_holds, second_holds)
    assert b"text" == first.get("key")


def test_the_only_node_that_may_open_the_store_waits_for_nobody(free_port: int) -> None:
    """Another process holds the port of --node-rank 0."""
    with socket.create_server(("", free_port)), pytest.raises(ClusterError, match=f"port {free_port} of this machine"):
        open_store(client_of(free_port, is_client=False, must_host=True, node_rank=0))


def test_another_program_on_the_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers no question of torch's client, which would wait for it for ever."""
    monkeypatch.setattr(endpoint, "answers", lambda _peer, within_s: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        with pytest.raises(ClusterError) as caught:
            await_store(client_of(port, may_host_store=True), {})

    assert str(caught.value).startswith(
        f"port {port} of this machine is held by another process (ss -ltnp names it); end it"
    )
    assert str(caught.value).endswith("end it, or give another port with --rdzv-endpoint, the same on every node")


def test_another_program_on_another_address_is_named() -> None:
    """Torch's store listens on all addresses, so it cannot open, and nobody answers at the endpoint."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = int(server.getsockname()[1])
        with pytest.raises(ClusterError, match=f"port {port} of this machine is held by another process"):
            await_store(client_of(port, may_host_store=True), {})


def test_another_program_that_is_no_rendezvous_is_noted_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line comes before the long pause until the next attempt."""
    monkeypatch.setattr(endpoint, "answers", lambda _peer, within_s: False)
    monkeypatch.setattr(endpoint, "FOREIGN_S", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = client_of(int(server.getsockname()[1]), connect_s=0.5)
        with pytest.raises(ClusterError, match="where the nodes meet: what listens there does not answer as a rend"):
            await_store(settings, {})

    assert 1 == capsys.readouterr().err.count("what listens there does not answer as a rendezvous of torch")


@pytest.mark.parametrize(
    ("facts", "cure"),
    [
        ({"flag": ADDRESS, "node_rank": 0}, "if it is this job's first node, give this launcher another --node-rank"),
        ({"flag": ENDPOINT}, "end it, or give another port with --rdzv-endpoint"),
        ({"flag": ADDRESS, "node_rank": 0, "most_nodes": 1}, "a job of --nnodes 1 has one launcher"),
    ],
)
def test_a_port_in_use_is_no_matter_of_host_names(facts: dict[str, object], cure: str) -> None:
    """The cure depends on the flags; the advice of the surroundings ends the sentence."""
    error = RuntimeError("The server socket has failed. port: 29500, code: -98, name: EADDRINUSE")

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
    assert explained(RuntimeError(why), client_of(80)).startswith(expected)


@pytest.mark.parametrize(("node_rank", "is_here", "is_said"), [(0, False, True), (0, True, False), (-1, False, False)])
def test_a_first_node_at_a_foreign_address_is_noted(
    capsys: pytest.CaptureFixture[str], free_port: int, node_rank: int, is_here: bool, is_said: bool
) -> None:
    """Only a note: a virtual address may lead here by a way that this machine does not know."""
    open_store(client_of(free_port, flag=ADDRESS, is_client=False, node_rank=node_rank, is_here=is_here))

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
    place = RendezvousSettings(endpoint=f"{host}:29517", node_rank=-1, may_host_store=True, most_nodes=2)

    expected = f"; {host} is this machine itself, so other machines need --rdzv-endpoint with the first node's name"
    assert expected.replace("[::1]", place.host_and_port[0]) == advice(place, {})
    assert advice(replace(place, most_nodes=1), {}) == ""


def test_a_host_name_of_debians_line_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes `127.0.1.1 NAME` into /etc/hosts, so equally named machines would each wait alone."""
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answers)

    place = RendezvousSettings(endpoint="node0:29517", node_rank=-1, may_host_store=True, most_nodes=2)
    found = advice(place, {})
    assert found.startswith("; node0 means 127.0.1.1 here, this machine itself, as a line of Debian's /etc/hosts says")
    assert found.endswith("give --rdzv-endpoint the first node's address")

    answers.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0)))
    assert advice(place, {}) == ""
