"""Pipeline schedules: the passes of each rank, the schedule file, Megatron's own schedules.

Line numbers refer to megatron-core's pipeline_parallel/schedules.py.
"""

# A = actions of all ranks, S = stages (model chunks), K = kinds of action, M = micro-batches.

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from pipette_launch.errors import FactError, LayoutError, UsageError
from pipette_launch.facts.layout import Ints, Layout

Kind = Literal["F", "B", "I", "W"]
Placement = Literal["loop", "v"]
"""`loop`: stage c is on pipeline rank c % pp. `v`: chunk 0 puts stages on the ranks from first to last, and chunk 1
from last to first, so rank 0 has the first and the last stage."""
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
FORWARD, BACKWARD, INPUT, WEIGHT = range(len(KINDS))
"""Indices of the kinds in `KINDS`."""
_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
_NOWHERE = -1


class Action(NamedTuple):
    """One pass of one micro-batch through one stage: `2B1` is the backward of micro-batch 1 on stage 2.

    A stage is a model chunk, numbered in model order. `B` is the whole backward. A split backward has `I`, the gradient
    of the input, for which the previous stage waits, and `W`, the gradients of the weights.
    """

    stage: int
    kind: Kind
    microbatch: int

    @property
    def word(self) -> str:
        """Short form of the action, such as `2B1`."""
        return f"{self.stage}{self.kind}{self.microbatch}"


Ranks = tuple[tuple[Action, ...], ...]
"""The passes of each pipeline rank, in order of execution."""


def words(actions: Iterable[Action]) -> list[str]:
    """Return the short forms of actions: `["0F0", "0B0"]`."""
    return [action.word for action in actions]


def rank_of(stage: int, *, pp: int, placement: Placement) -> int:
    """Return the pipeline rank that runs a stage."""
    return 2 * pp - 1 - stage if placement == "v" and stage >= pp else stage % pp


class Columns(NamedTuple):
    """All actions of a schedule as arrays, sorted by rank, then by order of execution."""

    rank_A: Ints
    stage_A: Ints
    kind_A: Ints
    """Kind of each action as an index into `KINDS`."""
    microbatch_A: Ints

    def action(self, index: int) -> Action:
        """Return one action of the schedule."""
        return Action(int(self.stage_A[index]), KINDS[self.kind_A[index]], int(self.microbatch_A[index]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedTimes:
    """Expected nanoseconds of passes and messages, which decide the order of messages, with one entry for each stage.

    Times are whole numbers, so that all ranks compute equal sums. Raise FactError if an entry is missing, if a pass
    takes less than 1 ns, or if a message takes less than 0 ns.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    """Times of the whole backward on each stage."""
    input: tuple[int, ...]
    """Times of the input gradient on each stage."""
    weight: tuple[int, ...]
    """Times of the weight gradients on each stage."""
    forward_hop: tuple[int, ...]
    """Times of the messages from stage s to stage s + 1. The last stage has no entry."""
    backward_hop: tuple[int, ...]
    """Times of the messages from stage s + 1 to stage s. The last stage has no entry."""

    def __post_init__(self) -> None:
        passes = (self.forward, self.backward, self.input, self.weight)
        hops = (self.forward_hop, self.backward_hop)
        stages = len(self.forward)
        if {len(each) for each in passes} != {stages} or {len(each) for each in hops} != {stages - 1}:
            needed = f"{stages} stages need {stages} times of each pass and {stages - 1} hops each way"
            raise FactError(f"pass times: {needed}")
        if min(map(min, passes)) < 1 or min((0, *self.forward_hop, *self.backward_hop)) < 0:
            raise FactError("pass times: each pass takes at least 1 ns, and each hop at least 0 ns")

    @classmethod
    def equal(cls, num_stages: int) -> ExpectedTimes:
        """Return equal times for all passes, and 0 for messages."""
        one, nothing = (1,) * num_stages, (0,) * (num_stages - 1)
        return cls(forward=one, backward=one, input=one, weight=one, forward_hop=nothing, backward_hop=nothing)

    def of(self, action: Action) -> int:
        """Return the expected time of a pass."""
        times = {"F": self.forward, "B": self.backward, "I": self.input, "W": self.weight}
        return times[action.kind][action.stage]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The passes of each pipeline rank, in order of execution.

    Raise FactError if a rank does not run F, then B or I and W, once for each of its stages and each micro-batch.
    """

    name: str
    pp: int
    vpp: int
    num_microbatches: int
    ranks: Ranks
    placement: Placement = "loop"
    times: ExpectedTimes | None = None
    """Expected times, which decide the order of messages over NCCL. None = all passes take equal time."""

    def __post_init__(self) -> None:
        pp, vpp, microbatches, stages = self.pp, self.vpp, self.num_microbatches, self.num_stages
        num_actions = sum(map(len, self.ranks))
        timed = len(self.times.forward) if self.times else stages
        for is_wrong, reason in (
            (min(pp, vpp, microbatches) < 1, f"pp={pp}, vpp={vpp} and {microbatches} micro-batches must be positive"),
            (self.placement == "v" and vpp != 2, f"the placement v needs two chunks on each rank, got vpp={vpp}"),
            (len(self.ranks) != pp, f"{len(self.ranks)} action lists for {pp} pipeline ranks"),
            (
                stages * microbatches > num_actions,
                f"{num_actions} actions cannot run {microbatches} micro-batches on {stages} stages",
            ),
            (timed != stages, f"times of {timed} stages for {stages}"),
        ):
            if is_wrong:
                raise FactError(f"{self.name}: {reason}")
        columns = self.columns
        problem = _problem_of_owners(self, columns) or _problem_of_passes(self, columns)
        if problem:
            raise FactError(f"{self.name}: {problem}")

    @property
    def num_stages(self) -> int:
        """Number of model chunks."""
        return self.pp * self.vpp

    @property
    def rank_S(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return tuple(self.rank_of(stage) for stage in range(self.num_stages))

    @property
    def columns(self) -> Columns:
        """All actions of the schedule as new arrays."""
        rank_A = np.repeat(np.arange(self.pp), [len(actions) for actions in self.ranks])
        stages, kinds, microbatches = [], [], []
        for actions in self.ranks:
            stages += [action[0] for action in actions]
            kinds += [_NUMBER[action[1]] for action in actions]
            microbatches += [action[2] for action in actions]
        return Columns(rank_A, *(np.array(column, dtype=np.int64) for column in (stages, kinds, microbatches)))

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that runs a stage."""
        return rank_of(stage, pp=self.pp, placement=self.placement)


def positions(columns: Columns, *, num_stages: int, num_microbatches: int) -> Ints:
    """Return the index of each action as an array [stage, kind, micro-batch]. -1 = the schedule has no such action."""
    place_SKM = np.full((num_stages, len(KINDS), num_microbatches), _NOWHERE)
    place_SKM[columns.stage_A, columns.kind_A, columns.microbatch_A] = np.arange(len(columns.stage_A))
    return place_SKM


def _problem_of_owners(schedule: Schedule, columns: Columns) -> str:
    owner_S = np.array(schedule.rank_S)
    strange_A = (columns.stage_A >= schedule.num_stages) | (columns.microbatch_A >= schedule.num_microbatches)
    strange_A |= (columns.stage_A < 0) | (columns.microbatch_A < 0)
    strange_A |= owner_S[np.where(strange_A, 0, columns.stage_A)] != columns.rank_A
    if not strange_A.any():
        return ""
    index = int(strange_A.argmax())
    return f"{columns.action(index).word} does not belong to pipeline rank {columns.rank_A[index]}"


def _problem_of_passes(schedule: Schedule, columns: Columns) -> str:
    place_SKM = positions(columns, num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches)
    twice_A = place_SKM[columns.stage_A, columns.kind_A, columns.microbatch_A] != np.arange(len(columns.stage_A))
    if twice_A.any():
        return f"{columns.action(int(twice_A.argmax())).word} occurs twice"
    has_SKM = place_SKM != _NOWHERE
    forward, whole, split, weight = (has_SKM[:, kind] for kind in (FORWARD, BACKWARD, INPUT, WEIGHT))
    wrong_SM = ~forward | (split != weight) | (split == whole)
    if wrong_SM.any():
        stage, microbatch = (int(index) for index in np.argwhere(wrong_SM)[0])
        kinds = [kind for kind, has in zip(KINDS, has_SKM[stage, :, microbatch], strict=True) if has]
        runs = f"{' '.join(kinds) or 'nothing'} of micro-batch {microbatch} on stage {stage}"
        return f"rank {schedule.rank_of(stage)} runs {runs}; it needs one F, and one B or one I and one W"
    back_SM = np.maximum(place_SKM[:, BACKWARD], place_SKM[:, INPUT])
    early_SM = (back_SM < place_SKM[:, FORWARD]) | (weight & (place_SKM[:, WEIGHT] < back_SM))
    if not early_SM.any():
        return ""
    stage, microbatch = (int(index) for index in np.argwhere(early_SM)[0])
    runs = f"rank {schedule.rank_of(stage)} runs micro-batch {microbatch} of stage {stage}"
    return f"{runs} in the wrong order; the order is F, then B, or F, I, W"


VARIABLE = "PIPETTE_SCHEDULE"
"""Environment variable with the path of the file for the patch `schedules`."""
_SHARED = ("name", "pp", "vpp", "num_microbatches", "placement", "times")
"""Fields that `Schedule` and `ScheduleFile` have in common."""
_WORD = re.compile(rf"(\d{{1,9}})([{''.join(KINDS)}])(\d{{1,9}})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleFile:
    """A schedule with its actions in short form."""

    KIND: ClassVar[str] = "schedule"

    name: str
    pp: int
    vpp: int
    num_microbatches: int
    placement: Placement
    ranks: tuple[str, ...]
    """Actions of each pipeline rank, separated by blanks."""
    checks_first_step: bool = False
    """True if Megatron's own schedule also runs the first step, to compare results. This needs memory for both runs."""
    times: ExpectedTimes | None = None
    """Expected times, as in `Schedule.times`."""

    @classmethod
    def of(cls, schedule: Schedule, *, checks_first_step: bool = False) -> ScheduleFile:
        """Convert a schedule to its file."""
        shared = {name: getattr(schedule, name) for name in _SHARED}
        ranks = tuple(" ".join(words(actions)) for actions in schedule.ranks)
        return cls(ranks=ranks, checks_first_step=checks_first_step, **shared)

    def schedule(self) -> Schedule:
        """Convert the file to a schedule. Raise FactError if the actions do not form a schedule."""
        shared = {name: getattr(self, name) for name in _SHARED}
        return Schedule(ranks=tuple(tuple(map(action_of, rank.split())) for rank in self.ranks), **shared)


def action_of(word: str) -> Action:
    """Read the short form of an action, `2B1`."""
    found = _WORD.fullmatch(word)
    if found is None:
        form = f"write stage, letter ({', '.join(KINDS)}) and micro-batch, such as 2B1"
        raise FactError(f"{word!r} is not an action; {form}")
    return Action(int(found[1]), KINDS[KINDS.index(found[2])], int(found[3]))


Count = TypeVar("Count", int, Ints)

EXECUTABLE = ("zb-1p", "v-zb", "v-half", "v-min")
"""Names of the additional schedules that a plan may choose and that the patch `schedules` executes."""
RELEASES = ((0, 16), (0, 21))
"""Oldest megatron-core release that the patch `schedules` supports, and the first later release that it refuses."""


def schedule_names(given: str) -> tuple[str, ...]:
    """Read `stock`, `all` or schedule names separated by commas; UsageError for a name that cannot be executed."""
    if given in ("stock", "all"):
        return EXECUTABLE if given == "all" else ()
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    for name in names:
        if name not in EXECUTABLE:
            raise UsageError(f"schedule {name!r} cannot be executed; there are stock, all, {', '.join(EXECUTABLE)}")
    return names


@dataclass(frozen=True, kw_only=True)
class StockSchedule:
    """Schedule of stock Megatron (get_forward_backward_func, lines 45-151): 1F1B, plain or interleaved.

    Each rank runs forwards ahead, then one forward and one backward in turn, then the remaining backwards. Without
    pipelining (pp = 1) the backward of each micro-batch follows its forward. Raise LayoutError if Megatron would refuse
    this combination of pp, vpp and micro-batches (lines 996-1019).
    """

    pp: int
    vpp: int
    group_size: int
    """Micro-batches that a rank runs through one chunk before its next chunk; not used without interleaving."""
    num_microbatches: int

    def __post_init__(self) -> None:
        group_size, microbatches = self.group_size, self.num_microbatches
        if self.vpp == 1:
            return
        if self.pp < 2:
            raise LayoutError(f"an interleaved schedule needs pp > 1, got pp={self.pp} and vpp={self.vpp}")
        if not self.pp <= group_size <= microbatches:
            raise LayoutError(
                f"micro-batch group size {group_size} must lie between pp={self.pp} and the {microbatches} "
                f"micro-batches of a step; take fewer pipeline ranks or a smaller micro-batch"
            )
        if 0 < microbatches % group_size < self.pp:
            raise LayoutError(
                f"{microbatches} micro-batches leave a last group of {microbatches % group_size} after groups of "
                f"{group_size}; the last group must be empty or hold at least pp={self.pp}"
            )

    @classmethod
    def of(cls, layout: Layout, num_microbatches: int) -> StockSchedule:
        """Return the schedule that stock Megatron runs for a layout."""
        group_size = (layout.microbatch_group_size or layout.pp) if layout.vpp > 1 else 1
        return cls(pp=layout.pp, vpp=layout.vpp, group_size=group_size, num_microbatches=num_microbatches)

    @property
    def name(self) -> str:
        """Name of the schedule, equal to `Layout.schedule_name`."""
        return Layout(pp=self.pp, vpp=self.vpp).schedule_name

    @property
    def num_stages(self) -> int:
        """Number of model chunks."""
        return self.pp * self.vpp

    @property
    def rank_S(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return tuple(stage % self.pp for stage in range(self.num_stages))

    @property
    def warmup_P(self) -> Ints:
        """Number of forwards that each rank runs ahead, if there are enough micro-batches."""
        if self.vpp == 1:
            return np.arange(self.pp - 1, -1, -1)
        return np.array([num_warmup(self.pp, self.vpp, self.group_size, rank) for rank in range(self.pp)])

    @cached_property
    def columns(self) -> Columns:
        """All actions of the schedule as arrays."""
        microbatch_N, chunk_N = schedule_table(self.vpp, self.num_microbatches, self.group_size)
        forwards = len(chunk_N)
        index_N = np.arange(forwards)
        rank_P1 = np.arange(self.pp)[:, None]
        ahead_P1 = np.minimum(self.warmup_P, forwards)[:, None]
        rows = rank_P1 * 2 * forwards
        forward_PN = rows + np.where(index_N < ahead_P1, index_N, 2 * index_N - ahead_P1)
        backward_PN = rows + np.where(index_N < forwards - ahead_P1, 2 * index_N + ahead_P1 + 1, index_N + forwards)
        stage_A, kind_A, microbatch_A = (np.empty(2 * forwards * self.pp, dtype=np.int64) for _ in range(3))
        stage_A[forward_PN] = chunk_N * self.pp + rank_P1
        # A rank runs the backwards of its chunks in reverse order.
        stage_A[backward_PN] = (self.vpp - 1 - chunk_N) * self.pp + rank_P1
        kind_A[forward_PN], kind_A[backward_PN] = FORWARD, BACKWARD
        microbatch_A[forward_PN] = microbatch_A[backward_PN] = microbatch_N
        return Columns(np.repeat(np.arange(self.pp), 2 * forwards), stage_A, kind_A, microbatch_A)


@lru_cache(maxsize=1024)
def schedule_table(vpp: int, num_microbatches: int, group_size: int) -> tuple[Ints, Ints]:
    """Return micro-batch and chunk of each forward of a rank, in order of execution (line 798, get_schedule_table)."""
    index_N = np.arange(num_microbatches * vpp)
    first_N = index_N // (group_size * vpp) * group_size
    inside_N = index_N - first_N * vpp
    width_N = np.minimum(group_size, num_microbatches - first_N)
    return first_N + inside_N % width_N, inside_N // width_N


def num_warmup(pp: Count, vpp: Count, group_size: Count, rank: Count) -> Count:
    """Return the number of forwards that a rank of interleaved 1F1B runs ahead (lines 762-786)."""
    return 2 * (pp - rank - 1) + (vpp - 1) * group_size


def schedule_of(layout: Layout, num_microbatches: int) -> Schedule:
    """Return the schedule that stock Megatron runs for a layout, as passes."""
    stock = StockSchedule.of(layout, num_microbatches)
    _, stage_A, kind_A, microbatch_A = stock.columns
    kinds = [KINDS[kind] for kind in kind_A.tolist()]
    actions = tuple(map(Action, stage_A.tolist(), kinds, microbatch_A.tolist()))
    passes = 2 * num_microbatches * layout.vpp
    ranks = tuple(actions[first : first + passes] for first in range(0, len(actions), passes))
    return Schedule(name=stock.name, pp=layout.pp, vpp=layout.vpp, num_microbatches=num_microbatches, ranks=ranks)
