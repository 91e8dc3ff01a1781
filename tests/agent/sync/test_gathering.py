"""Whoever has not come to a meeting is waited for as long as it lives."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from torch.distributed import HashStore, TCPStore

from pipette_launch.agent.sync.gathering import PROBE_S, PROOF_S, Gathering
from pipette_launch.agent.sync.peer_watch import GONE, SILENT
from pipette_launch.agent.sync.store import AgentStore
from pipette_launch.facts.messages import Member


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
def test_who_is_said_to_be_silent_is_asked(agent: type, expected: str) -> None:
    """Its neighbour may not reach it for a cut wire; until its workers have ended it does not come itself."""
    with agent() as port:
        member = Member(token="t", address="127.0.0.1", port=port, node_rank=-1)  # noqa: S106, it is a name
        lost: dict[str, str] = {}
        gathering = Gathering(
            [member],
            AgentStore(HashStore(), "pipette", is_own=True),
            lost,
            lambda _, what: SILENT if what == "lost" else "",
        )
        ends_s = time.monotonic() + 2 * PROOF_S + 2 * PROBE_S
        while not lost and time.monotonic() < ends_s:
            gathering._find_lost([member])
            time.sleep(PROBE_S)

        assert ({"t": expected} if expected else {}) == lost
