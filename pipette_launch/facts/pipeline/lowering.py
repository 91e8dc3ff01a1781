"""Lowering: from the passes of a schedule to a program for each rank, with sends and receives between its passes.

Every message has a moment: the expected end of the pass that makes it. Its rank posts the send at this moment. The
other rank posts the receive no later. A pass or a message waits only for messages of earlier moments, so no ranks wait
for each other in a circle.

NCCL runs the messages of a rank in streams. Those from one rank to another have a stream for themselves, on both ends
in the order of their moments (`Message.way`). A receive occupies its stream until its message is there. So it is posted
once the message before it should be there, and just before the pass that computes when its own message is ready: a
receive that is posted behind this pass starts when the pass ends. A receive that is posted while its stream is occupied
would hold up this pass on devices with one work queue (CUDA_DEVICE_MAX_CONNECTIONS=1).

Messages over gloo do not wait for each other, and each travels once its receive is posted. So a receive is posted when
the pass that makes its message starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from pipette_launch.errors import FactError
from pipette_launch.facts.schedule import Action, PassTimes, Ranks


class Message(NamedTuple):
    """One tensor that goes from rank to rank."""

    source: int
    """Pipeline rank."""
    target: int
    is_gradient: bool
    """Gradient of the input of a stage, or its output."""
    stage: int
    """The stage that made the tensor."""
    microbatch: int

    @property
    def way(self) -> tuple[int, int]:
        """The ranks that it goes from and to."""
        return self.source, self.target


Program = tuple["Action | Message", ...]
"""Passes and messages of one rank in turn; the rank sends or receives each of the messages."""


def programs(
    passes: Ranks, rank_S: Sequence[int], times: PassTimes | None = None, *, in_streams: bool = True
) -> tuple[Program, ...]:
    """Put the messages between the passes.

    Args:
        passes: of each pipeline rank.
        rank_S: the pipeline rank of each stage.
        times: of passes and messages, by which messages are ordered; None = all passes take equally long.
        in_streams: whether a receive occupies the stream of its way until its message is there (NCCL).

    Raises:
        FactError: the ranks would wait for each other for ever; the message says for what.

    """
    expected = times or PassTimes.equal(len(rank_S))
    start_of = starts(passes, rank_S, expected)
    moment_of = {
        message: (start, start + expected.of(action))
        for action, start in start_of.items()
        if (message := message_from(action, rank_S)) is not None
    }
    start_P = [[start_of[action] for action in actions] for actions in passes]
    # At equal times sends come first, then receives, then the pass, which may need their tensors.
    timed: list[list[tuple[int, int, int, Action | Message]]] = [
        [(start, 2, 0, action) for start, action in zip(rank, actions, strict=True)]
        for rank, actions in zip(start_P, passes, strict=True)
    ]
    before: dict[tuple[int, int], int] = defaultdict(int)
    for message, (start, moment) in sorted(moment_of.items(), key=lambda item: item[1][1]):
        asked = start
        if in_streams:
            asked = max(_last_start(message, moment, start_P, passes, expected), min(moment, before[message.way]))
            before[message.way] = moment + _hop((message.is_gradient, message.stage, 0), rank_S, expected)
        timed[message.source].append((moment, 0, moment, message))
        timed[message.target].append((asked, 1, moment, message))
    return tuple(tuple(step for *_, step in sorted(rank)) for rank in timed)


def _last_start(message: Message, moment: int, start_P: list[list[int]], passes: Ranks, times: PassTimes) -> int:
    """Return the start of the pass that the receiver computes when a message is ready.

    A receiver that is idle at that moment gets the moment itself; before its first pass it gets 0.
    """
    rank = message.target
    at = bisect_left(start_P[rank], moment) - 1
    if at < 0:
        return 0
    start = start_P[rank][at]
    return start if start + times.of(passes[rank][at]) >= moment else moment


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
    """Return the message of a pass of a stage: outputs go to the next stage, gradients to the stage before.

    Source and target are the same rank where both stages are there.
    """
    to_stage = stage + (-1 if is_gradient else 1)
    return Message(rank_S[stage], rank_S[to_stage], is_gradient, stage, microbatch)


def message_from(action: Action, rank_S: Sequence[int]) -> Message | None:
    """Return the message that a pass sends; None if nothing leaves its rank."""
    is_gradient = action.kind != "F"
    if action.kind == "W" or action.stage == (0 if is_gradient else len(rank_S) - 1):
        return None
    message = message_of(rank_S, action.stage, action.microbatch, is_gradient=is_gradient)
    return message if message.source != message.target else None


def message_to(action: Action, rank_S: Sequence[int]) -> Message | None:
    """Return the message that a pass needs from another rank; None if it needs no other rank."""
    is_gradient = action.kind != "F"
    if action.kind == "W" or action.stage == (len(rank_S) - 1 if is_gradient else 0):
        return None
    giver = action.stage + (1 if is_gradient else -1)
    message = message_of(rank_S, giver, action.microbatch, is_gradient=is_gradient)
    return message if message.source != message.target else None


def starts(passes: Ranks, rank_S: Sequence[int], times: PassTimes) -> dict[Action, int]:
    """Return when each pass starts if messages do not wait for each other.

    Raises:
        FactError: the ranks would wait for each other for ever.

    """
    num_stages = len(rank_S)
    ends: dict[tuple[bool, int, int], int] = {}
    found: dict[Action, int] = {}
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
            found[action] = max(clocks[rank], ends[needed] + _hop(needed, rank_S, times) if needed is not None else 0)
            clocks[rank] = found[action] + times.of(action)
            at[rank] += 1
            if action.kind != "W":
                made = (action.kind != "F", action.stage, action.microbatch)
                ends[made] = clocks[rank]
                ready += waiting.pop(made, [])
    stuck = [
        f"rank {rank} at {actions[at[rank]].word}" for rank, actions in enumerate(passes) if at[rank] < len(actions)
    ]
    if stuck:
        raise FactError(f"this schedule can not run: its ranks wait for each other, {', '.join(stuck)}")
    return found


def _needed(action: Action, num_stages: int) -> tuple[bool, int, int] | None:
    """Return which tensor of another stage a pass needs: is it a gradient, whose, of which micro-batch."""
    if action.kind == "F":
        return (False, action.stage - 1, action.microbatch) if action.stage > 0 else None
    if action.kind == "W" or action.stage == num_stages - 1:
        return None
    return True, action.stage + 1, action.microbatch


def _hop(needed: tuple[bool, int, int], rank_S: Sequence[int], times: PassTimes) -> int:
    is_gradient, stage, _ = needed
    to_stage = stage + (-1 if is_gradient else 1)
    if rank_S[stage] == rank_S[to_stage]:
        return 0
    return times.backward_hop[to_stage] if is_gradient else times.forward_hop[stage]
