"""How the agents of a round reach one decision."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeVar

from pipette_launch.errors import ClusterError
from pipette_launch.facts import files
from pipette_launch.facts.messages.round import Decision, NodeRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipette_launch.agent.sync.store import RoundStore

logger = logging.getLogger(__name__)

PEER_WAIT_S = 120.0
"""How long agents of one round wait for each other's word."""
Report = TypeVar("Report", bound=files.Document)


def agree(
    round_store: RoundStore,
    record: NodeRecord,
    held: Decision | None,
    *,
    decide: Callable[[Sequence[NodeRecord], Decision | None], Decision],
) -> Decision:
    """Introduce this node to the others, and return what is decided for all.

    Args:
        round_store: the keys of this round.
        record: this node's introduction.
        held: what this node went by in the round before.
        decide: called on the coordinator alone.

    """
    if held is not None:
        round_store.put(f"held/{round_store.group_rank}", files.dumps(held))
    texts = round_store.gather("node", files.dumps(record), deadline_s=PEER_WAIT_S)
    if texts:
        records = [files.loads(NodeRecord, text, f"record of node {index}") for index, text in enumerate(texts)]
        round_store.put("decision", files.dumps(decide(records, held or _held_elsewhere(round_store, records))))
    text = round_store.take("decision", what="the decision of the first node", deadline_s=PEER_WAIT_S)
    return files.loads(Decision, text, "decision of the first node")


def plan_of_first(
    round_store: RoundStore, *, make: Callable[[], Decision], is_gone: Callable[[], bool], deadline_s: float
) -> Decision:
    """Return the plan of the first node, for which the others wait.

    Args:
        round_store: the keys of this round.
        make: makes the plan, called on the first node alone.
        is_gone: whether the job has ended meanwhile.
        deadline_s: how long the others wait, in seconds.

    Raises:
        ClusterError: the plan did not come in time, or never will.

    """
    if round_store.is_coordinator:
        round_store.put("plan", files.dumps(make()))
    text = round_store.take("plan", what="the plan of the first node", deadline_s=deadline_s, give_up=is_gone)
    return files.loads(Decision, text, "plan of the first node")


def begin_anew(why: str, restarts: int) -> int:
    """Nodes that are gone would be waited for in training, so the round ends; returns the restarts that are left.

    Raises:
        ClusterError: none were left, and with them the job ends too, as under torchrun.

    """
    if restarts == 0:
        raise ClusterError(f"{why}; with --max-restarts the job would have begun anew without it")
    logger.warning("%s; beginning anew without it", why)
    return restarts - 1


def _held_elsewhere(round_store: RoundStore, records: Sequence[NodeRecord]) -> Decision | None:
    """Ask an agent that was here before for the plan, when the new coordinator was not."""
    for group_rank, record in enumerate(records):
        if record.has_plan:
            text = round_store.take(f"held/{group_rank}", what=f"the plan of node {group_rank}", deadline_s=PEER_WAIT_S)
            return files.loads(Decision, text, f"decision of node {group_rank}")
    return None


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
