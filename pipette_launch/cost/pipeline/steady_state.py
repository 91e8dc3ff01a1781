"""Megatron's own schedules, priced without running through every micro-batch.

After its warm-up a pipeline repeats itself: the state that decides the rest of a step (when each rank is free, and the
messages on their way) equals the state some turns earlier, delayed by a constant. The ends of actions are a max-plus
linear system, so if this holds for one period, it always holds (Baccelli et al. 1992, Synchronization and Linearity,
section 3.7). A step therefore ends like a step of fewer micro-batches, plus this constant for each period left out. A
step that does not come to repeat itself is run whole. The result equals the whole schedule's except for rounding,
some parts in 10^13, and does not depend on the other pipelines priced at the same time.
"""

# S = stages, P = pipeline ranks, R = pipelines that are priced side by side, X = entries of the state, T = turns back.

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from pipette_launch.cost.pipeline.engine import Engine, Floats, Order
from pipette_launch.facts.layout import Ints, Layout

_ROUNDING = 1e-13
"""Two delays are equal if they differ by less than this share of the time since the step began."""
_CACHED_SHAPES = 512
_CACHED_ACTIONS = 1 << 20
"""Most actions of the engines in memory, some 300 MB."""


class SteadyEngine(Engine):
    """Engine that simulates only enough micro-batches to find the period of the steady state."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._shape = order

    def drain_s_SR(self, durations_R: Floats, hops_R: Floats) -> Floats:
        """Price several pipelines, each independently of the others; arguments as of `Engine`."""
        shape = self._shape
        drained = np.empty((shape.num_stages, durations_R.shape[1]))
        # A last group that is not full differs from the others: every tried length has one of the same size.
        group, last_group = (shape.group_size, shape.num_microbatches % shape.group_size) if shape.vpp > 1 else (1, 0)
        # The fewest micro-batches in which the state can be read often enough.
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
            # The micro-batches left out must be a multiple of the period. Without a period yet, try a longer step.
            for rest in np.unique(rest_R[~done_R]).tolist():
                longer = length + rest * start.turn if rest > 0 else 2 * length - last_group
                todo.append((longer, some[rest_R == rest]))
        return drained


class _Start(Engine):
    """The same schedule with fewer micro-batches, and the places where the state of the pipeline is read."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.turn = order.group_size if order.vpp > 1 else 1
        """Number of micro-batches after which the same chunks come again."""
        self._shape = order

    def price(self, durations_R: Floats, hops_R: Floats) -> tuple[Floats, Ints, Floats]:
        """Price the schedule, and find the period of its steady state.

        Returns:
            Ends of the stages' last backwards, as `drain_s_SR`; the period of each pipeline in turns, 0 if there is
            none yet; and the delay of a period.

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
        """Places of the ends that make up the state: late in the step, one turn before, two turns before, and so on.

        A round is one forward and one backward of a rank in the steady part. The state is read after round j on rank 0
        and, interleaved, after round j + r on rank r: then no rank has used what another has not sent, and messages on
        their way were sent in the last rounds: one round, or g - p + 1 for groups of g. (Rank r is w(r) forwards ahead,
        and w(r) - w(r + 1) is 1, or 2 interleaved; from the last rank back to the first it is g chunk passes.)
        """
        order = self._shape
        interleaved = order.vpp > 1
        warmup_P = order.warmup_P
        # A last group that is not full differs from the others; it belongs to the end of the step.
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
        # The longest period that is tried: a loop of hops over k ranks repeats itself after k micro-batches.
        most_turns = 2 if interleaved else order.pp
        return states[: most_turns + 1]


def engine_of(
    layout: Layout, num_microbatches: int, *, rendezvous: bool = False, blocking_ends: bool = False
) -> Engine:
    """Return the engine of the schedule that stock Megatron runs for a layout, made once for each shape.

    `num_microbatches` belong to one replica and step; `rendezvous` and `blocking_ends` are passed to `Order`.
    """
    group = (layout.microbatch_group_size or layout.pp) if layout.vpp > 1 else 1
    order = Order(
        pp=layout.pp,
        vpp=layout.vpp,
        group_size=group,
        num_microbatches=num_microbatches,
        rendezvous=rendezvous,
        blocking_ends=blocking_ends,
    )
    return _kept(order, SteadyEngine)


_engines: OrderedDict[tuple[type[Engine], Order], Engine] = OrderedDict()

E = TypeVar("E", SteadyEngine, _Start)


def _kept(order: Order, make: type[E]) -> E:
    """Return an engine from memory, or make it; the engines that were not used for longest are dropped first."""
    engine = _engines.pop((make, order), None)
    if not isinstance(engine, make):
        engine = make(order)
        room = _CACHED_ACTIONS - sum(kept.num_prepared for kept in _engines.values())
        while _engines and (room < 0 or len(_engines) >= _CACHED_SHAPES):
            room += _engines.popitem(last=False)[1].num_prepared
    _engines[make, order] = engine
    return engine
