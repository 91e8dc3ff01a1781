"""Whether another agent is alive, as the kernels of both hosts know it.

A connection that carries nothing is held open to the other agent. When that process ends, its kernel closes the
connection; when its host is silent, this kernel's own probes remain without an answer. A busy host still answers them.
"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipette_launch.facts.messages.membership import Member

SILENT_S = 8.0
"""After how long without any sign a host counts as lost."""
GONE = "its agent is gone"
SILENT = f"silent for {SILENT_S:.0f} s"


class PeerWatch:
    """Watches one agent in a thread of its own."""

    def __init__(self, peer: Member) -> None:
        """Begin to watch."""
        self.peer = peer
        self.lost = ""
        """Why the agent is believed lost; empty while it is not."""
        self._connection: socket.socket | None = None
        self._is_over = False
        threading.Thread(target=self._watch, name="pipette-peer-watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._is_over = True
        if self._connection is not None:
            # Another thread waits in it: closing alone would not wake that up.
            _shut(self._connection)

    def _watch(self) -> None:
        lost = self._why_it_ended()
        if not self._is_over:
            self.lost = lost

    def _why_it_ended(self) -> str:
        try:
            with socket.create_connection((self.peer.address, self.peer.port), timeout=SILENT_S) as connection:
                self._connection = connection
                _probe_often(connection)
                connection.settimeout(None)
                if self._is_over:
                    return ""
                connection.recv(1)
        except (ConnectionRefusedError, ConnectionResetError):
            return GONE
        except OSError:
            return SILENT
        return GONE


def why_unreachable(peer: Member, *, timeout_s: float) -> str:
    """Ask an agent's kernel whether the agent is there: `GONE`, `SILENT`, or empty where it is."""
    try:
        socket.create_connection((peer.address, peer.port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return GONE
    except OSError:
        return SILENT
    return ""


def _probe_often(connection: socket.socket) -> None:
    """Let the kernel ask for a sign of life each second, and end the connection after `SILENT_S` without one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", int(SILENT_S) - 2)):
        # Names that other systems than Linux lack: the connection then ends later.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # It has ended by itself.
        return
