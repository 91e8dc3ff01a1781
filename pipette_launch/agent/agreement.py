"""How the agents of a round reach one decision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipette_launch.facts import files
from pipette_launch.facts.round import Decision, NodeRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipette_launch.agent.exchange import Exchange

MEETING_S = 120.0
"""How long agents of one round wait for each other's word."""


def agree(
    exchange: Exchange,
    record: NodeRecord,
    held: Decision | None,
    *,
    decide: Callable[[Sequence[NodeRecord], Decision | None], Decision],
) -> Decision:
    """Introduce this node to the others, and return what is decided for all.

    Args:
        exchange: the keys of this round.
        record: this node's introduction.
        held: what this node went by in the round before.
        decide: called on the chief alone.

    """
    if held is not None:
        exchange.put(f"held/{exchange.group_rank}", files.dumps(held))
    texts = exchange.gather("node", files.dumps(record), deadline_s=MEETING_S)
    if texts:
        records = [files.loads(NodeRecord, text, f"record of node {index}") for index, text in enumerate(texts)]
        exchange.put("decision", files.dumps(decide(records, held or _held_elsewhere(exchange, records))))
    text = exchange.take("decision", what="the decision of the first node", deadline_s=MEETING_S)
    return files.loads(Decision, text, "decision of the first node")


def _held_elsewhere(exchange: Exchange, records: Sequence[NodeRecord]) -> Decision | None:
    """Ask an agent that was here before for the plan, when the new chief was not."""
    for group_rank, record in enumerate(records):
        if record.has_plan:
            text = exchange.take(f"held/{group_rank}", what=f"the plan of node {group_rank}", deadline_s=MEETING_S)
            return files.loads(Decision, text, f"decision of node {group_rank}")
    return None
