"""The work of a search, cut into tasks of one layout each.

What a task finds depends on the task, the field and the seed alone, not on the tasks before it nor on the clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipette_launch.facts import Layout, files
from pipette_launch.search.candidates import Field
from pipette_launch.search.placement.exhaustive import exhaustion
from pipette_launch.search.placement.search import begin, improve
from pipette_launch.search.placement.slots import IsLate, Placed, Placement, PlacementProblem, faster, host_order

Clock = Callable[[], float]
Stage = Literal["price", "carry", "improve", "exhaust"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One piece of work on one layout."""

    stage: Stage
    """What to do with the layout.

    `price`: bound it, and price it in torchrun's order and in the best start. `carry`: the same in `placement`, which
    was found for another layout. `improve`: search for a better placement from `placement` on. `exhaust`: try all.
    """
    layout: Layout
    beat_s: float = float("inf")
    """Seconds: a layout whose bound is no lower is not priced."""
    placement: Placement = ()
    cost_s: float = float("inf")
    bound_s: float = 0.0
    round: int = 0
    """How often this layout was improved before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """The result of a task."""

    bound_s: float
    host_order_s: float = float("inf")
    """Step time in torchrun's order; infinite where the bound ended the pricing."""
    placement: Placement = ()
    cost_s: float = float("inf")
    is_optimal: bool = False

    @property
    def is_priced(self) -> bool:
        """Whether the layout has a price, and not only a bound."""
        return bool(self.placement)


def perform(field: Field, task: Task, *, seed: int, is_late: IsLate) -> Tried:
    """Do one task; when it is late it ends early, always with a result.

    Args:
        field: what layouts are judged by.
        task: what to do.
        seed: of all chance in the task.
        is_late: whether the time is up.

    """
    if task.stage in ("price", "carry"):
        return _first_price(field, task, is_late=is_late)
    objective = field.predictor.placement_cost(task.layout)
    problem = PlacementProblem(layout=task.layout, cluster=field.cluster, objective=objective, bound_s=task.bound_s)
    placed = Placed(placement=task.placement, cost_s=task.cost_s, is_optimal=False)
    if task.stage == "exhaust":
        *_, placed = placed, *exhaustion(problem, placed, is_late=is_late)
    else:
        rng = random.Random(files.digest(seed, task.layout, task.round))
        placed = improve(problem, placed, turn=task.round, rng=rng, is_late=is_late)
    return Tried(bound_s=task.bound_s, placement=placed.placement, cost_s=placed.cost_s, is_optimal=placed.is_optimal)


def _first_price(field: Field, task: Task, *, is_late: IsLate) -> Tried:
    """Price a layout in torchrun's order, and in the best start or in the placement that the task names."""
    layout = task.layout
    bound_s = field.predictor.bound_s(layout)
    if bound_s >= task.beat_s:
        return Tried(bound_s=bound_s)
    objective = field.predictor.placement_cost(layout)
    problem = PlacementProblem(layout=layout, cluster=field.cluster, objective=objective, bound_s=bound_s)
    if task.stage == "carry":
        best = problem.best_of([task.placement])
        if best.cost_s >= task.beat_s:
            return Tried(bound_s=bound_s)
    in_host_order = problem.best_of([host_order(layout.world_size)])
    if task.stage == "price":
        best = in_host_order
        if not best.is_optimal:
            started = begin(problem, is_late=is_late)
            best = started if started.is_optimal else faster(best, started)
    return Tried(
        bound_s=bound_s,
        host_order_s=in_host_order.cost_s,
        placement=best.placement,
        cost_s=best.cost_s,
        is_optimal=best.is_optimal,
    )
