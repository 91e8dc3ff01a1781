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
import time
from typing import TYPE_CHECKING

from torch.distributed import TCPStore

from pipette_launch.agent.leaving import STORE_THREAD
from pipette_launch.agent.sync.store import within
from pipette_launch.defaults import HOST_SILENCE_S

if TYPE_CHECKING:
    from torch.distributed import Store

    from pipette_launch.facts.messages import Member

PAUSE_S = 1.0
AGAIN_S = 0.05
"""Between two attempts to connect, where the way or this process has a trouble of its own."""
NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
GONE = "its agent is gone"
SILENT = f"silent for {HOST_SILENCE_S:.0f} s"


class PeerWatch:
    """Watches one agent in a thread of its own."""

    def __init__(self, peer: Member) -> None:
        """Begin to watch."""
        self.peer = peer
        self.lost = ""
        """Why the agent is believed lost; empty while it is not."""
        self._is_over = threading.Event()
        self._has_answer = threading.Event()
        threading.Thread(target=self._watch, name=f"{STORE_THREAD}-watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer, once the question that is under way was answered, or was not in time."""
        self._is_over.set()
        self._has_answer.wait(HOST_SILENCE_S)

    def _watch(self) -> None:
        while not (self.lost or self._is_over.wait(AGAIN_S)):
            self._has_answer.clear()
            self.lost = self._why_it_ended()
        self._has_answer.set()

    def _why_it_ended(self) -> str:
        """Return when the connection does: why the agent is lost, or nothing where only the connection is."""
        try:
            with socket.create_connection((self.peer.address, self.peer.port), timeout=HOST_SILENCE_S) as connection:
                store = connected(self.peer, within_s=HOST_SILENCE_S)
                # Not select(): it takes no descriptor above 1023, and the first agent holds connections of all others.
                ended = select.poll()
                ended.register(connection, select.POLLIN)
                # Nothing is ever sent: there is something to read when the connection has ended.
                self._has_answer.set()
                while not (self._is_over.is_set() or ended.poll(1000 * PAUSE_S)):
                    self._has_answer.clear()
                    within(HOST_SILENCE_S, lambda: store.check(["pipette"]))
                    self._has_answer.set()
        except TimeoutError:
            return SILENT
        except (OSError, RuntimeError):
            # It may be a fault of this process, as too many open files or threads.
            return why_unreachable(self.peer, timeout_s=HOST_SILENCE_S)
        return ""


def connected(peer: Member, *, within_s: float) -> Store:
    """Return a client of the store that an agent holds.

    Raises:
        TimeoutError: nobody answers; torch by itself tries for ever where a process is stopped.
        RuntimeError: there is no store.

    """
    return within(within_s, lambda: TCPStore(peer.address, peer.port, is_master=False, wait_for_workers=False))


def answers(peer: Member, *, within_s: float) -> bool:
    """Whether the store that an agent holds answers."""
    try:
        store = connected(peer, within_s=within_s)
        within(within_s, lambda: store.check(["pipette"]))
    except (TimeoutError, RuntimeError):
        return False
    return True


def why_unreachable(peer: Member, *, timeout_s: float) -> str:
    """Ask an agent's kernel whether the agent is there: `GONE`, `SILENT` for so long, or empty where it is."""
    ends_s = time.monotonic() + timeout_s
    while True:
        left_s = ends_s - time.monotonic()
        try:
            socket.create_connection((peer.address, peer.port), timeout=max(left_s, AGAIN_S)).close()
        except ConnectionRefusedError:
            return GONE
        except TimeoutError:
            return SILENT
        except OSError as error:
            if error.errno not in NO_WAY:
                # This process may have too many open files, which says nothing of the other one.
                return ""
            if left_s <= AGAIN_S:
                return SILENT
            # A route that is missing for a moment is no silence.
            time.sleep(AGAIN_S)
        else:
            return ""
