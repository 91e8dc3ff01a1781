"""Lines on the screen about the nodes that are missing while torch's rendezvous gathers them."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pipette_launch.agent.sync.endpoint import advice, say
from pipette_launch.agent.sync.store import within
from pipette_launch.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from pipette_launch.agent.sync.rendezvous import RendezvousSettings

FIRST_LINE_S = 15.0
LINE_GROWTH = 4
"""Each line comes after 4 times as long a wait as the line before."""
MOST_SPEAKERS = 8
"""In a job of more nodes only the host of the rendezvous prints whom it waits for."""
MOST_NAMES = 8
ANSWER_S = 2.0


class Waiting:
    """Looks at torch's rendezvous while this node waits in it."""

    def __init__(self, inner: RendezvousHandler, settings: RendezvousSettings) -> None:
        self._inner: Any = inner
        self._settings = settings
        self._next_line_s = FIRST_LINE_S
        self.is_spare = False
        """True if the job had all its nodes when this node came: it trains only after another node is lost."""
        self._names: list[str] = []
        """Nodes that had come at the last look; torch forgets them when its time is over."""

    def announce(self) -> None:
        """Leave this node's rank in the store, where --node-rank gives one."""
        store = getattr(self._inner, "_store", None)
        if store is not None and self._settings.node_rank >= 0:
            with suppress(RuntimeError):
                store.set(self._key(self._settings.node_rank), "here")

    def look(self, waited_s: float) -> None:
        """Print whom this node waits for, when it is time for it.

        Raises:
            ClusterError: a second launcher of a job of one node: it would wait in vain.

        """
        state = self._state()
        if state is None:
            return
        settings, node = self._settings, getattr(self._inner, "_this_node", None)
        # A list of its own, in one step: torch's thread adds participants at the same time.
        self._names = sorted(one.addr for one in list(state.participants))
        if node in state.redundancy_list and not self.is_spare:
            self.is_spare = True
            words = spare_words(self._names, settings)
            if settings.most_nodes == 1:
                raise ClusterError(f"{words}{settings.advice}")
            say(f"{words}; waiting to take the place of a lost one{settings.advice}")
        speaks = settings.may_host_store or settings.most_nodes <= MOST_SPEAKERS
        if speaks and len(self._names) < settings.least_nodes and waited_s >= self._next_line_s:
            self._next_line_s *= LINE_GROWTH
            say(f"{self.missing(waited_s)}; waiting up to {settings.join_s:.0f} s{advice(settings, os.environ)}")

    def missing(self, waited_s: float) -> str:
        """Return which nodes have not come."""
        return missing_words(self._names, self._missing_ranks(), self._settings, waited_s)

    def _missing_ranks(self) -> list[int]:
        store = getattr(self._inner, "_store", None)
        if store is None or self._settings.node_rank < 0:
            return []
        ranks = range(self._settings.most_nodes)
        try:
            return within(ANSWER_S, lambda: [rank for rank in ranks if not store.check([self._key(rank)])])
        except (TimeoutError, RuntimeError):
            return []

    def _key(self, node_rank: int) -> str:
        return f"pipette/{self._settings.run_id}/node-rank/{node_rank}"

    def _state(self) -> Any:
        """Return torch's own state of the c10d rendezvous; None under another backend."""
        return getattr(getattr(self._inner, "_state_holder", None), "state", None)


def missing_words(names: Sequence[str], ranks: Collection[int], settings: RendezvousSettings, waited_s: float) -> str:
    """Return which nodes have not come: by rank where ranks are given, else by their number."""
    least, most = settings.least_nodes, settings.most_nodes
    nodes = f"{least} nodes" if least == most else f"{least} to {most} nodes"
    there = f" ({_listed(names)})" if names else ""
    where = f"{len(names)} of {nodes} have come to {settings.endpoint} in {waited_s:.0f} s{there}"
    if ranks:
        return f"{where}; missing: --node-rank {_listed([str(rank) for rank in sorted(ranks)])}"
    return f"{where}; each needs the same --rdzv-endpoint and --rdzv-id ({settings.run_id})"


def spare_words(names: Sequence[str], settings: RendezvousSettings) -> str:
    """Return that the job has all its nodes without this launcher, and the ways it may be meant otherwise."""
    nodes = "its one node" if settings.most_nodes == 1 else f"all its {settings.most_nodes} nodes"
    return (
        f"the job at {settings.endpoint} with --rdzv-id {settings.run_id} already has {nodes} "
        f"({_listed(names)}), so this launcher is one too many; raise --nnodes if it belongs to that job, or "
        "give another --rdzv-endpoint if it is another job"
    )


def _listed(words: Sequence[str]) -> str:
    rest = len(words) - MOST_NAMES
    return ", ".join(words[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
