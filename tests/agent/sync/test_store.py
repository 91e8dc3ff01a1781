"""What comes through the rendezvous store is taken from other machines: cut off, too long or no text, it is refused."""

from __future__ import annotations

import base64
import time
import zlib

import pytest
from torch.distributed import HashStore

from pipette_launch.agent.sync import store as agent_store
from pipette_launch.agent.sync.store import RoundStore, StoreGone, pack, unpack
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files


def test_a_text_comes_back() -> None:
    """As it was packed."""
    assert "ä" * 1000 == unpack(pack("ä" * 1000))


@pytest.mark.parametrize(
    "packed", ["x", "é", "!!!!", pack("text")[:-8], base64.b64encode(zlib.compress(b"\xff")).decode()]
)
def test_what_was_not_packed_is_refused(packed: str) -> None:
    """By an error of ours."""
    with pytest.raises(ClusterError, match="what another node sent"):
        unpack(packed)


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the limit is ever held."""
    monkeypatch.setattr(files, "MOST_BYTES", 1000)

    assert "x" * 1000 == unpack(pack("x" * 1000))
    with pytest.raises(ClusterError, match="more than 1000 bytes unpacked"):
        unpack(pack("x" * 1001))


def test_bytes_that_are_no_text_are_refused() -> None:
    """Whoever put them there."""
    store = HashStore()
    store.set("pipette/round/key", b"\xff")
    ours = RoundStore(store, 0, 1, is_coordinator=True)

    for get in (lambda: ours.peek("key"), lambda: ours.take("key", what="it", deadline_s=1)):
        with pytest.raises(ClusterError, match="what another node said of key is no text"):
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
