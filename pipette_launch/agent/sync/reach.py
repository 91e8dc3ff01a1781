"""Which agents do not reach each other although others reach both: a cut wire, a wrong route, a firewall.

The workers of two such nodes would wait for each other until gloo or NCCL gives up, half an hour later.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from pipette_launch.agent.sync.peer_watch import why_unreachable
from pipette_launch.defaults import HOST_SILENCE_S

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
