"""The search for a plan: list layouts, drop layouts that do not fit, price and place promising layouts, choose one."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipette_launch.cost.learned import NOTHING_LEARNED, Corrections
from pipette_launch.cost.step.step_bounds import BoundColumns
from pipette_launch.defaults import MARGIN, MEMORY_MARGIN, SEARCH_BUDGET_S, SEED
from pipette_launch.errors import OptionError, check_share
from pipette_launch.facts import Job, Layout, Measurements, Plan, Provenance
from pipette_launch.facts.plan import MOST_RANKED
from pipette_launch.search import explanations
from pipette_launch.search.candidates import MANY_SLOTS, WORTH, Candidate, Promising, SearchInputs
from pipette_launch.search.choose import DEGREES, LEANER, choose, ranking
from pipette_launch.search.frontier import DOMINATED, PRUNED, UNPROMISING, Frontier
from pipette_launch.search.layouts import BaseLayouts, base_layouts
from pipette_launch.search.schedule_choice import LEANEST, best_scheduled, unsupported
from pipette_launch.search.slots import IsLate

FIRST_BATCH = 6
"""Number of layouts that are priced before placements are improved. Each later batch is 1.5 times larger."""
FIRST_BATCH_MANY = 48
"""Number of layouts in the first batch on many slots, where placing takes 40 times longer than pricing."""
MOST_AT_ONCE = 64
WHILE_PRICING = 1
"""Number of layouts whose placements are improved after each batch."""
AFTER_PRICING = ((1024, (4, 2, 1)), (math.inf, (2, 1, 1)))
"""(most slots, number of layouts that each round after pricing improves). On more slots fewer, as rounds are slow."""
ALIKE = 2
"""In one round, at most this number of layouts with equal degrees is placed. A good placement of one layout also suits
other layouts with these degrees."""
MOST_EXCESS = 0.15
"""On many slots, layouts of equal degrees are priced by rising bound, until consecutive layouts promise longer steps
than the best step. Pricing stops once the seconds beyond the best step sum up to this share of the best step. A layout
that promises a step no longer than the best step sets the sum to 0. All layouts with the user's own degrees are priced,
because predictions for these degrees are the most certain."""
LEANER_LAYOUTS = 3
"""Number of layouts with less memory than the best that are priced at the end, in case memory runs out."""
OFFLOAD_GAIN = 0.02
"""Share of the best step that a layout with offloaded activations must save, because copies may slow other traffic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """The result of a search."""

    candidates: tuple[Candidate, ...]
    """Priced layouts in the order of pricing. The user's own layout comes first if it fits in memory."""
    num_seen: int
    """Number of layouts that were priced, or were pruned by a lower bound above the best step."""
    num_open: int
    """Number of layouts that were left open, because layouts with the same degrees looked slower than the best."""
    num_offloaded: int
    """Number of priced layouts with offloading, which the list of base layouts does not have."""
    floor_s: float
    is_cut_short: bool
    """True if the deadline ended the search."""


class SearchLoop:
    """A search in progress. A layout that the frontier returned is open (not priced yet), priced, or pruned."""

    def __init__(self, inputs: SearchInputs, frontier: Frontier, *, seed: int, is_late: IsLate) -> None:
        """Begin without priced layouts; `seed` decides random numbers, and `is_late` returns true at the deadline."""
        self._inputs, self._frontier, self._seed, self._is_late = inputs, frontier, seed, is_late
        self._priced: dict[Layout, Candidate] = {}
        self._pruned: set[Layout] = set()
        self._open: dict[Layout, Promising] = {}
        self._excess: dict[tuple[int, ...], float] = defaultdict(float)
        """For each set of degrees: sum of the shares by which promised steps exceed the best step (`MOST_EXCESS`)."""
        self._num_offloaded = 0

    def run(self) -> Searched:
        """Search to the end or to the deadline: the user's own layout, a dive, layouts by rising bound, placements."""
        inputs = self._inputs
        self._price_first()
        if not self._is_late():
            self._price(self._frontier.dive(FIRST_BATCH, below_s=self._best_s()))
            self._place(WHILE_PRICING)
        size = FIRST_BATCH if inputs.cluster.num_slots <= MANY_SLOTS else FIRST_BATCH_MANY
        while batch := self._frontier.take(size, below_s=self._best_s(), is_late=self._is_late):
            self._price(batch, beat_s=self._best_s())
            self._place(WHILE_PRICING)
            size = min(size + size // 2, MOST_AT_ONCE)
            if self._is_late():
                break
        self._offload()
        for width in next(widths for most, widths in AFTER_PRICING if inputs.cluster.num_slots <= most):
            self._place(width)
        if not self._is_late():
            self._price_leaner()
        # Pruned layouts have bounds above the best step.
        floors_s = [one.bound_s for one in self._priced.values()] + [one.least_s for one in self._open.values()]
        return Searched(
            candidates=tuple(self._priced.values()),
            num_seen=len(self._priced) + len(self._pruned),
            num_open=len(self._open),
            num_offloaded=self._num_offloaded,
            floor_s=min(self._best_s(), self._frontier.least_s, *floors_s),
            is_cut_short=self._is_late(),
        )

    def _price_first(self) -> None:
        """Price the user's own layout even after the deadline, because the choice compares every plan with it."""
        inputs, own = self._inputs, self._inputs.job.own
        if inputs.own_fault is None and inputs.own_dropped is None:
            first = [Promising(least_s=0.0, number=0, layout=own, peak_bytes=inputs.predictor.peaks(own))]
        else:
            first = (self._frontier.dive(1) or self._frontier.take(1))[:1]
        for one in first:
            found = inputs.price(one)
            assert found is not None
            self._priced[one.layout] = found

    def _price(self, batch: list[Promising], *, beat_s: float = float("inf")) -> None:
        """Price the new layouts of a batch. Layouts are left open only if there is a step time to beat."""
        for one in batch:
            if one.layout in self._priced or one.layout in self._pruned:
                continue
            degrees = DEGREES(one.layout)
            if self._is_late() or (self._excess[degrees] >= MOST_EXCESS and beat_s < math.inf):
                self._open[one.layout] = one
                continue
            found = self._inputs.price(one, beat_s=beat_s)
            if found is None:
                self._pruned.add(one.layout)
                continue
            self._open.pop(one.layout, None)
            self._priced[one.layout] = found
            if self._inputs.cluster.num_slots > MANY_SLOTS and degrees != DEGREES(self._inputs.job.own):
                excess = found.promise_s / beat_s - 1
                self._excess[degrees] = self._excess[degrees] + excess if excess > 0 else 0.0

    def _place(self, width: int) -> None:
        """Improve the placements of the `width` most promising layouts."""
        for one in self._most_promising(width):
            if self._is_late():
                return
            self._priced[one.layout] = self._inputs.with_better_placement(one, seed=self._seed, is_late=self._is_late)

    def _offload(self) -> None:
        """Price layouts near the best one, and near the user's own, that fit only with offloaded activations."""
        own = () if self._inputs.own_cannot_run else (self._inputs.job.own,)
        for layout in dict.fromkeys((self._best().layout, *own)):
            least_s = (1 - OFFLOAD_GAIN) * self._best_s()
            for one in self._frontier.with_offloading(layout, below_s=least_s):
                found = None if self._is_late() else self._inputs.price(one, beat_s=least_s)
                if found and found.placed.cost_s < least_s:
                    self._num_offloaded += found.layout not in self._priced
                    self._priced[found.layout] = found

    def _price_leaner(self) -> None:
        """Price layouts that need less memory than the best, and are faster than the user's own if this one runs."""
        best, own = self._best(), self._priced.get(self._inputs.job.own)
        most_bytes, below_s = LEANER * max(best.peak_bytes), own.host_order_s if own else math.inf
        leaner = self._frontier.leaner(LEANER_LAYOUTS, most_bytes=most_bytes, below_s=below_s)
        self._pruned.difference_update(one.layout for one in leaner)
        self._price(leaner)

    def _most_promising(self, width: int) -> list[Candidate]:
        """Return the most promising layouts whose bounds allow a noticeable gain."""
        best_s = self._best_s() * (1 - WORTH)
        found: list[Candidate] = []
        taken: Counter[tuple[int, ...]] = Counter()
        for one in sorted(self._priced.values(), key=lambda one: one.promise_s):
            if len(found) == width or self._is_late():
                break
            degrees = DEGREES(one.layout)
            if one.can_improve and one.bound_s < best_s and taken[degrees] < ALIKE:
                taken[degrees] += 1
                found.append(one)
        return found

    def _best(self) -> Candidate:
        return min(self._priced.values(), key=lambda one: one.placed.cost_s)

    def _best_s(self) -> float:
        return min((one.placed.cost_s for one in self._priced.values()), default=float("inf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SolveOptions:
    """Effort of a search, and the rule for a better plan."""

    margin: float = MARGIN
    """Share of the user's own step time that another plan must save."""
    memory_margin: float = MEMORY_MARGIN
    """Share of device memory that a plan must leave free."""
    budget_s: float = SEARCH_BUDGET_S
    seed: int = SEED
    num_alternatives: int = 3
    schedules: tuple[str, ...] = ()
    """Names of schedules to try in addition to Megatron's own."""
    num_ranked: int = 0
    """Number of sets of degrees in the ranked list. With 0, the plan has no list and no front."""

    def __post_init__(self) -> None:
        check_share("margin", self.margin)
        check_share("memory_margin", self.memory_margin)
        if not 0 <= self.budget_s < math.inf:
            raise OptionError("budget_s", f"must be at least 0 seconds and finite, got {self.budget_s:g}")
        if not 0 <= self.num_ranked <= MOST_RANKED:
            raise OptionError("num_ranked", f"must be from 0 to {MOST_RANKED}, got {self.num_ranked}")


def solve(
    job: Job,
    measurements: Measurements,
    *,
    options: SolveOptions,
    clock: Callable[[], float],
    provenance: Provenance,
    corrections: Corrections = NOTHING_LEARNED,
) -> Plan:
    """Find the fastest legal layout that fits, place its ranks, and compare the plan with the user's own configuration.

    Arguments and seed decide each step of the search, and the budget only ends the search. So equal inputs give equal
    plans unless the budget runs out, and a larger budget never finds a slower step. The plan may still take another
    layout that counts as equally fast (`choose.EQUAL`). `clock` returns seconds that never decrease.

    Raises:
        PlanError: no layout is legal, fits or can be priced; the error names the reason and possible remedies.

    """
    started_s = clock()
    deadline_s = started_s + options.budget_s
    cluster = measurements.cluster
    inputs = SearchInputs.of(job, measurements, memory_margin=options.memory_margin, corrections=corrections)
    slots, table = cluster.num_slots, inputs.predictor.compute
    base = base_layouts(job, world_size=slots, device_kind=cluster.device_kind, domains=inputs.domains, table=table)
    inputs = replace(inputs, own_fault=base.own_fault)

    def is_late() -> bool:
        return clock() >= deadline_s

    frontier = _frontier(inputs, base, is_late)
    searched = SearchLoop(inputs, frontier, seed=options.seed, is_late=is_late).run()
    own_is_unlisted = job.own not in base and any(one.layout == job.own for one in searched.candidates)
    num_layouts = base.num_layouts + searched.num_offloaded + own_is_unlisted
    # The number of layouts that were ruled out, by reason, most frequent reason first.
    dropped = Counter(base.dropped) + frontier.dropped
    if not searched.is_cut_short:
        dominated = len(frontier.dominated.difference(one.layout for one in searched.candidates))
        pruned = num_layouts - len(searched.candidates) - searched.num_open - dominated - frontier.dropped.total()
        # A sum of Counters leaves negative numbers out without an error.
        assert pruned >= 0, f"{-pruned} layouts were counted twice"
        dropped += Counter({PRUNED: pruned, UNPROMISING: searched.num_open, DOMINATED: dominated})
    plan = _plan(inputs, searched, options, corrections.notes, provenance)
    if options.schedules:
        # Schedules get a budget of their own, because building schedules of long pipelines can take ten seconds.
        schedules_deadline_s = clock() + options.budget_s
        plan = _scheduled(plan, inputs, searched, frontier, options, lambda: clock() >= schedules_deadline_s)
    ranked, front = ranking(inputs, searched.candidates, plan.chosen, options.num_ranked)
    return replace(
        plan,
        ranked=ranked,
        front=front,
        num_layouts=num_layouts,
        dropped=dict(dropped.most_common()),
        solve_s=clock() - started_s,
    )


def _frontier(inputs: SearchInputs, base: BaseLayouts, is_late: IsLate) -> Frontier:
    """Compute bounds of the base layouts; raises PlanError if no layout can be chosen, not even the user's own."""
    bounds = BoundColumns(inputs.job, inputs.measurements, inputs.predictor)
    frontier = Frontier(inputs, base, bounds)
    if (base.own_fault or inputs.own_dropped) and not frontier.find_any():
        raise explanations.nothing_left(inputs, dropped=frontier.dropped, is_late=is_late)
    return frontier


def _plan(
    inputs: SearchInputs, searched: Searched, options: SolveOptions, learned: tuple[str, ...], provenance: Provenance
) -> Plan:
    """Choose among the priced layouts, with reasons; the caller adds counts and times."""
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
        advice=explanations.advice(inputs, chosen),
        num_layouts=0,
        dropped={},
        floor_s=searched.floor_s,
        solve_s=0.0,
        provenance=provenance,
    )


def _scheduled(
    plan: Plan, inputs: SearchInputs, searched: Searched, frontier: Frontier, options: SolveOptions, is_late: IsLate
) -> Plan:
    """Choose a schedule that Megatron lacks if it saves enough; note the reason if the job cannot run any."""
    fault = unsupported(inputs.job, inputs.cluster)
    if fault:
        return replace(plan, advice=(*plan.advice, f"Schedules beside Megatron's own are left out: {fault}."))
    found = best_scheduled(
        inputs,
        searched.candidates,
        frontier.over_the_limit(live=LEANEST),
        plan.chosen,
        options.schedules,
        seed=options.seed,
        is_late=is_late,
    )
    if found is None:
        return plan
    return replace(
        plan,
        chosen=found,
        # If the patch for the schedule fails, the job next tries the plan under Megatron's own schedule.
        alternatives=(plan.chosen, *plan.alternatives)[: options.num_alternatives],
        keeps_own=False,
        floor_s=min(plan.floor_s, found.step_time_s),
        reasons=(explanations.scheduled(found, plan.chosen), *plan.reasons),
    )
