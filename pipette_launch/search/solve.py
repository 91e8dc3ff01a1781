"""The front door: enumerate, drop what does not fit, place the promising, return the best plan within the budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipette_launch.cost.corrected import NOTHING_LEARNED, Corrections
from pipette_launch.errors import UsageError
from pipette_launch.facts import Job, Layout, Measurements, Plan, Provenance, files
from pipette_launch.search import advise, words
from pipette_launch.search.candidates import Candidate, Field
from pipette_launch.search.choose import choose
from pipette_launch.search.enumerate import layouts
from pipette_launch.search.place import (
    AT_ONCE,
    EXACT,
    Placed,
    Seats,
    exhaustion,
    improvements,
    num_placements,
)

Clock = Callable[[], float]

FIRST_BATCH = 32
"""Layouts that are priced before the best of all so far are placed."""
RUNNERS_UP = 24
"""So many are priced although their bounds say that they cannot win."""
WHILE_PRICING = (1,)
"""So many layouts are placed further in each round between two batches; every layout has had its starts by then."""
AFTER_PRICING = (8, 4, 2, 2)
"""And so many once all are priced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolveOptions:
    """How hard to look, and what counts as better."""

    margin: float = 0.02
    """Another plan than the user's own must be faster by this part of the step."""
    memory_margin: float = 0.08
    """Part of the device's memory that stays free."""
    budget_s: float = 5.0
    seed: int = 0
    num_alternatives: int = 3

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
    clock: Clock,
    provenance: Provenance,
    corrections: Corrections = NOTHING_LEARNED,
) -> Plan:
    """Find the fastest legal layout that fits, and its placement; the user's own configuration is the incumbent.

    The course is fixed by the arguments and the seed, and the budget only cuts it short. So equal inputs give equal
    plans where the budget is not the limit, and more budget never gives a slower plan.

    Args:
        job: the model, the batch, the user's own layout and its pins.
        measurements: the allocation and what was measured on it.
        options: margins, budget, seed.
        clock: seconds that only grow, such as `time.monotonic`.
        provenance: stored in the plan as it is.
        corrections: what earlier outcomes on these machines taught; the plan's notes say what was made of it.

    Raises:
        PlanError: no layout is legal, fits or can be priced; it says which constraint binds and what would help.

    """
    started_s = clock()
    cluster = measurements.cluster
    found = layouts(
        job,
        world_size=cluster.num_slots,
        devices_per_host=cluster.devices_per_host,
        device_kind=cluster.device_kind,
    )
    field = Field.of(job, measurements, found, memory_margin=options.memory_margin, corrections=corrections)
    if not field.peak_bytes:
        raise advise.nothing_left(field, found, memory_margin=options.memory_margin)
    searched = search(field, seed=options.seed, clock=clock, deadline_s=started_s + options.budget_s)
    chosen = choose(field, searched.candidates, margin=options.margin, num_alternatives=options.num_alternatives)
    cut_short = (words.cut_short(field, searched.num_seen, options.budget_s),) if searched.is_cut_short else ()
    return Plan(
        hosts=tuple(host.name for host in cluster.hosts),
        devices_per_host=cluster.devices_per_host,
        device_kind=cluster.device_kind,
        chosen=chosen.choice,
        alternatives=chosen.alternatives,
        own=chosen.own,
        keeps_own=chosen.keeps_own,
        reasons=words.reasons(field, chosen, margin=options.margin),
        notes=(*cut_short, *corrections.notes, *words.notes(field, chosen)),
        num_layouts=field.num_layouts,
        dropped=field.dropped,
        solve_s=clock() - started_s,
        provenance=provenance,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """What the search came back with."""

    candidates: tuple[Candidate, ...]
    """The layouts that were priced, in that order; the user's own first, where it fits."""
    num_seen: int
    """Layouts that were priced, or whose bound showed that they cannot win."""
    is_cut_short: bool
    """The deadline came before the end of the course."""


def search(field: Field, *, seed: int, clock: Clock, deadline_s: float) -> Searched:
    """Price the layouts in batches, each twice as large as the last, place a few after each, and more at the end.

    It is one fixed course that the deadline cuts short; the first layout (the user's own, where it fits) is always
    priced.
    """
    course = _Course(field, seed=seed, clock=clock, deadline_s=deadline_s)
    todo = list(field.peak_bytes)
    size = FIRST_BATCH
    while todo:
        course.price(todo[:size])
        course.place(WHILE_PRICING)
        todo, size = todo[size:], 2 * size
    course.place(AFTER_PRICING)
    course.price_runners_up()
    course.prove()
    return Searched(candidates=tuple(course.pool.values()), num_seen=course.num_seen, is_cut_short=course.is_late())


class _Course:
    """The state of a search: what was priced so far, and how far the placing of each layout has come."""

    def __init__(self, field: Field, *, seed: int, clock: Clock, deadline_s: float) -> None:
        self.field = field
        self.pool: dict[Layout, Candidate] = {}
        self.num_seen = 0
        self._seed = seed
        self._clock = clock
        self._deadline_s = deadline_s
        self._beaten: dict[Layout, float] = {}
        self._courses: dict[Layout, Iterator[Placed]] = {}

    def is_late(self) -> bool:
        """Whether the time is up."""
        return self._clock() >= self._deadline_s

    def price(self, batch: list[Layout]) -> None:
        """Price a batch in torchrun's order by rising bound, until none of the rest can be faster than the best."""
        bounds: dict[Layout, float] = {}
        for layout in batch:
            if (bounds or self.pool) and self.is_late():
                break
            bounds[layout] = self.field.predictor.bound_s(layout)
        own = self.field.job.own
        for layout in sorted(bounds, key=lambda layout: (layout != own, bounds[layout])):
            if self.pool and self.is_late():
                return
            self.num_seen += 1
            if bounds[layout] < self._least_s():
                self._admit(self.field.in_host_order(layout, bound_s=bounds[layout]))
            else:
                self._beaten[layout] = bounds[layout]

    def place(self, widths: tuple[int, ...]) -> None:
        """Go on with the placing of the most promising layouts, so many in each round."""
        for width in widths:
            for layout in self._hopes()[:width]:
                if self.is_late():
                    return
                self._improve(layout)

    def price_runners_up(self) -> None:
        """Price the nearest of those that cannot win: they are what to try after the best."""
        nearest = sorted(self._beaten, key=lambda layout: self._beaten[layout])[:RUNNERS_UP]
        for layout in nearest:
            if self.is_late():
                return
            self.pool[layout] = self.field.in_host_order(layout, bound_s=self._beaten[layout])

    def prove(self) -> None:
        """Try every placement of the best layout, where they are few."""
        leader = min(self.pool.values(), key=lambda candidate: candidate.placed.cost_s)
        seats = Seats.of(self.field.cluster)
        if leader.meets_bound or not AT_ONCE < num_placements(leader.layout, seats) <= EXACT:
            return
        for placed in exhaustion(
            leader.layout,
            seats,
            leader.placed,
            cost=self.field.predictor.objective(leader.layout),
            clock=self._clock,
            deadline_s=self._deadline_s,
        ):
            self.pool[leader.layout] = replace(leader, placed=placed, is_exhausted=placed.is_optimal)

    def _hopes(self) -> list[Layout]:
        """Layouts whose placing is not at its end and could still win, the most promising first."""
        least_s = self._least_s()
        hopes = [one for one in self.pool.values() if one.can_improve and one.bound_s < least_s]
        return [one.layout for one in sorted(hopes, key=lambda one: one.promise_s)]

    def _admit(self, one: Candidate) -> None:
        """Take in a layout and its first placements, from a seed of its own, so that no other changes its course."""
        self.pool[one.layout] = one
        if not one.can_improve:
            return
        self._courses[one.layout] = improvements(
            one.layout,
            self.field.cluster,
            cost=self.field.predictor.objective(one.layout),
            bound_s=one.bound_s,
            rng=random.Random(files.digest(self._seed, one.layout)),
            clock=self._clock,
            deadline_s=self._deadline_s,
        )
        self._improve(one.layout)

    def _improve(self, layout: Layout) -> None:
        """Go one step further with the placing of a layout."""
        one = self.pool[layout]
        placed = next(self._courses[layout], None)
        if placed is not None and placed.cost_s <= one.placed.cost_s:
            one = replace(one, placed=placed)
        self.pool[layout] = replace(one, num_searches=one.num_searches + 1, is_exhausted=placed is None)

    def _least_s(self) -> float:
        return min((candidate.placed.cost_s for candidate in self.pool.values()), default=float("inf"))
