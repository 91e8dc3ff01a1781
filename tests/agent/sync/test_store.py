"""What comes through the rendezvous store is taken from other machines: cut off, too long or no text, it is refused."""

from __future__ import annotations

import base64
import zlib

import pytest
from torch.distributed import HashStore

from pipette_launch.agent.sync.store import RoundStore, pack, unpack
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
