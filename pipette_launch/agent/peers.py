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
from collections import Counter
from typing import TYPE_CHECKING

from torch.distributed import TCPStore

from pipette_launch.agent.signals import STORE_THREAD
from pipette_launch.agent.store import within
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


if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pipette_launch.facts.messages import Member

SWEEP_S = 60.0
"""Within about so long each agent connects to each of the others, however many they are."""
LONGEST_PAUSE_S = 1.0


class ReachSweep:
    """Connects to some agents in turn, in a thread of its own, until one is lost."""

    def __init__(self, peers: Sequence[Member]) -> None:
        """Begin."""
        self.peer: Member | None = None
        """The one that is lost."""
        self.lost = ""
        """Why it is believed so; empty while none is."""
        self._peers = peers
        self._is_over = threading.Event()
        self._has_answer = threading.Event()
        self._has_answer.set()
        if peers:
            threading.Thread(target=self._sweep, name="pipette-reach", daemon=True).start()

    def stop(self) -> None:
        """Connect no more, once the attempt that is under way has come to an end."""
        self._is_over.set()
        self._has_answer.wait(HOST_SILENCE_S)

    def _sweep(self) -> None:
        pause_s = min(LONGEST_PAUSE_S, SWEEP_S / len(self._peers))
        while True:
            for peer in self._peers:
                if self._is_over.wait(pause_s):
                    return
                self._has_answer.clear()
                # Whose process has ended is known to its neighbour at once, unless the wire between them is cut.
                lost = why_unreachable(peer, timeout_s=HOST_SILENCE_S)
                if lost:
                    self.peer, self.lost = peer, lost
                self._has_answer.set()
                if lost:
                    return


def cut_wires(missed: Mapping[str, Collection[str]]) -> tuple[tuple[str, str], ...]:
    """List the pairs that do not reach each other, of agents that each say whom they miss; others do not count."""
    pairs = {(min(one, peer), max(one, peer)) for one, peers in missed.items() for peer in peers if peer in missed}
    return tuple(sorted(pairs))


def best_left_out(pairs: Collection[tuple[str, str]], order: Sequence[str]) -> dict[str, str]:
    """Choose agents without which all others reach each other: whoever misses most others goes first.

    Args:
        pairs: two agents each, by token; the first does not reach the second.
        order: all agents that came; of two that miss equally many, the later one is left out.

    Returns:
        Those that are left out, each with an agent that it does not reach.

    """
    place = {token: index for index, token in enumerate(order)}
    cut = {frozenset(pair) for pair in pairs if set(pair) <= set(place) and len(set(pair)) == 2}
    left_out: dict[str, str] = {}
    while cut:
        missed = Counter(token for pair in cut for token in pair)
        worst = max(missed, key=lambda token: (missed[token], place[token]))
        others = {token for pair in cut if worst in pair for token in pair} - {worst}
        left_out[worst] = min(others, key=place.__getitem__)
        cut = {pair for pair in cut if worst not in pair}
    return left_out


def out_of_reach(
    agents: Sequence[Member], cut: Collection[tuple[str, str]], *, standby: Collection[str]
) -> dict[str, str]:
    """Say of the agents that are best left out, by token, from where they are out of reach.

    Args:
        agents: all that came, the first one first.
        cut: pairs of them that do not reach each other, by token.
        standby: those that run no workers, which are left out rather than others.

    """
    order = sorted(agents, key=lambda agent: agent.token in standby)
    address = {agent.token: agent.address for agent in agents}
    left_out = best_left_out(cut, [agent.token for agent in order])
    return {token: f"out of reach from {address[peer]}" for token, peer in left_out.items()}
