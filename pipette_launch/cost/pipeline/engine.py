"""Time of a pipeline under a schedule: one loop over the actions computes the end of each action by a longest path."""

# Letters of array axes: S = stages (model chunks), P = pipeline ranks, A = actions of all ranks, R = pipelines that are
# priced together, M = micro-batches, X = requested actions.
# Durations are blocks of S numbers: forwards, whole backwards, first forwards and, if the backward is split, input
# gradients and weight gradients. Hops are messages between stages: S - 1 forwards, S - 1 backwards, and a 0. Kinds of
# actions: F = forward, B = whole backward, I = input gradient, W = weight gradient.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import FactError
from pipette_launch.facts.layout import Floats, Ints, Layout
from pipette_launch.facts.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Columns,
    ExpectedTimes,
    Schedule,
    StockSchedule,
    positions,
)
from pipette_launch.installed import compiled

NANOSECOND_S = 1e-9
NO_ACTION = -1
_IN_C = compiled("cost.pipeline._longest_path")
_ENDS_AT_ONCE = 1 << 21
"""Pipelines are priced in batches of at most this number of actions (16 MB), or of `_FEWEST_AT_ONCE` pipelines."""
_FEWEST_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch on each stage of one pipeline, and between neighbouring stages."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """Seconds of the whole backward of one micro-batch on each stage, with recompute."""
    forward_hop_s: tuple[float, ...]
    """Seconds of a message from stage s to s + 1 (S - 1 entries); ignored if both stages are on one rank."""
    backward_hop_s: tuple[float, ...]
    """Seconds of a message from stage s + 1 to s: S - 1 entries."""
    first_forward_s: tuple[float, ...] = ()
    """Seconds of the forward of micro-batch 0 on each stage; empty = equal to `forward_s`."""
    input_s: tuple[float, ...] = ()
    """Seconds of the input gradient on each stage, for schedules that split the backward; empty = unknown."""
    weight_s: tuple[float, ...] = ()
    """Seconds of the weight gradients on each stage, for schedules that split the backward; empty = unknown."""

    @property
    def durations_s(self) -> list[float]:
        """Seconds of all stages' forwards, backwards, first forwards and, if known, input and weight gradients."""
        first_s = self.first_forward_s or self.forward_s
        return [*self.forward_s, *self.backward_s, *first_s, *self.input_s, *self.weight_s]

    @property
    def hops_s(self) -> list[float]:
        """Seconds of forward messages, then of backward messages, and a 0 for actions without a message."""
        return [*self.forward_hop_s, *self.backward_hop_s, 0.0]

    @property
    def expected(self) -> ExpectedTimes:
        """Times of passes and messages in nanoseconds, including guessed input and weight gradients if unknown."""
        stages = len(self.forward_s)
        durations = [max(1, round(seconds / NANOSECOND_S)) for seconds in self.durations_s]
        forward, backward, _, *halves = (tuple(durations[at : at + stages]) for at in range(0, len(durations), stages))
        input_, weight = halves or (backward, backward)
        hops = (self.forward_hop_s, self.backward_hop_s)
        forward_hop, backward_hop = (tuple(round(seconds / NANOSECOND_S) for seconds in each) for each in hops)
        return ExpectedTimes(
            forward=forward,
            backward=backward,
            input=input_,
            weight=weight,
            forward_hop=forward_hop,
            backward_hop=backward_hop,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Start and end of every action in one pipeline's step."""

    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first forward to the end of the last backward."""
        return max(ends[-1] for ends in self.end_s)


class DependencyGraph(NamedTuple):
    """Dependency graph of a schedule's actions, numbered rank after rank in the order in which each rank runs them."""

    previous_A: Ints
    """Index of the previous action on the same rank; -1 for a rank's first action."""
    cause_A: Ints
    """Index of the action whose result each action needs; -1 if the action needs no result. A forward needs the forward
    of the previous stage. A backward or input gradient needs the gradient of the next stage, or the forward if its
    stage is the last. A weight gradient has -1, because its rank always runs the input gradient earlier."""
    level_A: Ints
    """Number of actions in the longest chain that must run before each action."""


def _graph_of(schedule: Schedule | StockSchedule) -> DependencyGraph:
    columns = schedule.columns
    rank_A, stage_A, kind_A, microbatch_A = columns
    is_first_A = np.concatenate(([True], rank_A[1:] != rank_A[:-1]))
    place_SKM = positions(columns, num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches)
    back_SM = np.maximum(place_SKM[:, BACKWARD], place_SKM[:, INPUT])
    nothing_1M = np.full((1, schedule.num_microbatches), NO_ACTION)
    forward_cause_SM = np.concatenate((nothing_1M, place_SKM[:-1, FORWARD]))
    backward_cause_SM = np.concatenate((back_SM[1:], place_SKM[-1:, FORWARD]))
    where = (stage_A, microbatch_A)
    backward_A = np.where(kind_A == WEIGHT, NO_ACTION, backward_cause_SM[where])
    cause_A = np.where(kind_A == FORWARD, forward_cause_SM[where], backward_A)
    bounds_P = np.concatenate((np.flatnonzero(is_first_A), [len(rank_A)]))
    return DependencyGraph(
        previous_A=np.where(is_first_A, NO_ACTION, np.arange(len(rank_A)) - 1),
        cause_A=cause_A,
        level_A=_assigned_levels(cause_A, bounds_P, columns, schedule.name),
    )


def _assigned_levels(cause_A: Ints, bounds_P: Ints, columns: Columns, name: str) -> Ints:
    """Return each action's level: the round in which it runs if every rank runs at most one action in a round."""
    count = len(cause_A)
    level_A = np.full(count + 1, count)
    level_A[NO_ACTION] = NO_ACTION
    next_P, end_P = bounds_P[:-1].copy(), bounds_P[1:].copy()
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


class Engine:
    """Schedule whose actions are sorted so that each follows the actions it waits for, to price many pipelines.

    An action starts when the previous action of its rank has ended and the message with its input has arrived. The
    message starts when the action that sends it ends. With `rendezvous` each receiver must request its message. With
    `blocking_ends` the receivers in Megatron's warm-up and cool-down must (`exchanges.Waits`). A requested message
    starts when the sending action and the receiver's previous action have ended. Sends do not occupy a rank, except in
    blocking warm-up and cool-down, in which a rank that receives no message waits until its own send ends.
    The order of the actions depends on the schedule only, so the engine sorts them once. Each pricing is one pass over
    the actions: O(pp * vpp * n).

    Raises FactError if the schedule deadlocks.
    """

    def __init__(
        self, schedule: Schedule | StockSchedule, *, rendezvous: bool = False, blocking_ends: bool = False
    ) -> None:
        self._schedule, self._rendezvous, self._blocking_ends = schedule, rendezvous, blocking_ends
        # Megatron's own schedules never deadlock. Other schedules are sorted at once, to raise the error here.
        if not isinstance(schedule, StockSchedule):
            assert self.graph

    @cached_property
    def graph(self) -> DependencyGraph:
        """Dependency graph of the schedule."""
        return _graph_of(self._schedule)

    @property
    def meets_receivers(self) -> bool:
        """True if some messages start only when their receiver requests them, as in some of Megatron's schedules."""
        return self._rendezvous or self._blocking_ends

    @property
    def columns(self) -> Columns:
        """Actions of the schedule, rank after rank, in the order of a `Timeline`."""
        return self._schedule.columns

    @cached_property
    def place_A(self) -> Ints:
        """Index of each action of `graph` in the engine's own order; the last is for action -1, which ends at 0 s."""
        place_A = np.empty(len(self._order_A) + 1, dtype=np.int64)
        place_A[self._order_A] = np.arange(len(self._order_A))
        place_A[-1] = len(self._order_A)
        return place_A

    @cached_property
    def table_A(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Indices (previous, cause, hop, wait, duration) of each action, in the engine's own order.

        The hop is the message that brings the cause's result to the action. The wait is the message for which the rank
        stays idle between its previous action and the action itself.
        """
        previous_A, cause_A, _ = self.graph
        hop_A, order_A = self._hop_A(), self._order_A
        own_columns = hop_A[order_A], self._wait_A(hop_A)[order_A], self._duration_A()[order_A]
        return self.place_A[previous_A[order_A]], self.place_A[cause_A[order_A]], *own_columns

    @cached_property
    def last_backward_S(self) -> Ints:
        """Index of each stage's last backward in the engine's own order."""
        _, stage_A, kind_A, _ = self.columns
        ends_A = np.flatnonzero((kind_A != FORWARD) & (kind_A != INPUT))
        last_S = np.zeros(self._schedule.num_stages, dtype=np.int64)
        np.maximum.at(last_S, stage_A[ends_A], ends_A)
        return np.asarray(self.place_A[last_S])

    def drain_s_SR(self, durations_R: Floats, hops_R: Floats) -> Floats:
        """Return the end of each stage's last backward, after which the stage's gradients can be reduced.

        Each column has `StageTimes.durations_s` or `StageTimes.hops_s` of one pipeline. The digits of a pipeline's
        result do not depend on the other pipelines in the call.
        """
        return self.ends_at(self.last_backward_S, durations_R, hops_R)

    def ends_at(self, places_X: Ints, durations_R: Floats, hops_R: Floats) -> Floats:
        """Return the ends of the actions at indices `places_X` of the engine's order, one column for each pipeline."""
        stages = self._schedule.num_stages
        if len(hops_R) != 2 * stages - 1 or len(durations_R) not in (3 * stages, 5 * stages):
            raise FactError(f"times of {(len(hops_R) + 1) // 2} stages for a schedule of {stages}")
        if len(durations_R) < 5 * stages and self.splits_backward:
            raise FactError(f"{self._schedule.name} splits the backward: give input_s and weight_s of each stage")
        at_once = max(_ENDS_AT_ONCE // len(self._sorted_level_A), _FEWEST_AT_ONCE)
        found = np.empty((len(places_X), durations_R.shape[1]))
        for first in range(0, durations_R.shape[1], at_once):
            some = slice(first, first + at_once)
            found[:, some] = self.ends_AR(durations_R[:, some], hops_R[:, some])[places_X]
        return found

    def ends_AR(self, durations_R: Floats, hops_R: Floats) -> Floats:
        """Return the ends of all actions of several pipelines, in the engine's own order, followed by a row of 0."""
        ends = np.zeros((len(self._sorted_level_A) + 1, durations_R.shape[1]))
        durations_R = self.row_durations(durations_R)
        if _IN_C:
            times_R = np.ascontiguousarray(durations_R), np.ascontiguousarray(hops_R)
            _IN_C.ends(*self.table_A, *times_R, ends, ends.shape[1])
            return ends
        for start, stop, previous, cause, hop, wait, duration in self._rows_by_level:
            ready = ends.take(cause, axis=0)
            ready += hops_R.take(hop, axis=0)
            free = ends.take(previous, axis=0)
            if self.meets_receivers:
                free += hops_R.take(wait, axis=0)
            np.maximum(ready, free, out=ready)
            np.add(ready, durations_R.take(duration, axis=0), out=ends[start:stop])
        return ends

    def row_durations(self, durations_R: Floats) -> Floats:
        """Return the durations of passes, to which the indices in `table_A` refer."""
        return durations_R

    def timeline(self, times: StageTimes) -> Timeline:
        """Return the start and the end of every action of one pipeline."""
        durations, hops_J = np.array(times.durations_s), np.array(times.hops_s)
        end_A = self.ends_at(self.place_A[:-1], durations[:, None], hops_J[:, None])[:, 0]
        start_A = end_A - durations[self._duration_A()]
        bounds = np.cumsum(np.bincount(self.columns.rank_A))[:-1]
        starts, ends = (tuple(tuple(each.tolist()) for each in np.split(way_A, bounds)) for way_A in (start_A, end_A))
        return Timeline(start_s=starts, end_s=ends)

    @cached_property
    def _order_A(self) -> Ints:
        return np.argsort(self.graph.level_A, kind="stable")

    @cached_property
    def splits_backward(self) -> bool:
        """True if the schedule runs some weight gradients (W) apart from input gradients (I)."""
        # Megatron's own schedules never split the backward, so their actions need not be listed here.
        return not isinstance(self._schedule, StockSchedule) and bool((self.columns.kind_A == WEIGHT).any())

    @cached_property
    def _sorted_level_A(self) -> Ints:
        return np.sort(self.graph.level_A)

    @cached_property
    def _rows_by_level(self) -> list[tuple[int, int, Ints, Ints, Ints, Ints, Ints]]:
        """Rows of `table_A` by level; actions of equal level do not depend on each other."""
        bounds = np.cumsum(np.bincount(self._sorted_level_A)).tolist()
        previous, cause, hop, wait, duration = self.table_A
        return [
            (a, b, previous[a:b], cause[a:b], hop[a:b], wait[a:b], duration[a:b])
            for a, b in zip([0, *bounds[:-1]], bounds, strict=True)
        ]

    def _duration_A(self) -> Ints:
        """Return the index of each action's seconds in `StageTimes.durations_s`."""
        _, stage_A, kind_A, microbatch_A = self.columns
        # Block of durations for each kind of `KINDS` (F, B, I, W); the first forward has its own block.
        block_A = np.array([0, 1, 3, 4])[kind_A]
        block_A[(kind_A == FORWARD) & (microbatch_A == 0)] = 2
        return block_A * self._schedule.num_stages + stage_A

    def _hop_A(self) -> Ints:
        """Return the index in `StageTimes.hops_s` of the message that brings the input of each action."""
        _, stage_A, kind_A, _ = self.columns
        stages = self._schedule.num_stages
        rank_S = np.array(self._schedule.rank_S)
        none = 2 * (stages - 1)
        crosses_S = rank_S[1:] != rank_S[:-1]
        forward_S = np.concatenate(([none], np.where(crosses_S, np.arange(stages - 1), none)))
        backward_S = np.concatenate((np.where(crosses_S, np.arange(stages - 1, none), none), [none]))
        hop_A = np.where(kind_A == FORWARD, forward_S[stage_A], backward_S[stage_A])
        return np.where(kind_A == WEIGHT, none, hop_A)

    def _wait_A(self, hop_A: Ints) -> Ints:
        """Return the index in `StageTimes.hops_s` of the message for which a rank stays idle before each action.

        The rank waits for the message that the action needs. In a blocking warm-up or cool-down, an action that needs
        no message waits for the message that its rank sent before.
        """
        none = 2 * (self._schedule.num_stages - 1)
        if self._rendezvous:
            return hop_A
        if not self._blocking_ends:
            return np.full(len(hop_A), none)
        previous_A = self.graph.previous_A
        rank_A, stage_A, kind_A, _ = self.columns
        # Stage that needs each result. No stage needs the last stage's forward or the first stage's backward.
        step_A = np.where(kind_A == FORWARD, 1, -1)
        target_A = np.clip(stage_A + step_A, 0, self._schedule.num_stages - 1)
        stays_A = np.array(self._schedule.rank_S)[target_A] == rank_A
        way_A = np.where(kind_A == FORWARD, stage_A, self._schedule.num_stages - 2 + stage_A)
        sent_A = np.where(previous_A < 0, none, np.where(stays_A, none, way_A)[previous_A])
        return np.where(self._blocked_A(), np.where(hop_A == none, sent_A, hop_A), none)

    def _blocked_A(self) -> NDArray[np.bool_]:
        """Return True for actions of a blocking warm-up or cool-down, before which the rank waits for a message.

        These actions are the warm-up's forwards, the next forward, and all backwards of the cool-down but the first.
        The message for the cool-down's first backward was requested during an earlier pass (schedules.py of
        core_v0.16.1, forward_backward_pipelining_with_interleaving).
        """
        assert isinstance(self._schedule, StockSchedule)
        rank_A, _, kind_A, _ = self.columns
        forwards = self._schedule.num_microbatches * self._schedule.vpp
        ahead_A = np.minimum(self._schedule.warmup_P, forwards)[rank_A]
        is_forward_A = kind_A == FORWARD
        # Number of forwards (or of backwards) on the same rank before each forward (or backward).
        number_A = np.where(is_forward_A, np.cumsum(is_forward_A), np.cumsum(~is_forward_A)) - rank_A * forwards - 1
        return np.where(is_forward_A, number_A <= ahead_A, number_A > forwards - ahead_A)


def simulate(schedule: Schedule, times: StageTimes) -> Timeline:
    """Price one pipeline, action by action; raises FactError for a deadlock, or times of another schedule."""
    return Engine(schedule).timeline(times)


def critical_counts(engine: Engine, durations_R: Floats, hops_R: Floats) -> tuple[Floats, Floats]:
    """Count the uses of each pass and message on the longest path of each pipeline; arguments as in `drain_s_SR`.

    The makespan is the maximum, over all paths, of a sum of pass times and message times. So the makespan is convex in
    the times of passes and messages, and the counts are a subgradient. For any other times, the makespan is at least
    counts * times. The last row of the message counts stands for "no message" and is 0.
    """
    previous_A, cause_A, hop_A, wait_A, duration_A = engine.table_A
    ends = engine.ends_AR(durations_R, hops_R)
    nowhere = len(previous_A)
    rows_R = engine.row_durations(durations_R)
    first = len(rows_R) - len(durations_R)
    duration_counts, hop_counts = np.zeros(rows_R.shape), np.zeros(hops_R.shape)
    if _IN_C:
        times_R = np.ascontiguousarray(rows_R), np.ascontiguousarray(hops_R)
        _IN_C.counts(*engine.table_A, *times_R, ends, duration_counts, hop_counts, ends.shape[1])
        hop_counts[-1] = 0
        return duration_counts[first:], hop_counts
    column = np.arange(durations_R.shape[1])
    place = ends[:nowhere].argmax(axis=0)
    while len(column):
        duration_counts[duration_A[place], column] += 1
        hop, wait, cause, before = hop_A[place], wait_A[place], cause_A[place], previous_A[place]
        # If an action's cause and the rank's previous action end together, the path goes through the previous action.
        waits = ends[cause, column] + hops_R[hop, column] > ends[before, column] + hops_R[wait, column]
        hop_counts[np.where(waits, hop, wait), column] += 1
        place = np.where(waits, cause, before)
        inside = place != nowhere
        place, column = place[inside], column[inside]
    hop_counts[-1] = 0
    return duration_counts[first:], hop_counts


@lru_cache(maxsize=64)
def _engine_of(schedule: StockSchedule, *, rendezvous: bool, blocking_ends: bool) -> Engine:
    return Engine(schedule, rendezvous=rendezvous, blocking_ends=blocking_ends)


def engine_of(
    layout: Layout, num_microbatches: int, *, rendezvous: bool = False, blocking_ends: bool = False
) -> Engine:
    """Return the engine of the schedule that stock Megatron runs for a layout; the last 64 engines are cached."""
    schedule = StockSchedule.of(layout, num_microbatches)
    return _engine_of(schedule, rendezvous=rendezvous, blocking_ends=blocking_ends)
