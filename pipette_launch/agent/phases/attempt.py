"""An attempt at training: whether it has trained, and how it ended, as one agent knows it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipette_launch.agent.sync.store import RoundOver

if TYPE_CHECKING:
    from pipette_launch.agent.sync.store import RoundStore
    from pipette_launch.facts.messages import AttemptEnd, Failure

NEWS_S = 1.0
"""How long a node whose worker died waits for word of an iteration; the last rank's agent looks once an interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The last attempt at training on this node, which it tells of in the next round."""

    index: int = -1
    """`Decision.attempt`; -1 where the last phase was no training."""
    began_s: float = 0.0
    ended: AttemptEnd = "none"
    failure: Failure | None = None


class FirstIteration:
    """What one agent saw of an attempt, and what the others have published about it."""

    def __init__(self) -> None:
        self._round_store: RoundStore | None = None
        self._proven = False
        self._seen = False
        self._published = False

    def begin(self, round_store: RoundStore, *, proven: bool) -> None:
        """Forget the last attempt; `proven` says that this one is a restart of what has trained before."""
        self._round_store, self._proven, self._seen, self._published = round_store, proven, False, False

    def see(self) -> None:
        """Take note of an iteration; called by the thread that reads the workers' output."""
        self._seen = True

    def share(self) -> None:
        """Let the other nodes know of the first iteration, or hear of it while the store is there."""
        if self._published or self._round_store is None:
            return
        if self._seen:
            self._round_store.put("iterated", "yes")
        else:
            self._seen = self._round_store.has("iterated")
        self._published = self._seen

    def has_trained(self, *, wait_s: float = 0.0) -> bool:
        """Whether an iteration was seen anywhere under this plan."""
        if self._proven or self._seen or self._round_store is None:
            return self._proven or self._seen
        end = time.monotonic() + (wait_s if self._round_store.group_size > 1 else 0.0)
        # The store goes with its host; what was seen here is then all there is.
        with contextlib.suppress(RoundOver):
            while not (known := self._round_store.has("iterated")) and time.monotonic() < end:
                time.sleep(0.1)
            return known
        return False

    def settle(self, *, trained: bool) -> AttemptEnd:
        """Agree with all nodes on how the attempt ended; the first word counts."""
        mine: AttemptEnd = "after-first-iteration" if trained else "before-first-iteration"
        if self._round_store is None:
            return mine
        with contextlib.suppress(RoundOver):
            self.share()
            settled = self._round_store.settle("verdict", mine)
            return "before-first-iteration" if settled == "before-first-iteration" else "after-first-iteration"
        return mine
