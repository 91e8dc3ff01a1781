"""What agents say to each other through the rendezvous store; every wait polls, so that signals get through."""

from __future__ import annotations

import base64
import time
import zlib
from typing import TYPE_CHECKING

from pipette_launch.errors import ClusterError
from pipette_launch.facts import files

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

FIRST_POLL_S = 0.02
LAST_POLL_S = 0.2
"""Waits grow, so that hundreds of nodes that wait for one do not keep the store busy."""
MOST_BYTES = 4 << 20
"""Of one value that holds a part of a long text; TCPStore takes 8 MiB in one value."""


class RoundStore:
    """The keys of one rendezvous round; every backend that is used here gives each round a prefix of its own."""

    def __init__(self, store: Store, group_rank: int, group_size: int, *, is_coordinator: bool) -> None:
        self.group_rank = group_rank
        self.group_size = group_size
        self.is_coordinator = is_coordinator
        """Whether this node decides for all: the first in torchrun's own order."""
        self._store = store

    def put(self, key: str, text: str) -> None:
        """Publish a text once."""
        self._store.set(f"pipette/{key}", text)

    def has(self, key: str) -> bool:
        """Whether a text was published; never blocks."""
        return bool(self._store.check([f"pipette/{key}"]))

    def peek(self, key: str) -> str | None:
        """Return a text, or None where it was not published yet; never blocks."""
        return self._text(key) if self.has(key) else None

    def take(self, key: str, *, what: str, deadline_s: float, give_up: Callable[[], bool] = lambda: False) -> str:
        """Wait for a text.

        Raises:
            ClusterError: it did not come in time, or `give_up` said that it never will.

        """
        end = time.monotonic() + deadline_s
        poll_s = FIRST_POLL_S
        while not self.has(key):
            if give_up():
                raise ClusterError(f"no longer waiting for {what}: the nodes of the job changed")
            if time.monotonic() > end:
                raise ClusterError(f"waited {deadline_s:.0f} s in vain for {what}; look at the log of that node")
            time.sleep(poll_s)
            poll_s = min(1.5 * poll_s, LAST_POLL_S)
        return self._text(key)

    def _text(self, key: str) -> str:
        try:
            return self._store.get(f"pipette/{key}").decode()
        except UnicodeDecodeError as error:
            raise ClusterError(f"what another node said of {key} is no text ({error})") from error

    def gather(self, key: str, text: str, *, deadline_s: float) -> list[str]:
        """Give one's own text; the coordinator gets everybody's, in group order, the others an empty list."""
        self.put(f"{key}/{self.group_rank}", text)
        if not self.is_coordinator:
            return []
        return [
            self.take(f"{key}/{rank}", what=f"the record of node {rank} of {self.group_size}", deadline_s=deadline_s)
            for rank in range(self.group_size)
        ]

    def settle(self, key: str, text: str, *, deadline_s: float) -> str:
        """Return what the first agent to call this said, whoever it was."""
        if self._store.add(f"pipette/{key}/claims", 1) == 1:
            self.put(key, text)
            return text
        return self.take(key, what=f"the first word on {key}", deadline_s=deadline_s)

    def count(self, key: str, amount: int = 1) -> int:
        """Add to a counter and return it; 0 reads it."""
        return int(self._store.add(f"pipette/{key}", amount))


def pack(text: str) -> str:
    """Make a text small; matrices of links are long."""
    return base64.b64encode(zlib.compress(text.encode(), level=1)).decode()


def unpack(packed: str) -> str:
    """Undo `pack`; raises ClusterError for what `pack` has not made, and for a text of more than files.MOST_BYTES."""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(base64.b64decode(packed, validate=True), files.MOST_BYTES).decode()
    except (ValueError, zlib.error) as error:
        raise ClusterError(f"what another node sent cannot be unpacked ({error})") from error
    if not stream.eof:
        raise ClusterError(f"what another node sent is cut off, or has more than {files.MOST_BYTES} bytes unpacked")
    return text
