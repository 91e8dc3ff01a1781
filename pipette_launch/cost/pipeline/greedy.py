"""Weight gradients put where ranks would wait: a given order run by real times, under a memory limit."""

# S = stages, P = pipeline ranks, M = micro-batches. Kinds: F, and I (its W is owed from then on) or B (no W).

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from pipette_launch.cost.pipeline.timeline import StageTimes
from pipette_launch.errors import FactError
from pipette_launch.facts.schedule import Action, Placement, Schedule, rank_of

PassOrder = tuple[tuple[Action, ...], ...]
"""For each rank its forwards and backwards, without W; each stage's micro-batches ascend."""

_NEVER = float("inf")
_SLACK = 1e-9
"""Sums of floats that should be equal differ by less, relative to a limit or to a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingProblem:
    """What a generated schedule is for: a pipeline, its times and how much it may keep."""

    pp: int
    vpp: int
    placement: Placement = "loop"
    num_microbatches: int
    times: StageTimes
    held_S: tuple[float, ...]
    """What each stage keeps for one micro-batch, in any unit."""
    w_share: float = 1.0
    """The share of it that the weight gradient still needs."""
    limit_P: tuple[float, ...]
    """Most that each rank may keep, in the same unit."""
    objective: Literal["makespan", "span"] = "makespan"
    """What to keep short: the whole, or the longest rank's own."""

    def __post_init__(self) -> None:
        stages = self.pp * self.vpp
        if min(self.pp, self.vpp, self.num_microbatches) < 1:
            raise FactError(f"pp={self.pp}, vpp={self.vpp} and {self.num_microbatches} micro-batches must be positive")
        if {len(self.held_S), len(self.times.forward_s)} != {stages} or len(self.limit_P) != self.pp:
            raise FactError(f"{stages} stages on {self.pp} ranks need as many times, sizes and limits")
        if min(self.held_S) < 0 or not 0 <= self.w_share <= 1:
            raise FactError(f"sizes must not be negative and w_share lies in 0..1, got {self.w_share}")
        for rank, limit in enumerate(self.limit_P):
            held = [size for size, owner in zip(self.held_S, self.rank_S, strict=True) if owner == rank]
            if limit < sum(held) * (1 - _SLACK):
                raise FactError(
                    f"rank {rank} may keep {limit:g}, less than the {sum(held):g} of one micro-batch on its stages"
                )

    @property
    def rank_S(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return tuple(rank_of(stage, pp=self.pp, placement=self.placement) for stage in range(self.pp * self.vpp))


@dataclass(frozen=True, kw_only=True, slots=True)
class FillRules:
    """What an idle rank does while the next action of its order is still to come."""

    weight_gap: float
    """A W is put into a gap of at least this many times its length."""
    pull: Literal["none", "backward", "all"] = "none"
    """Which later actions of the order may run first: none, backwards, or forwards too where memory allows."""
    pull_gap: float = 0.0
    """They are pulled into a gap of at least this many times their length."""
    pull_first: bool = False
    """Whether they come before a W that would fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSchedule:
    """What came out: for each rank its actions with start and end, and whether all of them ran within the limits."""

    ranks: tuple[tuple[tuple[float, float, Action], ...], ...]
    complete: bool

    @property
    def makespan_s(self) -> float:
        """End of the last action."""
        return max(rank[-1][1] for rank in self.ranks)

    def score_s(self, problem: SchedulingProblem) -> float:
        """What the problem wants short; infinite where some actions could not run."""
        if not self.complete:
            return _NEVER
        if problem.objective == "makespan":
            return self.makespan_s
        return max(rank[-1][1] - rank[0][0] for rank in self.ranks)

    def schedule(self, name: str, problem: SchedulingProblem) -> Schedule:
        """Return the order that was found."""
        return Schedule(
            name=name,
            pp=problem.pp,
            vpp=problem.vpp,
            num_microbatches=problem.num_microbatches,
            placement=problem.placement,
            ranks=tuple(tuple(action for _, _, action in rank) for rank in self.ranks),
        )


def fill(
    problem: SchedulingProblem, order: PassOrder, rules: FillRules, patient: frozenset[Action] = frozenset()
) -> DraftSchedule:
    """Simulate an order: each rank runs its next action as soon as it can, and while it waits what the rules allow.

    A forward that would pass the limit waits for a W that makes room; where none is owed the draft stays incomplete.

    Args:
        problem: times, sizes and limits.
        order: forwards and backwards of each rank.
        rules: what idle ranks do.
        patient: actions for which a rank waits, and does nothing meanwhile.

    """
    return _Clock(problem, order, rules, patient).run()


class _Clock:
    """The state of one run. Events say that a rank may have something to do; a busy or idle rank just ignores them."""

    def __init__(
        self, problem: SchedulingProblem, order: PassOrder, rules: FillRules, patient: frozenset[Action]
    ) -> None:
        stages, microbatches = problem.pp * problem.vpp, problem.num_microbatches
        seconds = problem.times.durations_s
        self.problem, self.order, self.rules, self.patient = problem, order, rules, patient
        self.rank_S = problem.rank_S
        self.forward_s, self.backward_s = seconds[:stages], seconds[stages : 2 * stages]
        self.first_s, self.input_s, self.weight_s = (seconds[i * stages : (i + 1) * stages] for i in (2, 3, 4))
        self.arrival = {kind: [[_NEVER] * microbatches for _ in range(stages)] for kind in "FI"}
        self.arrival["B"] = self.arrival["I"]
        self.arrival["F"][0] = [0.0] * microbatches
        self.done = {kind: [0] * stages for kind in "FI"}
        self.done["B"] = self.done["I"]
        self.owed: list[list[Action]] = [[] for _ in order]
        self.paid = [0] * problem.pp
        self.place = [0] * problem.pp
        self.live = [0.0] * problem.pp
        self.free_s = [0.0] * problem.pp
        self.ran: list[list[tuple[float, float, Action]]] = [[] for _ in order]
        self.events = [(0.0, rank) for rank in range(problem.pp)]
        # For each rank, where the micro-batches of each stage and kind stand in its order.
        self.chains: list[defaultdict[tuple[int, str], list[int]]] = []
        for actions in order if rules.pull != "none" else ():
            self.chains.append(defaultdict(list))
            for place, action in enumerate(actions):
                self.chains[-1][action.stage, action.kind].append(place)
        self.ceiling_P = [limit * (1 + _SLACK) for limit in problem.limit_P]

    def run(self) -> DraftSchedule:
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.free_s[rank]:
                action = self.choose(rank, now)
                if action is not None:
                    self.start(rank, now, action)
        complete = all(place == len(actions) for place, actions in zip(self.place, self.order, strict=True))
        return DraftSchedule(ranks=tuple(tuple(ran) for ran in self.ran), complete=complete)

    def choose(self, rank: int, now: float) -> Action | None:
        """The action to start now, or None to wait for an event."""
        weight = self.owed[rank][self.paid[rank]] if self.paid[rank] < len(self.owed[rank]) else None
        action = self.next_of(rank)
        if action is None:
            return weight
        stage, kind, microbatch = action
        if kind == "F" and self.live[rank] + self.problem.held_S[stage] > self.ceiling_P[rank]:
            return weight or self.meanwhile(rank, now, _NEVER, None)
        arrival_s = self.arrival[kind][stage][microbatch]
        if arrival_s <= now:
            return action
        gap_s = arrival_s - now
        if action not in self.patient:
            other = self.meanwhile(rank, now, gap_s, weight)
            if other is not None:
                return other
        if arrival_s < _NEVER:
            heapq.heappush(self.events, (arrival_s, rank))
        return None

    def next_of(self, rank: int) -> Action | None:
        """The first action of the rank's order that has not run."""
        actions, place = self.order[rank], self.place[rank]
        while place < len(actions) and actions[place].microbatch < self.done[actions[place].kind][actions[place].stage]:
            place += 1
        self.place[rank] = place
        return actions[place] if place < len(actions) else None

    def meanwhile(self, rank: int, now: float, gap_s: float, weight: Action | None) -> Action | None:
        """What fits into a gap by the rules."""
        if weight is not None and gap_s < self.rules.weight_gap * self.weight_s[weight.stage]:
            weight = None
        if self.rules.pull == "none" or (weight is not None and not self.rules.pull_first):
            return weight
        return self.pulled(rank, now, gap_s) or weight

    def pulled(self, rank: int, now: float, gap_s: float) -> Action | None:
        """The first later action of the order that could run now and fits into the gap."""
        best, best_place = None, len(self.order[rank])
        for (stage, kind), places in self.chains[rank].items():
            microbatch = self.done[kind][stage]
            if microbatch == len(places) or places[microbatch] >= best_place:
                continue
            if self.arrival[kind][stage][microbatch] > now or (kind == "F" and self.rules.pull != "all"):
                continue
            action = self.order[rank][places[microbatch]]
            if gap_s < self.rules.pull_gap * self.seconds_of(action):
                continue
            if kind == "F" and not self.leaves_room(rank, stage, places[microbatch]):
                continue
            best, best_place = action, places[microbatch]
        return best

    def leaves_room(self, rank: int, stage: int, place: int) -> bool:
        """Whether all that the order has before a pulled forward still fits beside it, each W right after its I."""
        held_S, ceiling = self.problem.held_S, self.ceiling_P[rank]
        live = self.live[rank] + held_S[stage]
        if live > ceiling:
            return False
        live -= sum(self.problem.w_share * held_S[weight.stage] for weight in self.owed[rank][self.paid[rank] :])
        for action in self.order[rank][self.place[rank] : place]:
            if action.microbatch < self.done[action.kind][action.stage]:
                continue
            live += held_S[action.stage] if action.kind == "F" else -held_S[action.stage]
            if live > ceiling:
                return False
        return True

    def seconds_of(self, action: Action) -> float:
        """How long an action takes."""
        stage, kind, microbatch = action
        if kind == "F":
            return self.forward_s[stage] if microbatch else self.first_s[stage]
        return {"B": self.backward_s, "I": self.input_s, "W": self.weight_s}[kind][stage]

    def start(self, rank: int, now: float, action: Action) -> None:
        """Run an action, and tell the rank that waits for its result when it will be there."""
        stage, kind, microbatch = action
        end_s = now + self.seconds_of(action)
        held = self.problem.held_S[stage]
        self.free_s[rank] = end_s
        self.ran[rank].append((now, end_s, action))
        heapq.heappush(self.events, (end_s, rank))
        if kind == "W":
            self.paid[rank] += 1
            self.live[rank] -= self.problem.w_share * held
            return
        self.done[kind][stage] += 1
        if kind == "F":
            self.live[rank] += held
            if stage + 1 < len(self.rank_S):
                self.send(now, end_s, action, stage + 1)
            else:
                self.arrival["I"][stage][microbatch] = end_s
            return
        self.live[rank] -= held if kind == "B" else (1 - self.problem.w_share) * held
        if kind == "I":
            self.owed[rank].append(Action(stage, "W", microbatch))
        if stage:
            self.send(now, end_s, action, stage - 1)

    def send(self, now: float, end_s: float, action: Action, target: int) -> None:
        """Take a result to a neighbouring stage: from now on its rank knows when it comes."""
        stage, kind, microbatch = action
        rank = self.rank_S[target]
        hops = self.problem.times.forward_hop_s if kind == "F" else self.problem.times.backward_hop_s
        arrival_s = end_s + (hops[min(stage, target)] if rank != self.rank_S[stage] else 0.0)
        self.arrival[kind][target][microbatch] = arrival_s
        # A busy rank looks for itself when it is free, but only for what its order has next.
        if self.chains or self.free_s[rank] <= now:
            heapq.heappush(self.events, (max(arrival_s, self.free_s[rank]), rank))


def order_of(schedule: Schedule, num_microbatches: int) -> PassOrder:
    """Forwards and backwards of a schedule's first micro-batches, without their W."""
    return tuple(
        tuple(action for action in actions if action.kind != "W" and action.microbatch < num_microbatches)
        for actions in schedule.ranks
    )
