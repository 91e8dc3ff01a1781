"""Schedules whose order of passes depends on the times of the stages, and whose weight gradients fill gaps.

`fill` runs a given order with real times within a memory limit, and puts weight gradients (W) into the gaps in which a
rank would wait. `best_draft` tries several orders of passes with several rules for gaps, and improves the best drafts.
This module makes orders for zero bubble (1F1B with delayed W) and for V placements (repeated building blocks).
"""

# Letters of array axes: S = stages, P = pipeline ranks, M = micro-batches. Kinds of passes: F = forward, B = whole
# backward, I = input gradient, after which the weight gradient W is due. Slots are the times of one micro-batch's
# passes on one rank, in the order F of chunk 0, F of chunk 1, backward of chunk 1, backward of chunk 0. A block
# contains the slots of every rank, and a schedule repeats the block every six units (2405.15362).

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pipette_launch.cost.pipeline.engine import StageTimes, simulate
from pipette_launch.errors import FactError
from pipette_launch.facts.schedule import Action, Kind, Placement, Schedule, rank_of

PassOrder = tuple[tuple[Action, ...], ...]
"""Forwards and backwards of each rank in order, without W; a stage runs its micro-batches by rising number."""

_NEVER = float("inf")
_SLACK = 1e-9
"""Tolerance for rounding, relative to a memory limit or to one second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingProblem:
    """Pipeline that needs a schedule, with its times and memory limits."""

    pp: int
    vpp: int
    placement: Placement = "loop"
    num_microbatches: int
    times: StageTimes
    held_S: tuple[float, ...]
    """Memory that each stage keeps for one micro-batch, in any unit."""
    w_share: float = 1.0
    """Share of `held_S` that the weight gradient still needs."""
    limit_P: tuple[float, ...]
    """Most memory that each rank may keep, in the unit of `held_S`."""
    objective: Literal["makespan", "span"] = "makespan"
    """Time to minimize: `makespan` = whole step, `span` = longest time from a rank's first start to its last end."""

    def __post_init__(self) -> None:
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
    """Rules for the actions that a rank runs while it waits for the input of the next action in its order."""

    weight_gap: float
    """A weight gradient (W) fills a gap if the gap is at least this multiple of the W's length."""
    pull: Literal["none", "backward", "all"] = "none"
    """Later actions of the order that may fill a gap: none, backwards, or also forwards if memory allows."""
    pull_gap: float = 0.0
    """A later action fills a gap if the gap is at least this multiple of the action's length."""
    pull_first: bool = False
    """True if a later action has priority over a weight gradient when both fit into the gap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSchedule:
    """Simulated schedule: the actions of each rank, with start and end."""

    ranks: tuple[tuple[tuple[float, float, Action], ...], ...]
    complete: bool

    @property
    def makespan_s(self) -> float:
        """Time at which the last action of the draft ends."""
        return max(rank[-1][1] for rank in self.ranks)

    def score_s(self, problem: SchedulingProblem) -> float:
        """Return the time that the problem minimizes; infinite if some actions could not run."""
        if not self.complete:
            return _NEVER
        if problem.objective == "makespan":
            return self.makespan_s
        return max(rank[-1][1] - rank[0][0] for rank in self.ranks)

    def schedule(self, name: str, problem: SchedulingProblem) -> Schedule:
        """Return this draft as a `Schedule`."""
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
    """Simulate an order: each rank runs its next action as soon as possible, and fills waits as the rules allow.

    A forward that would exceed the memory limit waits for a weight gradient that frees memory. If no weight gradient is
    due, the draft stays incomplete. A rank waits for the actions in `patient` without filling the gap before them.
    """
    return _Clock(problem, order, rules, patient).run()


class _Clock:
    """State of one simulation of an order.

    An event is a time at which a rank may start an action; a busy rank ignores events.
    """

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
        # Index in the rank's order of each micro-batch's pass, by rank, stage and kind.
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
        """Return the action to start now, or None to wait for an event."""
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
        """Return the first action of the rank's order that has not run."""
        actions, place = self.order[rank], self.place[rank]
        while place < len(actions) and actions[place].microbatch < self.done[actions[place].kind][actions[place].stage]:
            place += 1
        self.place[rank] = place
        return actions[place] if place < len(actions) else None

    def meanwhile(self, rank: int, now: float, gap_s: float, weight: Action | None) -> Action | None:
        """Return an action that fits into a gap of `gap_s` seconds by the rules; None if no action fits."""
        if weight is not None and gap_s < self.rules.weight_gap * self.weight_s[weight.stage]:
            weight = None
        if self.rules.pull == "none" or (weight is not None and not self.rules.pull_first):
            return weight
        return self.pulled(rank, now, gap_s) or weight

    def pulled(self, rank: int, now: float, gap_s: float) -> Action | None:
        """Return the first later action of the order that could run now and fits into the gap."""
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
        """Return True if a later forward may run early, so that all actions before it in the order still fit in memory.

        The check assumes that each W runs directly after its I.
        """
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
        """Return the duration of an action."""
        stage, kind, microbatch = action
        if kind == "F":
            return self.forward_s[stage] if microbatch else self.first_s[stage]
        return {"B": self.backward_s, "I": self.input_s, "W": self.weight_s}[kind][stage]

    def start(self, rank: int, now: float, action: Action) -> None:
        """Run an action, and add an event for the rank that needs its result."""
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
        """Send a result to a neighbouring stage, and record the arrival time on the stage's rank."""
        stage, kind, microbatch = action
        rank = self.rank_S[target]
        hops = self.problem.times.forward_hop_s if kind == "F" else self.problem.times.backward_hop_s
        arrival_s = end_s + (hops[min(stage, target)] if rank != self.rank_S[stage] else 0.0)
        self.arrival[kind][target][microbatch] = arrival_s
        # A busy rank checks the next action of its order when the rank becomes free.
        if self.chains or self.free_s[rank] <= now:
            heapq.heappush(self.events, (max(arrival_s, self.free_s[rank]), rank))


def order_of(schedule: Schedule, num_microbatches: int) -> PassOrder:
    """Return the forwards and backwards of a schedule's first micro-batches, without weight gradients (W)."""
    return tuple(
        tuple(action for action in actions if action.kind != "W" and action.microbatch < num_microbatches)
        for actions in schedule.ranks
    )


_TRIES = 4
"""`polish` first lets a rank wait at all gaps together, and then at each of at most this number of gaps alone."""
_FINALISTS = 6
_KEPT = 3
"""Number of best drafts that `polish` tries to shorten."""
_ACTIONS = 1_000_000
"""Most actions that are simulated to choose a draft, which takes seconds. Polishing may simulate a quarter more."""
_SAME = 1e-9

Ran = tuple[float, float, Action]
Choice = tuple[int, FillRules]
"""Pair of an index of an order, and rules for the weight gradients in this order."""


def best_draft(
    problem: SchedulingProblem, orders: Callable[[SchedulingProblem], Iterable[PassOrder]], rules: Sequence[FillRules]
) -> DraftSchedule:
    """Simulate every order with all rules, and polish the drafts that are shortest by the problem's objective.

    For a long step, the orders are first compared over its first few micro-batches, because later micro-batches repeat
    the same pattern. So `orders` must return the same number of orders for fewer micro-batches. Raises FactError if no
    order runs to its end within the limits.
    """
    pairs = itertools.product(range(len(tuple(orders(problem)))), range(len(rules)))
    # Orders and rules are tried by rising index, because the limit on simulated actions may not allow all of them.
    choices = [(place, rules[number]) for place, number in sorted(pairs, key=lambda pair: (sum(pair), pair))]
    if len(choices) > max(_fills(problem), _FINALISTS):
        # Number of micro-batches that suffice to fill the pipeline, run its steady part, and drain the pipeline.
        few = min(problem.num_microbatches, 3 * problem.pp)
        shorter = dataclasses.replace(problem, num_microbatches=few)
        tried = choices[: max(_fills(shorter), _FINALISTS)]
        choices = [choice for _, choice in _ranked(shorter, orders, tried)][:_FINALISTS]
    ranked = _ranked(problem, orders, choices)
    all_orders = tuple(orders(problem))
    best_of: dict[int, tuple[DraftSchedule, FillRules]] = {}
    for draft, (place, rule) in ranked:
        best_of.setdefault(place, (draft, rule))
    drafts = [
        polish(problem, all_orders[place], rule, draft, _fills(problem) // (4 * _KEPT))
        for place, (draft, rule) in list(best_of.items())[:_KEPT]
    ]
    best = min(drafts, key=lambda draft: draft.score_s(problem))
    if not best.complete:
        raise FactError("no order of this schedule runs to its end within the memory limit")
    return best


def polish(
    problem: SchedulingProblem, order: PassOrder, rules: FillRules, draft: DraftSchedule, fills: int
) -> DraftSchedule:
    """Let ranks wait instead of filling a gap whose action delays the critical path, while this shortens the step.

    `polish` simulates the order at most `fills` times.
    """
    patient: frozenset[Action] = frozenset()
    while draft.complete and fills > 0:
        waits = [wait for wait in _waits(problem, draft) if not wait <= patient]
        tries = [patient.union(*waits), *(patient | wait for wait in waits[:_TRIES])] if waits else []
        for tried in tuple(dict.fromkeys(tries))[:fills]:
            fills -= 1
            other = fill(problem, order, rules, tried)
            if other.score_s(problem) < draft.score_s(problem) - _SAME * draft.makespan_s:
                draft, patient = other, tried
                break
        else:
            return draft
    return draft


def _fills(problem: SchedulingProblem) -> int:
    return max(_ACTIONS // (3 * problem.pp * problem.vpp * problem.num_microbatches), 1)


def _ranked(
    problem: SchedulingProblem, orders: Callable[[SchedulingProblem], Iterable[PassOrder]], choices: Sequence[Choice]
) -> list[tuple[DraftSchedule, Choice]]:
    made = tuple(orders(problem))
    seen: dict[tuple[PassOrder, FillRules], tuple[DraftSchedule, Choice]] = {}
    for place, rule in choices:
        if (made[place], rule) not in seen:
            seen[made[place], rule] = (fill(problem, made[place], rule), (place, rule))
    return sorted(seen.values(), key=lambda found: found[0].score_s(problem))


def _waits(problem: SchedulingProblem, draft: DraftSchedule) -> Iterator[frozenset[Action]]:
    """For each message on the critical path, yield the set of actions before it that a weight gradient delays."""
    where = {action: (rank, place) for rank, ran in enumerate(draft.ranks) for place, (_, _, action) in enumerate(ran)}
    lengths = [ran[-1][1] - (0.0 if problem.objective == "makespan" else ran[0][0]) for ran in draft.ranks]
    rank = lengths.index(max(lengths))
    place = len(draft.ranks[rank]) - 1
    while True:
        # Go back to the first of the rank's actions that run without a gap up to this action.
        while _follows(draft.ranks[rank], place):
            place -= 1
        cause = _cause(problem, draft.ranks[rank][place][2])
        if cause is None:
            return
        rank, place = where[cause]
        ran = draft.ranks[rank]
        after_weight = place
        while _follows(ran, after_weight) and ran[after_weight - 1][2].kind != "W":
            after_weight -= 1
        if _follows(ran, after_weight):
            yield frozenset(action for _, _, action in ran[after_weight : place + 1])


def _follows(ran: tuple[Ran, ...], place: int) -> bool:
    return place > 0 and ran[place - 1][1] >= ran[place][0] - _SAME


def _cause(problem: SchedulingProblem, action: Action) -> Action | None:
    """Return the action whose result an action needs, of another stage or the last stage's forward; None for a W."""
    stage, kind, microbatch = action
    if kind == "W" or (kind == "F" and stage == 0):
        return None
    if kind == "F":
        return Action(stage - 1, "F", microbatch)
    last = problem.pp * problem.vpp - 1
    return Action(last, "F", microbatch) if stage == last else Action(stage + 1, kind, microbatch)


_KINDS: tuple[Kind, Kind] = ("F", "I")
WEIGHT_GAPS = tuple(FillRules(weight_gap=gap) for gap in (0.25, 0.9, 0.0, 0.5))
"""Rules that are tried for a weight gradient (W), which fills any gap, or only gaps that are nearly as long as the
weight gradient. Measurements show that the best rule depends on the times of the stages."""


def zero_bubble(name: str, problem: SchedulingProblem) -> Schedule:
    """Return ZB-1P or ZB-2P (2401.10241); a rank keeps at most the memory of 1F1B's first rank, or twice this memory.

    Forwards (F) and input gradients (I) run in the order of 1F1B. The number of warm-up forwards depends on the limit
    and on the time at which the first gradient comes back. Several numbers of warm-up forwards are tried, each with all
    rules of `WEIGHT_GAPS`. With equal stages and messages of c seconds the bubble of ZB-1P is (p-1)(F+I-W+4c), as in
    2401.10241, Table 5.
    """
    return best_draft(problem, _orders, WEIGHT_GAPS).schedule(name, problem)


def refilled(schedule: Schedule, problem: SchedulingProblem) -> Schedule:
    """Place a schedule's weight gradients (W) again, by real times and within the limits; F and I keep their order.

    Returns the given schedule if the new placement of W does not shorten the step.
    """

    def orders(asked: SchedulingProblem) -> tuple[PassOrder, ...]:
        return (order_of(schedule, asked.num_microbatches),)

    anew = best_draft(problem, orders, WEIGHT_GAPS).schedule(schedule.name, problem)
    before, after = (simulate(one, problem.times) for one in (schedule, anew))
    if problem.objective == "span":
        return anew if max(after.span_s_P) < max(before.span_s_P) else schedule
    return anew if after.makespan_s < before.makespan_s else schedule


def _orders(problem: SchedulingProblem) -> Iterator[PassOrder]:
    """Yield one order for each rule of `_warmups`, with warm-up forwards, then backward and forward in turn."""
    for ahead_P in zip(*(_warmups(problem, rank) for rank in range(problem.pp)), strict=True):
        ranks = []
        for rank, ahead in enumerate(ahead_P):
            forward, backward = (
                [Action(rank, kind, microbatch) for microbatch in range(problem.num_microbatches)] for kind in _KINDS
            )
            turns = itertools.zip_longest(backward, forward[ahead:])
            ranks.append((*forward[:ahead], *(action for turn in turns for action in turn if action is not None)))
        yield tuple(ranks)


def _warmups(problem: SchedulingProblem, rank: int) -> tuple[int, ...]:
    """Count the forwards before a rank's first backward, by five rules.

    Two rules take the numbers of warm-up forwards of 1F1B and of eager 1F1B. Two more rules count the forwards that fit
    before the first gradient comes back, rounded down and up. The fifth rule counts these forwards if rank 0 lacks
    memory for some of its own forwards, so that gradients come back later. Each count is at least the count of 1F1B,
    and at most the number of forwards that fit in memory.
    """
    most, behind = problem.num_microbatches, problem.pp - rank
    room_P = [limit / held if held else math.inf for limit, held in zip(problem.limit_P, problem.held_S, strict=False)]
    until = min(_until_return(problem, rank), float(most))
    late = max(0.0, _until_return(problem, 0) - room_P[0])
    late_until = min(_until_return(problem, rank) - late, float(most))
    counts = (behind, 2 * behind - 1, math.floor(until), math.ceil(until), math.ceil(late_until))
    room = min(room_P[rank] * (1 + 1e-9), float(most))
    return tuple(max(1, min(max(count, behind), math.floor(room))) for count in counts)


def _until_return(problem: SchedulingProblem, rank: int) -> float:
    """Return the number of forwards that fit before the first gradient comes back to a rank."""
    times = problem.times
    input_s = times.durations_s[3 * problem.pp :]
    later_s = sum(times.forward_s[rank:]) + sum(input_s[rank + 1 : problem.pp])
    hops_s = sum(times.forward_hop_s[rank:]) + sum(times.backward_hop_s[rank:])
    return (later_s + hops_s) / times.forward_s[rank] if times.forward_s[rank] else math.inf


PERIOD = 6
"""Units of work of one micro-batch on one rank: two chunks with forward, input gradient and weight gradient."""

Slots = tuple[int, int, int, int]
Block = tuple[Slots, ...]
Slopes = tuple[int, int, int, int]
"""Slopes: units of time from a pass on one rank to the same pass on the next rank, for each of the four passes."""

SPLIT_RULES = (
    FillRules(weight_gap=0.5),
    FillRules(weight_gap=1.0),
    FillRules(weight_gap=0.0, pull="all"),
    FillRules(weight_gap=0.25, pull="all", pull_gap=0.5),
    FillRules(weight_gap=0.75, pull="all", pull_gap=1.0),
    FillRules(weight_gap=0.75, pull="all", pull_gap=0.5, pull_first=True),
)
WHOLE_RULES = (
    FillRules(weight_gap=1.0),
    FillRules(weight_gap=1.0, pull="all"),
    FillRules(weight_gap=1.0, pull="all", pull_gap=0.5),
    FillRules(weight_gap=1.0, pull="all", pull_gap=1.0),
)

_BLOCKS = 6
"""Number of building blocks that are tried for each tuple of slopes."""


def v_schedule(name: str, problem: SchedulingProblem, slopes: Sequence[Slopes]) -> Schedule:
    """Return V-ZB, V-Half or V-Min: the best draft from blocks with these slopes, simulated with real times.

    The peak memory of each rank stays within the problem's limits. The default limits of V-ZB, V-Half and V-Min are p,
    floor((p+2)/2) and floor((p+4)/3) micro-batches (2405.15362).
    """

    def orders(asked: SchedulingProblem) -> Iterator[PassOrder]:
        every = (linear_blocks(asked.pp, each)[:_BLOCKS] for each in slopes)
        for blocks in itertools.zip_longest(*every):
            yield from (order_of_block(block, asked.num_microbatches, "I") for block in blocks if block is not None)

    return best_draft(problem, orders, SPLIT_RULES).schedule(name, problem)


def one_forward_one_backward_v(problem: SchedulingProblem) -> Schedule:
    """Return 1F1B-V: whole backwards on a V placement, with two thirds of 1F1B's memory."""

    def orders(asked: SchedulingProblem) -> Iterable[PassOrder]:
        return [order_of_block(block, asked.num_microbatches, "B") for block in short_lived_blocks(asked.pp)]

    return best_draft(problem, orders, WHOLE_RULES).schedule("1f1b-v", problem)


def order_of_block(block: Block, num_microbatches: int, backward: Kind) -> PassOrder:
    """Repeat a building block for every micro-batch, and return each rank's passes in the order of their slots."""
    pp = len(block)
    ranks = []
    for rank, slots in enumerate(block):
        passes: tuple[tuple[int, int, Kind], ...] = (
            (slots[0], rank, "F"),
            (slots[1], 2 * pp - 1 - rank, "F"),
            (slots[2], 2 * pp - 1 - rank, backward),
            (slots[3], rank, backward),
        )
        timed = sorted(
            (slot + PERIOD * microbatch, Action(stage, kind, microbatch))
            for microbatch in range(num_microbatches)
            for slot, stage, kind in passes
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
        if all(len({slot % PERIOD for slot in slots}) == 4 for slots in block):
            # Units of time for which a micro-batch's activations are kept on the rank that keeps activations longest.
            life = max(slots[3] - slots[0] + slots[2] - slots[1] for slots in block)
            blocks.append((life, block))
    return tuple(block for _, block in sorted(blocks))


Residues = tuple[int, int, int, int]
"""Slots (start units) of a rank's four passes, modulo the period of 6 units."""


@lru_cache(maxsize=64)
def short_lived_blocks(pp: int) -> tuple[Block, ...]:
    """Return the blocks that keep activations for the shortest time, one for each pattern of the first rank.

    A whole backward takes two units of time, and a forward takes one unit. On every rank the two forwards and two
    backwards fill the period of six units, so a rank has one of 36 patterns. The patterns of neighbouring ranks fix the
    delay between them, so the best block is a shortest path over the ranks.
    """
    patterns = []
    for first, second, back, last in itertools.product(range(PERIOD), repeat=4):
        used = {first, second, back, (back + 1) % PERIOD, last, (last + 1) % PERIOD}
        if len(used) == PERIOD:
            patterns.append((first, second, back, last))
    best: dict[Residues, tuple[int, tuple[Residues, ...]]] = {
        own: (_delay(own[0], own[1], 1) + _delay(own[2], own[3], 2), (own,)) for own in patterns
    }
    for _ in range(pp - 1):
        best = {
            own: min((seconds + _between(own, after[0]), (own, *after)) for seconds, after in best.values())
            for own in patterns
        }
    found = sorted((life + _delay(own[1], own[2], 1), ranks) for own, (life, ranks) in best.items())
    # Patterns that differ only by a rotation within the period give the same block.
    shapes = {_block_of(ranks): None for _, ranks in found}
    return tuple(shapes)


def _delay(before: int, after: int, units: int) -> int:
    """Return the units from the start of a pass of length `units` to the start of the pass that needs its result."""
    return (after - before - units) % PERIOD + units


def _between(own: Residues, after: Residues) -> int:
    """Return the units that one more rank adds to the time of a micro-batch: two passes down the V, two passes up."""
    forward = _delay(own[0], after[0], 1) + _delay(after[1], own[1], 1)
    return forward + _delay(own[2], after[2], 2) + _delay(after[3], own[3], 2)


def _block_of(ranks: tuple[Residues, ...]) -> Block:
    """Return the building block with these patterns on its ranks. The first slot of rank 0 is 0."""

    def slots(ways: tuple[Residues, ...], which: int, units: int, start: int) -> list[int]:
        """Return the slots of one pass on each rank, in the order in which a micro-batch visits the ranks."""
        steps = (_delay(before[which], after[which], units) for before, after in itertools.pairwise(ways))
        return list(itertools.accumulate(steps, initial=start))

    back_up, first, last = ranks[::-1], ranks[0], ranks[-1]
    down = slots(ranks, 0, 1, 0)
    up = slots(back_up, 1, 1, down[-1] + _delay(last[0], last[1], 1))
    back = slots(ranks, 2, 2, up[-1] + _delay(first[1], first[2], 1))
    end = slots(back_up, 3, 2, back[-1] + _delay(last[2], last[3], 2))
    return tuple(zip(down, up[::-1], back, end[::-1], strict=True))
