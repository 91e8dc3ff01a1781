"""A lower bound over all placements of one layout, from the links and slots as they were measured.

Each argument (`bounds/arguments.py`) names something slow that every placement must use, raises the prices of one
pipeline's step accordingly, and tries every pipeline rank where it could be. The shortest of these steps is a lower
bound, so the largest over all arguments is one too. Ranks are counted in blocks that exchange inside the layers. Either
every such group lies within a host, or some group does not and pays for a link between hosts: each case has its bound,
and the lesser of them holds for all placements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipette_launch.cost.step.placed import PlacementCost
from pipette_launch.facts.layout import Layout
from pipette_launch.search.bounds.arguments import BoundArgument, BoundArguments
from pipette_launch.search.bounds.raised_prices import RaisedPrices, side_by_side
from pipette_launch.search.bounds.rings import Places

_ROUNDING = 1e-12
"""Of sums that run in another order than those of a placement."""
_EQUAL = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """No placement of a layout is faster."""

    seconds: float
    words: str
    """Why, as a sentence without its end."""


def placement_bound_s(model: PlacementCost) -> Bound:
    """Bound the step time of a layout over all its placements.

    Args:
        model: the layout's step time as a function of the placement (`Predictor.placement_cost`).

    """
    best, places = RaisedPrices.best(model), Places.of(model)
    cases: list[list[BoundArgument]] = []
    for block in blocks(model.work.layout, places.devices):
        arguments = BoundArguments(places=places, best=best, unit=block.unit)
        cases.append(list(arguments.all()))
        if len(places) > 1:
            cases[-1] += [arguments.crossing(names) for names in block.breaks]
    every = [argument for case in cases for argument in case]
    seconds_K = side_by_side([argument.trials for argument in every]).steps_s_K(model.work)
    ends = np.cumsum([len(argument.trials.embedding_s_K) for argument in every])
    least = iter([float(seconds_K[start:end].min()) for start, end in zip([0, *ends[:-1]], ends, strict=True)])
    least_s, words = min(
        (_largest([(next(least), one.words) for one in case]) for case in cases), key=lambda pair: pair[0]
    )
    return Bound(seconds=least_s * (1 - _ROUNDING) * model.factor, words=words)


def _largest(bounds: list[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest bound, with the sentence of the first argument that gives it."""
    most_s = max(seconds for seconds, _ in bounds)
    return most_s, next(words for seconds, words in bounds if seconds >= most_s * (1 - _EQUAL))


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A case: each block of so many ranks lies on one place, and some groups do not."""

    unit: int
    breaks: tuple[tuple[str, ...], ...]
    """Names of kinds of groups; of each tuple some group of one of these kinds. Empty = no group lies on several."""


def blocks(layout: Layout, devices: int) -> list[Block]:
    """Return cases of which one holds for every placement.

    Groups are taken from the innermost outwards: tensor-parallel, context-parallel, then experts', as long as blocks
    of them fill places of so many devices. Where they cannot be filled, some group does not lie on one place.
    """
    kinds: list[tuple[int, tuple[str, ...]]] = []
    cell = layout.tp * layout.cp
    if layout.tp > 1:
        kinds.append((layout.tp, ("tp",)))
    if layout.cp > 1:
        kinds.append((cell, ("cp",)))
    experts, shared = layout.ep * layout.etp, ("ep", "etp", "ep_etp")
    nested = not layout.use_tp_pp_dp_mapping and (experts % cell == 0 or cell % experts == 0)
    if experts > 1 and nested and layout.ep > 1:
        kinds.append((max(experts, cell), shared))
    found = []
    unit = 1
    for size, names in kinds:
        # Ranks that share experts are whole groups of the others, so where one of these breaks they break too.
        breaks = (names, shared) if names != shared and kinds[-1][1] == shared and experts % size == 0 else (names,)
        found.append(Block(unit=unit, breaks=breaks))
        if devices % math.lcm(unit, size):
            return found
        unit = math.lcm(unit, size)
    return [*found, Block(unit=unit, breaks=())]
