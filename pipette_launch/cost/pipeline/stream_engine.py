"""Pricing of a schedule whose messages run over NCCL: the longest path through the programs that the workers run.

A rank posts a send or a receive behind its last pass. Each starts when this pass has ended and the message before it on
the same way too. A message travels once both have started. A device with one work queue starts passes and messages in
the order in which its rank posts them (CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron asks for tensor parallelism before
Blackwell). All devices are priced so: of 400 drawn steps the worst was 3 % longer than with more queues. Not priced:
multiprocessors that a waiting receive occupies.
"""

# A = passes of all ranks, S = stages, R = pipelines that are priced side by side. Rows are passes and starts of
# messages, in an order in which every cause comes before its effect.

from __future__ import annotations

from collections import deque
from functools import cached_property

import numpy as np

from pipette_launch.cost.pipeline.dependencies import Ints
from pipette_launch.cost.pipeline.engine import Engine, Floats
from pipette_launch.facts.schedule import Action, Message, Program, Schedule, message_to, programs

_NOTHING = -1
"""In place of a row: it ends at 0."""
_NO_TIME = 0
"""Place of the duration 0, in front of the durations of passes."""


class StreamEngine(Engine):
    """An engine for schedules over NCCL: `facts.pipeline.lowering` puts the messages between the passes."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._schedule = schedule

    @cached_property
    def table_A(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """As `Engine.table_A`, with three rows for each message: one for each rank that is ready, and its start."""
        order, place = self._rows_by_level, self._place_of_row
        previous, cause, hop, duration = np.array(self._rows.table, dtype=np.int64).reshape(-1, 4)[order].T
        no_hop = np.full(len(order), self._no_hop)
        return place[previous], place[cause], np.ascontiguousarray(hop), no_hop, np.ascontiguousarray(duration)

    @cached_property
    def place_A(self) -> Ints:
        """As `Engine.place_A`."""
        row_A = [self._rows.row_of[action] for actions in self._schedule.ranks for action in actions]
        return self._place_of_row[[*row_A, _NOTHING]]

    def row_durations(self, durations_R: Floats) -> Floats:
        """Put the duration 0, which starts of messages take, in front of the durations of passes."""
        return np.concatenate([np.zeros((1, durations_R.shape[1])), durations_R])

    def _run(self, durations: list[float], hops: list[float]) -> list[float]:
        return super()._run([0.0, *durations], hops)

    @property
    def _no_hop(self) -> int:
        return 2 * (self._schedule.num_stages - 1)

    @cached_property
    def _rows_by_level(self) -> Ints:
        """Rows by their levels."""
        return np.argsort(self._rows.level, kind="stable")

    @cached_property
    def _place_of_row(self) -> Ints:
        """Place of each row in that order, and at the end the place of no row."""
        place = np.empty(len(self._rows_by_level) + 1, dtype=np.int64)
        place[self._rows_by_level] = np.arange(len(self._rows_by_level))
        place[_NOTHING] = len(self._rows_by_level)
        return place

    @cached_property
    def _level_A(self) -> Ints:
        return np.sort(np.array(self._rows.level, dtype=np.int64))

    @cached_property
    def _rows(self) -> _Rows:
        schedule = self._schedule
        duration_A = iter((self._duration_A() + 1).tolist())
        duration_of = {action: next(duration_A) for actions in schedule.ranks for action in actions}
        found = programs(schedule.ranks, schedule.rank_S, schedule.times)
        return _Rows(found, schedule.rank_S, duration_of, no_hop=self._no_hop)


class _Rows:
    """Passes and starts of messages, each with the two rows that it waits for.

    Args:
        programs: of all ranks.
        rank_S: pipeline rank of each stage.
        duration_of: where the time of each pass stands among the durations.
        no_hop: where the hop of 0 stands among the hops.

    """

    def __init__(
        self, programs: tuple[Program, ...], rank_S: tuple[int, ...], duration_of: dict[Action, int], *, no_hop: int
    ) -> None:
        self.table: list[tuple[int, int, int, int]] = []
        """Row before, row that is waited for, the hop between, and the duration."""
        self.level: list[int] = []
        """Longest chain of rows in front of each one."""
        self.row_of: dict[Action | Message, int] = {}
        self._no_hop = no_hop
        self._last = [_NOTHING] * len(programs)
        """The last row of each rank: nothing starts before it ends."""
        self._posted: dict[Message, int] = {}
        """Start of the first of two ends of a message."""
        self._before: dict[tuple[int, tuple[int, int]], Message] = {}
        """By rank and way: the message that the rank has posted last."""
        at = [0] * len(programs)
        ready = deque(range(len(programs)))
        while ready:
            rank = ready.popleft()
            for step in programs[rank][at[rank] :]:
                needed = self._before.get((rank, step.way)) if isinstance(step, Message) else message_to(step, rank_S)
                if needed is not None and needed not in self.row_of:
                    break
                arrived = (self.row_of[needed], self._hop(needed)) if needed else (_NOTHING, self._no_hop)
                duration = _NO_TIME if isinstance(step, Message) else duration_of[step]
                self._last[rank] = self._add(self._last[rank], *arrived, duration)
                at[rank] += 1
                if not isinstance(step, Message):
                    self.row_of[step] = self._last[rank]
                    continue
                self._before[rank, step.way] = step
                other = self._posted.setdefault(step, self._last[rank])
                if other != self._last[rank]:
                    self.row_of[step] = self._add(self._last[rank], other, self._no_hop, _NO_TIME)
                    ready += step.way

    def _add(self, previous: int, cause: int, hop: int, duration: int) -> int:
        self.table.append((previous, cause, hop, duration))
        self.level.append(1 + max(self.level[row] if row != _NOTHING else -1 for row in (previous, cause)))
        return len(self.table) - 1

    def _hop(self, message: Message) -> int:
        """Return where the time of a message stands among the hops."""
        return message.stage + self._no_hop // 2 - 1 if message.is_gradient else message.stage
