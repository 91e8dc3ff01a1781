"""Price one layout: its bound, its step time in the best of some placements, and in a better one."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from pipette_launch.facts import Layout, files
from pipette_launch.search.candidates import Candidate, SearchInputs
from pipette_launch.search.frontier import Promising
from pipette_launch.search.placement.device_order import settled
from pipette_launch.search.placement.search import begin, exchange_devices, improve
from pipette_launch.search.placement.slots import IsLate, Placement, PlacementProblem, host_order

GAIN = 1e-4
"""A round that saves less than this part of the step counts as one without gain."""


def price(
    inputs: SearchInputs,
    one: Promising,
    *,
    is_late: IsLate,
    beat_s: float = float("inf"),
    carried: Placement | None = None,
) -> Candidate | Promising:
    """Bound a layout, and price it in torchrun's order and in the best start; one that cannot win gets only its bound.

    Args:
        inputs: what layouts are judged by.
        one: the layout.
        is_late: whether to try no more starts.
        beat_s: seconds; a layout that takes as long is not priced.
        carried: the placement of another layout, priced instead of the starts.

    """
    layout = one.layout
    bound_s = inputs.predictor.bound_s(layout)
    if math.isfinite(one.least_s):
        bound_s = max(bound_s, one.least_s)
    beaten = replace(one, least_s=bound_s)
    if bound_s >= beat_s:
        return beaten
    problem = placement_problem(inputs, layout, bound_s)
    if carried:
        best = settled(problem, carried)
        if best.cost_s >= beat_s:
            return beaten
        host_order_s = problem.best_of([host_order(layout.world_size)]).cost_s
    else:
        best, host_order_s = begin(problem, is_late=is_late)
    return Candidate(layout=layout, peak_bytes=one.peak_bytes, bound_s=bound_s, host_order_s=host_order_s, placed=best)


def with_better_placement(inputs: SearchInputs, one: Candidate, *, seed: int, is_late: IsLate) -> Candidate:
    """Search one round for a better placement; what is found depends on the candidate and the seed alone.

    Args:
        inputs: what layouts are judged by.
        one: a layout and its best placement so far.
        seed: of all chance.
        is_late: whether to end the round early.

    """
    problem, rng = placement_problem(inputs, one.layout, one.bound_s), _chance(one, seed)
    placed = improve(problem, one.placed, turn=one.rounds, rng=rng, is_late=is_late)
    # The first round goes on from the best start, which may be a minimum; up to 64 hosts the next begins elsewhere.
    is_stalled = one.rounds > 0 and placed.cost_s >= one.placed.cost_s * (1 - GAIN)
    return replace(one, placed=placed, rounds=one.rounds + 1, is_stalled=is_stalled)


def with_devices_exchanged(inputs: SearchInputs, one: Candidate, *, seed: int, is_late: IsLate) -> Candidate:
    """Let single ranks change hosts from the best placement on; arguments as in `with_better_placement`."""
    problem, rng = placement_problem(inputs, one.layout, one.bound_s), _chance(one, seed)
    return replace(one, placed=exchange_devices(problem, one.placed, rng=rng, is_late=is_late))


def placement_problem(inputs: SearchInputs, layout: Layout, bound_s: float) -> PlacementProblem:
    """A layout to be placed on the slots of the allocation, by its step time."""
    objective = inputs.predictor.placement_cost(layout)
    return PlacementProblem(
        layout=layout, cluster=inputs.cluster, objective=objective, bound_s=bound_s, blocks=inputs.blocks(layout)
    )


def _chance(one: Candidate, seed: int) -> random.Random:
    return random.Random(files.digest(seed, one.layout, one.rounds))
