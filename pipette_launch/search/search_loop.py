"""The order of a search: price promising layouts, improve the placement of the best, then bound how good the best is.

What the search does next depends on what it found before, never on the clock: the deadline ends it and changes nothing
else, so more time never gives a slower plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipette_launch.facts import Layout
from pipette_launch.search.bounds.placement_bound import placement_bound_s
from pipette_launch.search.candidates import MANY_SLOTS, Candidate, Field
from pipette_launch.search.choose import LEANER
from pipette_launch.search.frontier import Frontier, Promising
from pipette_launch.search.placement.exhaustive import AT_ONCE, EXACT, num_placements
from pipette_launch.search.placement.slots import IsLate, Placed, Placement, Slots
from pipette_launch.search.tasks import Task, Tried, perform

FIRST_BATCH = 6
"""Layouts that are priced before the placement of the best is improved; each batch is half as large again."""
MOST_AT_ONCE = 64
WHILE_PRICING = 1
"""After each batch the placements of so many layouts are improved."""
AFTER_PRICING = (8, 4, 2, 2)
AFTER_PRICING_MANY = (2, 1, 1)
"""And so many in each round after all are priced; fewer on many slots, where a round gains more and takes longer."""
RUNNERS_UP = 3
"""So many layouts that cannot win are priced as alternatives, and as many that need less memory."""
GAIN = 1e-4
"""A round that saves less than this part of the step counts as one without gain."""
SHARPENED = 6
"""So many candidates whose bound is below the best step time are bounded again by the links that they must use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """What the search came back with."""

    candidates: tuple[Candidate, ...]
    """The layouts that were priced, in that order; the user's own first, where it fits."""
    num_seen: int
    """Layouts that were priced, or whose bound showed that they cannot win."""
    floor_s: float
    """Seconds: no legal layout that fits is faster in any placement."""
    is_cut_short: bool
    """The deadline came before the search had ended by itself."""


class SearchLoop:
    """The state of a search: the layouts that were priced, their best placements, and how often each was improved."""

    def __init__(
        self,
        field: Field,
        frontier: Frontier,
        *,
        seed: int,
        is_late: IsLate,
    ) -> None:
        """Begin with nothing priced.

        Args:
            field: what layouts are judged by.
            frontier: the layouts.
            seed: of all chance.
            is_late: whether the search must end.

        """
        self._field = field
        self._frontier = frontier
        self._seed = seed
        self._is_late = is_late
        self._pool: dict[Layout, Candidate] = {}
        self._beaten: dict[Layout, Promising] = {}
        self._surrounded: set[tuple[Layout, Placement]] = set()
        """Layouts and placements that were the best at some time, and whose neighbours were priced then."""
        self._missed_s = float("inf")
        """Least bound in seconds of the layouts that the deadline left without a price."""

    def run(self) -> Searched:
        """Search to the end or to the deadline."""
        self._price_own()
        self._frontier.hurry_when(self._is_late)
        if not self._is_late():
            self._price(self._frontier.dive(FIRST_BATCH, below_s=self._best_s()))
            self._surround()
            self._place(WHILE_PRICING)
        size = FIRST_BATCH
        while batch := self._frontier.take(size, below_s=self._best_s()):
            self._price(batch, beat_s=self._best_s())
            self._surround()
            self._place(WHILE_PRICING)
            size = min(size + size // 2, MOST_AT_ONCE)
            if self._is_late():
                break
        for width in AFTER_PRICING if self._field.cluster.num_slots <= MANY_SLOTS else AFTER_PRICING_MANY:
            self._place(width)
        self._exhaust()
        self._price_runners_up()
        self._prove()
        return Searched(
            candidates=tuple(self._pool.values()),
            num_seen=len(self._pool) + len(self._beaten),
            floor_s=self._floor_s(),
            is_cut_short=self._is_late(),
        )

    def _run_tasks(self, tasks: list[Task]) -> list[Tried | None]:
        """Return the results of a batch in its order, None for a task that would begin after the deadline."""
        return [
            None if self._is_late() else perform(self._field, task, seed=self._seed, is_late=self._is_late)
            for task in tasks
        ]

    def _price_own(self) -> None:
        """Price the user's own layout, if it has a price, even after the deadline: every choice is compared with it."""
        field, own = self._field, self._field.job.own
        if field.own_fault is None and field.own_dropped is None:
            first = [Promising(least_s=0.0, number=0, layout=own, peak_bytes=field.predictor.peaks(own))]
        else:
            first = (self._frontier.dive(1) or self._frontier.take(1))[:1]
        for one in first:
            task = Task(stage="price", layout=one.layout)
            tried = perform(self._field, task, seed=self._seed, is_late=self._is_late)
            self._pool[one.layout] = _candidate(one, tried)

    def _price(self, batch: list[Promising], *, beat_s: float = float("inf")) -> None:
        """Price those of a batch that were not priced before."""
        batch = [one for one in batch if one.layout not in self._pool and one.layout not in self._beaten]
        found = self._run_tasks([Task(stage="price", layout=one.layout, beat_s=beat_s) for one in batch])
        for one, tried in zip(batch, found, strict=True):
            if tried is None:
                self._missed_s = min(self._missed_s, one.least_s)
            elif tried.is_priced:
                self._pool[one.layout] = _candidate(one, tried)
            else:
                self._beaten[one.layout] = replace(one, least_s=tried.bound_s)

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
            tasks = [Task(stage="carry", layout=one.layout, placement=placement, beat_s=best_s) for one in near]
            for one, tried in zip(near, self._run_tasks(tasks), strict=True):
                if tried is not None and tried.cost_s < best_s:
                    known = self._pool.get(one.layout)
                    self._pool[one.layout] = _better(known, tried) if known else _candidate(one, tried)
                    self._beaten.pop(one.layout, None)

    def _place(self, width: int) -> None:
        """Improve the placements of the most promising layouts by one round, then price the neighbours of the best."""
        hopes = self._hopes(width)
        tasks = [
            Task(
                stage="improve",
                layout=one.layout,
                placement=one.placed.placement,
                cost_s=one.placed.cost_s,
                bound_s=one.bound_s,
                round=one.rounds,
            )
            for one in hopes
        ]
        for one, tried in zip(hopes, self._run_tasks(tasks), strict=True):
            if tried is not None:
                gained = tried.cost_s < one.placed.cost_s * (1 - GAIN)
                self._pool[one.layout] = replace(
                    _better(one, tried), rounds=one.rounds + 1, stalled=0 if gained else one.stalled + 1
                )
        self._surround()

    def _hopes(self, width: int) -> list[Candidate]:
        """Return the most promising layouts whose sharpened bounds say that they could still win."""
        best_s = self._best_s()
        found: list[Candidate] = []
        for one in sorted(self._pool.values(), key=lambda one: one.promise_s):
            if len(found) == width or self._is_late():
                break
            if one.can_improve and one.bound_s < best_s:
                sharper = self._sharpened(one)
                if sharper.can_improve and sharper.bound_s < best_s:
                    found.append(sharper)
        return found

    def _sharpened(self, one: Candidate) -> Candidate:
        """Bound a layout by the links that it must use, once; that is cheaper than improving its placement."""
        if not one.bound_reason:
            bound = placement_bound_s(self._field.predictor.placement_cost(one.layout))
            one = replace(one, bound_s=max(bound.seconds, one.bound_s), bound_reason=bound.words)
            self._pool[one.layout] = one
        return one

    def _exhaust(self) -> None:
        """Try every placement of the best layout, where there are few."""
        leader = self._leader()
        few = AT_ONCE < num_placements(leader.layout, Slots.of(self._field.cluster)) <= EXACT
        if leader.meets_bound or not few:
            return
        placed = leader.placed
        task = Task(stage="exhaust", layout=leader.layout, placement=placed.placement, cost_s=placed.cost_s)
        for tried in self._run_tasks([task]):
            if tried is not None:
                self._pool[leader.layout] = _better(leader, tried)

    def _price_runners_up(self) -> None:
        """Price some layouts that cannot win, as alternatives: those of the lowest bounds, and some of less memory."""
        near = sorted(self._beaten.values())[:RUNNERS_UP]
        for one in near:
            self._beaten.pop(one.layout)
        most_bytes = LEANER * max(self._leader().peak_bytes)
        self._price([*near, *self._frontier.runners_up(RUNNERS_UP, most_bytes=most_bytes)])

    def _prove(self) -> None:
        """Sharpen the bound of the best layout, then the lowest bounds, while that could raise the floor."""
        if not self._is_late():
            self._sharpened(self._leader())
        for _ in range(SHARPENED):
            lowest = min(self._pool.values(), key=lambda one: (one.floor_s, one.placed.cost_s))
            if self._is_late() or lowest.bound_reason or lowest.floor_s >= self._best_s():
                return
            self._sharpened(lowest)

    def _floor_s(self) -> float:
        """The least of all lower bounds; layouts that the bound ruled out lie above the best."""
        floors = [one.floor_s for one in self._pool.values()]
        return min(self._best_s(), self._missed_s, self._frontier.least_s, *floors)

    def _leader(self) -> Candidate:
        return min(self._pool.values(), key=lambda one: one.placed.cost_s)

    def _best_s(self) -> float:
        return min((one.placed.cost_s for one in self._pool.values()), default=float("inf"))


def _candidate(one: Promising, tried: Tried) -> Candidate:
    return Candidate(
        layout=one.layout,
        peak_bytes=one.peak_bytes,
        bound_s=tried.bound_s,
        host_order_s=tried.host_order_s,
        placed=Placed(placement=tried.placement, cost_s=tried.cost_s, is_optimal=tried.is_optimal),
    )


def _better(one: Candidate, tried: Tried) -> Candidate:
    """The candidate with the placement that was found, where it is no worse."""
    if tried.cost_s > one.placed.cost_s:
        return one
    return replace(one, placed=Placed(placement=tried.placement, cost_s=tried.cost_s, is_optimal=tried.is_optimal))
