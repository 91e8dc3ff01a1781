"""Another order of devices inside hosts, the same on all hosts, where that order alone pays clearly."""

# H = hosts, D = devices of one host, O = orders.

from __future__ import annotations

from functools import lru_cache
from itertools import permutations

import numpy as np

from pipette_launch.facts import Cluster, Links
from pipette_launch.facts.cluster import in_device_order, shared_order
from pipette_launch.search.assignment.problem import Ints
from pipette_launch.search.placement.slots import IsLate, Placed, Placement, PlacementProblem
from pipette_launch.search.placement.tiers import distances_s, tiers_of

LEAST_GAIN = 0.02
"""Part of the step that an order must save against device order on the same hosts."""
UNEVEN = 1.25
"""Links inside a host differ if the slowest takes longer than the fastest by this factor, in the mean of both ways.
With a spread of 3 % the 28 links of eight devices lie within 1.2 of each other on each of 64 hosts."""
ALL_ORDERS = 4
"""All orders of up to this number of devices are priced (24 of four)."""
SWEEPS = 8
"""Most passes over all swaps of two devices."""


def settled(problem: PlacementProblem, placement: Placement) -> Placed:
    """Price a placement from elsewhere, with its devices in order unless its own order pays here too."""
    return _judged(problem, [shared_order(placement, problem.slots.devices_per_host)], placement)


def ordered(problem: PlacementProblem, placed: Placed, *, is_late: IsLate, thorough: bool) -> Placed:
    """Look for the best order of devices that all hosts share; device order stays unless another pays clearly.

    Args:
        problem: a layout and the slots for its ranks.
        placed: ranks of each host, in any shared order.
        is_late: whether to stop.
        thorough: also swap devices while that gains, beyond a few likely orders.

    """
    cluster, devices = problem.cluster, problem.slots.devices_per_host
    if not are_uneven(cluster.within_host):
        return placed
    known = shared_order(placed.placement, devices)
    best = _judged(problem, [known, *map(tuple, _likely_orders(cluster).tolist())], placed.placement)
    for _ in range(SWEEPS if thorough and devices > ALL_ORDERS else 0):
        here = shared_order(best.placement, devices)
        if here is None or is_late():
            break
        found = _judged(problem, [here, *_swapped(here)], best.placement)
        if found.cost_s >= best.cost_s:
            break
        best = found
    return best


@lru_cache(maxsize=4)
def are_uneven(within_host: tuple[Links, ...]) -> bool:
    """Return true if the links inside any host differ by more than their spread."""
    return within_host[0].size > 2 and any(_ratio(links) > UNEVEN for links in set(within_host))


def _ratio(links: Links) -> float:
    one_way = distances_s(links)[np.triu_indices(links.size, 1)]
    return float(one_way.max() / one_way.min()) if one_way.min() > 0 else 1.0


def _judged(problem: PlacementProblem, orders: list[tuple[int, ...] | None], placement: Placement) -> Placed:
    """Return the best of some orders of the same ranks, or device order where none of them pays clearly."""
    devices = problem.slots.devices_per_host
    plain = in_device_order(placement, devices)
    different = list(dict.fromkeys(order for order in orders if order and order != tuple(range(devices))))
    placement_KW = np.array([plain, *(in_device_order(plain, devices, order) for order in different)])
    costs_s = problem.objective.costs(placement_KW)
    least = int(costs_s.argmin())
    chosen = least if costs_s[least] < costs_s[0] * (1 - LEAST_GAIN) else 0
    return problem.placed(tuple(placement_KW[chosen].tolist()), float(costs_s[chosen]))


def _swapped(order: tuple[int, ...]) -> list[tuple[int, ...]]:
    found = []
    for first in range(len(order)):
        for second in range(first + 1, len(order)):
            swapped = list(order)
            swapped[first], swapped[second] = swapped[second], swapped[first]
            found.append(tuple(swapped))
    return found


def _likely_orders(cluster: Cluster) -> Ints:
    return _orders_of(cluster.within_host)


@lru_cache(maxsize=4)
def _orders_of(within_host: tuple[Links, ...]) -> Ints:
    """Return all orders of few devices, else near devices side by side or at each distance that divides a host."""
    devices = within_host[0].size
    if devices <= ALL_ORDERS:
        return np.array(list(permutations(range(devices))), dtype=np.int64)
    kinds = list(dict.fromkeys(within_host))
    slowest = Links(
        latency_s=np.max([links.latency_s for links in kinds], axis=0),
        bandwidth_bytes_per_s=np.min([links.bandwidth_bytes_per_s for links in kinds], axis=0),
    )
    near_D = tiers_of(slowest).order_H
    widths = [width for width in range(1, devices) if devices % width == 0]
    return np.array([near_D.reshape(width, -1).T.ravel() for width in widths])
