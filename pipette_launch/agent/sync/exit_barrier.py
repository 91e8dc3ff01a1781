"""How agents end a phase together, and leave the host of their store for last."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous.api import RendezvousError

if TYPE_CHECKING:
    from pipette_launch.agent.sync.rendezvous_handler import AgentStoreHandler
    from pipette_launch.agent.sync.store import RoundStore

GOODBYE_S = 10.0
"""How long the agent that hosts the rendezvous store waits for the others to leave first."""

logger = logging.getLogger(__name__)


def await_all(
    round_store: RoundStore, handler: AgentStoreHandler, phase: str, *, num_nodes: int, timeout_s: float
) -> bool:
    """Wait for all nodes that run workers to finish a phase; false when one failed instead, and waits to begin anew."""
    try:
        round_store.count(f"done/{phase}")
        end = time.monotonic() + timeout_s
        while round_store.count(f"done/{phase}", 0) < num_nodes and time.monotonic() < end:
            if handler.num_nodes_waiting() > 0:
                return False
            if handler.is_closed():
                # A node gave the job up: it will never finish, and its own exit code says so.
                return True
            time.sleep(0.1)
        # Nodes on standby have nothing to count, and wait for this.
        round_store.put(f"over/{phase}", "yes")
    except (RuntimeError, RendezvousError) as error:
        # The store went with its host, whose work was done too: nothing is left to wait for.
        logger.info("exit barrier ended early: %s", error)
    return True


def say_goodbye(round_store: RoundStore, *, hosts_store: bool) -> None:
    """Leave; the store's host waits for the others, who still read from it."""
    try:
        round_store.count("bye")
        end = time.monotonic() + GOODBYE_S
        while hosts_store and round_store.count("bye", 0) < round_store.group_size and time.monotonic() < end:
            time.sleep(0.05)
    except RuntimeError as error:
        logger.info("the rendezvous store is gone: %s", error)
