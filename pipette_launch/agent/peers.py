"""Liveness of other agents.

An agent keeps an idle connection to another agent's store. The kernel closes it when the other process ends. The agent
also sends a request every second. A request gets no answer if the other host lost power, the wire is cut or the other
process is stopped. torch answers requests in a separate thread, so a busy agent answers too.
"""

from __future__ import annotations

import errno
import itertools
import logging
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from functools import partial

from torch.distributed import Store, TCPStore

from pipette_launch.agent.signals import STORE_THREAD
from pipette_launch.agent.store import call_torch, within
from pipette_launch.defaults import FIRST_ANSWER_S, HOST_SILENCE_S
from pipette_launch.facts.messages import Member

PAUSE_S = 1.0
"""Seconds between two requests to the watched agent, and longest time (s) between two connections to other agents."""
RETRY_S = 0.05
"""Seconds between two attempts to connect, after a missing route or a fault of this process."""
NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
GONE = "its agent is gone"
SILENT = f"silent for {HOST_SILENCE_S:.0f} s"
MOST_KEPT = 16
"""Number of agents to which an agent keeps connections open."""
SWEEP_S = 60.0
"""Seconds in which each agent connects to each other agent at least once. In a small job it does so more often."""

logger = logging.getLogger(__name__)


class OpenConnections:
    """Connections to other agents' stores, on which no agent sends bytes.

    The kernel ends a connection with FIN after the end of the other process. A firewall that rejects packets answers
    with RST or ICMP. So the end of a connection distinguishes an agent that is gone from an agent that is cut off.
    """

    def __init__(self) -> None:
        self._open: dict[str, socket.socket] = {}
        self._over: list[socket.socket] = []
        """Connections that ended. Another thread may still poll them, and their descriptors must not get a new use."""
        self._ended: set[str] = set()
        self._lock = threading.Lock()
        # The finalizer refers to the sockets, so that Python's collector of cycles does not end them first.
        weakref.finalize(self, _close, self._open, self._over).atexit = False

    def keep(self, peer: Member, connection: socket.socket) -> socket.socket:
        """Keep a connection unless an older one is still open; close the other one, and return the kept connection."""
        with self._lock:
            self._look()
            if peer.token not in self._open:
                connection.setblocking(False)
                # A firewall forgets a connection that is silent for days, so the kernel sends a packet every two hours.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                self._open[peer.token] = connection
            if self._open[peer.token] is not connection:
                connection.close()
            return self._open[peer.token]

    def keep_only(self, peers: Collection[Member]) -> None:
        """Close the connections to all agents but these. No thread may poll the others."""
        tokens = {peer.token for peer in peers}
        with self._lock:
            for connection in (*self._over, *(self._open.pop(token) for token in self._open.keys() - tokens)):
                connection.close()
            self._over.clear()

    def ended(self) -> frozenset[str]:
        """Return the tokens of the agents whose processes have ended, as their kernels reported."""
        with self._lock:
            self._look()
            return frozenset(self._ended)

    def _look(self) -> None:
        """Note the connections that ended. Only the first look at a connection finds its error."""
        for token, connection in list(self._open.items()):
            try:
                connection.recv(1, socket.MSG_PEEK)
                self._ended.add(token)
            except BlockingIOError:
                continue
            except OSError as error:
                logger.info("the connection to another agent broke, which does not prove its end: %s", error)
            self._over.append(self._open.pop(token))


def _close(opened: dict[str, socket.socket], over: list[socket.socket]) -> None:
    for connection in (*opened.values(), *over):
        connection.close()


class LostFinder(threading.Thread):
    """Thread that looks for lost agents, and ends when an agent is lost."""

    NAME = "pipette-reach"

    def __init__(self, peers: Sequence[Member], connections: OpenConnections) -> None:
        super().__init__(name=self.NAME, daemon=True)
        self._connections = connections
        self.peer = peers[0] if peers else None
        """Agent that is lost, or was checked last; None if no agents are to be checked."""
        self.lost = ""
        """Reason why the agent `peer` is believed lost; empty while all checked agents answer."""
        self._peers = peers
        self._is_over = threading.Event()
        self._has_answer = threading.Event()
        self._has_answer.set()
        self._asked_s = 0.0
        if peers:
            self.start()

    def stop(self) -> Member | None:
        """Stop the thread. Return the agent that is silent, or that has not yet answered the pending request."""
        self._is_over.set()
        return self.peer if self.lost == SILENT or not self._has_answer.is_set() else None

    @property
    def is_silent(self) -> bool:
        """True if the agent is silent. A request that waited nearly as long counts too, because the round ended it."""
        waited_s = time.monotonic() - self._asked_s
        return self.lost == SILENT or (not self._has_answer.is_set() and waited_s > HOST_SILENCE_S - PAUSE_S)

    def _ask(self) -> None:
        """Note that a request begins."""
        self._asked_s = time.monotonic()
        self._has_answer.clear()


class PeerWatch(LostFinder):
    """Thread that watches one other agent by an open connection."""

    NAME = f"{STORE_THREAD}-watch"

    def run(self) -> None:
        """Watch the agent until it is lost. After a fault of this process, connect again."""
        while not (self.lost or self._is_over.wait(RETRY_S)):
            self._ask()
            self.lost = self._why_connection_ended(self._peers[0])
        self._has_answer.set()

    def _why_connection_ended(self, peer: Member) -> str:
        """Keep a connection open until it ends; return why the agent is lost, or "" if the agent still runs."""
        try:
            opened = socket.create_connection((peer.address, peer.port), timeout=HOST_SILENCE_S)
            connection = self._connections.keep(peer, opened)
            store = connected(peer, within_s=FIRST_ANSWER_S)
            # Use poll(): select() takes no descriptor above 1023, and the first agent has all agents' connections.
            ended = select.poll()
            ended.register(connection, select.POLLIN)
            self._has_answer.set()
            # No agent sends bytes on this connection, so the connection becomes readable only when it is closed.
            while not (self._is_over.is_set() or ended.poll(1000 * PAUSE_S)):
                self._ask()
                within(HOST_SILENCE_S, lambda: store.check(["pipette"]))
                self._has_answer.set()
        except TimeoutError:
            return SILENT
        except (OSError, RuntimeError, ValueError):
            # The connection may have failed by a fault of this process, for example too many open files. A new round
            # may have closed it (ValueError).
            return why_unreachable(peer, timeout_s=HOST_SILENCE_S)
        return ""


class ReachSweep(LostFinder):
    """Thread that connects to the other agents in turn, until an agent is lost."""

    def run(self) -> None:
        """Connect to each agent about once in `SWEEP_S`, and keep the connections to the next `MOST_KEPT` agents."""
        kept = self._peers[:MOST_KEPT]
        pause_s = min(PAUSE_S, SWEEP_S / len(self._peers))
        for peer in itertools.cycle(self._peers):
            if self.lost or self._is_over.wait(pause_s):
                return
            self._ask()
            # The neighbour of an agent notices the agent's end at once, unless the wire between the two agents is cut.
            then = partial(self._connections.keep, peer) if peer in kept else socket.socket.close
            self.peer, self.lost = peer, why_unreachable(peer, timeout_s=HOST_SILENCE_S, then=then)
            self._has_answer.set()


def connected(peer: Member, *, within_s: float) -> Store:
    """Return a client of an agent's store; raises RuntimeError if no store listens at this address.

    Raises TimeoutError if the store does not answer, and other OSErrors if no connection can be opened. torch itself
    would wait for ever for a stopped process, and repeat refused connections for five minutes.
    """
    ends_s = time.monotonic() + within_s
    try:
        idle = socket.create_connection((peer.address, peer.port), timeout=within_s)
    except ConnectionRefusedError as error:
        raise RuntimeError(GONE) from error
    # An idle connection shows the end of the process. Repeated connections would keep the store's only thread busy,
    # because this thread looks up the name of each client.
    with idle:
        ended = select.poll()
        ended.register(idle, select.POLLIN)
        call = call_torch(lambda: TCPStore(peer.address, peer.port, is_master=False, wait_for_workers=False))
        while not wait([call], RETRY_S).done:
            if ended.poll(0):
                raise RuntimeError(GONE)
            if time.monotonic() > ends_s:
                raise TimeoutError(f"no answer within {within_s:g} s")
        return call.result()


def answers(peer: Member, *, within_s: float) -> bool:
    """Return True if an agent's store answers."""
    try:
        store = connected(peer, within_s=within_s)
        within(within_s, lambda: store.check(["pipette"]))
    except (OSError, RuntimeError):
        return False
    return True


def why_unreachable(
    peer: Member, *, timeout_s: float, then: Callable[[socket.socket], object] = socket.socket.close
) -> str:
    """Connect to an agent's port; return `GONE`, `SILENT`, or "" if its kernel accepts the connection.

    `then` gets the connection. `GONE` means that the connection is refused, which a firewall may do too.
    """
    ends_s = time.monotonic() + timeout_s
    while True:
        left_s = ends_s - time.monotonic()
        try:
            connection = socket.create_connection((peer.address, peer.port), timeout=max(left_s, RETRY_S))
        except ConnectionRefusedError:
            return GONE
        except TimeoutError:
            return SILENT
        except OSError as error:
            if error.errno not in NO_ROUTE:
                # A fault of this process, such as too many open files, is no evidence against the other agent.
                return ""
            if left_s <= RETRY_S:
                return SILENT
            # A route may be missing only for a moment.
            time.sleep(RETRY_S)
        else:
            then(connection)
            return ""
