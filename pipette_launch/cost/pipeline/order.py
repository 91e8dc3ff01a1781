"""Megatron's own schedules as columns, worked out without an object for each action."""

# A = actions of all ranks, P = pipeline ranks, N = forwards of one rank (micro-batches times chunks).

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts.known_schedules import check_interleaving, num_warmup, schedule_of
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import BACKWARD, FORWARD, Columns, Schedule

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Order:
    """The schedule that stock Megatron runs for a shape; `schedule` is the same with an object for each action.

    Raises:
        LayoutError: Megatron would refuse these numbers.

    """

    pp: int
    vpp: int
    group_size: int
    """Micro-batches that go through one chunk before the next; without interleaving it says nothing."""
    num_microbatches: int
    rendezvous: bool = False
    """Whether a message starts when its receiver asks for it, and not when it is sent (`traffic.meets_receivers`)."""
    blocking_ends: bool = False
    """Whether warm-up and cool-down wait for their messages, each before its next pass (`traffic.blocks_at_ends`)."""

    def __post_init__(self) -> None:
        if self.vpp > 1:
            check_interleaving(pp=self.pp, vpp=self.vpp, microbatches=self.num_microbatches, group_size=self.group_size)

    @property
    def name(self) -> str:
        """As `Schedule.name`."""
        return self._layout.schedule_name

    @property
    def num_stages(self) -> int:
        """Model chunks in all."""
        return self.pp * self.vpp

    @property
    def rank_S(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return tuple(stage % self.pp for stage in range(self.num_stages))

    @property
    def warmup_P(self) -> Ints:
        """Forwards that each rank runs before its first backward, not capped by their number."""
        if self.vpp == 1:
            return np.arange(self.pp - 1, -1, -1)
        return np.array([num_warmup(self.pp, self.vpp, self.group_size, rank) for rank in range(self.pp)])

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule itself."""
        return schedule_of(self._layout, self.num_microbatches)

    @property
    def _layout(self) -> Layout:
        return Layout(pp=self.pp, vpp=self.vpp, microbatch_group_size=self.group_size if self.vpp > 1 else 0)

    @cached_property
    def columns(self) -> Columns:
        """As `Schedule.columns`: warm-up, then a forward and a backward in turn, then what is left."""
        microbatch_N, chunk_N = self._table()
        forwards = len(microbatch_N)
        index_N = np.arange(forwards)
        rank_P1 = np.arange(self.pp)[:, None]
        ahead_P1 = np.minimum(self.warmup_P, forwards)[:, None]
        rows = rank_P1 * 2 * forwards
        forward_PN = rows + np.where(index_N < ahead_P1, index_N, 2 * index_N - ahead_P1)
        backward_PN = rows + np.where(index_N < forwards - ahead_P1, 2 * index_N + ahead_P1 + 1, index_N + forwards)
        stage_A, kind_A, microbatch_A = (np.empty(2 * forwards * self.pp, dtype=np.int64) for _ in range(3))
        stage_A[forward_PN] = chunk_N * self.pp + rank_P1
        # Backwards take the chunks in reverse.
        stage_A[backward_PN] = (self.vpp - 1 - chunk_N) * self.pp + rank_P1
        kind_A[forward_PN], kind_A[backward_PN] = FORWARD, BACKWARD
        microbatch_A[forward_PN] = microbatch_A[backward_PN] = microbatch_N
        return Columns(np.repeat(np.arange(self.pp), 2 * forwards), stage_A, kind_A, microbatch_A)

    @cached_property
    def blocked_A(self) -> NDArray[np.bool_]:
        """Which actions of `columns` start only after a message that their rank waits for beforehand.

        With blocking ends these are the forwards of the warm-up and the one behind it, and the backwards of the
        cool-down but its first, which was asked for while others computed (schedules.py of core_v0.16.1,
        forward_backward_pipelining_with_interleaving).
        """
        rank_A, _, kind_A, _ = self.columns
        if self.rendezvous or not self.blocking_ends:
            return np.full(len(rank_A), self.rendezvous)
        forwards = self.num_microbatches * self.vpp
        ahead_A = np.minimum(self.warmup_P, forwards)[rank_A]
        is_forward_A = kind_A == FORWARD
        # Of the rank's forwards, or of its backwards, from 0.
        number_A = np.where(is_forward_A, np.cumsum(is_forward_A), np.cumsum(~is_forward_A)) - rank_A * forwards - 1
        return np.where(is_forward_A, number_A <= ahead_A, number_A > forwards - ahead_A)

    def _table(self) -> tuple[Ints, Ints]:
        """Micro-batch and chunk of each forward of a rank (facts.schedules.schedule_table)."""
        group = self.group_size if self.vpp > 1 else self.num_microbatches
        index_N = np.arange(self.num_microbatches * self.vpp)
        start_N = index_N // (group * self.vpp) * group
        inside_N = index_N - start_N * self.vpp
        width_N = np.minimum(group, self.num_microbatches - start_N)
        return start_N + inside_N % width_N, inside_N // width_N
