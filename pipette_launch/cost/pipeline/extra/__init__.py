"""Pipeline schedules by name, also schedules that Megatron lacks: order of passes, memory, and time over NCCL.

The rest of the product reaches this optional part through this module only. A new schedule is a function that makes
its order, and an entry in `SCHEDULES`. The function belongs to `facts.known_schedules` if a few counts decide the
order, and to `drafts` if the stages' times do.
"""

# A = actions of all ranks, S = stages.
# A = passes of all ranks, S = stages, R = pipelines that are priced side by side. Rows are passes and starts of
# messages, in an order in which every cause comes before its effect.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from pipette_launch.cost.pipeline.engine import Engine, Floats, StageTimes
from pipette_launch.cost.pipeline.extra.drafts import (
    SchedulingProblem,
    one_forward_one_backward_v,
    refilled,
    v_schedule,
    zero_bubble,
)
from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts.known_schedules import (
    eager_one_forward_one_backward,
    gpipe,
    grouped_split,
    interleaved,
    interleaved_zero_bubble,
    one_forward_one_backward,
)
from pipette_launch.facts.layout import Ints
from pipette_launch.facts.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    WEIGHT,
    Action,
    Message,
    Placement,
    Program,
    Schedule,
    message_to,
    programs,
    rank_of,
)
from pipette_launch.text import did_you_mean

Chunks = Literal["one", "two", "several"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Numbers that decide a schedule whose order does not depend on the stages' times."""

    pp: int
    vpp: int
    num_microbatches: int
    group_size: int
    """Number of micro-batches that a rank runs through one chunk before its next chunk."""
    extra: int | None = None
    """Number of additional warm-up forwards, compared with 1F1B; None = the schedule's own number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedSchedule:
    """A schedule with a name, and the function that makes it from counts or from the stages' times."""

    sentence: str
    peak: Callable[[int, int, int], float]
    """Function from (pp, vpp, group size) to the most micro-batches that a rank keeps. A micro-batch whose W has not
    run counts in full."""
    by_counts: Callable[[Counts], Schedule] | None = None
    by_times: Callable[[SchedulingProblem], Schedule] | None = None
    chunks: Chunks = "one"
    """Number of chunks that the schedule allows on each rank."""
    placement: Placement = "loop"
    splits_backward: bool = True
    refills: bool = False
    """True if the schedule's weight gradients (W) are placed again when times are given."""
    has_groups: bool = False
    """True if the size of the micro-batch groups can be chosen."""
    has_extra: bool = False
    """True if the number of forwards ahead can be chosen."""


SCHEDULES: dict[str, NamedSchedule] = {
    "gpipe": NamedSchedule(
        sentence="all forwards, then all backwards",
        peak=lambda _p, _v, _g: float("inf"),
        by_counts=lambda at: gpipe(at.pp, at.num_microbatches),
        splits_backward=False,
    ),
    "1f1b": NamedSchedule(
        sentence="one forward and one backward in turn",
        peak=lambda p, _v, _g: p,
        by_counts=lambda at: one_forward_one_backward(at.pp, at.num_microbatches),
        splits_backward=False,
    ),
    "eager-1f1b": NamedSchedule(
        sentence="1F1B with up to twice the forwards ahead",
        peak=lambda p, _v, _g: 2 * p - 1,
        by_counts=lambda at: eager_one_forward_one_backward(at.pp, at.num_microbatches, at.extra),
        splits_backward=False,
        has_extra=True,
    ),
    "interleaved-1f1b": NamedSchedule(
        sentence="Megatron's interleaved schedule of virtual stages",
        peak=lambda p, v, g: (2 * (p - 1) + (v - 1) * g + 1) / v,
        by_counts=lambda at: interleaved(at.pp, at.vpp, at.num_microbatches, at.group_size),
        chunks="several",
        splits_backward=False,
        has_groups=True,
    ),
    "gis": NamedSchedule(
        sentence="interleaved groups, a short warm-up, W after I; groups may be as small as half the pipeline",
        peak=lambda p, v, g: (g * (v - 1) + p) / v,
        by_counts=lambda at: grouped_split(at.pp, at.vpp, at.num_microbatches, at.group_size),
        chunks="several",
        refills=True,
        has_groups=True,
    ),
    "zb-h1": NamedSchedule(
        sentence="1F1B with W delayed by a count for each rank",
        peak=lambda p, _v, _g: p,
        by_counts=lambda at: interleaved_zero_bubble(at.pp, 1, at.num_microbatches),
    ),
    "interleaved-zb": NamedSchedule(
        sentence="interleaved groups, a short warm-up, W delayed",
        peak=lambda p, _v, _g: p,
        by_counts=lambda at: interleaved_zero_bubble(at.pp, at.vpp, at.num_microbatches),
        chunks="several",
        refills=True,
    ),
    "zb-1p": NamedSchedule(
        sentence="zero bubble within 1F1B's memory",
        peak=lambda p, _v, _g: p,
        by_times=lambda problem: zero_bubble("zb-1p", problem),
    ),
    "zb-2p": NamedSchedule(
        sentence="zero bubble within twice 1F1B's memory",
        peak=lambda p, _v, _g: 2 * p,
        by_times=lambda problem: zero_bubble("zb-2p", problem),
    ),
    "v-zb": NamedSchedule(
        sentence="V placement within 1F1B's memory",
        peak=lambda p, _v, _g: p,
        # If passes are half a period apart from rank to rank, all ranks run the same order, so no bubble repeats in any
        # period.
        by_times=lambda problem: v_schedule("v-zb", problem, ((3, 3, 3, 3),)),
        chunks="two",
        placement="v",
    ),
    "v-half": NamedSchedule(
        sentence="V placement within half of 1F1B's memory",
        peak=lambda p, _v, _g: (p + 2) // 2,
        by_times=lambda problem: v_schedule(
            "v-half", problem, ((2, 1, 1, 2), (1, 2, 1, 2), (2, 1, 2, 1), (1, 2, 2, 1))
        ),
        chunks="two",
        placement="v",
    ),
    "v-min": NamedSchedule(
        sentence="V placement within a third of 1F1B's memory",
        peak=lambda p, _v, _g: (p + 4) // 3,
        by_times=lambda problem: v_schedule("v-min", problem, ((1, 1, 1, 1),)),
        chunks="two",
        placement="v",
    ),
    "1f1b-v": NamedSchedule(
        sentence="V placement, whole backwards, two thirds of 1F1B's memory",
        peak=lambda p, _v, _g: (2 * p + 2) // 3,
        by_times=one_forward_one_backward_v,
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
    extra: int | None = None,
    times: StageTimes | None = None,
    held_S: Sequence[float] | None = None,
    w_share: float = 1.0,
    limit_P: Sequence[float] | None = None,
    objective: Literal["makespan", "span"] = "makespan",
) -> Schedule:
    """Return a schedule by its name.

    Args:
        name: one of `SCHEDULES`.
        pp: pipeline ranks.
        vpp: chunks of each rank.
        num_microbatches: micro-batches of one step.
        group_size: micro-batches that a rank runs through one chunk before its next chunk; None = pp.
        extra: additional warm-up forwards, compared with 1F1B (eager-1f1b); None = the schedule's own number.
        times: times of the stages, with input and weight gradients separate. None = equal times, for schedules whose
            order depends on times. If times are given, gis and interleaved-zb place their weight gradients (W) again.
        held_S: memory of each stage for one micro-batch, in any unit; None = equal parts of one micro-batch.
        w_share: share of `held_S` that a weight gradient (W) still needs.
        limit_P: most memory of each rank, in the unit of `held_S`; None = the schedule's known peak.
        objective: time to minimize. `span` needs zero bubble's post-validation.

    Raises:
        LayoutError: no such schedule exists for these numbers; the message gives the reason.
        FactError: times, sizes or limits contradict each other, or the limits allow no order.

    """
    group = pp if group_size is None else group_size
    counts = Counts(pp=pp, vpp=vpp, num_microbatches=num_microbatches, group_size=group, extra=extra)
    known = _checked(name, counts, chooses_group=group_size is not None)
    if known.by_counts and not (known.refills and times is not None):
        if limit_P is not None:
            raise LayoutError(f"the order of {name} is fixed and takes no memory limit")
        return known.by_counts(counts)
    held = tuple(held_S) if held_S is not None else (1 / vpp,) * (pp * vpp)
    problem = SchedulingProblem(
        pp=pp,
        vpp=vpp,
        placement=known.placement,
        num_microbatches=num_microbatches,
        times=times if times is not None else _equal_times(pp * vpp),
        held_S=held,
        w_share=w_share,
        limit_P=tuple(limit_P) if limit_P is not None else most_kept(name, counts, held),
        objective=objective,
    )
    if known.splits_backward and not problem.times.input_s:
        raise FactError(f"{name} splits the backward: give input_s and weight_s of each stage")
    if known.by_counts:
        return refilled(known.by_counts(counts), problem)
    assert known.by_times
    return known.by_times(problem)


def _checked(name: str, counts: Counts, *, chooses_group: bool) -> NamedSchedule:
    """Return a schedule by its name; raise LayoutError if the name is unknown or refuses the counts."""
    if name not in SCHEDULES:
        hint = did_you_mean(name.lower(), SCHEDULES, otherwise=f"there are {', '.join(SCHEDULES)}")
        raise LayoutError(f"no schedule is called {name!r}; {hint}")
    known = SCHEDULES[name]
    pp, vpp = counts.pp, counts.vpp
    if min(pp, vpp, counts.num_microbatches) < 1:
        raise LayoutError(f"{name}: pp={pp}, vpp={vpp} and {counts.num_microbatches} micro-batches must be positive")
    if not {"one": vpp == 1, "two": vpp == 2, "several": vpp > 1}[known.chunks]:
        raise LayoutError(f"{name} has {known.chunks} chunks on each rank, got vpp={vpp}")
    if known.chunks != "one" and pp == 1:
        raise LayoutError(f"{name} needs a pipeline, got pp=1")
    if chooses_group and not known.has_groups:
        raise LayoutError(f"{name} has no micro-batch groups to choose, got group_size={counts.group_size}")
    if counts.extra is not None and not known.has_extra:
        raise LayoutError(f"{name} has no forwards more ahead to choose; extra={counts.extra} is eager-1f1b's")
    return known


def _equal_times(stages: int) -> StageTimes:
    one, hops = (1.0,) * stages, (0.0,) * (stages - 1)
    return StageTimes(
        forward_s=one, backward_s=(2.0,) * stages, input_s=one, weight_s=one, forward_hop_s=hops, backward_hop_s=hops
    )


def most_kept(name: str, counts: Counts, held_S: Sequence[float]) -> tuple[float, ...]:
    """Return the known peak memory of each rank under a named schedule, in the unit of `held_S`.

    `held_S` is the memory of each stage for one micro-batch.
    """
    known = SCHEDULES[name]
    held_P = [0.0] * counts.pp
    for stage, held in enumerate(held_S[: counts.pp * counts.vpp]):
        held_P[rank_of(stage, pp=counts.pp, placement=known.placement)] += held
    most = min(known.peak(counts.pp, counts.vpp, counts.group_size), counts.num_microbatches)
    return tuple(most * held for held in held_P)


def peak_live_bytes(
    schedule: Schedule, chunk_bytes: Sequence[int], waiting_bytes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the most bytes that each rank's stages hold for micro-batches whose backward is not done.

    Only the order of passes matters: F takes its stage's bytes, B frees these bytes, and I frees all but the bytes that
    W needs. For schedules of stock Megatron the result equals `cost.memory.peak.peak_live_bytes` on every
    rank.

    Args:
        schedule: the schedule.
        chunk_bytes: bytes that each stage keeps for one micro-batch, in model order.
        waiting_bytes: bytes that each stage's weight gradients still need when the input gradient is done: 32 of the
            34 + 5as/h bytes of a layer in Korthikanti et al. 2022, equation 1 (a fully recomputed layer keeps 2);
            None = all of `chunk_bytes`.

    Raises:
        FactError: the number of stages is wrong, or a size is negative.

    """
    waiting_bytes = chunk_bytes if waiting_bytes is None else waiting_bytes
    for sizes in (chunk_bytes, waiting_bytes):
        if len(sizes) != schedule.num_stages:
            raise FactError(f"bytes of {len(sizes)} stages for a schedule of {schedule.num_stages}")
        if min(sizes) < 0:
            raise FactError(f"bytes must not be negative, got {min(sizes)}")
    kept_S, for_weight_S = np.array(chunk_bytes, dtype=np.int64), np.array(waiting_bytes, dtype=np.int64)
    change_KS = np.zeros((len(KINDS), schedule.num_stages), dtype=np.int64)
    change_KS[FORWARD] = kept_S
    change_KS[BACKWARD] = -kept_S
    change_KS[INPUT] = for_weight_S - kept_S
    change_KS[WEIGHT] = -for_weight_S
    columns = schedule.columns
    delta_A = change_KS[columns.kind_A, columns.stage_A]
    first_P = np.cumsum([len(actions) for actions in schedule.ranks])[:-1]
    return tuple(int(np.cumsum(delta).max()) for delta in np.split(delta_A, first_P))


_NOTHING = -1
"""Index that means "no row"; its end is 0."""
_NO_TIME = 0
"""Index of the duration 0, before the durations of passes."""


class StreamEngine(Engine):
    """Engine for schedules over NCCL: the longest path through the programs that the workers run.

    A rank posts a send or a receive after its latest pass. The send or receive starts when this pass and the previous
    message in the same direction have ended. A message travels once its sender and its receiver have started. A device
    with one work queue starts passes and messages in the order in which its rank posts them. Megatron requires one
    queue for tensor parallelism before Blackwell (CUDA_DEVICE_MAX_CONNECTIONS=1). All devices are priced with one
    queue: of 400 random steps the worst was 3 % longer than with more queues. The multiprocessors that a waiting
    receive occupies are not priced.
    """

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._schedule = schedule

    @cached_property
    def table_A(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Return `Engine.table_A` with 3 more rows for each message: sender ready, receiver ready, message start."""
        order, place = self._rows_by_level, self._place_of_row
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

    def _run(self, durations: list[float], hops: list[float]) -> list[float]:
        return super()._run([0.0, *durations], hops)

    @property
    def _no_hop(self) -> int:
        return 2 * (self._schedule.num_stages - 1)

    @cached_property
    def _rows_by_level(self) -> Ints:
        """Rows sorted by their levels."""
        return np.argsort(self._rows.level, kind="stable")

    @cached_property
    def _place_of_row(self) -> Ints:
        """Index of each row in the order of levels, followed by the index that means "no row"."""
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
    """Rows for passes and starts of messages; each row waits for at most two earlier rows.

    Args:
        programs: programs of all ranks.
        rank_S: pipeline rank of each stage.
        duration_of: index of each pass's time among the durations.
        no_hop: index of the 0 among the hops.

    """

    def __init__(
        self, programs: tuple[Program, ...], rank_S: tuple[int, ...], duration_of: dict[Action, int], *, no_hop: int
    ) -> None:
        self.table: list[tuple[int, int, int, int]] = []
        """For each row: previous row, row whose result is needed, hop from that row, and duration."""
        self.level: list[int] = []
        """Length of the longest chain of rows before each row."""
        self.row_of: dict[Action | Message, int] = {}
        self._no_hop = no_hop
        self._last = [_NOTHING] * len(programs)
        """Latest row of each rank; the rank's next row starts after its end."""
        self._posted: dict[Message, int] = {}
        """Row in which the first end of a message, send or receive, was posted."""
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
        """Return the index of a message's time among the hops."""
        return message.stage + self._no_hop // 2 - 1 if message.is_gradient else message.stage
