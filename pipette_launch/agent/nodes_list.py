"""torch's list of the nodes of a job: in a large job one node writes the list for all, and a few nodes renew all."""

# ruff: noqa: SLF001  `BORROWED` lists the private names of torch that this file needs.

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import astuple
from datetime import datetime, timezone
from typing import Any

from torch.distributed.elastic.rendezvous import api, dynamic_rendezvous

NODES_PER_S = 64
"""Number of nodes for which the pause between two looks at torch's list of nodes grows by one second."""
FEW_NODES = 32
"""Largest job in which each node writes torch's list itself, as under torchrun."""
TURN_S = 2e-3
"""Seconds by which a node's longest pause before its write of torch's list grows for each node."""
BORROWED = (
    "_this_node _store _heartbeat_lock _keep_alive _start_heartbeats _stop_heartbeats "
    "_op_executor._add_to_participants _op_executor._remove_from_participants "
    "_state_holder._dirty _state_holder._last_sync_time _state_holder._cache_duration"
)
"""Private names of torch's handler. The files of torch 2.6 to 2.14 have these names; only 2.13 ran with this code."""

logger = logging.getLogger(__name__)


def is_known(inner: Any) -> bool:
    """Return True if torch's handler has all names of `BORROWED`; else log the missing names."""
    paths = [name.rpartition(".") for name in BORROWED.split()]
    missing = [name for owner, _, name in paths if not hasattr(getattr(inner, owner, None) if owner else inner, name)]
    missing += [] if hasattr(dynamic_rendezvous, "_Action") else ["_Action"]
    if missing:
        logger.warning("torch's rendezvous has no %s: each node renews itself, as under torchrun", ", ".join(missing))
    return not missing


class SharedWrites:
    """Lets nodes that enter, renew or leave torch's list at the same time do so by few writes: one node writes for all.

    Under torch alone N nodes write N lists of up to N nodes, and repeat each write for which another node was faster.
    Here each node adds a line to a log in the store and pauses. The first node that wakes up applies all lines.
    """

    def __init__(self, inner: Any, num_nodes: int) -> None:
        self._inner, self._longest_s, self._look_s = inner, num_nodes * TURN_S, max(1, num_nodes // NODES_PER_S)
        self._holder, self._node, self._store = inner._state_holder, inner._this_node, inner._store
        self._torchs_sync, self._holder.sync = self._holder.sync, self.sync
        self._last: tuple[bool, bool, datetime | None] = (False, True, None)
        """True if this node was in the list at the last look; True if the list was open; last renewal of this node."""

    def sync(self) -> bool | None:
        """Write or read the list, as torch's method does."""
        try:
            return self._sync()
        except RuntimeError as error:
            raise api.RendezvousConnectionError(str(error)) from error

    def _sync(self) -> bool | None:
        holder, (was_in, was_open, last_beat) = self._holder, self._last
        is_in, beat = self._node in holder.state.participants, holder.state.last_heartbeats.get(self._node)
        if holder._dirty and (was_in != is_in or (is_in and was_open and beat != last_beat)):
            has_set = self._write_together(beat if is_in else None)
        else:
            if was_in and was_open and self._store.check([self._key("complete")]):
                holder._last_sync_time = -1
            has_set = self._torchs_sync()
            if has_set is False:
                self._pause_and_read()
        state = holder.state
        if has_set and was_open and state.complete:
            self._store.set(self._key("complete"), "")
        self._last = (self._node in state.participants, not state.complete, state.last_heartbeats.get(self._node))
        # A node that waits for other nodes looks for the key of a complete list each second, and seldom reads the list.
        holder._cache_duration = self._look_s if all(self._last) else 1
        return has_set

    def _write_together(self, beat: datetime | None) -> bool | None:
        """Enter or renew this node, or remove this node without a `beat`; False makes torch look again."""
        key, number = self._key("nodes"), self._holder.state.round
        self._store.append(key, json.dumps([*astuple(self._node), beat and beat.isoformat()]) + "\n")
        self._pause_and_read()
        state = self._holder.state
        is_open, found = not (state.complete or state.closed), state.last_heartbeats.get(self._node)
        is_due = self._node in state.participants if beat is None else is_open and (found is None or found < beat)
        if state.round != number or not is_due:
            return False
        log = self._store.get(key).decode()
        self._apply([json.loads(line) for line in log.splitlines()])
        self._holder.mark_dirty()
        has_set: bool | None = self._torchs_sync()
        if has_set:
            self._store.compare_set(key, log, "")
        return has_set

    def _apply(self, lines: list[list[Any]]) -> None:
        settings, state, was_open = self._inner.settings, self._holder.state, not self._holder.state.complete
        dead = datetime.now(timezone.utc) - settings.keep_alive_interval * settings.keep_alive_max_attempt
        for node, beat in {type(self._node)(*fields): beat for *fields, beat in lines}.items():
            executor: Any = type(self._inner._op_executor)(node, self._holder, settings)
            # torch records each step with the calling functions' names, which takes milliseconds.
            executor._record = lambda *_, **__: None
            executor._state, is_in = state, node in state.participants
            if beat is None and is_in:
                executor._remove_from_participants()
            elif beat and was_open and not state.complete:
                at = datetime.fromisoformat(beat)
                if at > state.last_heartbeats.get(node, dead):
                    if not is_in:
                        executor._add_to_participants()
                    state.last_heartbeats[node] = at

    def _pause_and_read(self) -> None:
        time.sleep(random.uniform(0, self._longest_s))
        self._holder._dirty, self._holder._last_sync_time = False, -1
        self._torchs_sync()

    def _key(self, what: str) -> str:
        return f"pipette/{self._inner.get_run_id()}/{what}/{self._holder.state.round}"


def share_writes(inner: Any, most_nodes: int) -> None:
    """Let the nodes of a large job write torch's list together, if the store has the calls that this needs."""
    if most_nodes > FEW_NODES and inner._store.has_extended_api():
        SharedWrites(inner, most_nodes)


def renew(inner: Any, ranks: Collection[int]) -> None:
    """Renew the nodes with these torch ranks from now on, by torch's own thread; without ranks, renew no node."""
    inner._stop_heartbeats()

    def renewing(context: Any, _deadline: float) -> Any:
        state, now = context.state, datetime.now(timezone.utc)
        beats = {node: state.last_heartbeats[node] for node, rank in state.participants.items() if rank in ranks}
        is_due = min(beats.values(), default=now) <= now - context.settings.keep_alive_interval
        if not (is_due and state.complete and context.node in beats):
            return dynamic_rendezvous._Action.FINISH
        state.last_heartbeats.update(dict.fromkeys(beats, now))
        return dynamic_rendezvous._Action.KEEP_ALIVE

    def renew_all() -> None:
        with suppress(api.RendezvousError), inner._heartbeat_lock:
            inner._op_executor.run(renewing, math.inf)

    if ranks:
        inner._keep_alive = renew_all
        inner._start_heartbeats()
