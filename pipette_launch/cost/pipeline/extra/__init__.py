"""Pipeline schedules by name, with order, memory and time over NCCL, including schedules that Megatron lacks.

The rest of pipette-launch imports the optional package `pipeline.extra` only through this module. A new schedule is a
function that makes its order, and an entry in `SCHEDULES`. The function belongs to `facts.schedule` if a few
counts decide the order, and to `drafts` if the times of the stages decide the order.
"""

# Letters of array axes: A = actions (passes) of all ranks, S = stages, P = pipeline ranks, R = pipelines that are
# priced together. Rows are passes and starts of messages, in an order in which every cause comes before its effect.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from pipette_launch.cost.pipeline.engine import Engine, StageTimes
from pipette_launch.cost.pipeline.extra import drafts
from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts import schedule as orders
from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.facts.schedule import Action, Message, Placement, Program, Schedule, message_to, programs, rank_of
from pipette_launch.text import did_you_mean

Chunks = Literal["one", "two", "several"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedSchedule:
    """A schedule with a name, and the function that makes it from counts or from the stages' times."""

    peak: Callable[[int, int, int], float]
    """Function from (pp, vpp, group size) to the most micro-batches that a rank keeps. The whole memory of a
    micro-batch counts until its weight gradient (W) has run."""
    by_counts: Callable[[int, int, int, int], Schedule] | None = None
    """Function of (pp, vpp, micro-batches, group size)."""
    by_times: Callable[[drafts.SchedulingProblem], Schedule] | None = None
    chunks: Chunks = "one"
    """Number of chunks that the schedule allows on each rank, as a word such as `one` or `several`."""
    placement: Placement = "loop"
    splits_backward: bool = True
    refills: bool = False
    """True if the schedule's weight gradients (W) are placed again when times are given."""
    has_groups: bool = False
    """True if the size of the micro-batch groups can be chosen."""


SCHEDULES: dict[str, NamedSchedule] = {
    # 1F1B runs one forward and one backward in turn.
    "1f1b": NamedSchedule(
        peak=lambda p, _v, _g: p,
        by_counts=lambda p, _v, n, _g: orders.one_forward_one_backward(p, n),
        splits_backward=False,
    ),
    # Eager 1F1B runs up to twice as many forwards ahead as 1F1B.
    "eager-1f1b": NamedSchedule(
        peak=lambda p, _v, _g: 2 * p - 1,
        by_counts=lambda p, _v, n, _g: orders.eager_one_forward_one_backward(p, n),
        splits_backward=False,
    ),
    # Interleaved 1F1B is Megatron's schedule of virtual stages.
    "interleaved-1f1b": NamedSchedule(
        peak=lambda p, v, g: (2 * (p - 1) + (v - 1) * g + 1) / v,
        by_counts=orders.interleaved,
        chunks="several",
        splits_backward=False,
        has_groups=True,
    ),
    # Schedule `gis` has interleaved groups, a short warm-up, and weight gradients directly after input gradients.
    # Groups of `gis` may have as few micro-batches as half the pipeline ranks.
    "gis": NamedSchedule(
        peak=lambda p, v, g: (g * (v - 1) + p) / v,
        by_counts=orders.grouped_split,
        chunks="several",
        refills=True,
        has_groups=True,
    ),
    # Schedule `zb-h1` is 1F1B in which each rank delays weight gradients by a fixed number of micro-batches.
    "zb-h1": NamedSchedule(
        peak=lambda p, _v, _g: p, by_counts=lambda p, _v, n, _g: orders.interleaved_zero_bubble(p, 1, n)
    ),
    # Schedule `interleaved-zb` has interleaved groups, a short warm-up, and delayed weight gradients.
    "interleaved-zb": NamedSchedule(
        peak=lambda p, _v, _g: p,
        by_counts=lambda p, v, n, _g: orders.interleaved_zero_bubble(p, v, n),
        chunks="several",
        refills=True,
    ),
    # ZB-1P delays weight gradients to fill bubbles within the memory of 1F1B, and ZB-2P within twice this memory.
    "zb-1p": NamedSchedule(peak=lambda p, _v, _g: p, by_times=lambda problem: drafts.zero_bubble("zb-1p", problem)),
    "zb-2p": NamedSchedule(peak=lambda p, _v, _g: 2 * p, by_times=lambda problem: drafts.zero_bubble("zb-2p", problem)),
    # V-ZB has a V placement within the memory of 1F1B. If passes are half a period apart from rank to rank, all ranks
    # run the same order, so the steady periods have no bubble.
    "v-zb": NamedSchedule(
        peak=lambda p, _v, _g: p,
        by_times=lambda problem: drafts.v_schedule("v-zb", problem, ((3, 3, 3, 3),)),
        chunks="two",
        placement="v",
    ),
    # V-Half has a V placement within half of the memory of 1F1B, and V-Min within a third.
    "v-half": NamedSchedule(
        peak=lambda p, _v, _g: (p + 2) // 2,
        by_times=lambda problem: drafts.v_schedule(
            "v-half", problem, ((2, 1, 1, 2), (1, 2, 1, 2), (2, 1, 2, 1), (1, 2, 2, 1))
        ),
        chunks="two",
        placement="v",
    ),
    "v-min": NamedSchedule(
        peak=lambda p, _v, _g: (p + 4) // 3,
        by_times=lambda problem: drafts.v_schedule("v-min", problem, ((1, 1, 1, 1),)),
        chunks="two",
        placement="v",
    ),
    # 1F1B-V has a V placement with whole backwards, within two thirds of the memory of 1F1B.
    "1f1b-v": NamedSchedule(
        peak=lambda p, _v, _g: (2 * p + 2) // 3,
        by_times=drafts.one_forward_one_backward_v,
        chunks="two",
        placement="v",
        splits_backward=False,
    ),
}
"""Every schedule by its name. Stock Megatron has only 1f1b and interleaved-1f1b."""


def named_schedule(
    name: str,
    *,
    pp: int,
    vpp: int = 1,
    num_microbatches: int,
    group_size: int | None = None,
    times: StageTimes | None = None,
    held_S: Sequence[float] | None = None,
) -> Schedule:
    """Return the schedule `name` of `SCHEDULES`, with `vpp` chunks on each of `pp` ranks.

    A rank runs `group_size` micro-batches through one chunk before its next chunk (None = pp). `times` have separate
    input and weight gradients (None = equal times). If times are given, gis and interleaved-zb place their weight
    gradients (W) again. `held_S` is the memory of each stage for one micro-batch, in any unit (None = equal parts).
    Raises LayoutError with the reason if no schedule exists for these numbers. Raises FactError if times or sizes
    contradict each other, or if no order of passes stays within the schedule's known peak memory.
    """
    known = _checked(name, pp, vpp, num_microbatches, group_size)
    counts = pp, vpp, num_microbatches, pp if group_size is None else group_size
    if known.by_counts and not (known.refills and times is not None):
        return known.by_counts(*counts)
    stages = pp * vpp
    one, hops = (1.0,) * stages, (0.0,) * (stages - 1)
    equal = StageTimes(
        forward_s=one, backward_s=(2.0,) * stages, input_s=one, weight_s=one, forward_hop_s=hops, backward_hop_s=hops
    )
    held = tuple(held_S) if held_S is not None else (1 / vpp,) * stages
    problem = drafts.SchedulingProblem(
        pp=pp,
        vpp=vpp,
        placement=known.placement,
        num_microbatches=num_microbatches,
        times=times if times is not None else equal,
        held_S=held,
        limit_P=most_kept(name, held, *counts),
    )
    if known.splits_backward and not problem.times.input_s:
        raise FactError(f"{name} splits the backward: give input_s and weight_s of each stage")
    if known.by_counts:
        return drafts.refilled(known.by_counts(*counts), problem)
    assert known.by_times
    return known.by_times(problem)


def _checked(name: str, pp: int, vpp: int, num_microbatches: int, group_size: int | None) -> NamedSchedule:
    if name not in SCHEDULES:
        hint = did_you_mean(name.lower(), SCHEDULES, otherwise=f"there are {', '.join(SCHEDULES)}")
        raise LayoutError(f"no schedule is called {name!r}; {hint}")
    known = SCHEDULES[name]
    if min(pp, vpp, num_microbatches) < 1:
        raise LayoutError(f"{name}: pp={pp}, vpp={vpp} and {num_microbatches} micro-batches must be positive")
    if not {"one": vpp == 1, "two": vpp == 2, "several": vpp > 1}[known.chunks]:
        raise LayoutError(f"{name} has {known.chunks} chunks on each rank, got vpp={vpp}")
    if known.chunks != "one" and pp == 1:
        raise LayoutError(f"{name} needs a pipeline, got pp=1")
    if group_size is not None and not known.has_groups:
        raise LayoutError(f"{name} has no micro-batch groups to choose, got group_size={group_size}")
    return known


def most_kept(
    name: str, held_S: Sequence[float], pp: int, vpp: int, num_microbatches: int, group_size: int
) -> tuple[float, ...]:
    """Return each rank's known peak memory under a schedule, from the memory of each stage for one micro-batch."""
    known = SCHEDULES[name]
    held_P = [0.0] * pp
    for stage, held in enumerate(held_S[: pp * vpp]):
        held_P[rank_of(stage, pp=pp, placement=known.placement)] += held
    most = min(known.peak(pp, vpp, group_size), num_microbatches)
    return tuple(most * held for held in held_P)


def peak_live_bytes(
    schedule: Schedule, chunk_bytes: Sequence[int], waiting_bytes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the most bytes that each rank's stages hold for micro-batches whose backward is not done.

    Only the order of passes matters. A forward (F) allocates the bytes of its stage, a backward (B) frees these bytes,
    and an input gradient (I) frees all but the bytes that the weight gradient (W) needs. These `waiting_bytes` are 32
    of the 34 + 5as/h bytes of a layer in Korthikanti et al. 2022, equation 1 (a fully recomputed layer keeps 2). None =
    all of `chunk_bytes`. For Megatron's own schedules the result equals `cost.memory.peak.peak_live_bytes`.
    """
    waiting_bytes = chunk_bytes if waiting_bytes is None else waiting_bytes
    kept_S, for_weight_S = np.array(chunk_bytes, dtype=np.int64), np.array(waiting_bytes, dtype=np.int64)
    # Rows in the order of `facts.schedule.KINDS`: F, B, I, W.
    change_KS = np.array([kept_S, -kept_S, for_weight_S - kept_S, -for_weight_S])
    columns = schedule.columns
    delta_A = change_KS[columns.kind_A, columns.stage_A]
    first_P = np.cumsum([len(actions) for actions in schedule.ranks])[:-1]
    return tuple(int(np.cumsum(delta).max()) for delta in np.split(delta_A, first_P))


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

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._schedule = schedule

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
