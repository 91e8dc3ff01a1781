"""Time of Megatron's own schedules, computed from the steady state instead of from every micro-batch.

After its warm-up a pipeline becomes periodic. Its state is the time at which each rank is free and each travelling
message arrives. One period later, each of these times is larger by the same constant. The ends of actions are a
max-plus linear system, so a state that repeats once repeats always (Baccelli et al. 1992, Synchronization and
Linearity, section 3.7). The time of a step is therefore the time of a step with fewer micro-batches, plus this constant
for each period left out. If no period is found, the whole step is simulated. The result equals the whole schedule's
except for rounding, some parts in 10^13, and does not depend on the other pipelines priced at the same time.
"""

# S = stages, P = pipeline ranks, R = pipelines that are priced side by side, X = entries of the state, T = turns back.

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from pipette_launch.cost.pipeline.engine import Engine, Order
from pipette_launch.facts.layout import Floats, Ints, Layout

_ROUNDING = 1e-13
"""Two delays count as equal if they differ by less than this share of the time since the start of the step."""
_CACHED_SHAPES = 512
_CACHED_ACTIONS = 1 << 20
"""Largest sum of the actions of all engines in memory, about 300 MB."""


class SteadyEngine(Engine):
    """Engine that simulates only enough micro-batches to find the period of the steady state."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._shape = order

    def drain_s_SR(self, durations_R: Floats, hops_R: Floats) -> Floats:
        """Return the ends of the stages' last backwards for several pipelines; arguments as in `Engine.drain_s_SR`."""
        shape = self._shape
        drained = np.empty((shape.num_stages, durations_R.shape[1]))
        # A last group of micro-batches that is not full differs from the full groups, so every tried step length ends
        # with a group of the same size.
        group, last_group = (shape.group_size, shape.num_microbatches % shape.group_size) if shape.vpp > 1 else (1, 0)
        # Least number of micro-batches in which the state is read often enough to find a period.
        fewest = 4 * group + last_group if shape.vpp > 1 else 2 * shape.pp + 1
        todo = [(fewest, np.arange(durations_R.shape[1]))]
        while todo:
            length, some = todo.pop()
            if length >= shape.num_microbatches:
                drained[:, some] = super().drain_s_SR(durations_R[:, some], hops_R[:, some])
                continue
            start = _kept(replace(shape, num_microbatches=length), _Start)
            ended, turns_R, later_s_R = start.price(durations_R[:, some], hops_R[:, some])
            missing = (shape.num_microbatches - length) // start.turn
            rest_R = np.where(turns_R > 0, missing % np.maximum(turns_R, 1), -1)
            done_R = rest_R == 0
            later_s_R = missing // np.maximum(turns_R, 1) * later_s_R
            drained[:, some[done_R]] = ended[:, done_R] + later_s_R[done_R]
            # The number of micro-batches left out must be a multiple of the period. If no period was found, a longer
            # step is tried.
            for rest in np.unique(rest_R[~done_R]).tolist():
                longer = length + rest * start.turn if rest > 0 else 2 * length - last_group
                todo.append((longer, some[rest_R == rest]))
        return drained


class _Start(Engine):
    """The schedule with fewer micro-batches, and the indices of the actions whose ends form the pipeline's state."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.turn = order.group_size if order.vpp > 1 else 1
        """Number of micro-batches after which a rank runs the same sequence of chunks again (a turn)."""
        self._shape = order

    def price(self, durations_R: Floats, hops_R: Floats) -> tuple[Floats, Ints, Floats]:
        """Return the time of the schedule, and the period of its steady state.

        Returns:
            Ends of the stages' last backwards, as in `drain_s_SR`; the period of each pipeline in turns, 0 if no period
            was found; and the delay of a period in seconds.

        """
        places = np.concatenate([self.last_backward_S, *self._states])
        ends_XR = self.ends_at(places, durations_R, hops_R)
        drained, *state_TXR = np.split(ends_XR, np.cumsum([len(self.last_backward_S), *map(len, self._states[:-1])]))
        turns_R = np.zeros(durations_R.shape[1], dtype=np.int64)
        later_s_R = np.zeros(durations_R.shape[1])
        left = np.arange(durations_R.shape[1])
        now_XR, *before_TXR = state_TXR
        for turns, before_XR in enumerate(before_TXR, 1):
            later_XR = now_XR[:, left] - before_XR[:, left]
            most_R = later_XR.max(axis=0)
            same_R = most_R - later_XR.min(axis=0) <= _ROUNDING * now_XR[:, left].max(axis=0)
            turns_R[left[same_R]], later_s_R[left[same_R]] = turns, most_R[same_R]
            left = left[~same_R]
            if not len(left):
                break
        return drained, turns_R, later_s_R

    @cached_property
    def _states(self) -> list[Ints]:
        """Indices of the ends that form the state: late in the step, one turn earlier, two turns earlier, and so on.

        A round is one forward and one backward of a rank in the steady part. The state is read after round j on rank 0
        and, with interleaving, after round j + r on rank r. At this cut no rank has used a message that is not sent
        yet. All travelling messages were sent in the last round, or with interleaved groups of g in the last g - p + 1
        rounds. (Rank r has a warm-up of w(r) forwards, and w(r) - w(r + 1) is 1, or 2 with interleaving. From the last
        rank back to the first rank the difference is g chunk passes.)
        """
        order = self._shape
        interleaved = order.vpp > 1
        warmup_P = order.warmup_P
        # A last group of micro-batches that is not full counts to the end of the step, as in `SteadyEngine`.
        full = order.num_microbatches // self.turn * self.turn * order.vpp
        last = full - int(warmup_P[0]) - 1
        rounds = order.group_size - order.pp + 1 if interleaved else 1
        rank_P = np.arange(order.pp)
        first_P = 2 * order.num_microbatches * order.vpp * rank_P + warmup_P
        per_turn = self.turn * order.vpp
        states = []
        for turns in range((last + 1 - rounds) // per_turn + 1):
            round_P = last - turns * per_turn + (rank_P if interleaved else 0)
            forward = [first_P + 2 * (round_P - back) for back in range(rounds)]
            states.append(self.place_A[np.concatenate([*forward, *(places + 1 for places in forward)])])
        # Longest period that is tried: messages in a cycle over k ranks repeat after k micro-batches.
        most_turns = 2 if interleaved else order.pp
        return states[: most_turns + 1]


def engine_of(
    layout: Layout, num_microbatches: int, *, rendezvous: bool = False, blocking_ends: bool = False
) -> Engine:
    """Return the engine of the schedule that stock Megatron runs for a layout; made once for each `Order`."""
    order = Order(
        pp=layout.pp,
        vpp=layout.vpp,
        group_size=(layout.microbatch_group_size or layout.pp) if layout.vpp > 1 else 1,
        num_microbatches=num_microbatches,
        rendezvous=rendezvous,
        blocking_ends=blocking_ends,
    )
    return _kept(order, SteadyEngine)


_engines: OrderedDict[tuple[type[Engine], Order], Engine] = OrderedDict()

E = TypeVar("E", SteadyEngine, _Start)


def _kept(order: Order, make: type[E]) -> E:
    """Return an engine from the cache, or make it; the cache drops the least recently used engines first."""
    engine = _engines.pop((make, order), None)
    if not isinstance(engine, make):
        engine = make(order)
        room = _CACHED_ACTIONS - sum(kept.num_prepared for kept in _engines.values())
        while _engines and (room < 0 or len(_engines) >= _CACHED_SHAPES):
            room += _engines.popitem(last=False)[1].num_prepared
    _engines[make, order] = engine
    return engine
