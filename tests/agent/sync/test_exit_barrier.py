"""Agents end together; the host of their store is the last to leave."""

from __future__ import annotations

import threading
import time

from torch.distributed import HashStore

from pipette_launch.agent.sync.exit_barrier import await_all, say_goodbye
from pipette_launch.agent.sync.store import RoundStore


def wait(*, done: int = 0, done_after_s: float = 0.0, called: bool = False, gone: bool = False) -> bool:
    """Wait at the end of a phase with another node that is done now or later, or that has called a meeting."""

    class GoneStore(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("failed to recv, got 0 bytes")

    round_store = RoundStore(GoneStore() if gone else HashStore(), 1, 2, is_coordinator=False)
    round_store.count("done/train", done)
    if called:
        round_store.call_all("a worker failed")
    later = threading.Timer(done_after_s, lambda: round_store.count("done/train"))
    if done_after_s:
        later.start()
    return await_all(round_store, "train", num_nodes=2)


def test_all_are_done() -> None:
    """The last one ends the wait."""
    assert wait(done=1)


def test_a_node_that_failed_begins_anew() -> None:
    """Its workers need those of this node."""
    assert not wait(called=True)


def test_a_node_that_ends_later_is_waited_for() -> None:
    """Agents that left would be taken for lost, and its workers ended in the middle of what they do."""
    began_s = time.monotonic()

    assert wait(done_after_s=0.5)
    assert time.monotonic() - began_s > 0.4


def test_a_store_that_is_gone_is_not_waited_for() -> None:
    """The work of this node is done."""
    assert wait(gone=True)


def test_the_host_leaves_last() -> None:
    """It waits for the others, and they for nobody."""
    store = HashStore()
    host, guest = (RoundStore(store, rank, 2, is_coordinator=rank == 0) for rank in range(2))
    timer = threading.Timer(0.3, lambda: say_goodbye(guest, holds_store=False))
    began_s = time.monotonic()
    timer.start()

    say_goodbye(host, holds_store=True)

    assert 0.2 < time.monotonic() - began_s < 5
    timer.join()
