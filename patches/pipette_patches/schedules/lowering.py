"""From the passes of a schedule to what each rank does in turn: passes, and between them batches of sends and receives.

Where every pass takes one unit of time, each message belongs to the moment at which the pass ends that makes it. Sender
and receiver exchange it at that moment, in one batch with all else that they exchange then. A batch waits for batches
of the same and of earlier moments alone, so no ranks wait for each other in a circle, even where a send ends only when
its receive has begun, as with NCCL.

Where messages do not wait for each other (gloo), a receiver asks for each some moments earlier, so that it travels
while the receiver still computes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from pipette_launch.facts.schedule import Action
from pipette_launch.facts.schedules import Ranks
from pipette_patches.errors import PatchError


class Message(NamedTuple):
    """One tensor that goes from rank to rank."""

    source: int
    """Pipeline rank."""
    target: int
    is_gradient: bool
    """The gradient of what the stage took in; else what the stage put out."""
    stage: int
    """Whose pass made the tensor."""
    microbatch: int


Batch = tuple[Message, ...]
"""Messages that a rank hands to the network together; it sends or receives each of them."""
Program = tuple["Action | Batch", ...]
"""What one rank does in turn."""


def programs(passes: Ranks, rank_S: Sequence[int], *, ahead: int = 0) -> tuple[Program, ...]:
    """Put the messages between the passes.

    Args:
        passes: of each pipeline rank.
        rank_S: the pipeline rank of each stage.
        ahead: moments by which a receive comes before its send; 0 where messages wait for each other.

    Raises:
        PatchError: the ranks would wait for each other for ever; the message says for what.

    """
    start_of = _starts(passes, num_stages=len(rank_S))
    batches: list[dict[int, list[Message]]] = [defaultdict(list) for _ in passes]
    for action, start in start_of.items():
        message = _message(action, rank_S)
        if message is not None:
            batches[message.source][start + 1].append(message)
            batches[message.target][start + 1 - ahead].append(message)
    done = []
    for actions, batch_at in zip(passes, batches, strict=True):
        # At equal moments the batch comes first: the pass may need what it brings.
        timed: list[tuple[int, int, Action | Batch]] = [(start_of[action], 1, action) for action in actions]
        timed += [(moment, 0, tuple(sorted(batch))) for moment, batch in batch_at.items()]
        done.append(tuple(step for _, _, step in sorted(timed, key=lambda step: step[:2])))
    return tuple(done)


def forward_passes(rank_S: Sequence[int], num_microbatches: int) -> Ranks:
    """Return the passes of an evaluation: as many micro-batches as there are ranks go through a chunk before the next.

    Every rank takes its chunks in this one order, so any number of micro-batches can run.
    """
    pp = max(rank_S) + 1
    return tuple(
        tuple(
            Action(stage, "F", microbatch)
            for first in range(0, num_microbatches, pp)
            for stage in range(len(rank_S))
            if rank_S[stage] == rank
            for microbatch in range(first, min(first + pp, num_microbatches))
        )
        for rank in range(pp)
    )


def message_of(rank_S: Sequence[int], stage: int, microbatch: int, *, is_gradient: bool) -> Message:
    """Return what a pass of a stage gives to its neighbour: outputs go to the next stage, gradients to the one before.

    Source and target are the same rank where both stages are there.
    """
    to_stage = stage + (-1 if is_gradient else 1)
    return Message(rank_S[stage], rank_S[to_stage], is_gradient, stage, microbatch)


def _message(action: Action, rank_S: Sequence[int]) -> Message | None:
    """Return what a pass sends; None where nothing leaves its rank."""
    is_gradient = action.kind != "F"
    if action.kind == "W" or action.stage == (0 if is_gradient else len(rank_S) - 1):
        return None
    message = message_of(rank_S, action.stage, action.microbatch, is_gradient=is_gradient)
    return message if message.source != message.target else None


def _starts(passes: Ranks, *, num_stages: int) -> dict[Action, int]:
    """Return when each pass starts if all take one unit of time and messages take none."""
    ends: dict[tuple[bool, int, int], int] = {}
    starts: dict[Action, int] = {}
    clocks, at = [0] * len(passes), [0] * len(passes)
    waiting: dict[tuple[bool, int, int], list[int]] = defaultdict(list)
    ready = deque(range(len(passes)))
    while ready:
        rank = ready.popleft()
        for action in passes[rank][at[rank] :]:
            needed = _needed(action, num_stages)
            if needed is not None and needed not in ends:
                waiting[needed].append(rank)
                break
            starts[action] = max(clocks[rank], ends[needed] if needed is not None else 0)
            clocks[rank] = starts[action] + 1
            at[rank] += 1
            if action.kind != "W":
                made = (action.kind != "F", action.stage, action.microbatch)
                ends[made] = clocks[rank]
                ready += waiting.pop(made, [])
    stuck = [
        f"rank {rank} at {actions[at[rank]].word}" for rank, actions in enumerate(passes) if at[rank] < len(actions)
    ]
    if stuck:
        raise PatchError(f"this schedule can not run: its ranks wait for each other, {', '.join(stuck)}")
    return starts


def _needed(action: Action, num_stages: int) -> tuple[bool, int, int] | None:
    """Return which tensor of another stage a pass needs: is it a gradient, whose, of which micro-batch."""
    if action.kind == "F":
        return (False, action.stage - 1, action.microbatch) if action.stage > 0 else None
    if action.kind == "W" or action.stage == num_stages - 1:
        return None
    return True, action.stage + 1, action.microbatch
