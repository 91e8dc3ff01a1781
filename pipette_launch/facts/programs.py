"""Programs: the passes of each pipeline rank with the messages between them, for schedules that Megatron lacks.

`programs` adds a send and a receive for each message. The moment of a message is the expected end of the pass that
makes the message. The sender posts the send at the moment of the message, and the receiver posts the receive at this
moment or earlier. A pass or message waits only for messages with earlier moments, so the ranks cannot wait for each
other in a circle.

NCCL runs all messages from one rank to another in one stream, in the order of their moments on both ranks. A receive
occupies its stream until the message arrives. So a receive is posted after the expected arrival of the stream's
previous message, directly before the pass that the receiver runs when the message is ready. A later receive would start
only when the receiver's pass ends. An earlier receive would stop the receiver's pass on devices with one work queue
(CUDA_DEVICE_MAX_CONNECTIONS=1).

A gloo message waits for no other message and starts when its receive is posted. With gloo, the receive is posted when
the pass that makes the message starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from pipette_launch.errors import FactError
from pipette_launch.facts.schedule import Action, ExpectedTimes, Ranks


class Message(NamedTuple):
    """A tensor that the pipeline rank `source` sends to the pipeline rank `target`."""

    source: int
    target: int
    is_gradient: bool
    """True for the gradient of a stage's input, False for a stage's output."""
    stage: int
    """Stage that makes the tensor."""
    microbatch: int

    @property
    def way(self) -> tuple[int, int]:
        """Pipeline rank of the sender, and pipeline rank of the receiver."""
        return self.source, self.target


Program = tuple[Action | Message, ...]
"""Passes and messages of one rank, in order of execution. A message is sent by `source`, and received by `target`."""


def programs(
    passes: Ranks, rank_S: Sequence[int], times: ExpectedTimes | None = None, *, in_streams: bool = True
) -> tuple[Program, ...]:
    """Insert the messages between the passes of each rank.

    Raise FactError if the ranks would wait for each other forever. `times` are expected times, which decide the order
    of messages. If the times are `None`, all passes take equal time. `in_streams` is true for NCCL, whose receives
    occupy a stream until the message arrives, and false for gloo.
    """
    expected = times or ExpectedTimes.equal(len(rank_S))
    start_of = _starts(passes, rank_S, expected)
    moment_of = {
        message: (start, start + expected.of(action))
        for action, start in start_of.items()
        if (message := _made(action, rank_S)) is not None and message.source != message.target
    }
    start_P = [[start_of[action] for action in actions] for actions in passes]
    # At equal times the order is sends, receives, pass, because the pass may need the received tensors.
    timed: list[list[tuple[int, int, int, Action | Message]]] = [
        [(start, 2, 0, action) for start, action in zip(rank, actions, strict=True)]
        for rank, actions in zip(start_P, passes, strict=True)
    ]
    before: dict[tuple[int, int], int] = defaultdict(int)
    for message, (start, moment) in sorted(moment_of.items(), key=lambda item: item[1][1]):
        asked = start
        if in_streams:
            asked = max(_last_start(message, moment, start_P, passes, expected), min(moment, before[message.way]))
            before[message.way] = moment + _hop(message, expected)
        timed[message.source].append((moment, 0, moment, message))
        timed[message.target].append((asked, 1, moment, message))
    return tuple(tuple(step for *_, step in sorted(rank)) for rank in timed)


def _last_start(message: Message, moment: int, start_P: list[list[int]], passes: Ranks, times: ExpectedTimes) -> int:
    """Return the start time of the pass that the receiver runs when a message is ready.

    The result is `moment` if the receiver is idle at that time, and 0 before the receiver's first pass.
    """
    rank = message.target
    at = bisect_left(start_P[rank], moment) - 1
    if at < 0:
        return 0
    start = start_P[rank][at]
    return start if start + times.of(passes[rank][at]) >= moment else moment


def forward_passes(rank_S: Sequence[int], num_microbatches: int) -> Ranks:
    """Return the passes of an evaluation, which has forwards only, for any number of micro-batches.

    On all ranks, a group of pp micro-batches goes through one chunk before the next chunk.
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
    """Return the tensor that a stage makes: an output for the next stage, or a gradient for the previous stage.

    Source and target are equal if both stages are on one rank.
    """
    return Message(rank_S[stage], rank_S[stage + (-1 if is_gradient else 1)], is_gradient, stage, microbatch)


def message_to(action: Action, rank_S: Sequence[int]) -> Message | None:
    """Return the message that a pass needs from another rank. Return None if the pass needs no message."""
    needed = _needed(action, rank_S)
    return needed if needed and needed.source != needed.target else None


def _made(action: Action, rank_S: Sequence[int]) -> Message | None:
    is_gradient = action.kind != "F"
    if action.kind == "W" or action.stage == (0 if is_gradient else len(rank_S) - 1):
        return None
    return message_of(rank_S, action.stage, action.microbatch, is_gradient=is_gradient)


def _needed(action: Action, rank_S: Sequence[int]) -> Message | None:
    is_gradient = action.kind != "F"
    if action.kind == "W" or action.stage == (len(rank_S) - 1 if is_gradient else 0):
        return None
    return message_of(rank_S, action.stage + (1 if is_gradient else -1), action.microbatch, is_gradient=is_gradient)


def _starts(passes: Ranks, rank_S: Sequence[int], times: ExpectedTimes) -> dict[Action, int]:
    """Return the start (ns) of each pass if messages do not wait for other messages; FactError for a deadlock."""
    ends: dict[Message, int] = {}
    found: dict[Action, int] = {}
    clocks, at = [0] * len(passes), [0] * len(passes)
    waiting: dict[Message, list[int]] = defaultdict(list)
    ready = deque(range(len(passes)))
    while ready:
        rank = ready.popleft()
        for action in passes[rank][at[rank] :]:
            needed = _needed(action, rank_S)
            if needed is not None and needed not in ends:
                waiting[needed].append(rank)
                break
            found[action] = max(clocks[rank], ends[needed] + _hop(needed, times) if needed is not None else 0)
            clocks[rank] = found[action] + times.of(action)
            at[rank] += 1
            made = _made(action, rank_S)
            if made is not None:
                ends[made] = clocks[rank]
                ready += waiting.pop(made, [])
    unfinished = [(rank, actions[at[rank]]) for rank, actions in enumerate(passes) if at[rank] < len(actions)]
    if unfinished:
        stuck = ", ".join(f"rank {rank} at {action.word}" for rank, action in unfinished)
        raise FactError(f"this schedule cannot run: its ranks wait for each other, {stuck}")
    return found


def _hop(message: Message, times: ExpectedTimes) -> int:
    """Return the expected nanoseconds of a message. A tensor that stays on its rank takes no time."""
    if message.source == message.target:
        return 0
    return times.backward_hop[message.stage - 1] if message.is_gradient else times.forward_hop[message.stage]
