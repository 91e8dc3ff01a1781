"""Better places for whole hosts: improve a model of the step time, judge by the step time itself, and model again."""

# H = hosts = seats = places, D = devices of one host.

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations

import numpy as np

from pipette_launch.cost.step.placed import PlacementCost
from pipette_launch.facts import Links
from pipette_launch.search.assignment.descent import descend
from pipette_launch.search.assignment.problem import Arrangement, Flows, Ints
from pipette_launch.search.placement.slots import IsLate, Placed, Placement, PlacementProblem, Slots, faster
from pipette_launch.search.placement.tiers import nearest
from pipette_launch.search.step_model.linear import linearise

FEW_HOSTS = 6
"""Up to so many, all orders of hosts (720 of six) are priced by the step time itself."""
FEW_DOMAINS = 4
"""The same of NVLink domains that hosts must stay in (24 orders of four), however many hosts they have."""
MANY_HOSTS = 64
DESCENTS = 3
"""Up to `MANY_HOSTS` hosts get the best of so many descents, which differ in chance alone; more hosts get one."""
DESCENT_STEPS = 50
"""Batches of proposals."""
TURNS = 3
"""How often the step time is modelled at most, each time at the best placement so far."""
NEAR = 16
"""Near places that a seat may be brought to."""
WORTH = 1e-6
"""A turn is made only if the model predicts that it saves this part of the step."""


def rearranged(
    problem: PlacementProblem, start: Placed, *, model: PlacementCost, rng: random.Random, is_late: IsLate
) -> Placed:
    """Exchange what hosts hold, without touching what any of them holds; never worse than the start.

    All orders of a few hosts are priced. For more it is a bounded piece of work, of some milliseconds for ten hosts
    and of the order of a second for a thousand.

    Args:
        problem: what is placed where.
        start: where to begin.
        model: the objective of the problem.
        rng: the only source of chance.
        is_late: whether to stop.

    """
    best, slots = start, problem.slots
    num_hosts = slots.num_hosts
    orders = list(_orders(best.placement, slots))
    if orders:
        best = faster(best, problem.best_of(orders))
    if num_hosts <= FEW_HOSTS:
        return best
    chance = np.random.default_rng(rng.getrandbits(64))
    known = None
    for _ in range(TURNS):
        if is_late() or best.is_optimal:
            break
        linear = linearise(model, np.array(best.placement), known=known)
        known = linear.cuts
        arranged = _arranged(linear.flows, problem.cluster.between_hosts, slots, chance, is_late)
        if arranged.cost_s >= linear.flows.cost(np.arange(num_hosts)) - WORTH * best.cost_s:
            break
        placement = moved(best.placement, arranged.place_Q)
        cost_s = model.cost(placement)
        if cost_s < best.cost_s:
            best = problem.placed(placement, cost_s)
        if num_hosts > MANY_HOSTS:
            # One turn takes as long as a round should there.
            break
        if cost_s > best.cost_s:
            # Add cuts at the placement that the model priced too low.
            known = linearise(model, np.array(placement), known=known).cuts
    return best


def _orders(placement: Placement, slots: Slots) -> Iterator[Placement]:
    """Yield all allowed orders of few hosts, or where hosts must stay in a few equal domains, those of domains."""
    groups = slots.host_groups
    ranks_HD = np.array(placement, dtype=np.int64).reshape(slots.num_hosts, -1)
    if slots.num_hosts <= FEW_HOSTS:
        for order in permutations(range(slots.num_hosts)):
            found = tuple(ranks_HD[list(order)].ravel().tolist())
            if len(groups) == 1 or slots.allows(found):
                yield found
    elif 1 < len(groups) <= FEW_DOMAINS and len({len(group) for group in groups}) == 1:
        there_HD = np.empty_like(ranks_HD)
        for ordered in permutations(groups):
            there_HD[np.ravel(groups)] = ranks_HD[np.ravel(ordered)]
            yield tuple(there_HD.ravel().tolist())


def _arranged(flows: Flows, links: Links, slots: Slots, rng: np.random.Generator, is_late: IsLate) -> Arrangement:
    """Better places for the seats of a block problem: the best of a few descents, or of one on many hosts."""
    start_Q, near_HK = np.arange(flows.num_seats), nearest(links, NEAR)
    group_H = np.asarray(slots.domain_H, dtype=np.int64) if slots.domain_H else None
    descents = (
        descend(flows, start_Q, near_HK=near_HK, group_H=group_H, steps=DESCENT_STEPS, rng=rng, is_late=is_late)
        for _ in range(DESCENTS if flows.num_seats <= MANY_HOSTS else 1)
    )
    return min(descents, key=lambda found: found.cost_s)


def moved(placement: Placement, place_Q: Ints) -> Placement:
    """Give what host q holds to host `place_Q[q]`."""
    ranks_HD = np.array(placement, dtype=np.int64).reshape(len(place_Q), -1)
    there_HD = np.empty_like(ranks_HD)
    there_HD[place_Q] = ranks_HD
    return tuple(there_HD.ravel().tolist())


def shuffled(placement: Placement, slots: Slots, rng: random.Random, *, share: float) -> Placement:
    """Let some random hosts pass on the ranks that they hold in a circle; of one domain, where ranks must stay in it.

    Args:
        placement: RANK of each slot.
        slots: of the cluster.
        rng: the only source of chance.
        share: of the hosts; three take part at least.

    """
    groups = slots.host_groups
    group = groups[0] if len(groups) == 1 else rng.choice(groups)
    chosen = rng.sample(group, min(len(group), max(3, round(share * len(group)))))
    place_Q = np.arange(slots.num_hosts)
    place_Q[chosen] = np.roll(chosen, 1)
    return moved(placement, place_Q)
