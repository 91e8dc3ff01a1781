"""Whether another agent is alive.

A connection that carries nothing is held open to the store that the other agent holds: when that process ends, its
kernel closes the connection at once. And the store is asked once a second: a host without power, a cut wire and a
stopped process leave the question without an answer. torch answers in a thread of its own, however busy the agent is.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
from typing import TYPE_CHECKING

from torch.distributed import TCPStore

from pipette_launch.agent.leaving import STORE_THREAD
from pipette_launch.agent.sync.store import within

if TYPE_CHECKING:
    from torch.distributed import Store

    from pipette_launch.facts.messages.membership import Member

SILENT_S = 8.0
"""After how long without an answer an agent counts as lost."""
PAUSE_S = 1.0
NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
GONE = "its agent is gone"
SILENT = f"silent for {SILENT_S:.0f} s"


class PeerWatch:
    """Watches one agent in a thread of its own."""

    def __init__(self, peer: Member) -> None:
        """Begin to watch."""
        self.peer = peer
        self.lost = ""
        """Why the agent is believed lost; empty while it is not."""
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name=f"{STORE_THREAD}-watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._is_over.set()

    def _watch(self) -> None:
        lost = self._why_it_ended()
        if not self._is_over.is_set():
            self.lost = lost

    def _why_it_ended(self) -> str:
        try:
            with socket.create_connection((self.peer.address, self.peer.port), timeout=SILENT_S) as connection:
                store = connected(self.peer, within_s=SILENT_S)
                while not self._is_over.is_set():
                    # Nothing is ever sent: there is something to read when the connection has ended.
                    if select.select([connection], [], [], PAUSE_S)[0]:
                        return GONE
                    within(SILENT_S, lambda: store.check(["pipette"]))
        except (ConnectionError, RuntimeError):
            return GONE
        except OSError:
            # A TimeoutError is one, too.
            return SILENT
        return ""


def connected(peer: Member, *, within_s: float) -> Store:
    """Return a client of the store that an agent holds.

    Raises:
        TimeoutError: nobody answers; torch by itself tries for ever where a process is stopped.
        RuntimeError: there is no store.

    """
    return within(within_s, lambda: TCPStore(peer.address, peer.port, is_master=False, wait_for_workers=False))


def why_unreachable(peer: Member, *, timeout_s: float) -> str:
    """Ask an agent's kernel whether the agent is there: `GONE`, `SILENT`, or empty where it is."""
    try:
        socket.create_connection((peer.address, peer.port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return GONE
    except OSError as error:
        # This process may have too many open files, which says nothing of the other one.
        return SILENT if isinstance(error, TimeoutError) or error.errno in NO_WAY else ""
    return ""
