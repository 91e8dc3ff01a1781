"""Pipeline schedules: which rank runs which micro-batch of which stage, and in which order, written as words."""

# A = actions of all ranks, S = stages (model chunks), K = kinds of action, M = micro-batches.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import FactError

Kind = Literal["F", "B", "I", "W"]
Placement = Literal["loop", "v"]
"""`loop`: stage c on rank c % pp. `v`: chunk 0 runs down the ranks and chunk 1 back up, so rank 0 holds both ends."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
FORWARD, BACKWARD, INPUT, WEIGHT = range(len(KINDS))
"""Where each kind stands in `KINDS`."""

_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
_NOWHERE = -1


class Action(NamedTuple):
    """One pass of one micro-batch through one stage: `2B1` is the backward of micro-batch 1 on stage 2.

    A stage is a model chunk, numbered in model order. `B` is the whole backward; a schedule that splits it writes `I`
    for the input's gradient, which the stage before waits for, and `W` for the weights' gradients.
    """

    stage: int
    kind: Kind
    microbatch: int

    @property
    def word(self) -> str:
        """The action as people write it."""
        return f"{self.stage}{self.kind}{self.microbatch}"


Ranks = tuple[tuple[Action, ...], ...]
"""The passes of each pipeline rank, in order."""


def words(actions: Iterable[Action]) -> list[str]:
    """Actions as words: `["0F0", "0B0"]`."""
    return [action.word for action in actions]


def rank_of(stage: int, *, pp: int, placement: Placement) -> int:
    """Pipeline rank of a stage."""
    if placement == "v" and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


class Columns(NamedTuple):
    """All actions of a schedule as arrays: rank after rank, each in its own order."""

    rank_A: NDArray[np.int64]
    stage_A: NDArray[np.int64]
    kind_A: NDArray[np.int64]
    """Places in `KINDS`."""
    microbatch_A: NDArray[np.int64]

    def action(self, index: int) -> Action:
        """Return one of the actions."""
        return Action(int(self.stage_A[index]), KINDS[self.kind_A[index]], int(self.microbatch_A[index]))


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTimes:
    """Expected nanoseconds of the passes and messages of a schedule, by which its messages are ordered.

    Whole numbers, so that sums are equal on all ranks. Raises FactError if a number of entries does not fit the stages,
    a pass takes less than 1 ns, or a hop takes less than 0 ns.
    """

    forward: tuple[int, ...]
    """One entry for each stage, as in `backward`, `input` and `weight`."""
    backward: tuple[int, ...]
    """The whole backward."""
    input: tuple[int, ...]
    """Its input gradient alone."""
    weight: tuple[int, ...]
    """Its weight gradients alone."""
    forward_hop: tuple[int, ...]
    """From stage s to s + 1: one entry less than stages."""
    backward_hop: tuple[int, ...]
    """From stage s + 1 to s."""

    def __post_init__(self) -> None:
        passes = (self.forward, self.backward, self.input, self.weight)
        hops = (self.forward_hop, self.backward_hop)
        stages = len(self.forward)
        if {len(each) for each in passes} != {stages} or {len(each) for each in hops} != {stages - 1}:
            raise FactError(
                f"pass times: {stages} stages need {stages} times of each pass and {stages - 1} hops each way"
            )
        if min(map(min, passes)) < 1 or min((0, *self.forward_hop, *self.backward_hop)) < 0:
            raise FactError("pass times: each pass takes one nanosecond or more, and each hop 0 or more")

    @classmethod
    def equal(cls, num_stages: int) -> PassTimes:
        """Every pass takes one unit, and messages take no time."""
        one, nothing = (1,) * num_stages, (0,) * (num_stages - 1)
        return cls(forward=one, backward=one, input=one, weight=one, forward_hop=nothing, backward_hop=nothing)

    def of(self, action: Action) -> int:
        """Return the time of a pass."""
        times = {"F": self.forward, "B": self.backward, "I": self.input, "W": self.weight}
        return times[action.kind][action.stage]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What every pipeline rank does, in order.

    Raises:
        FactError: some rank does not run, for each of its stages and every micro-batch, one F and then either one B, or
            one I and then one W.

    """

    name: str
    pp: int
    vpp: int
    num_microbatches: int
    ranks: Ranks
    placement: Placement = "loop"
    times: PassTimes | None = None
    """Expected times, by which its messages are ordered over NCCL; None = all passes take equally long."""

    def __post_init__(self) -> None:
        """Check that nothing is missing, strange, double or before what it needs on its own rank."""
        if min(self.pp, self.vpp, self.num_microbatches) < 1:
            raise FactError(
                f"{self.name}: pp={self.pp}, vpp={self.vpp} and {self.num_microbatches} micro-batches must be positive"
            )
        if self.placement == "v" and self.vpp != 2:
            raise FactError(f"{self.name}: a V has two chunks on each rank, got vpp={self.vpp}")
        if len(self.ranks) != self.pp:
            raise FactError(f"{self.name}: {len(self.ranks)} action lists for {self.pp} pipeline ranks")
        num_actions = sum(map(len, self.ranks))
        if self.num_stages * self.num_microbatches > num_actions:
            raise FactError(
                f"{self.name}: {num_actions} actions cannot run {self.num_microbatches} micro-batches on "
                f"{self.num_stages} stages"
            )
        if self.times is not None and len(self.times.forward) != self.num_stages:
            raise FactError(f"{self.name}: times of {len(self.times.forward)} stages for {self.num_stages}")
        columns = self.columns
        _check_owners(self, columns)
        _check_passes(self, columns)

    @property
    def num_stages(self) -> int:
        """Model chunks in all."""
        return self.pp * self.vpp

    @property
    def rank_S(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return tuple(self.rank_of(stage) for stage in range(self.num_stages))

    @property
    def columns(self) -> Columns:
        """The actions as arrays, made afresh."""
        rank_A = np.repeat(np.arange(self.pp), [len(actions) for actions in self.ranks])
        stages, kinds, microbatches = [], [], []
        for actions in self.ranks:
            stages += [action[0] for action in actions]
            kinds += [_NUMBER[action[1]] for action in actions]
            microbatches += [action[2] for action in actions]
        return Columns(rank_A, *(np.array(column, dtype=np.int64) for column in (stages, kinds, microbatches)))

    def rank_of(self, stage: int) -> int:
        """Pipeline rank of a stage."""
        return rank_of(stage, pp=self.pp, placement=self.placement)


def positions(columns: Columns, *, num_stages: int, num_microbatches: int) -> NDArray[np.int64]:
    """Where each action stands among all: [stage, kind, micro-batch], -1 where the schedule has no such action."""
    place_SKM = np.full((num_stages, len(KINDS), num_microbatches), _NOWHERE)
    place_SKM[columns.stage_A, columns.kind_A, columns.microbatch_A] = np.arange(len(columns.stage_A))
    return place_SKM


def _check_owners(schedule: Schedule, columns: Columns) -> None:
    """Every action names a stage of its own rank and a micro-batch of the step."""
    owner_S = np.array(schedule.rank_S)
    strange_A = (columns.stage_A >= schedule.num_stages) | (columns.microbatch_A >= schedule.num_microbatches)
    strange_A |= (columns.stage_A < 0) | (columns.microbatch_A < 0)
    strange_A |= owner_S[np.where(strange_A, 0, columns.stage_A)] != columns.rank_A
    if strange_A.any():
        index = int(strange_A.argmax())
        raise FactError(
            f"{schedule.name}: {columns.action(index).word} does not belong to pipeline rank {columns.rank_A[index]}"
        )


def _check_passes(schedule: Schedule, columns: Columns) -> None:
    """Every stage runs each micro-batch forward once and backward once, whole or split, in that order."""
    place_SKM = positions(columns, num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches)
    twice_A = place_SKM[columns.stage_A, columns.kind_A, columns.microbatch_A] != np.arange(len(columns.stage_A))
    if twice_A.any():
        raise FactError(f"{schedule.name}: {columns.action(int(twice_A.argmax())).word} stands twice")
    has_SKM = place_SKM != _NOWHERE
    forward, whole, split, weight = (has_SKM[:, kind] for kind in (FORWARD, BACKWARD, INPUT, WEIGHT))
    wrong_SM = ~forward | (split != weight) | (split == whole)
    if wrong_SM.any():
        stage, microbatch = (int(index) for index in np.argwhere(wrong_SM)[0])
        kinds = [kind for kind, has in zip(KINDS, has_SKM[stage, :, microbatch], strict=True) if has]
        raise FactError(
            f"{schedule.name}: rank {schedule.rank_of(stage)} runs {' '.join(kinds) or 'nothing'} of micro-batch "
            f"{microbatch} on stage {stage}; it needs one F, and one B or one I and one W"
        )
    back_SM = np.maximum(place_SKM[:, BACKWARD], place_SKM[:, INPUT])
    early_SM = (back_SM < place_SKM[:, FORWARD]) | (weight & (place_SKM[:, WEIGHT] < back_SM))
    if early_SM.any():
        stage, microbatch = (int(index) for index in np.argwhere(early_SM)[0])
        raise FactError(
            f"{schedule.name}: rank {schedule.rank_of(stage)} runs micro-batch {microbatch} of stage {stage} in the "
            f"wrong order; F comes first, then B, or I and then W"
        )
