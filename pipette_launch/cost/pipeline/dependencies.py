"""What each action of a schedule waits for, and an order in which every cause comes before its effect."""

# A = actions of all ranks, P = pipeline ranks, S = stages, K = kinds of action, M = micro-batches.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.pipeline.order import Order
from pipette_launch.errors import FactError
from pipette_launch.facts.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Columns, Schedule, positions

Ints = NDArray[np.int64]
NO_ACTION = -1


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """The graph of a schedule; actions are numbered rank after rank, each rank in its own order."""

    columns: Columns
    previous_A: Ints
    """The rank's action before, or -1."""
    cause_A: Ints
    """The action whose result is needed, or -1: that of F(s) is F(s - 1), that of B(s) or I(s) is B or I of s + 1, that
    of the last stage is its own F; a W needs only its own I, which its rank has always run before."""
    level_A: Ints
    """Longest chain of actions in front of each one."""

    @classmethod
    def of(cls, schedule: Schedule | Order) -> Dependencies:
        """Find them; raises FactError where the order can never run."""
        columns = schedule.columns
        count = len(columns.rank_A)
        first_A = np.concatenate(([True], columns.rank_A[1:] != columns.rank_A[:-1]))
        previous_A = np.where(first_A, NO_ACTION, np.arange(count) - 1)
        cause_A = _causes(schedule, columns)
        bounds_P = np.concatenate((np.flatnonzero(first_A), [count]))
        level_A = _levels(cause_A, bounds_P, columns, schedule.name)
        return cls(columns=columns, previous_A=previous_A, cause_A=cause_A, level_A=level_A)

    def target_A(self, rank_S: Ints) -> Ints:
        """Return the rank that waits for each action's result; its own where no other does."""
        _, stage_A, kind_A, _ = self.columns
        last = len(rank_S) - 1
        sends_on_A = (kind_A == FORWARD) & (stage_A < last)
        sends_back_A = ((kind_A == BACKWARD) | (kind_A == INPUT)) & (stage_A > 0)
        return np.asarray(rank_S[stage_A + sends_on_A - sends_back_A])


def _causes(schedule: Schedule | Order, columns: Columns) -> Ints:
    place_SKM = positions(columns, num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches)
    back_SM = np.maximum(place_SKM[:, BACKWARD], place_SKM[:, INPUT])
    nothing_1M = np.full((1, schedule.num_microbatches), NO_ACTION)
    forward_cause_SM = np.concatenate((nothing_1M, place_SKM[:-1, FORWARD]))
    backward_cause_SM = np.concatenate((back_SM[1:], place_SKM[-1:, FORWARD]))
    _, stage_A, kind_A, microbatch_A = columns
    where = (stage_A, microbatch_A)
    backward_A = np.where(kind_A == WEIGHT, NO_ACTION, backward_cause_SM[where])
    return np.where(kind_A == FORWARD, forward_cause_SM[where], backward_A)


def _levels(cause_A: Ints, bounds_P: Ints, columns: Columns, name: str) -> Ints:
    """All ranks step together, one action each where they can: the step at which an action runs is its level."""
    count = len(cause_A)
    level_A = np.full(count + 1, count)
    level_A[NO_ACTION] = NO_ACTION  # nothing is waited for
    next_P = bounds_P[:-1].copy()
    end_P = bounds_P[1:].copy()
    step = 0
    while len(next_P):
        runs_P = level_A[cause_A[next_P]] < step
        ran = next_P[runs_P]
        if not len(ran):
            stuck = int(next_P[0])
            waits, awaited = (columns.action(index).word for index in (stuck, int(cause_A[stuck])))
            raise FactError(f"{name} deadlocks: {waits} waits for {awaited}, which never runs")
        level_A[ran] = step
        next_P += runs_P
        if (next_P == end_P).any():
            left_P = next_P < end_P
            next_P, end_P = next_P[left_P], end_P[left_P]
        step += 1
    return level_A[:-1]
