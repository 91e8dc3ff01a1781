"""Better places for whole hosts: settle a model of the step time, judge on the step time itself, and model again."""

# H = hosts = seats = places, D = devices of one host.

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import permutations

import numpy as np

from pipette_launch.cost.step.placed import PlacementCost
from pipette_launch.search.assignment.descent import descend
from pipette_launch.search.assignment.problem import Flows
from pipette_launch.search.assignment.settle import Settled, settle
from pipette_launch.search.placement.allowed import Ints, Placed, Placement, meets
from pipette_launch.search.placement.tiers import nearest
from pipette_launch.search.step_model.linear import linearise

FEW_HOSTS = 6
"""Up to so many, all orders of hosts (720 of six) are priced by the step time itself."""
TEMPERED_HOSTS = 40
TEMPERED_MOVES = 2_560
MANY_HOSTS = 64
STEPS, MORE_STEPS = 30, 50
"""Batches of proposals of a descent, and on many hosts."""
TURNS = 3
"""How often the step time is modelled at most, each time at the best placement of the last."""
NEAR = 16
"""Near places that a seat may be brought to."""
WORTH = 1e-6
"""Turns go on while the model promises to save this part of the step."""


def rearranged(
    start: Placed,
    num_hosts: int,
    *,
    model: PlacementCost,
    bound_s: float,
    rng: random.Random,
    clock: Callable[[], float],
    deadline_s: float,
) -> Placed:
    """Exchange what hosts hold, without touching what any of them holds; never worse than the start.

    All orders of a few hosts are priced. For more it is a bounded piece of work, of some milliseconds for ten hosts
    and of the order of a second for a thousand.
    """
    best = start
    if num_hosts <= FEW_HOSTS:
        return _best_order(best, num_hosts, model, bound_s)
    chance = np.random.default_rng(rng.getrandbits(64))
    known = None
    near_HK = nearest(model.fabric.cluster.between_hosts, NEAR)
    for _ in range(TURNS):
        if clock() >= deadline_s or best.is_optimal:
            break
        linear = linearise(model, np.array(best.placement), known=known)
        known = linear.cuts
        settled = _settled(linear.flows, near_HK, chance, clock=clock, deadline_s=deadline_s)
        if settled.cost >= linear.flows.cost(np.arange(num_hosts)) - WORTH * best.cost_s:
            break
        placement = moved(best.placement, settled.place_Q)
        cost_s = model.cost(placement)
        if cost_s < best.cost_s:
            best = Placed(placement=placement, cost_s=cost_s, is_optimal=meets(cost_s, bound_s))
            if num_hosts > MANY_HOSTS:
                # One such turn is a round's work there.
                break
        else:
            # What the model did not know of the place that it liked.
            known = linearise(model, np.array(placement), known=known).cuts
    return best


def _settled(
    flows: Flows, near_HK: Ints, rng: np.random.Generator, *, clock: Callable[[], float], deadline_s: float
) -> Settled:
    """Downhill from here; on few hosts then by tempering, or by trying every order."""
    found = descend(
        flows,
        np.arange(flows.num_seats),
        near_HK=near_HK,
        steps=MORE_STEPS if flows.num_seats > MANY_HOSTS else STEPS,
        rng=rng,
        clock=clock,
        deadline_s=deadline_s,
    )
    if flows.num_seats > TEMPERED_HOSTS:
        return found
    return settle(flows, found.place_Q, moves=TEMPERED_MOVES, rng=rng, clock=clock, deadline_s=deadline_s)


def moved(placement: Placement, place_Q: Ints) -> Placement:
    """Give what host q holds to host `place_Q[q]`."""
    ranks_HD = np.array(placement, dtype=np.int64).reshape(len(place_Q), -1)
    there_HD = np.empty_like(ranks_HD)
    there_HD[place_Q] = ranks_HD
    return tuple(there_HD.ravel().tolist())


def shuffled(placement: Placement, num_hosts: int, rng: random.Random, *, share: float) -> Placement:
    """Let a share of the hosts, three at least, pass on what they hold in a circle."""
    count = min(num_hosts, max(3, round(share * num_hosts)))
    chosen = rng.sample(range(num_hosts), count)
    place_Q = np.arange(num_hosts)
    place_Q[chosen] = np.roll(chosen, 1)
    return moved(placement, place_Q)


def _best_order(best: Placed, num_hosts: int, model: PlacementCost, bound_s: float) -> Placed:
    orders = np.array(list(permutations(range(num_hosts))), dtype=np.int64)
    ranks_HD = np.array(best.placement, dtype=np.int64).reshape(num_hosts, -1)
    placement_KW = ranks_HD[orders].reshape(len(orders), -1)
    costs = model.costs(placement_KW)
    least = int(costs.argmin())
    if costs[least] >= best.cost_s:
        return best
    cost_s = float(costs[least])
    return Placed(placement=tuple(placement_KW[least].tolist()), cost_s=cost_s, is_optimal=meets(cost_s, bound_s))
