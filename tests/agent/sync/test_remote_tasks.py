"""Nodes that wait for a plan help to make it; whoever cannot is done without."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.api import SignalException

from pipette_launch.agent.controller import Helper
from pipette_launch.agent.sync import remote_tasks
from pipette_launch.agent.sync.remote_tasks import help_out, invite
from pipette_launch.agent.sync.store import Exchange


class Shouter:
    """A helper that answers in capitals, the second time one looks; `Q` makes it fail."""

    name = "shouter"

    def __init__(self, order: str) -> None:
        self.order = order
        self.batch = ""
        self.looked = 0
        self.closed = False

    def size(self) -> int:
        return 3

    def give(self, batch: str) -> None:
        if batch == "Q":
            raise OSError("no more processes")
        self.batch, self.looked = batch, 0

    def answer(self) -> str | None:
        self.looked += 1
        return (self.order + self.batch).upper() if self.looked > 1 else None

    def close(self) -> None:
        self.closed = True


class CountingStore(HashStore):
    """Counts bytes that were written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, int]] = []

    def set(self, key: str, value: str) -> None:
        self.written.append((key, len(value)))
        super().set(key, value)


@contextmanager
def node(exchange: Exchange, hire: Callable[[str], Helper]) -> Iterator[threading.Thread]:
    """A node that helps until it is over, in a thread."""
    over = threading.Event()
    thread = threading.Thread(target=lambda: help_out(exchange, hire, is_over=over.is_set))
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join()


def answer_of(helper: Helper, batch: str) -> str:
    """Give a batch and wait."""
    end_s = time.monotonic() + 30
    while not helper.size():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    helper.give(batch)
    while (answer := helper.answer()) is None:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return answer


def exchanges(count: int, store: HashStore | None = None) -> list[Exchange]:
    """All nodes of a round."""
    store = store or HashStore()
    return [Exchange(store, rank, count, is_chief=rank == 0) for rank in range(count)]


def test_batches_go_out_and_answers_come_back() -> None:
    """Whatever their language; in the end what worked on this node is ended."""
    chief, other = exchanges(2)
    hired: list[Shouter] = []

    def hire(order: str) -> Shouter:
        hired.append(Shouter(order))
        return hired[0]

    with node(other, hire):
        (helper,) = invite(chief, "grüß ")
        assert ["GRÜSS A", "GRÜSS B\n"] == [answer_of(helper, batch) for batch in ("a", "b\n")]
        assert ("node 1", 3) == (helper.name, helper.size())
        assert not hired[0].closed
    assert hired[0].closed


def test_a_node_that_cannot_help_says_so() -> None:
    """Its answer is empty, and it goes back to waiting for the plan."""
    chief, other = exchanges(2)
    with node(other, Shouter) as thread:
        (helper,) = invite(chief, "")

        assert "" == answer_of(helper, "Q")
        thread.join(30)
        assert not thread.is_alive()


def test_a_node_whose_processes_cannot_start_is_never_ready() -> None:
    """The first node does without it."""
    chief, other = exchanges(2)

    def hire(order: str) -> Helper:
        raise OSError("no more processes")

    with node(other, hire) as thread:
        (helper,) = invite(chief, "")
        thread.join(30)
        assert (False, 0) == (thread.is_alive(), helper.size())


def test_without_an_order_a_node_only_waits() -> None:
    """It ends when it is over."""
    _, other = exchanges(2)

    with node(other, Shouter) as thread:
        assert thread.is_alive()
    assert not thread.is_alive()


def test_traffic_grows_with_the_nodes() -> None:
    """The order is written once, whatever their number; a large one is read by few nodes or by none."""
    written = []
    for count in (2, 3, 5):
        store = CountingStore()
        assert count - 1 == len(invite(exchanges(count, store)[0], "x" * 1000))
        written.append(len(store.written))
    assert [2, 3, 5] == written


@pytest.mark.parametrize(("most", "nodes"), [(10**9, 4), (200, 2), (99, 0)])
def test_a_large_order_is_read_by_few(monkeypatch: pytest.MonkeyPatch, most: int, nodes: int) -> None:
    """As many as its bytes allow; what the store would not take is not written."""
    monkeypatch.setattr(remote_tasks, "pack", lambda text: text)
    monkeypatch.setattr(remote_tasks, "MOST_TRAFFIC_BYTES", most)

    assert nodes == len(invite(exchanges(5)[0], "x" * 100))
    monkeypatch.setattr(remote_tasks, "MOST_BYTES", 99)
    assert [] == invite(exchanges(5)[0], "x" * 100)


def test_a_signal_gets_through() -> None:
    """It ends the agent, and before it what works on this node."""
    chief, other = exchanges(2)
    invite(chief, "")
    chief.put("errand/1/1", remote_tasks.pack("a"))
    shouter = Shouter("")

    def end() -> None:
        raise SignalException("got signal: 15", signal.SIGTERM)

    shouter.answer = end  # type: ignore[method-assign]
    with pytest.raises(SignalException):
        help_out(other, lambda order: shouter, is_over=lambda: False)
    assert shouter.closed
