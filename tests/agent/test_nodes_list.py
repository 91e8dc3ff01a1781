"""In a large job one node writes torch's list for all nodes that come at once, and a few nodes renew all."""

from __future__ import annotations

import json
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from pipette_launch.agent import nodes_list
from pipette_launch.agent.rendezvous import RendezvousSettings
from pipette_launch.agent.rendezvous_handler import AgentStoreHandler
from pipette_launch.errors import ClusterError


def settings(port: int, least: int, most: int) -> RendezvousSettings:
    """A node whose store is another process's."""
    return RendezvousSettings(
        endpoint=f"127.0.0.1:{port}", node_rank=-1, may_host_store=False, is_client=True, connect_s=5.0,
        least_nodes=least, most_nodes=most,
    )  # fmt: skip


def open_handlers(port: int, number: int, nodes: str, **conf: str) -> list[AgentStoreHandler]:
    """Return handlers of this many nodes of a job with these --nnodes."""
    least, most = map(int, nodes.split(":"))
    handlers = []
    for _ in range(number):
        client = TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        parameters = RendezvousParameters("c10d", "localhost", "job", least, most, local_addr="127.0.0.1", **conf)
        torchs = create_handler(client, C10dRendezvousBackend(client, "job"), parameters)
        handlers.append(AgentStoreHandler(torchs, settings(port, least, most), is_round_over=lambda: False))
    return handlers


def by_rank(pool: ThreadPoolExecutor, handlers: list[AgentStoreHandler]) -> list[Any]:
    """Let all nodes meet, and return their handlers by torch's rank."""
    found = {
        met.rank: one for met, one in zip(pool.map(lambda one: one.next_rendezvous(), handlers), handlers, strict=True)
    }
    return [found[rank] for rank in range(len(handlers))]


def nodes_of(handler: Any) -> list[int]:
    """Return the ranks in torch's list as this node reads it now."""
    handler._inner._state_holder.sync()
    return sorted(handler._inner._state_holder.state.participants.values())


def writes_of(handler: Any) -> Mock:
    """Count the writes of torch's list by this node from now on."""
    backend = handler._inner._state_holder._backend
    backend.set_state = Mock(wraps=backend.set_state)
    return backend.set_state  # type: ignore[no-any-return]


def test_one_agent_renews_the_nodes_of_a_round() -> None:
    """Of four nodes of torch's rendezvous the first renews three. torch keeps the three and drops the fourth."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    handlers = open_handlers(store.port, 4, "4:4", keep_alive_interval="1", keep_alive_max_attempt="6")
    with ThreadPoolExecutor(4) as pool:
        handlers = by_rank(pool, handlers)
    for rank, handler in enumerate(handlers):
        handler.renew({0, 1, 2} if rank == 0 else ())
    writes = writes_of(handlers[1])

    time.sleep(7.5)

    assert [0, 1, 2] == nodes_of(handlers[1])
    assert not writes.called
    for handler in handlers:
        handler.renew(())


def test_renewal_goes_on_after_a_waiting_node_is_taken_in() -> None:
    """Four agents train and renew all. They meet again as a fifth waits: it is numbered, and torch drops no node."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    conf = {"keep_alive_interval": "1", "keep_alive_max_attempt": "5", "last_call_timeout": "6", "join_timeout": "50"}
    handlers = open_handlers(store.port, 4, "4:5", **conf)
    with ThreadPoolExecutor(5) as pool:
        trained = by_rank(pool, handlers)
        for handler in trained:
            handler.renew(range(4))
        [fifth] = open_handlers(store.port, 1, "4:5", **conf)
        joined = pool.submit(fifth.next_rendezvous)
        waits_until_s = time.monotonic() + 30
        while not trained[3].num_nodes_joining():
            assert time.monotonic() < waits_until_s
            time.sleep(0.2)
        rejoined = [pool.submit(one.next_rendezvous) for one in trained]
        met = [one.result(60) for one in (*rejoined, joined)]
        ranks = dict(zip([one.rank for one in met], [*trained, fifth], strict=True))

        assert {5} == {one.world_size for one in met}
        assert {0, 1, 2, 3, 4} == set(ranks)
        for rank, handler in ranks.items():
            handler.renew(range(5) if rank < 4 else ())
        writes = writes_of(ranks[4])
        time.sleep(6.5)

        assert [0, 1, 2, 3, 4] == nodes_of(ranks[4])
        assert not writes.called
        for handler in ranks.values():
            handler.renew(())


def test_nodes_that_come_at_once_enter_torchs_list_by_few_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch alone writes the list at least once for each node."""
    monkeypatch.setattr(nodes_list, "FEW_NODES", 0)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    handlers = open_handlers(store.port, 32, "32:32")
    writes = [writes_of(one) for one in handlers]
    with ThreadPoolExecutor(32) as pool:
        handlers = by_rank(pool, handlers)

    assert list(range(32)) == nodes_of(handlers[0])
    assert sum(one.call_count for one in writes) < 32
    for handler in handlers:
        handler.renew(())


def test_a_node_that_comes_too_late_waits_for_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last call torch numbers the nodes that came. A node beyond the most is no participant."""
    monkeypatch.setattr(nodes_list, "FEW_NODES", 0)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    handlers = open_handlers(store.port, 3, "1:2", join_timeout="60")
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(one.next_rendezvous) for one in handlers]
        done = wait(calls, 30, FIRST_COMPLETED).done | wait(calls, 3).done

        assert [0, 1] == sorted(one.result().rank for one in done)
        [late] = [one for one, call in zip(handlers, calls, strict=True) if call not in done]
        assert late._inner._this_node in late._inner._state_holder.state.redundancy_list
        handlers[calls.index(done.pop())].set_closed()
        with pytest.raises(ClusterError, match="has ended"):
            calls[handlers.index(late)].result(30)
    for handler in handlers:
        handler.renew(())


def test_a_line_of_a_dead_node_enters_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is applied only while torch would keep the node without a renewal."""
    monkeypatch.setattr(nodes_list, "FEW_NODES", 0)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    [handler] = open_handlers(store.port, 1, "1:2", last_call_timeout="1")
    long_ago = datetime.now(timezone.utc) - timedelta(seconds=16)
    store.append("pipette/job/nodes/0", json.dumps(["gone", 1, 0, long_ago.isoformat()]) + "\n")

    assert (0, 1) == (handler.next_rendezvous().rank, len(nodes_of(handler)))
    assert b"" == store.get("pipette/job/nodes/0")
    handler.renew(())


def test_in_a_small_job_each_node_writes_torchs_list_itself() -> None:
    """The private names of torch that shared writes need matter in large jobs only."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    handlers = open_handlers(store.port, 3, "3:3")
    with ThreadPoolExecutor(3) as pool:
        handlers = by_rank(pool, handlers)

    assert not store.check(["pipette/job/nodes/0"])
    for handler in handlers:
        handler.renew(())


@pytest.mark.parametrize("part", ["_heartbeat_lock", "_op_executor", "_state_holder"])
def test_with_an_unknown_torch_each_node_renews_itself(part: str, caplog: pytest.LogCaptureFixture) -> None:
    """A log line names the missing private names, and torch's own renewal goes on."""
    lacking = DynamicRendezvousHandler.__new__(DynamicRendezvousHandler)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    [known] = open_handlers(store.port, 1, "1:2")
    vars(lacking).update(vars(known._inner) | {part: SimpleNamespace()})
    if part == "_heartbeat_lock":
        del lacking._heartbeat_lock
    renewing = Mock()
    lacking._stop_heartbeats = renewing  # type: ignore[method-assign]

    handler = AgentStoreHandler(lacking, settings(1, 1, 2), is_round_over=bool)
    handler.renew({0})

    assert "each node renews itself, as under torchrun" in caplog.text
    assert not renewing.called
