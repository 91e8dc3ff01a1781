"""How agents end a phase together, and leave the one that holds their store for last."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pipette_launch.agent.sync.store import StoreGone

if TYPE_CHECKING:
    from pipette_launch.agent.sync.store import RoundStore

GOODBYE_S = 10.0
"""How long an agent that holds a store waits for the others to leave first."""

logger = logging.getLogger(__name__)


def await_all(round_store: RoundStore, phase: str, *, num_nodes: int) -> bool:
    """Wait for all nodes that run workers to finish a phase; false when one failed instead, and calls a meeting.

    However long it takes: an agent that leaves is lost to those whose workers still run, and whoever is lost is found.
    """
    try:
        round_store.count(f"done/{phase}")
        while round_store.count(f"done/{phase}", 0) < num_nodes:
            if round_store.is_over():
                return False
            time.sleep(0.1)
        # Nodes on standby have nothing to count, and wait for this.
        round_store.put(f"over/{phase}", "yes")
    except StoreGone as error:
        # The store went with its agent, whose work was done too: nothing is left to wait for.
        logger.info("exit barrier ended early: %s", error)
    return True


def say_goodbye(round_store: RoundStore, *, holds_store: bool) -> None:
    """Leave; an agent that holds a store waits for the others, who still read from it."""
    try:
        round_store.count("bye")
        end = time.monotonic() + GOODBYE_S
        while holds_store and round_store.count("bye", 0) < round_store.group_size and time.monotonic() < end:
            time.sleep(0.05)
    except StoreGone as error:
        logger.info("the store of the round is gone: %s", error)
