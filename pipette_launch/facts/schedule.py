"""Pipeline schedules: which rank runs which micro-batch of which stage, and in which order, written as words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts.layout import Layout

Kind = Literal["F", "B"]
Name = Literal["gpipe", "1f1b", "interleaved-1f1b", "no-pipelining"]

_WORD = re.compile(r"(\d+)([FB])(\d+)")


class Action(NamedTuple):
    """One pass of one micro-batch through one stage: `2B1` is the backward of micro-batch 1 on stage 2.

    A stage is a model chunk, numbered in model order. `B` is the whole backward, input and weight gradient together.
    """

    stage: int
    kind: Kind
    microbatch: int

    @property
    def word(self) -> str:
        """The action as people write it."""
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, word: str) -> Action:
        """Read an action from its word; raises FactError for anything else."""
        match = _WORD.fullmatch(word)
        if match is None:
            raise FactError(f"{word!r} is not an action; write stage, F or B, micro-batch, such as 2B1")
        stage, kind, microbatch = match.groups()
        return cls(int(stage), "F" if kind == "F" else "B", int(microbatch))


def words(actions: Iterable[Action]) -> list[str]:
    """Actions as words: `["0F0", "0B0"]`."""
    return [action.word for action in actions]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What every pipeline rank does, in order. Stage c belongs to rank c % pp."""

    name: Name
    pp: int
    vpp: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        """Check that each rank runs both passes of each of its stages once for every micro-batch."""
        if len(self.ranks) != self.pp:
            raise FactError(f"{self.name}: {len(self.ranks)} action lists for {self.pp} pipeline ranks")
        for rank, actions in enumerate(self.ranks):
            wanted = 2 * self.vpp * self.num_microbatches
            faults = [
                action
                for action in actions
                if not (action.stage % self.pp == rank and action.stage < self.num_stages)
                or not 0 <= action.microbatch < self.num_microbatches
            ]
            if faults:
                raise FactError(f"{self.name}: {faults[0].word} does not belong to pipeline rank {rank}")
            if len(actions) != wanted or len(set(actions)) != wanted:
                raise FactError(f"{self.name}: rank {rank} needs {wanted} different actions, got {len(actions)}")

    @property
    def num_stages(self) -> int:
        """Model chunks in all."""
        return self.pp * self.vpp

    @classmethod
    def from_words(cls, name: Name, *, pp: int, vpp: int, ranks: Iterable[Iterable[str]]) -> Schedule:
        """Read a schedule that `Schedule.words` wrote."""
        actions = tuple(tuple(Action.parse(word) for word in rank) for rank in ranks)
        microbatches = 1 + max((action.microbatch for rank in actions for action in rank), default=-1)
        return cls(name=name, pp=pp, vpp=vpp, num_microbatches=microbatches, ranks=actions)

    def words(self) -> list[list[str]]:
        """Every rank's actions as words."""
        return [words(actions) for actions in self.ranks]

    def peak_live(self, rank: int) -> int:
        """Most forward passes of one rank whose backward is still to come: what its activations are held for."""
        live = peak = 0
        for action in self.ranks[rank]:
            live += 1 if action.kind == "F" else -1
            peak = max(peak, live)
        return peak


@lru_cache(maxsize=256)
def no_pipelining(microbatches: int) -> Schedule:
    """One rank: forward and backward of each micro-batch in turn (megatron-core, forward_backward_no_pipelining)."""
    order = ((microbatch, 0) for microbatch in range(microbatches))
    actions = _one_forward_one_backward(tuple(order), pp=1, vpp=1, rank=0, num_warmup=0)
    return Schedule(name="no-pipelining", pp=1, vpp=1, num_microbatches=microbatches, ranks=(actions,))


@lru_cache(maxsize=256)
def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in the order of the micro-batches."""
    ranks = tuple(
        tuple(Action(stage, kind, microbatch) for kind in (_FORWARD, _BACKWARD) for microbatch in range(microbatches))
        for stage in range(stages)
    )
    return Schedule(name="gpipe", pp=stages, vpp=1, num_microbatches=microbatches, ranks=ranks)


@lru_cache(maxsize=256)
def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """1F1B: rank r runs pp - r - 1 forwards ahead, then one forward and one backward in turn (schedules.py:2093)."""
    order = tuple((microbatch, 0) for microbatch in range(microbatches))
    ranks = tuple(
        _one_forward_one_backward(order, pp=stages, vpp=1, rank=rank, num_warmup=stages - rank - 1)
        for rank in range(stages)
    )
    return Schedule(name="1f1b", pp=stages, vpp=1, num_microbatches=microbatches, ranks=ranks)


@lru_cache(maxsize=256)
def interleaved(pp: int, vpp: int, microbatches: int, group_size: int) -> Schedule:
    """Megatron's interleaved 1F1B: groups of micro-batches go through one chunk before the next.

    Rank r runs 2(pp - r - 1) + (vpp - 1) * group_size chunk forwards ahead (schedules.py:762-786); both passes follow
    the schedule table (schedules.py:798), the backward with the chunks reversed.

    Raises:
        LayoutError: Megatron would refuse these numbers (schedules.py:996-1019).

    """
    check_interleaving(pp=pp, vpp=vpp, microbatches=microbatches, group_size=group_size)
    order = schedule_table(vpp, microbatches, group_size)
    ranks = tuple(
        _one_forward_one_backward(order, pp=pp, vpp=vpp, rank=rank, num_warmup=num_warmup(pp, vpp, group_size, rank))
        for rank in range(pp)
    )
    return Schedule(name="interleaved-1f1b", pp=pp, vpp=vpp, num_microbatches=microbatches, ranks=ranks)


def check_interleaving(*, pp: int, vpp: int, microbatches: int, group_size: int) -> None:
    """Raise LayoutError where Megatron's interleaved schedule would refuse to run (schedules.py:996-1019)."""
    if pp < 2 or vpp < 2:
        raise LayoutError(f"an interleaved schedule needs pp > 1 and vpp > 1, got pp={pp} and vpp={vpp}")
    if not pp <= group_size <= microbatches:
        raise LayoutError(
            f"micro-batch group size {group_size} must lie between pp={pp} and the {microbatches} micro-batches of a "
            f"step; take fewer pipeline ranks or a smaller micro-batch"
        )
    if 0 < microbatches % group_size < pp:
        raise LayoutError(
            f"{microbatches} micro-batches leave a last group of {microbatches % group_size} after groups of "
            f"{group_size}; it must hold at least pp={pp}, or none"
        )


def schedule_table(vpp: int, microbatches: int, group_size: int) -> tuple[tuple[int, int], ...]:
    """(micro-batch, chunk) of each forward of a rank, in order (schedules.py:798, get_schedule_table)."""
    return tuple(
        (microbatch, chunk)
        for start in range(0, microbatches, group_size)
        for chunk in range(vpp)
        for microbatch in range(start, min(start + group_size, microbatches))
    )


def num_warmup(pp: int, vpp: int, group_size: int, rank: int) -> int:
    """Forwards that a rank of an interleaved schedule runs before its first backward (not capped by their number)."""
    return 2 * (pp - rank - 1) + (vpp - 1) * group_size


def schedule_of(layout: Layout, num_microbatches: int) -> Schedule:
    """Return the schedule that stock Megatron runs for a layout (get_forward_backward_func, schedules.py:45-151)."""
    if layout.pp == 1:
        return no_pipelining(num_microbatches)
    if layout.vpp == 1:
        return one_forward_one_backward(layout.pp, num_microbatches)
    return interleaved(layout.pp, layout.vpp, num_microbatches, layout.microbatch_group_size or layout.pp)


_FORWARD: Kind = "F"
_BACKWARD: Kind = "B"


def _one_forward_one_backward(
    order: tuple[tuple[int, int], ...], *, pp: int, vpp: int, rank: int, num_warmup: int
) -> tuple[Action, ...]:
    """Run `num_warmup` forwards ahead, then alternate; the backward takes the same order with the chunks reversed."""
    forward = [Action(chunk * pp + rank, _FORWARD, microbatch) for microbatch, chunk in order]
    backward = [Action((vpp - 1 - chunk) * pp + rank, _BACKWARD, microbatch) for microbatch, chunk in order]
    ahead = min(num_warmup, len(forward))
    actions = forward[:ahead]
    for position in range(ahead, len(forward)):
        actions += (forward[position], backward[position - ahead])
    return (*actions, *backward[len(forward) - ahead :])
