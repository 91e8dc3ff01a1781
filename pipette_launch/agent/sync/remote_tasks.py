"""How the nodes that wait for the first one's plan help it to make one, through the rendezvous store.

The order goes into the store once, and every node that helps reads it once; after that each node has keys of its own,
so traffic grows with the number of nodes and no faster. Nobody waits for a node: it takes part from when it says that
it is ready.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed.elastic.multiprocessing.api import SignalException

from pipette_launch.agent.controller import Helper
from pipette_launch.agent.sync.store import Exchange

logger = logging.getLogger(__name__)

MOST_BYTES = 4 << 20
"""Of an order in the store; TCPStore takes 8 MiB in one value."""
MOST_TRAFFIC_BYTES = 64 << 20
"""Of all nodes that read the order: so many nodes may help."""
SELDOM_S = 0.2
"""How often a node looks for an order, and for the plan while it works."""
FIRST_POLL_S = 0.005
LAST_POLL_S = 0.05

T = TypeVar("T")


class OtherNode:
    """A helper that is another node; an empty answer says that it can help no more."""

    def __init__(self, exchange: Exchange, group_rank: int) -> None:
        self.name = f"node {group_rank}"
        self._exchange = exchange
        self._keys = f"errand/{group_rank}"
        self._turn = 0

    def size(self) -> int:
        """How many processes it lends by now, as far as it has said so."""
        return int(self._exchange.peek(f"{self._keys}/ready") or 0)

    def give(self, batch: str) -> None:
        """Leave it a batch."""
        self._turn += 1
        self._exchange.put(f"{self._keys}/{self._turn}", pack(batch))

    def answer(self) -> str | None:
        """What it left; None while it is at work."""
        packed = self._exchange.peek(f"{self._keys}/{self._turn}/done")
        return None if packed is None else unpack(packed)

    def close(self) -> None:
        """Nothing to do: the plan ends its work."""


def invite(exchange: Exchange, order: str) -> Sequence[Helper]:
    """Give the other nodes an order; returns those that are asked to help, ready or not."""
    packed = pack(order)
    others = [rank for rank in range(exchange.group_size) if rank != exchange.group_rank]
    asked = others[: MOST_TRAFFIC_BYTES // len(packed)] if len(packed) <= MOST_BYTES else []
    if asked:
        exchange.put("errand/order", packed)
    for rank in asked:
        exchange.put(f"errand/{rank}/asked", "yes")
    return [OtherNode(exchange, rank) for rank in asked]


def help_out(exchange: Exchange, hire: Callable[[str], Helper], *, is_over: Callable[[], bool]) -> None:
    """Do what the first node asks for, until there is nothing left to do.

    Args:
        exchange: the keys of this round.
        hire: returns what does an order's work on this node.
        is_over: whether there is nothing left to do.

    """
    keys = f"errand/{exchange.group_rank}"
    if _await(lambda: exchange.peek(f"{keys}/asked"), is_over, last_poll_s=SELDOM_S) is None:
        return
    try:
        with contextlib.closing(hire(unpack(exchange.peek("errand/order") or ""))) as helper:
            _serve(exchange, keys, helper, is_over)
    except SignalException:
        raise
    except Exception:
        # The first node does without.
        logger.exception("this node cannot help to plan")


def _serve(exchange: Exchange, keys: str, helper: Helper, is_over: Callable[[], bool]) -> None:
    """Do one batch after the other."""
    ready = turn = 0

    def next_batch() -> str | None:
        nonlocal ready
        if helper.size() != ready:
            ready = helper.size()
            exchange.put(f"{keys}/ready", str(ready))
        return exchange.peek(f"{keys}/{turn}")

    while True:
        turn += 1
        batch = _await(next_batch, is_over)
        if batch is None:
            return
        try:
            helper.give(unpack(batch))
            answer = _await(helper.answer, is_over)
        except Exception:
            exchange.put(f"{keys}/{turn}/done", pack(""))
            raise
        if answer is None:
            return
        exchange.put(f"{keys}/{turn}/done", pack(answer))


def _await(look: Callable[[], T | None], is_over: Callable[[], bool], *, last_poll_s: float = LAST_POLL_S) -> T | None:
    """Look until there is something; None when it is over first."""
    poll_s = FIRST_POLL_S
    looked_s = time.monotonic()
    while (found := look()) is None:
        if time.monotonic() - looked_s >= SELDOM_S:
            if is_over():
                return None
            looked_s = time.monotonic()
        time.sleep(poll_s)
        poll_s = min(1.5 * poll_s, last_poll_s)
    return found


def pack(text: str) -> str:
    """Make a text small; matrices of links are long."""
    return base64.b64encode(zlib.compress(text.encode(), level=1)).decode()


def unpack(packed: str) -> str:
    """Undo `pack`."""
    return zlib.decompress(base64.b64decode(packed)).decode()
