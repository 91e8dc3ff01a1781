"""Another agent that ends, is stopped or never answers is found; one that is well is not."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import Store

from pipette_launch.agent import peers
from pipette_launch.agent.peers import (
    GONE,
    SILENT,
    LostFinder,
    OpenConnections,
    PeerWatch,
    ReachSweep,
    connected,
    why_unreachable,
)
from pipette_launch.defaults import HOST_SILENCE_S
from pipette_launch.facts.messages import Member

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]
STORE = (
    "import time\n"
    "from torch.distributed import TCPStore\n"
    "store = TCPStore('localhost', 0, is_master=True, wait_for_workers=False)\n"
    "print(store.port, flush=True)\n"
    "{does}\n"
)


@contextmanager
def agent(does: str = "time.sleep(600)") -> Iterator[tuple[subprocess.Popen[str], Member]]:
    """Another process that holds a store."""
    process = subprocess.Popen([sys.executable, "-c", STORE.format(does=does)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        yield process, Member(token="t", address="127.0.0.1", port=port, node_rank=-1)  # noqa: S106, it is a name
    finally:
        process.kill()
        process.communicate()


def lost(watch: PeerWatch, within_s: float) -> str:
    """Why the watched agent is believed lost, as soon as it is."""
    ends_s = time.monotonic() + within_s
    while not watch.lost and time.monotonic() < ends_s:
        time.sleep(0.02)
    return watch.lost


def test_an_agent_that_ends_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its kernel, before it is asked again."""
    monkeypatch.setattr(peers, "PAUSE_S", 30.0)
    with agent() as (process, member):
        watch = PeerWatch([member], OpenConnections())
        assert "" == lost(watch, 0.5)
        process.kill()

        assert GONE == lost(watch, 5.0)
        process.wait()
        assert GONE == why_unreachable(member, timeout_s=1.0)


def test_the_kernel_reports_the_end_of_a_watched_agent() -> None:
    """Only the end of the process ends an open connection with FIN."""
    connections = OpenConnections()
    with agent() as (process, member):
        watch = PeerWatch([member], connections)
        assert ("", frozenset()) == (lost(watch, 0.5), connections.ended())
        process.kill()

        assert GONE == lost(watch, 5.0)
        assert {"t"} == connections.ended()


def test_a_firewall_does_not_prove_the_end_of_an_agent() -> None:
    """A firewall that rejects packets breaks open connections with RST. The first look finds the error."""
    connections = OpenConnections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        opened = socket.create_connection(server.getsockname())
        taken, _ = server.accept()
        assert opened is connections.keep(member("a"), opened)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        taken.close()
        time.sleep(0.1)

        assert [frozenset()] * 2 == [connections.ended() for _ in range(2)]


def test_a_sweep_keeps_one_connection_to_each_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep connects again and again, and the first connection stays open until the agent ends."""
    monkeypatch.setattr(peers, "PAUSE_S", 0.01)
    connections = OpenConnections()
    with agent() as (process, member):
        sweep = ReachSweep([member], connections)
        ends_s = time.monotonic() + 10.0
        while not connections._open and time.monotonic() < ends_s:
            time.sleep(0.01)
        first = dict(connections._open)
        time.sleep(0.2)
        assert first == connections._open
        process.kill()
        while not sweep.lost and time.monotonic() < ends_s:
            time.sleep(0.01)

        assert (GONE, {"t"}) == (sweep.lost, connections.ended())
        connections.keep_only(())


def test_an_agent_that_ends_during_a_connection_is_found_at_once() -> None:
    """The kernel closes a process's connections before its port, so a watch may connect to a dying agent."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def die() -> None:
            taken = [server.accept()[0] for _ in range(2)]
            server.close()
            for connection in taken:
                connection.close()

        port = server.getsockname()[1]
        pool.submit(die)
        peer = Member(token="t", address="127.0.0.1", port=port, node_rank=-1)  # noqa: S106, a name
        watch = PeerWatch([peer], OpenConnections())

        assert GONE == lost(watch, 4.0)


def test_an_agent_that_is_stopped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel still answers, it does not."""
    monkeypatch.setattr(peers, "HOST_SILENCE_S", 1.0)
    with agent() as (process, member):
        watch = PeerWatch([member], OpenConnections())
        assert "" == lost(watch, 2.5)
        process.send_signal(signal.SIGSTOP)

        assert peers.SILENT == lost(watch, 10.0)
        assert "" == why_unreachable(member, timeout_s=1.0)


def test_an_agent_whose_store_waits_for_a_name_service_at_first_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's store looks up the name of the first node that connects, and answers nobody meanwhile."""

    def connected_late(peer: Member, *, within_s: float) -> Store:
        time.sleep(1.0)
        return connected(peer, within_s=within_s - 1.0)

    monkeypatch.setattr(peers, "HOST_SILENCE_S", 0.5)
    monkeypatch.setattr(peers, "connected", connected_late)
    with agent() as (_, member):
        watch = PeerWatch([member], OpenConnections())

        assert "" == lost(watch, 2.5)
        watch.stop()


def test_a_busy_agent_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose Python computes without a pause answers from another thread."""
    monkeypatch.setattr(peers, "PAUSE_S", 0.05)
    with agent("sum(range(10 ** 12))") as (_, member):
        watch = PeerWatch([member], OpenConnections())

        assert "" == lost(watch, 3.0)
        watch.stop()


def test_a_watch_that_is_over_says_nothing() -> None:
    """The end of the job is no loss."""
    with agent() as (process, member):
        watch = PeerWatch([member], OpenConnections())
        assert "" == lost(watch, 0.3)
        watch.stop()
        process.kill()

        assert "" == lost(watch, 2.0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionRefusedError(), GONE),
        (TimeoutError(), SILENT),
        (OSError(errno.EHOSTUNREACH, "no route"), SILENT),
        (OSError(errno.EMFILE, "too many open files"), ""),
    ],
)
def test_a_fault_of_this_process_is_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, error: OSError, expected: str
) -> None:
    """Only what the way or the other kernel says counts."""

    def fail(*_args: object, **_more: object) -> socket.socket:
        raise error

    monkeypatch.setattr(peers.socket, "create_connection", fail)
    peer = Member(token="t", address="127.0.0.1", port=1, node_rank=-1)  # noqa: S106, it is a name

    assert expected == why_unreachable(peer, timeout_s=0.3)


def test_a_watch_works_where_very_many_files_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of 512 agents holds a connection of each in its own store and in torch's: select() takes no more."""
    monkeypatch.setattr(peers, "HOST_SILENCE_S", 3.0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with agent() as (process, member), contextlib.ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, most), most))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1100):
            opened.callback(os.close, os.dup(0))
        watch = PeerWatch([member], OpenConnections())
        assert "" == lost(watch, 1.0)
        process.kill()

        assert GONE == lost(watch, 5.0)


def test_a_watch_goes_on_after_a_fault_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, or no more threads, for a while: the other agent is well."""
    connect, faults = socket.create_connection, [OSError(errno.EMFILE, "too many open files")] * 2

    def fail_at_first(*words: Any, **more: Any) -> socket.socket:
        if faults:
            raise faults.pop()
        return connect(*words, **more)

    with agent() as (process, member):
        monkeypatch.setattr(peers.socket, "create_connection", fail_at_first)
        monkeypatch.setattr(peers, "connected", failing_once(RuntimeError("can't start new thread")))
        watch = PeerWatch([member], OpenConnections())
        assert "" == lost(watch, 2.0)
        process.kill()

        assert GONE == lost(watch, 5.0)


def failing_once(error: Exception) -> Callable[..., Store]:
    """`connected`, which raises this at first."""
    connect, faults = peers.connected, [error]

    def connected(peer: Member, *, within_s: float) -> Store:
        if faults:
            raise faults.pop()
        return connect(peer, within_s=within_s)

    return connected


def test_a_route_that_is_missing_for_a_moment_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says so at once, long before the time is up."""
    connect, faults = socket.create_connection, [OSError(errno.ENETUNREACH, "no network")] * 2

    def fail_at_first(*words: Any, **more: Any) -> socket.socket:
        if faults:
            raise faults.pop()
        return connect(*words, **more)

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(peers.socket, "create_connection", fail_at_first)
        peer = Member(token="t", address="127.0.0.1", port=server.getsockname()[1], node_rank=-1)  # noqa: S106, a name

        assert "" == why_unreachable(peer, timeout_s=2.0)


def member(name: str) -> Member:
    """An agent that nobody has started."""
    return Member(token=name, address=name, port=1, node_rank=-1)


@pytest.mark.parametrize("why", [GONE, SILENT])
def test_a_sweep_stops_at_the_first_that_is_lost(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """An agent whose process has ended, too: where a wire is cut the neighbour watches another."""
    answers = {"a": "", "b": why, "c": SILENT}
    monkeypatch.setattr(peers, "PAUSE_S", 0.01)
    monkeypatch.setattr(peers, "why_unreachable", lambda peer, **_: answers[peer.token])
    sweep = ReachSweep([member(name) for name in "abc"], OpenConnections())

    ends_s = time.monotonic() + 10.0
    while not sweep.lost and time.monotonic() < ends_s:
        time.sleep(0.01)

    assert (member("b"), why) == (sweep.peer, sweep.lost)


def test_a_sweep_that_is_stopped_names_the_agent_that_has_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that fail at once end a round before any silence has lasted long enough."""
    asked = threading.Event()

    def silent_for_a_while(_peer: Member, **_: object) -> str:
        asked.set()
        time.sleep(0.5)
        return ""

    monkeypatch.setattr(peers, "PAUSE_S", 0.01)
    monkeypatch.setattr(peers, "why_unreachable", silent_for_a_while)
    sweep = ReachSweep([member("a"), member("b")], OpenConnections())
    assert asked.wait(10.0)
    began_s = time.monotonic()

    assert member("a") == sweep.stop()
    assert not sweep.lost
    assert time.monotonic() - began_s < 0.4


def test_a_sweep_between_two_attempts_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what was not asked."""
    monkeypatch.setattr(peers, "why_unreachable", lambda _peer, **_: SILENT)
    sweep = ReachSweep([member("a")], OpenConnections())
    began_s = time.monotonic()

    sweep.stop()

    assert time.monotonic() - began_s < 0.5
    assert not sweep.lost


@pytest.mark.parametrize(("waited_s", "expected"), [(HOST_SILENCE_S, True), (1.0, False)])
def test_a_request_that_waited_for_nearly_a_silence_counts_as_silence(waited_s: float, expected: bool) -> None:
    """The round ends with the first silence, so requests to other silent agents never reach their own limit."""
    finder = LostFinder([], OpenConnections())
    finder._ask()
    finder._asked_s -= waited_s

    assert expected == finder.is_silent
    finder._has_answer.set()
    assert not finder.is_silent


def test_connections_are_closed_although_they_are_part_of_a_cycle() -> None:
    """An agent's objects refer to each other, and Python warns of a socket that it has to close itself."""
    gc.collect()
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Python ends the older object of a cycle first.
        opened = socket.create_connection(server.getsockname())
        connections: Any = OpenConnections()
        connections.keep(member("a"), opened)
        taken, _ = server.accept()
        connections.itself = connections
        del connections, opened
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            gc.collect()

        assert (b"", []) == (taken.recv(1), [one.message for one in warned])
        taken.close()
