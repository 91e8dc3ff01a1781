"""What comes through the rendezvous store is taken from other machines: cut off, too long or no text, it is refused."""

from __future__ import annotations

import threading
import time
import zlib
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from pipette_launch.agent import store as agent_store
from pipette_launch.agent.store import (
    FAN_OUT,
    LOOKS_PER_S,
    PACKED,
    AgentStore,
    Reader,
    RoundStore,
    StoreGone,
    await_all,
    parent_of,
    patience_s,
    say_goodbye,
)
from pipette_launch.defaults import HAND_ON_S
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files


def own_store(store: HashStore | None = None) -> RoundStore:
    """Return the round's store of the agent that holds it."""
    return RoundStore(store or HashStore(), 1, is_coordinator=True)


@pytest.mark.parametrize("piece_bytes", [1 << 22, 7])
def test_a_long_text_comes_back(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """A long text is compressed, and cut into pieces that the store accepts."""
    monkeypatch.setattr(agent_store, "MOST_BYTES", piece_bytes)
    store = HashStore()
    text = "ä plan for many nodes " * 1000

    own_store(store).put("key", text)

    assert text == own_store(store).peek("key")
    assert len(store.get("pipette/round/key")) < 500


class Emptied(HashStore):
    """A store in which another agent deletes each text between two calls of one reader."""

    def check(self, keys: list[str]) -> bool:
        """Find the keys, which are gone at once."""
        found = super().check(keys)
        for key in keys:
            self.delete_key(key)
        return found


def test_a_text_that_is_deleted_while_it_is_read_is_no_text() -> None:
    """The reader does not wait for the deleted text, as torch's `get` would until the store's time limit."""
    store = Emptied()
    store.set_timeout(timedelta(seconds=1))
    store.set("pipette/round/key", "text")

    assert own_store(store).peek("key") is None
    assert not store.check(["pipette/round/key"])


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
    large, small = (RoundStore(store, size, is_coordinator=True) for size in (10**9, 1))
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
    ours = RoundStore(store, 1, is_coordinator=True)

    for get in (lambda: ours.peek("key"), lambda: ours.take("key", what="it", deadline_s=1)):
        with pytest.raises(ClusterError, match="the message of another node under key is no text"):
            get()


def reader(parent: Store | None, own: Store | None = None) -> Reader:
    """An agent that reads in the store of a parent; None = nobody listens there."""

    def connect() -> Store:
        if parent is None:
            raise RuntimeError("its agent is gone")
        return parent

    return Reader(own or HashStore(), "round", 20, connect)


def first_store() -> RoundStore:
    """The store of the first agent, which holds a text of several pieces."""
    first = RoundStore(HashStore(), 1000, is_coordinator=True)
    first.put("plan", LONG)
    return first


LONG = "".join(map(str, range(20_000)))


def test_agents_form_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent sends a text to more agents than the limit, and nobody waits for a later agent."""
    assert {0} == {parent_of(place) for place in range(1, FAN_OUT + 1)}
    monkeypatch.setattr(agent_store, "FAN_OUT", 2)

    assert [0, 0, 1, 1, 2, 2, 3, 3] == [parent_of(place) for place in range(1, 9)]
    assert [0, 0, 0, 1, 1, 1, 1, 2, 2] == [patience_s(place) / HAND_ON_S for place in range(9)]


def test_a_text_goes_from_hand_to_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces are copied as they are, and the first agent's store sends none of them."""
    monkeypatch.setattr(agent_store, "MOST_BYTES", 1 << 13)
    first, parent, own = first_store(), HashStore(), HashStore()
    AgentStore(parent, "pipette/round", limit_s=None).put_pieces("plan", first.pieces("plan"))
    monkeypatch.setattr(first, "pieces", lambda _key: [b"from the first"])

    assert LONG == reader(parent, own).read("plan", first)
    assert LONG == AgentStore(own, "pipette/round", limit_s=None).peek("plan")


def test_the_text_of_an_older_round_is_not_read() -> None:
    """A parent that is late still has the plan of the round before."""
    parent = HashStore()
    AgentStore(parent, "pipette/older", limit_s=None).put("plan", "older")

    assert LONG == reader(parent).read("plan", first_store())


class GoneStore(HashStore):
    """A store whose agent has ended."""

    def check(self, _keys: list[str]) -> bool:
        raise RuntimeError("failed to recv, got 0 bytes")


class SilentStore(HashStore):
    """A store that does not answer."""

    def check(self, keys: list[str]) -> bool:
        time.sleep(30.0)
        return super().check(keys)


@pytest.mark.parametrize("parent", [None, SilentStore, HashStore])
def test_the_first_agent_stands_in_for_a_parent_that_is_lost_or_late(parent: type[HashStore] | None) -> None:
    """A parent that is gone costs no time, and a silent one its patience once, however many texts follow."""
    one, first = reader(parent and parent()), first_store()
    took_s = []
    for _ in range(3):
        began_s = time.monotonic()
        assert LONG == one.read("plan", first)
        took_s.append(time.monotonic() - began_s)

    assert took_s[0] < (0.5 if parent is None else HAND_ON_S + 0.5)
    assert max(took_s[1:]) < 0.5


def test_a_meeting_ends_the_wait_for_a_parent() -> None:
    """All agents come to the meeting at once, with the plan that the first agent has."""
    first = first_store()
    first.put("alarm", "an agent is lost")
    began_s = time.monotonic()

    assert LONG == reader(HashStore()).read("plan", first)
    assert time.monotonic() - began_s < 1.0


def test_the_end_of_the_first_agent_ends_the_wait_for_a_parent() -> None:
    """The agents meet at another agent, as if each of them had read in the first agent's store."""
    began_s = time.monotonic()
    with pytest.raises(StoreGone):
        reader(HashStore()).read("plan", RoundStore(GoneStore(), 1000, is_coordinator=False))

    assert time.monotonic() - began_s < 1.0


def test_an_empty_text_counts_as_not_published() -> None:
    """An agent gets an empty text from torch if it reads while another agent deletes."""
    ours = own_store()
    ours.put("key", "")

    assert ours.peek("key") is None


def test_the_first_word_counts() -> None:
    """Whoever comes later hears it."""
    store = HashStore()
    agents = [RoundStore(store, 2, is_coordinator=True) for _ in range(2)]

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
    silent = RoundStore(SilentStore(), 2, is_coordinator=False)
    silent.say("left", "its agent was told to end")
    silent.say("alarm", "its agent was told to end")

    assert 1 == len(asked)
    with pytest.raises(StoreGone, match="silent for"):
        silent.has("alarm")


def wait(*, done: int = 0, done_after_s: float = 0.0, called: bool = False, gone: bool = False) -> bool:
    """Wait at the end of a phase with another node that is done now or later, or that has called a meeting."""
    round_store = RoundStore(GoneStore() if gone else HashStore(), 2, is_coordinator=False)
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
    host, guest = (RoundStore(store, 2, is_coordinator=rank == 0) for rank in range(2))
    timer = threading.Timer(0.3, lambda: say_goodbye(guest, holds_store=False))
    began_s = time.monotonic()
    timer.start()

    say_goodbye(host, holds_store=True)

    assert 0.2 < time.monotonic() - began_s < 5
    timer.join()
