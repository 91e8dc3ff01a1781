"""The schedules that Megatron lacks: ZB-1P (arXiv 2401.10241), and V-ZB, V-Half and V-Min (arXiv 2405.15362).

All four split the backward into input gradient (I) and weight gradient (W), and delay W into the gaps in which a rank
would wait. A schedule is built in two steps. First, each rank gets the paper's order of forwards and input gradients:
1F1B for ZB-1P, a repeated building block for the others. Then a simulation with the times of the stages runs this order
within a memory limit and fills its gaps. Several blocks are tried with several rules for gaps, and the shortest step
wins.

Only this module and `search.schedule_choice` know the four schedules. All other code handles any `Schedule`.
"""

# Kinds of passes: F = forward, I = input gradient, after which the weight gradient W is due. Letters of array axes:
# S = stages, P = pipeline ranks, M = micro-batches, A = passes of all ranks.

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pipette_launch.cost.pipeline.engine import StageTimes
from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import Action, Kind, Placement, Schedule, rank_of, schedule_of

Slopes = tuple[int, int, int, int]
"""Units of time from a pass on one rank to the same pass on the next rank, for each of a micro-batch's four passes: F
of chunk 0, F of chunk 1, I of chunk 1, I of chunk 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroBubble:
    """One of the four schedules."""

    peak: Callable[[int], int]
    """Function from pp to the most micro-batches that a rank keeps, each until its last weight gradient (W)."""
    slopes: tuple[Slopes, ...] = ()
    """Slopes of the building blocks that are tried on a V; empty for a pipeline with one chunk on each rank."""

    @property
    def vpp(self) -> int:
        """Number of chunks on each rank."""
        return 2 if self.slopes else 1

    @property
    def placement(self) -> Placement:
        """Ranks of the stages: a loop, or a V."""
        return "v" if self.slopes else "loop"


SCHEDULES: dict[str, ZeroBubble] = {
    "zb-1p": ZeroBubble(peak=lambda pp: pp),
    # If passes are half a period apart from rank to rank, all ranks run the same order without a bubble.
    "v-zb": ZeroBubble(peak=lambda pp: pp, slopes=((3, 3, 3, 3),)),
    "v-half": ZeroBubble(
        peak=lambda pp: (pp + 2) // 2, slopes=((2, 1, 1, 2), (1, 2, 1, 2), (2, 1, 2, 1), (1, 2, 2, 1))
    ),
    "v-min": ZeroBubble(peak=lambda pp: (pp + 4) // 3, slopes=((1, 1, 1, 1),)),
}
"""The four schedules by name (`facts.schedule.EXECUTABLE`), with the peaks of their papers."""

PassOrder = tuple[tuple[Action, ...], ...]
"""Forwards (F) and input gradients (I) of each rank in order; a stage runs its micro-batches by rising number."""

_ROUNDING = 1e-9
"""Tolerance of memory limits, relative to the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingProblem:
    """Pipeline that needs a schedule, with its times and memory limits."""

    kind: ZeroBubble
    pp: int
    num_microbatches: int
    times: StageTimes
    held_S: tuple[float, ...]
    """Memory that each stage keeps for one micro-batch until its weight gradient (W), in any unit."""
    limit_P: tuple[float, ...]
    """Most memory that each rank may keep, in the unit of `held_S`."""

    def __post_init__(self) -> None:
        if not self.times.input_s:
            raise FactError("these schedules split the backward: give input_s and weight_s of each stage")
        for rank, limit in enumerate(self.limit_P):
            held = sum(size for size, owner in zip(self.held_S, self.rank_S, strict=True) if owner == rank)
            if limit < held * (1 - _ROUNDING):
                raise FactError(f"rank {rank} may keep {limit:g}, less than the {held:g} of one micro-batch")

    @property
    def rank_S(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        stages = range(self.pp * self.kind.vpp)
        return tuple(rank_of(stage, pp=self.pp, placement=self.kind.placement) for stage in stages)


def named_schedule(
    name: str,
    *,
    pp: int,
    num_microbatches: int,
    times: StageTimes | None = None,
    held_S: Sequence[float] | None = None,
) -> Schedule:
    """Return the schedule `name` of `SCHEDULES` for `pp` ranks.

    `times` have separate input and weight gradients (None = equal times). `held_S` is the memory of each stage for one
    micro-batch, in any unit (None = equal parts). Raises LayoutError if no schedule exists for these numbers. Raises
    FactError if times or sizes contradict each other, or if no order of passes stays within the schedule's peak memory.
    """
    kind = SCHEDULES[name]
    if min(pp, num_microbatches) < 1:
        raise LayoutError(f"{name}: pp={pp} and {num_microbatches} micro-batches must be positive")
    if kind.slopes and pp == 1:
        raise LayoutError(f"{name} needs a pipeline, got pp=1")
    stages = pp * kind.vpp
    one, hops = (1.0,) * stages, (0.0,) * (stages - 1)
    equal = StageTimes(
        forward_s=one, backward_s=(2.0,) * stages, input_s=one, weight_s=one, forward_hop_s=hops, backward_hop_s=hops
    )
    held = tuple(held_S) if held_S is not None else one
    problem = SchedulingProblem(
        kind=kind,
        pp=pp,
        num_microbatches=num_microbatches,
        times=times if times is not None else equal,
        held_S=held,
        limit_P=most_kept(name, held, num_microbatches),
    )
    return Schedule(
        name=name,
        pp=pp,
        vpp=kind.vpp,
        num_microbatches=num_microbatches,
        placement=kind.placement,
        ranks=shortest_draft(problem).ranks,
    )


def most_kept(name: str, held_S: Sequence[float], num_microbatches: int) -> tuple[float, ...]:
    """Return each rank's peak memory under a schedule, from the memory of each stage for one micro-batch."""
    known = SCHEDULES[name]
    pp = len(held_S) // known.vpp
    held_P = [0.0] * pp
    for stage, held in enumerate(held_S):
        held_P[rank_of(stage, pp=pp, placement=known.placement)] += held
    most = min(known.peak(pp), num_microbatches)
    return tuple(most * held for held in held_P)


def schedule_peak_bytes(
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


_KINDS: tuple[Kind, Kind] = ("F", "I")
PERIOD = 6
"""Units of work of one micro-batch on one rank: two chunks with forward, input gradient and weight gradient."""
_BLOCKS = 6
"""Number of building blocks that are tried for each tuple of slopes."""

Block = tuple[tuple[int, int, int, int], ...]
"""Start of one micro-batch's four passes on each rank, in units of work."""


def pass_orders(kind: ZeroBubble, pp: int, num_microbatches: int) -> list[PassOrder]:
    """Return the orders that are tried for a schedule: the order of 1F1B, or repeated building blocks on a V."""
    if kind.slopes:
        blocks = (block for slopes in kind.slopes for block in linear_blocks(pp, slopes)[:_BLOCKS])
        return [repeated(block, num_microbatches) for block in blocks]
    whole = schedule_of(Layout(pp=pp), num_microbatches).ranks
    return [tuple(tuple(one if one.kind == "F" else one._replace(kind="I") for one in actions) for actions in whole)]


def repeated(block: Block, num_microbatches: int) -> PassOrder:
    """Repeat a building block every `PERIOD` units, and return each rank's passes in the order of their starts."""
    pp = len(block)
    ranks = []
    for rank, starts in enumerate(block):
        second = 2 * pp - 1 - rank
        passes: tuple[tuple[int, Kind], ...] = ((rank, "F"), (second, "F"), (second, "I"), (rank, "I"))
        timed = sorted(
            (start + PERIOD * microbatch, Action(stage, kind, microbatch))
            for microbatch in range(num_microbatches)
            for start, (stage, kind) in zip(starts, passes, strict=True)
        )
        ranks.append(tuple(action for _, action in timed))
    return tuple(ranks)


@lru_cache(maxsize=256)
def linear_blocks(pp: int, slopes: Slopes) -> tuple[Block, ...]:
    """Return building blocks whose passes are `slopes` units apart from rank to rank, those with least memory first.

    A micro-batch may wait up to 5 units at each of the V's three turns. A block is kept if no two passes of a rank
    coincide.
    """
    down, up, back_down, back_up = slopes
    last = pp - 1
    blocks = []
    for waits in itertools.product(range(PERIOD), repeat=3):
        turn = down * last + 1 + waits[0]
        back = turn + up * last + 1 + waits[1]
        back_turn = back + back_down * last + 1 + waits[2]
        block = tuple(
            (down * rank, turn + up * (last - rank), back + back_down * rank, back_turn + back_up * (last - rank))
            for rank in range(pp)
        )
        if all(len({start % PERIOD for start in starts}) == 4 for starts in block):
            # Units of time for which a micro-batch's activations are kept on the rank that keeps activations longest.
            life = max(starts[3] - starts[0] + starts[2] - starts[1] for starts in block)
            blocks.append((life, block))
    return tuple(block for _, block in sorted(blocks))


class GapRule(NamedTuple):
    """Passes that a rank runs while it waits for the input of the next pass in its order.

    A later pass of the order fills a gap of at least `later` times its length. Otherwise a weight gradient (W) fills a
    gap of at least `weight` times its length.
    """

    later: float
    weight: float


GAP_RULES = (
    GapRule(later=0.0, weight=0.0),
    GapRule(later=0.5, weight=0.25),
    GapRule(later=0.5, weight=0.75),
    GapRule(later=1.0, weight=0.9),
)
"""Rules that are tried for each order: the best rule depends on the times of the stages (240 simulated steps)."""
_FINALISTS = 6
"""Number of drafts that are simulated over all micro-batches of a long step."""


class Draft(NamedTuple):
    """Passes of each rank in the order in which a simulation ran them."""

    ranks: tuple[tuple[Action, ...], ...]
    makespan_s: float
    """End of the last pass; infinite if some passes could not run within the memory limit."""


def shortest_draft(problem: SchedulingProblem) -> Draft:
    """Simulate every order of the schedule with every rule of `GAP_RULES`, and return the shortest draft.

    For a long step, the drafts are first compared over its first few micro-batches, because later micro-batches repeat
    the same pattern. Raises FactError if no order runs to its end within the limits.
    """
    # Number of micro-batches that suffice to fill the pipeline, run its steady part, and drain the pipeline.
    few = min(3 * problem.pp, problem.num_microbatches)
    shorter = replace(problem, num_microbatches=few)
    drafts = [
        (fill(shorter, order, rule), place, rule)
        for place, order in enumerate(pass_orders(problem.kind, problem.pp, few))
        for rule in GAP_RULES
    ]
    drafts.sort(key=lambda draft: draft[0].makespan_s)
    best, _, _ = drafts[0]
    if few < problem.num_microbatches:
        orders = pass_orders(problem.kind, problem.pp, problem.num_microbatches)
        whole = (fill(problem, orders[place], rule) for _, place, rule in drafts[:_FINALISTS])
        best = min(whole, key=lambda draft: draft.makespan_s)
    if math.isinf(best.makespan_s):
        raise FactError("no order of this schedule runs to its end within the memory limit")
    return best


def fill(problem: SchedulingProblem, order: PassOrder, rule: GapRule) -> Draft:
    """Simulate an order: each rank runs its next pass as soon as possible, and fills waits as the rule allows.

    A forward that would exceed the memory limit waits for a weight gradient that frees memory. If no weight gradient is
    due, the draft stays incomplete.
    """
    return _Clock(problem, order, rule).run()


class _Clock:
    """State of one simulation of an order.

    An event is a time at which a rank may start a pass; a busy rank ignores events.
    """

    def __init__(self, problem: SchedulingProblem, order: PassOrder, rule: GapRule) -> None:
        stages, microbatches = len(problem.rank_S), problem.num_microbatches
        self.problem, self.order, self.rule = problem, order, rule
        self.rank_S = problem.rank_S
        seconds = problem.times.durations_s
        self.forward_s, _, self.first_s, self.input_s, self.weight_s = (
            seconds[at : at + stages] for at in range(0, 5 * stages, stages)
        )
        self.arrival_s = {kind: [[math.inf] * microbatches for _ in range(stages)] for kind in _KINDS}
        self.arrival_s["F"][0] = [0.0] * microbatches
        self.done = {kind: [0] * stages for kind in _KINDS}
        self.waiting: list[deque[Action]] = [deque() for _ in order]
        """Weight gradients (W) of each rank that are due."""
        self.stages_P = [
            [stage for stage, owner in enumerate(self.rank_S) if owner == rank] for rank in range(problem.pp)
        ]
        self.place = [0] * problem.pp
        self.live = [0.0] * problem.pp
        self.ceiling_P = [limit * (1 + _ROUNDING) for limit in problem.limit_P]
        self.free_s = [0.0] * problem.pp
        self.ran: list[list[Action]] = [[] for _ in order]
        self.events = [(0.0, rank) for rank in range(problem.pp)]
        self.place_of = [{action: place for place, action in enumerate(actions)} for actions in order]

    def run(self) -> Draft:
        while self.events:
            now_s, rank = heapq.heappop(self.events)
            if now_s >= self.free_s[rank]:
                action = self.choose(rank, now_s)
                if action is not None:
                    self.start(rank, now_s, action)
        is_complete = all(place == len(actions) for place, actions in zip(self.place, self.order, strict=True))
        return Draft(ranks=tuple(map(tuple, self.ran)), makespan_s=max(self.free_s) if is_complete else math.inf)

    def choose(self, rank: int, now_s: float) -> Action | None:
        """Return the pass to start now, or None to wait for an event."""
        weight = self.waiting[rank][0] if self.waiting[rank] else None
        action = self.next_of(rank)
        if action is None:
            return weight
        stage, kind, microbatch = action
        if kind == "F" and self.live[rank] + self.problem.held_S[stage] > self.ceiling_P[rank]:
            return weight or self.pulled(rank, now_s, math.inf)
        arrival_s = self.arrival_s[kind][stage][microbatch]
        if arrival_s <= now_s:
            return action
        gap_s = arrival_s - now_s
        later = self.pulled(rank, now_s, gap_s)
        if later is None and weight is not None and gap_s >= self.rule.weight * self.weight_s[weight.stage]:
            return weight
        if later is None and arrival_s < math.inf:
            heapq.heappush(self.events, (arrival_s, rank))
        return later

    def next_of(self, rank: int) -> Action | None:
        """Return the first pass of the rank's order that has not run."""
        actions, place = self.order[rank], self.place[rank]
        while place < len(actions) and actions[place].microbatch < self.done[actions[place].kind][actions[place].stage]:
            place += 1
        self.place[rank] = place
        return actions[place] if place < len(actions) else None

    def pulled(self, rank: int, now_s: float, gap_s: float) -> Action | None:
        """Return the first later pass of the order that could run now and fits into the gap."""
        ready = []
        for stage in self.stages_P[rank]:
            for kind in _KINDS:
                microbatch = self.done[kind][stage]
                if microbatch < self.problem.num_microbatches and self.arrival_s[kind][stage][microbatch] <= now_s:
                    action = Action(stage, kind, microbatch)
                    ready.append((self.place_of[rank][action], action))
        for place, action in sorted(ready):
            fits = gap_s >= self.rule.later * self.seconds_of(action)
            if fits and (action.kind == "I" or self.leaves_room(rank, action.stage, place)):
                return action
        return None

    def leaves_room(self, rank: int, stage: int, place: int) -> bool:
        """Return True if a later forward may run early, so that all passes before it in the order still fit in memory.

        The check assumes that each W runs directly after its I.
        """
        held_S, ceiling = self.problem.held_S, self.ceiling_P[rank]
        live = self.live[rank] + held_S[stage]
        if live > ceiling:
            return False
        live -= sum(held_S[weight.stage] for weight in self.waiting[rank])
        for action in self.order[rank][self.place[rank] : place]:
            if action.microbatch < self.done[action.kind][action.stage]:
                continue
            live += held_S[action.stage] if action.kind == "F" else -held_S[action.stage]
            if live > ceiling:
                return False
        return True

    def seconds_of(self, action: Action) -> float:
        """Return the duration of a pass."""
        stage, kind, microbatch = action
        if kind == "F":
            return self.forward_s[stage] if microbatch else self.first_s[stage]
        return self.input_s[stage] if kind == "I" else self.weight_s[stage]

    def start(self, rank: int, now_s: float, action: Action) -> None:
        """Run a pass, and add an event for the rank that needs its result."""
        stage, kind, microbatch = action
        end_s = now_s + self.seconds_of(action)
        self.free_s[rank] = end_s
        self.ran[rank].append(action)
        heapq.heappush(self.events, (end_s, rank))
        if kind == "W":
            self.waiting[rank].popleft()
            self.live[rank] -= self.problem.held_S[stage]
            return
        self.done[kind][stage] += 1
        if kind == "I":
            self.waiting[rank].append(Action(stage, "W", microbatch))
            if stage > 0:
                self.send(end_s, action, stage - 1)
            return
        self.live[rank] += self.problem.held_S[stage]
        if stage + 1 < len(self.rank_S):
            self.send(end_s, action, stage + 1)
        else:
            self.arrival_s["I"][stage][microbatch] = end_s

    def send(self, end_s: float, action: Action, target: int) -> None:
        """Send a result to a neighbouring stage, and add an event at its arrival, or when the stage's rank is free."""
        stage, kind, microbatch = action
        rank = self.rank_S[target]
        hops = self.problem.times.forward_hop_s if kind == "F" else self.problem.times.backward_hop_s
        arrival_s = end_s + (hops[min(stage, target)] if rank != self.rank_S[stage] else 0.0)
        self.arrival_s[kind][target][microbatch] = arrival_s
        heapq.heappush(self.events, (max(arrival_s, self.free_s[rank]), rank))
