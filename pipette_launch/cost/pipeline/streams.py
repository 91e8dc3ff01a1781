"""Price schedules over NCCL, whose messages wait for each other in streams."""

# Letters of array axes: A = rows of all ranks, R = pipelines that are priced together. Rows are passes and starts of
# messages, in an order in which every cause comes before its effect.

from __future__ import annotations

from collections import deque
from functools import cached_property

import numpy as np

from pipette_launch.cost.pipeline.engine import Engine
from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.facts.programs import Message, Program, message_to, programs
from pipette_launch.facts.schedule import Action, Schedule

_NOTHING = -1
"""Row index that means "no row", whose end counts as time 0."""
_NO_TIME = 0
"""Index of the duration 0, before the durations of passes."""


class StreamEngine(Engine):
    """Engine that prices schedules over NCCL by the longest path through the passes and messages of all ranks.

    A rank posts a send or a receive after its latest pass. The send or receive starts when this pass and the rank's
    previous message in the same direction have ended. A message travels when both its send and its receive have
    started. A device with one work queue starts passes and messages in the order in which its rank posts them. Megatron
    requires one work queue for tensor parallelism before Blackwell (CUDA_DEVICE_MAX_CONNECTIONS=1). All devices are
    priced with one work queue, which made at most 3 % difference in 400 random steps. The predicted time ignores that a
    waiting receive occupies multiprocessors.
    """

    _schedule: Schedule

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)

    @cached_property
    def table_A(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Return `Engine.table_A` with 3 more rows for each message: sender ready, receiver ready, message start."""
        order, place = self._order_A, self._place_of_row
        previous, cause, hop, duration = np.array(self._rows.table, dtype=np.int64).reshape(-1, 4)[order].T
        no_hop = np.full(len(order), self._no_hop)
        return place[previous], place[cause], np.ascontiguousarray(hop), no_hop, np.ascontiguousarray(duration)

    @cached_property
    def place_A(self) -> Ints:
        """Return the index of each action's row; the last entry is for action -1, as in `Engine.place_A`."""
        row_A = [self._rows.row_of[action] for actions in self._schedule.ranks for action in actions]
        return self._place_of_row[[*row_A, _NOTHING]]

    def row_durations(self, durations_R: Floats) -> Floats:
        """Put the duration 0 of message starts before the durations of passes."""
        return np.concatenate([np.zeros((1, durations_R.shape[1])), durations_R])

    @property
    def _no_hop(self) -> int:
        return 2 * (self._schedule.num_stages - 1)

    @cached_property
    def _order_A(self) -> Ints:
        return np.argsort(self._rows.level, kind="stable")

    @cached_property
    def _place_of_row(self) -> Ints:
        """Index of each row when rows are sorted by level, followed by the index that means "no row"."""
        place = np.empty(len(self._order_A) + 1, dtype=np.int64)
        place[self._order_A] = np.arange(len(self._order_A))
        place[_NOTHING] = len(self._order_A)
        return place

    @cached_property
    def _sorted_level_A(self) -> Ints:
        return np.sort(np.array(self._rows.level, dtype=np.int64))

    @cached_property
    def _rows(self) -> _Rows:
        schedule = self._schedule
        duration_A = iter((self._duration_A() + 1).tolist())
        duration_of = {action: next(duration_A) for actions in schedule.ranks for action in actions}
        found = programs(schedule.ranks, schedule.rank_S, schedule.times)
        return _Rows(found, schedule.rank_S, duration_of, no_hop=self._no_hop)


class _Rows:
    """Table of rows, one for each pass or start of a message. Each row waits for at most two earlier rows.

    `duration_of` is the index of each pass's time among the durations, and `no_hop` the index of the 0 among the hops.
    """

    def __init__(
        self, programs: tuple[Program, ...], rank_S: tuple[int, ...], duration_of: dict[Action, int], *, no_hop: int
    ) -> None:
        self.table: list[tuple[int, int, int, int]] = []
        """Indices for each row: previous row, row whose result is needed, message with this result, and duration."""
        self.level: list[int] = []
        """Number of rows in the longest chain that must end before each row."""
        self.row_of: dict[Action | Message, int] = {}
        self._no_hop = no_hop
        self._last = [_NOTHING] * len(programs)
        """Latest row of each rank. The next row of the rank starts after the end of this latest row."""
        self._posted: dict[Message, int] = {}
        """Row that posted the earlier of a message's send and receive."""
        self._before: dict[tuple[int, tuple[int, int]], Message] = {}
        """Latest message that a rank has posted in a direction, by (rank, direction)."""
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
        return message.stage + self._no_hop // 2 - 1 if message.is_gradient else message.stage
