"""What the agents of a round wait for from each other while a phase runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from pipette_launch.errors import ClusterError
from pipette_launch.facts import files
from pipette_launch.facts.messages import Decision

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipette_launch.agent.sync.store import RoundStore

PEER_WAIT_S = 120.0
"""How long agents of one round wait for each other's word; one whose workers are ended may take half a minute."""
Report = TypeVar("Report", bound=files.Document)


def plan_of_first(round_store: RoundStore, *, make: Callable[[], Decision], deadline_s: float) -> Decision:
    """Return the plan of the first node, for which the others wait.

    Args:
        round_store: the keys of this round.
        make: makes the plan, called on the first node alone.
        deadline_s: how long the others wait, in seconds.

    Raises:
        ClusterError: the plan did not come in time.
        RoundOver: it never will.

    """
    if round_store.is_coordinator:
        round_store.put("plan", files.dumps(make()))
    text = round_store.take("plan", what="the plan of the first node", deadline_s=deadline_s)
    return files.loads(Decision, text, "plan of the first node")


def reports(
    round_store: RoundStore, decision: Decision, kind: type[Report], *, prefix: str, patience_s: float
) -> tuple[list[Report], list[str]]:
    """Collect what the agents of a decision say, and the hosts of those that say nothing.

    Args:
        round_store: the keys of this round.
        decision: whose agents are asked.
        kind: of a report.
        prefix: of the key of each, before the agent's token.
        patience_s: for all of them together.

    Raises:
        RoundOver: one of them is known to be lost.

    """
    ends_s = time.monotonic() + patience_s
    found, absent = [], []
    for host, token in zip(decision.hosts, decision.tokens, strict=True):
        left_s = max(ends_s - time.monotonic(), 0.0)
        try:
            text = round_store.take(f"{prefix}/{token}", what=f"a report of {host}", deadline_s=left_s)
        except ClusterError:
            absent.append(host)
            continue
        found.append(files.loads(kind, text, f"report of {host}"))
    return found, absent
