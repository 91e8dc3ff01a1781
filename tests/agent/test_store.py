"""What comes through the rendezvous store is taken from other machines: cut off, too long or no text, it is refused."""

from __future__ import annotations

import threading
import time
import zlib

import pytest
from torch.distributed import HashStore

from pipette_launch.agent import store as agent_store
from pipette_launch.agent.store import LOOKS_PER_S, PACKED, RoundStore, StoreGone, await_all, say_goodbye
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files


def own_store(store: HashStore | None = None) -> RoundStore:
    """Return the round's store of the agent that holds it."""
    return RoundStore(store or HashStore(), 0, 1, is_coordinator=True)


@pytest.mark.parametrize("piece_bytes", [1 << 22, 7])
def test_a_long_text_comes_back(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """A long text is compressed, and cut into pieces that the store accepts."""
    monkeypatch.setattr(agent_store, "MOST_BYTES", piece_bytes)
    store = HashStore()
    text = "ä plan for many nodes " * 1000

    own_store(store).put("key", text)

    assert text == own_store(store).peek("key")
    assert len(store.get("pipette/round/key")) < 500


@pytest.mark.parametrize("packed", [b"x", zlib.compress(b"text")[:-2], zlib.compress(b"\xff")])
def test_a_damaged_long_text_is_refused(packed: bytes) -> None:
    """The error names the key."""
    store = HashStore()
    store.set("pipette/round/key", PACKED + b"\0" + packed)  # type: ignore[arg-type]

    with pytest.raises(ClusterError, match="the message of another node under key"):
        own_store(store).peek("key")


def test_a_missing_piece_is_refused() -> None:
    """The reader does not wait for a piece that is not there."""
    store = HashStore()
    store.set("pipette/round/key", PACKED + b"\2" + zlib.compress(b"text")[:-2])  # type: ignore[arg-type]

    with pytest.raises(ClusterError, match="key: is cut off"):
        own_store(store).peek("key")


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader never holds more than the limit of files."""
    store = HashStore()
    own_store(store).put("key", "x" * 5000)
    monkeypatch.setattr(files, "MOST_BYTES", 4999)

    with pytest.raises(ClusterError, match="more than 4999 bytes"):
        own_store(store).peek("key")


def test_a_large_job_looks_seldom() -> None:
    """The nodes of a job together look for a key at most LOOKS_PER_S times a second."""
    store = HashStore()
    large, small = (RoundStore(store, 0, size, is_coordinator=True) for size in (10**9, 1))
    assert not large.glance("alarm")
    assert not small.glance("alarm")

    large.put("alarm", "a host is lost")
    time.sleep(2 / LOOKS_PER_S)

    assert not large.glance("alarm")
    assert small.glance("alarm")


def test_bytes_that_are_no_text_are_refused() -> None:
    """Whoever put them there."""
    store = HashStore()
    store.set("pipette/round/key", b"\xff")
    ours = RoundStore(store, 0, 1, is_coordinator=True)

    for get in (lambda: ours.peek("key"), lambda: ours.take("key", what="it", deadline_s=1)):
        with pytest.raises(ClusterError, match="the message of another node under key is no text"):
            get()


def test_the_first_word_counts() -> None:
    """Whoever comes later hears it."""
    store = HashStore()
    agents = [RoundStore(store, place, 2, is_coordinator=True) for place in range(2)]

    assert "mine" == agents[0].settle("verdict", "mine")
    assert "mine" == agents[1].settle("verdict", "yours")


def test_a_store_that_was_silent_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question would take as long again: before an agent passes on a signal to its workers, it says two things."""
    asked = []

    class SilentStore(HashStore):
        def set(self, *words: str) -> None:
            asked.append(words)
            time.sleep(0.3)

    monkeypatch.setattr(agent_store, "HOST_SILENCE_S", 0.1)
    silent = RoundStore(SilentStore(), 1, 2, is_coordinator=False)
    silent.say("left", "its agent was told to end")
    silent.say("alarm", "its agent was told to end")

    assert 1 == len(asked)
    with pytest.raises(StoreGone, match="silent for"):
        silent.has("alarm")


def wait(*, done: int = 0, done_after_s: float = 0.0, called: bool = False, gone: bool = False) -> bool:
    """Wait at the end of a phase with another node that is done now or later, or that has called a meeting."""

    class GoneStore(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("failed to recv, got 0 bytes")

    round_store = RoundStore(GoneStore() if gone else HashStore(), 1, 2, is_coordinator=False)
    round_store.count("done/train", done)
    if called:
        round_store.put("alarm", "a worker failed")
    later = threading.Timer(done_after_s, lambda: await_all(round_store, "train", num_nodes=2))
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
