"""The entry of the search: enumerate layouts, drop what does not fit, place the promising, return the best plan."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

from pipette_launch.cost.learned import NOTHING_LEARNED, Corrections
from pipette_launch.cost.step.step_bounds import BoundColumns
from pipette_launch.defaults import MARGIN, MEMORY_MARGIN, SEARCH_BUDGET_S, SEED
from pipette_launch.errors import UsageError
from pipette_launch.facts import Job, Layout, Measurements, Plan, Provenance
from pipette_launch.search import explanations
from pipette_launch.search.candidates import (
    MANY_SLOTS,
    WORTH,
    Candidate,
    Promising,
    SearchInputs,
    placement_problem,
    price,
    with_better_placement,
    with_devices_exchanged,
)
from pipette_launch.search.choose import LEANER, choose
from pipette_launch.search.frontier import BEATEN, OUTDONE, UNPROMISING, Frontier
from pipette_launch.search.layouts import Cuts, cuts
from pipette_launch.search.placement import ANNEALED_SLOTS, EXACT, are_few, exhaustion, num_placements
from pipette_launch.search.placement_bound import placement_bound_s
from pipette_launch.search.schedule_choice import LEANEST, best_scheduled, unsupported
from pipette_launch.search.slots import IsLate, Placement, Slots

FIRST_BATCH = 6
"""Layouts that are priced before the placement of the best is improved; each batch is half as large again."""
FIRST_BATCH_MANY = 48
"""The same of those that come by rising bound, on many slots: a price takes a fortieth of improving a placement."""
MOST_AT_ONCE = 64
WHILE_PRICING = 1
"""After each batch the placements of so many layouts are improved."""
AFTER_PRICING = ((1024, (4, 2, 1)), (math.inf, (2, 1, 1)))
"""And on up to so many slots so many in each round after all are priced: on many slots a round takes long."""
ALIKE = 2
"""Of these at most so many of equal degrees: what one placement saves, those of others of these degrees save too."""
ANNEALED, ANNEALED_NEAR, ANNEALED_FOR = 3, 0.05, 0.01
"""(layouts, step, bound): on `ANNEALED_SLOTS` slots single ranks change hosts after all rounds, in at most 3 of the
fastest layouts. Their steps are at most 5 % longer than the best, and their bounds at least 1 % lower."""
RUNNERS_UP = 3
"""So many layouts that cannot win are priced as alternatives, as many that need less memory, and as many beside the
user's own."""
IN_VAIN = 0.15
"""On many slots, where a price takes long, layouts of equal degrees are priced by rising bound until some in succession
promise longer steps than the best: in sum longer by this part of it. One that promises no more begins the sum anew.
Those of the user's own degrees are all priced, as they may win where others are doubted."""
DEGREES = attrgetter("tp", "pp", "cp", "ep", "etp")
RAISED = 40
"""So many of the lowest bounds below the best step time are raised at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """What the search came back with."""

    candidates: tuple[Candidate, ...]
    """The layouts that were priced, in that order; the user's own first, where it fits."""
    num_seen: int
    """Layouts that were priced, or whose bound showed that they cannot win."""
    num_aside: int
    """Layouts that were not priced, as others of their degrees promise too little."""
    floor_s: float
    """Seconds: no legal layout that fits is faster in any placement."""
    is_cut_short: bool
    """The deadline came before the search had ended by itself."""


class SearchLoop:
    """The state of a search: the layouts that were priced, their best placements, and how often each was improved."""

    def __init__(self, inputs: SearchInputs, frontier: Frontier, *, seed: int, is_late: IsLate) -> None:
        """Begin with nothing priced.

        Args:
            inputs: what layouts are judged by.
            frontier: the layouts.
            seed: of all chance.
            is_late: whether the search must end.

        """
        self._inputs = inputs
        self._frontier = frontier
        self._seed = seed
        self._is_late = is_late
        self._pool: dict[Layout, Candidate] = {}
        self._beaten: dict[Layout, Promising] = {}
        self._surrounded: set[tuple[Layout, Placement]] = set()
        """Layouts and placements that were the best at some time, and whose neighbours were priced then."""
        self._missed_s = float("inf")
        """Least bound in seconds of the layouts that the deadline left without a price."""
        self._in_vain: dict[tuple[int, ...], float] = defaultdict(float)
        """By degrees, the sum of `IN_VAIN`."""
        self._aside: dict[Layout, Promising] = {}
        """Layouts that were not priced, as others of their degrees promise too little."""

    def run(self) -> Searched:
        """Search to the end or to the deadline."""
        self._price_own()
        self._frontier.hurry_when(self._is_late)
        if not self._is_late():
            self._price(self._frontier.dive(FIRST_BATCH, below_s=self._best_s()))
            self._surround()
            self._place(WHILE_PRICING)
        size = FIRST_BATCH if self._inputs.cluster.num_slots <= MANY_SLOTS else FIRST_BATCH_MANY
        while batch := self._frontier.take(size, below_s=self._best_s()):
            self._price(batch, beat_s=self._best_s())
            self._surround()
            self._place(WHILE_PRICING)
            size = min(size + size // 2, MOST_AT_ONCE)
            if self._is_late():
                break
        for width in next(widths for most, widths in AFTER_PRICING if self._inputs.cluster.num_slots <= most):
            self._place(width)
        self._anneal()
        self._exhaust()
        self._price_runners_up()
        self._prove()
        # The least of all lower bounds: layouts that the bound ruled out lie above the best.
        floors_s = [one.floor_s for one in self._pool.values()] + [one.least_s for one in self._aside.values()]
        return Searched(
            candidates=tuple(self._pool.values()),
            num_seen=len(self._pool) + len(self._beaten),
            num_aside=len(self._aside),
            floor_s=min(self._best_s(), self._missed_s, self._frontier.least_s, *floors_s),
            is_cut_short=self._is_late(),
        )

    def _price_own(self) -> None:
        """Price the user's own layout, if it has a price, even after the deadline: every choice is compared with it."""
        inputs, own = self._inputs, self._inputs.job.own
        if inputs.own_fault is None and inputs.own_dropped is None:
            first = [Promising(least_s=0.0, number=0, layout=own, peak_bytes=inputs.predictor.peaks(own))]
        else:
            first = (self._frontier.dive(1) or self._frontier.take(1))[:1]
        for one in first:
            self._keep(price(inputs, one, is_late=self._is_late))

    def _price(self, batch: list[Promising], *, beat_s: float = float("inf")) -> None:
        """Price those of a batch that were not priced before; none is set aside where there is nothing to beat."""
        for one in batch:
            if one.layout in self._pool or one.layout in self._beaten:
                continue
            degrees = DEGREES(one.layout)
            if self._is_late():
                self._missed_s = min(self._missed_s, one.least_s)
            elif self._in_vain[degrees] >= IN_VAIN and beat_s < math.inf:
                self._aside[one.layout] = one
            else:
                found = price(self._inputs, one, beat_s=beat_s, is_late=self._is_late)
                self._keep(found)
                if isinstance(found, Candidate) and self._may_be_in_vain(found.layout):
                    excess = found.promise_s / beat_s - 1
                    self._in_vain[degrees] = self._in_vain[degrees] + excess if excess > 0 else 0.0

    def _may_be_in_vain(self, layout: Layout) -> bool:
        """Whether other layouts of its degrees may get no price for what this one promises."""
        return self._inputs.cluster.num_slots > MANY_SLOTS and DEGREES(layout) != DEGREES(self._inputs.job.own)

    def _keep(self, found: Candidate | Promising) -> None:
        self._aside.pop(found.layout, None)
        if isinstance(found, Candidate):
            self._beaten.pop(found.layout, None)
            self._pool[found.layout] = found
        else:
            self._beaten[found.layout] = found

    def _surround(self) -> None:
        """Price the neighbours of the best layout in its placement, until none of them is better.

        A price takes milliseconds at 10,240 ranks, and improving a placement takes seconds. So a search that the
        deadline ends early still does not lose to its own plan with one flag changed. A neighbour that is no better is
        not kept: the frontier hands it out later, and then it gets starts of its own.
        """
        while not self._is_late():
            leader = self._leader()
            placement, best_s = leader.placed.placement, leader.placed.cost_s
            if (leader.layout, placement) in self._surrounded:
                return
            self._surrounded.add((leader.layout, placement))
            near = self._frontier.neighbours(leader.layout, below_s=best_s)
            for one in near:
                if self._is_late():
                    return
                found = price(self._inputs, one, beat_s=best_s, is_late=self._is_late, carried=placement)
                if isinstance(found, Candidate):
                    known = self._pool.get(one.layout)
                    self._keep(replace(known, placed=found.placed) if known else found)

    def _place(self, width: int) -> None:
        """Improve the placements of the most promising layouts by one round, then price the neighbours of the best."""
        for one in self._hopes(width):
            if self._is_late():
                return
            self._pool[one.layout] = with_better_placement(self._inputs, one, seed=self._seed, is_late=self._is_late)
        self._surround()

    def _hopes(self, width: int) -> list[Candidate]:
        """Return the most promising layouts whose sharpened bounds say that they could win by what is worth it."""
        best_s = self._best_s() * (1 - WORTH)
        found: list[Candidate] = []
        taken: Counter[tuple[int, ...]] = Counter()
        for one in sorted(self._pool.values(), key=lambda one: one.promise_s):
            if len(found) == width or self._is_late():
                break
            degrees = DEGREES(one.layout)
            if one.can_improve and one.bound_s < best_s and taken[degrees] < ALIKE:
                sharper = self._sharpened(one)
                if sharper.can_improve and sharper.bound_s < best_s:
                    taken[degrees] += 1
                    found.append(sharper)
        return found

    def _sharpened(self, one: Candidate) -> Candidate:
        """Bound a layout by the links that it must use, once; that is cheaper than improving its placement."""
        if not one.bound_reason:
            bound = placement_bound_s(self._inputs.predictor.placement_cost(one.layout))
            one = replace(one, bound_s=max(bound.seconds, one.bound_s), bound_reason=bound.words)
            self._pool[one.layout] = one
        return one

    def _anneal(self) -> None:
        """Let single ranks change hosts for the fastest layouts, where that may save much of the best step."""
        inputs, is_late = self._inputs, self._is_late
        if inputs.cluster.num_slots not in ANNEALED_SLOTS:
            return
        for fast in sorted(self._pool.values(), key=lambda one: one.placed.cost_s)[:ANNEALED]:
            best_s = self._best_s()
            if is_late() or fast.placed.cost_s > best_s * (1 + ANNEALED_NEAR):
                break
            one = self._sharpened(fast)
            if one.bound_s < best_s * (1 - ANNEALED_FOR):
                self._pool[one.layout] = with_devices_exchanged(inputs, one, seed=self._seed, is_late=is_late)
        self._surround()

    def _exhaust(self) -> None:
        """Try every placement of the best layout, where there are few."""
        leader = self._leader()
        slots = Slots.of(self._inputs.cluster)
        is_open = not are_few(leader.layout, slots) and num_placements(leader.layout, slots) <= EXACT
        if is_open and not leader.meets_bound and not self._is_late():
            problem = placement_problem(self._inputs, leader.layout, leader.bound_s)
            *_, placed = leader.placed, *exhaustion(problem, leader.placed, is_late=self._is_late)
            self._pool[leader.layout] = replace(leader, placed=placed)

    def _price_runners_up(self) -> None:
        """Price some layouts that are not the fastest: of the lowest bounds, of less memory, and beside the user's own.

        They are alternatives; those beside the user's own are taken where the fastest rests on too little measurement.
        """
        near = [*sorted(self._beaten.values())[:RUNNERS_UP], *self._beside_own()]
        for one in near:
            self._beaten.pop(one.layout, None)
        most_bytes = LEANER * max(self._leader().peak_bytes)
        self._price([*near, *self._frontier.runners_up(RUNNERS_UP, most_bytes=most_bytes)])

    def _beside_own(self) -> list[Promising]:
        """Return some that differ from the user's own in one choice and could be faster."""
        own = self._pool.get(self._inputs.job.own)
        if own is None:
            return []
        near = self._frontier.neighbours(own.layout, below_s=own.host_order_s)
        return [one for one in near if one.layout not in self._pool][:RUNNERS_UP]

    def _prove(self) -> None:
        """Sharpen the bound of the best layout, then raise the lowest bounds, while that could raise the floor.

        Of a layout that was set aside the price raises it, of another the links that it must use.
        """
        if not self._is_late():
            self._sharpened(self._leader())
        for _ in range(RAISED):
            lowest = min(self._pool.values(), key=lambda one: (one.floor_s, one.placed.cost_s))
            aside = min(self._aside.values(), default=None)
            if self._is_late():
                return
            if aside is not None and aside.least_s < lowest.floor_s:
                self._keep(price(self._inputs, aside, beat_s=self._best_s(), is_late=self._is_late))
            elif lowest.bound_reason or lowest.floor_s >= self._best_s():
                return
            else:
                self._sharpened(lowest)

    def _leader(self) -> Candidate:
        return min(self._pool.values(), key=lambda one: one.placed.cost_s)

    def _best_s(self) -> float:
        return min((one.placed.cost_s for one in self._pool.values()), default=float("inf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SolveOptions:
    """How hard to look, and what counts as better."""

    margin: float = MARGIN
    """Another plan than the user's own must be faster by this part of the step."""
    memory_margin: float = MEMORY_MARGIN
    """Part of the device's memory that stays free."""
    budget_s: float = SEARCH_BUDGET_S
    seed: int = SEED
    num_alternatives: int = 3
    schedules: tuple[str, ...] = ()
    """Schedules beside Megatron's own, by name."""

    def __post_init__(self) -> None:
        for name in ("margin", "memory_margin"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("budget_s", "num_alternatives"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} must not be negative, got {getattr(self, name)}")


def solve(
    job: Job,
    measurements: Measurements,
    *,
    options: SolveOptions,
    clock: Callable[[], float],
    provenance: Provenance,
    corrections: Corrections = NOTHING_LEARNED,
) -> Plan:
    """Find the fastest legal layout that fits, and its placement; the user's own configuration is the incumbent.

    The arguments and the seed fix what the search does, and the budget only ends it. So equal inputs give equal plans
    where the budget is not the limit, and more budget never finds a slower step; the plan may take one that counts as
    equally fast (`choose.EQUAL`), so its step may be longer by as much.

    Args:
        job: the model, the batch, the user's own layout and its pins.
        measurements: the allocation and what was measured on it.
        options: margins, budget, seed.
        clock: seconds that only grow, such as `time.monotonic`.
        provenance: stored in the plan as it is.
        corrections: learned from earlier outcomes on these machines; the plan's notes name them.

    Raises:
        PlanError: no layout is legal, fits or can be priced; the error names the constraint and what would help.

    """
    started_s = clock()
    deadline_s = started_s + options.budget_s
    cluster = measurements.cluster
    inputs = SearchInputs.of(job, measurements, memory_margin=options.memory_margin, corrections=corrections)
    found = cuts(
        job,
        world_size=cluster.num_slots,
        devices_per_host=cluster.devices_per_host,
        device_kind=cluster.device_kind,
        table=inputs.predictor.compute,
        rooms=inputs.rooms,
    )
    inputs = replace(inputs, own_fault=found.own_fault)

    def is_late() -> bool:
        return clock() >= deadline_s

    frontier = _frontier(inputs, found, options, is_late)
    searched = SearchLoop(inputs, frontier, seed=options.seed, is_late=is_late).run()
    dropped = _dropped(found, frontier, searched)
    plan = _plan(inputs, searched, options, corrections.notes, provenance)
    if options.schedules:
        # As long again as the search: some schedules of long pipelines take ten seconds to make.
        schedules_deadline_s = clock() + options.budget_s
        plan = _scheduled(plan, inputs, searched, frontier, options, lambda: clock() >= schedules_deadline_s)
    return replace(
        plan,
        reasons=(*plan.reasons, *explanations.kept_order(inputs, plan.chosen)),
        num_layouts=found.num_layouts,
        dropped=dropped,
        solve_s=clock() - started_s,
    )


def _dropped(found: Cuts, frontier: Frontier, searched: Searched) -> dict[str, int]:
    """Count the layouts that no longer stand for choice, by reason; the most frequent reason first."""
    dropped = Counter(found.dropped) + frontier.dropped
    if not searched.is_cut_short:
        outdone = len(frontier.outdone.difference(one.layout for one in searched.candidates))
        beaten = found.num_layouts - len(searched.candidates) - searched.num_aside - outdone - frontier.dropped.total()
        dropped += Counter({BEATEN: beaten, UNPROMISING: searched.num_aside, OUTDONE: outdone})
    return dict(dropped.most_common())


def _frontier(inputs: SearchInputs, found: Cuts, options: SolveOptions, is_late: IsLate) -> Frontier:
    """Bound the cuts; raises PlanError where neither a cut nor the user's own layout can be chosen."""
    job, measurements = inputs.job, inputs.measurements
    bounds = BoundColumns.of(job, measurements, inputs.predictor)
    frontier = Frontier(inputs, found, bounds)
    own_dropped = None if found.own_fault else inputs.own_dropped
    if own_dropped:
        frontier.dropped[own_dropped] += 1
    if (found.own_fault or own_dropped) and not frontier.find_any():
        raise explanations.nothing_left(
            inputs, dropped=frontier.dropped, memory_margin=options.memory_margin, is_late=is_late
        )
    return frontier


def _plan(
    inputs: SearchInputs, searched: Searched, options: SolveOptions, learned: tuple[str, ...], provenance: Provenance
) -> Plan:
    """Choose among the layouts that were priced, with reasons; the caller adds the counts of dropped layouts."""
    chosen = choose(inputs, searched.candidates, margin=options.margin, num_alternatives=options.num_alternatives)
    cut_short = (explanations.cut_short(searched.num_seen, options.budget_s),) if searched.is_cut_short else ()
    return Plan(
        hosts=tuple(host.name for host in inputs.cluster.hosts),
        devices_per_host=inputs.cluster.devices_per_host,
        device_kind=inputs.cluster.device_kind,
        chosen=chosen.choice,
        alternatives=chosen.alternatives,
        own=chosen.own,
        own_fault=inputs.own_cannot_run,
        keeps_own=chosen.keeps_own,
        reasons=(*cut_short, *explanations.reasons(inputs, chosen, floor_s=searched.floor_s, margin=options.margin)),
        notes=(*learned, *explanations.notes(inputs, chosen)),
        num_layouts=0,
        dropped={},
        floor_s=searched.floor_s,
        solve_s=0.0,
        provenance=provenance,
    )


def _scheduled(
    plan: Plan, inputs: SearchInputs, searched: Searched, frontier: Frontier, options: SolveOptions, is_late: IsLate
) -> Plan:
    """Choose a schedule that Megatron lacks, where one saves enough; else say what speaks against all of them."""
    fault = unsupported(inputs.job, inputs.cluster)
    if fault:
        return replace(plan, notes=(*plan.notes, f"Schedules beside Megatron's own are left out: {fault}."))
    over_the_limit = frontier.over_the_limit(live=LEANEST)
    found = best_scheduled(
        inputs, searched.candidates, over_the_limit, plan.chosen, options.schedules, seed=options.seed, is_late=is_late
    )
    if found is None:
        return plan
    return replace(
        plan,
        chosen=found,
        # Tried next, should the patch fail.
        alternatives=(plan.chosen, *plan.alternatives)[: options.num_alternatives],
        keeps_own=False,
        floor_s=min(plan.floor_s, found.step_time_s),
        reasons=(explanations.scheduled(found, plan.chosen), *plan.reasons),
    )
