"""How long a step takes whose messages are NCCL's sends and receives, run by the programs that the executor runs.

Sources: PyTorch 2.x, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and torch/distributed/distributed_c10d.py; NCCL
user guide, "Group Calls", "Point-to-point communication" and "Using multiple NCCL communicators concurrently"; CUDA
C++ Programming Guide, "Streams", "Events" and the variable CUDA_DEVICE_MAX_CONNECTIONS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipette_launch.cost.pipeline.engine import StageTimes
from pipette_launch.facts.programs import Message, Program, message_of, message_to
from pipette_launch.facts.schedule import Action, Kind


class DeadlockError(Exception):
    """The ranks wait for each other for ever."""


@dataclass
class _Operation:
    """A message on its stream of one rank."""

    rank: int
    message: Message
    passes: int
    """Passes that this rank had issued before."""
    before: _Operation | None
    """The operation before it on its stream."""
    start_s: float | None = None
    end_s: float | None = None


class Pipeline:
    """Programs of all ranks, run side by side.

    Args:
        programs: what each rank issues in turn.
        rank_S: the pipeline rank of each stage.
        pass_s: seconds of a pass.
        hop_s: seconds of a message.
        one_queue: whether kernels of all streams pass through one queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which
            Megatron asks for before Blackwell): then each starts after all that the rank issued before has started.

    """

    def __init__(
        self,
        programs: Sequence[Program],
        rank_S: Sequence[int],
        pass_s: Callable[[Action], float],
        hop_s: Callable[[Message], float],
        *,
        one_queue: bool = False,
    ) -> None:
        self.programs = programs
        self.rank_S = rank_S
        self.pass_s = pass_s
        self.hop_s = hop_s
        self.one_queue = one_queue
        ranks = range(len(programs))
        self.pass_ends: list[list[float]] = [[] for _ in ranks]
        self.started_s = [0.0 for _ in ranks]
        self.at = [0 for _ in ranks]
        self.operation_of: dict[tuple[int, Message], _Operation] = {}
        self.waiting: list[list[_Operation]] = [[] for _ in ranks]
        self.last: list[dict[tuple[int, int], _Operation]] = [{} for _ in ranks]
        """Latest operation of each rank on the stream of each way.

        Rule: unbatched operations of two ranks have their own communicator and stream, one in each process group
        (pointToPoint takes the key of `getKeySendRecv`, unless the group was bound to a device at its start).
        """
        self.ends: dict[Action, float] = {}

    def run(self) -> float:
        """Return when the last pass and the last message end; raises DeadlockError where they never do."""
        moved = True
        while moved:
            moves = [move(rank) for move in (self._issue, self._travel) for rank in range(len(self.programs))]
            moved = any(moves)
        for rank, program in enumerate(self.programs):
            if self.at[rank] < len(program) or self.waiting[rank]:
                raise DeadlockError(
                    f"rank {rank} at {program[self.at[rank] :][:1]}, {len(self.waiting[rank])} messages"
                )
        arrivals = [operation.end_s or 0.0 for operation in self.operation_of.values()]
        return max(*(ends[-1] for ends in self.pass_ends), *arrivals)

    def _issue(self, rank: int) -> bool:
        """Issue what a rank can, and start its passes: the host does not wait, streams do."""
        first = self.at[rank]
        for step in self.programs[rank][first:]:
            if isinstance(step, Action):
                if not self._run(rank, step):
                    break
            elif not self._post(rank, step):
                break
            self.at[rank] += 1
        return self.at[rank] > first

    def _post(self, rank: int, message: Message) -> bool:
        """Put a message on its stream."""
        assert message.source != rank or self._is_made(message), f"{message} is sent before it is made"
        known = self.operation_of.get((rank, message))
        if known is None:
            known = _Operation(rank, message, len(self.pass_ends[rank]), self.last[rank].get(message.way))
            self.last[rank][message.way] = self.operation_of[rank, message] = known
            self.waiting[rank].append(known)
        # One queue: nothing behind it is issued before it has started.
        return not self.one_queue or self._start(known)

    def _start(self, operation: _Operation) -> bool:
        """Start a message. Rule: a stream runs messages in order, after the passes issued before (`syncStream`)."""
        if operation.start_s is None:
            before_s = operation.before.end_s if operation.before else 0.0
            if before_s is None:
                return False
            ends = self.pass_ends[operation.rank][: operation.passes]
            operation.start_s = max(before_s, ends[-1] if ends else 0.0)
            if self.one_queue:
                operation.start_s = max(operation.start_s, self.started_s[operation.rank])
                self.started_s[operation.rank] = operation.start_s
        return True

    def _travel(self, rank: int) -> bool:
        """End the messages of a rank that have met their peers."""
        moved = False
        for operation in list(self.waiting[rank]):
            was = operation.start_s
            if not self._start(operation):
                continue
            moved = moved or was is None
            operation.end_s = self._arrival_s(operation.message)
            if operation.end_s is not None:
                self.waiting[rank].remove(operation)
                moved = True
        return moved

    def _arrival_s(self, message: Message) -> float | None:
        """Rule: a send ends only when its receive has begun (ncclSend may block until the peer's ncclRecv)."""
        ends = [self.operation_of.get((rank, message)) for rank in message.way]
        starts_s = [end.start_s for end in ends if end is not None and end.start_s is not None]
        return max(starts_s) + self.hop_s(message) if len(starts_s) == len(ends) else None

    def _run(self, rank: int, action: Action) -> bool:
        """Run a pass once what it waits for is there. Rule: `wait` makes its stream wait for the work's event."""
        stage, kind, microbatch = action
        ends = self.pass_ends[rank]
        ready_s = ends[-1] if ends else 0.0
        if self.one_queue:
            ready_s = max(ready_s, self.started_s[rank])
        needed = [message_to(action, self.rank_S)]
        if kind in "BI" and stage < len(self.rank_S) - 1:
            # The executor frees the output once it was sent.
            needed.append(message_of(self.rank_S, stage, microbatch, is_gradient=False))
        for message in needed:
            if message is None or message.source == message.target:
                continue
            operation = self.operation_of.get((rank, message))
            assert operation is not None, f"{action.word} needs {message}, which rank {rank} has not asked for"
            if operation.end_s is None:
                return False
            ready_s = max(ready_s, operation.end_s)
        self._check_made(action)
        self.started_s[rank] = max(self.started_s[rank], ready_s)
        ends.append(ready_s + self.pass_s(action))
        self.ends[action] = ends[-1]
        return True

    def _check_made(self, action: Action) -> None:
        """Fail where a pass would run before what it needs is made, on whichever rank."""
        stage, kind, microbatch = action
        is_gradient = kind != "F"
        giver = stage + (1 if is_gradient else -1)
        if kind == "W":
            assert Action(stage, "I", microbatch) in self.ends, f"{action.word} runs before its I"
        elif 0 <= giver < len(self.rank_S):
            needed = message_of(self.rank_S, giver, microbatch, is_gradient=is_gradient)
            assert self._is_made(needed), f"{action.word} runs before {needed} is made"

    def _is_made(self, message: Message) -> bool:
        kinds: tuple[Kind, ...] = ("B", "I") if message.is_gradient else ("F",)
        return any(Action(message.stage, kind, message.microbatch) in self.ends for kind in kinds)


def seconds_of(times: StageTimes) -> tuple[Callable[[Action], float], Callable[[Message], float]]:
    """Seconds of passes and of messages, as `Pipeline` takes them."""
    passes = {"F": times.forward_s, "B": times.backward_s, "I": times.input_s, "W": times.weight_s}

    def hop_s(message: Message) -> float:
        return times.backward_hop_s[message.stage - 1] if message.is_gradient else times.forward_hop_s[message.stage]

    return lambda action: passes[action.kind][action.stage], hop_s
