"""Agents end together; the host of their store is the last to leave."""

from __future__ import annotations

import threading
import time
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from pipette_launch.agent.sync.exit_barrier import await_all, say_goodbye
from pipette_launch.agent.sync.store import RoundStore


class Waiting:
    """A handler that knows of nodes that wait."""

    def __init__(self, count: int | Exception, *, closed: bool = False) -> None:
        self.count = count
        self.closed = closed

    def is_closed(self) -> bool:
        return self.closed

    def num_nodes_waiting(self) -> int:
        if isinstance(self.count, Exception):
            raise self.count
        return self.count


def wait(waiting: Any, *, done: int = 0, closed: bool = False, timeout_s: float = 0.3) -> bool:
    """Wait at the end of a phase with another node that may be done."""
    round_store = RoundStore(HashStore(), 0, 2, is_coordinator=True)
    round_store.count("done/train", done)
    handler: Any = Waiting(waiting, closed=closed)
    return await_all(round_store, handler, "train", num_nodes=2, timeout_s=timeout_s)


def test_all_are_done() -> None:
    """The last one ends the wait."""
    assert wait(0, done=1)


def test_a_node_that_failed_begins_anew() -> None:
    """Its workers need those of this node."""
    assert not wait(1)


def test_a_node_that_never_ends_is_not_waited_for_in_vain() -> None:
    """Nor is one whose store is gone: this node's work is done."""
    assert wait(0)
    assert wait(RendezvousConnectionError("gone"))


def test_a_job_that_another_node_gave_up_is_over() -> None:
    """Its agent closes the rendezvous: nobody waits five minutes for workers that will never end."""
    began_s = time.monotonic()

    assert wait(0, closed=True, timeout_s=60)
    assert time.monotonic() - began_s < 5


def test_the_host_leaves_last() -> None:
    """It waits for the others, and they for nobody."""
    store = HashStore()
    host, guest = (RoundStore(store, rank, 2, is_coordinator=rank == 0) for rank in range(2))
    timer = threading.Timer(0.3, lambda: say_goodbye(guest, hosts_store=False))
    began_s = time.monotonic()
    timer.start()

    say_goodbye(host, hosts_store=True)

    assert 0.2 < time.monotonic() - began_s < 5
    timer.join()
