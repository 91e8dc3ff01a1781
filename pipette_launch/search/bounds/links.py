"""What no placement can avoid of the links between hosts, from what each link costs.

A ring is a closed tour over units (blocks of ranks that lie on one host each); every host holds equally many units, all
of them are in use, and every unit lies on one ring. The functions check only a part of these conditions, so the figures
are lower bounds and not optima.
"""

# H = hosts, J = rings.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.collectives import spanning_tree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def best_ways(cost_HH: Floats) -> tuple[Floats, Floats]:
    """Return what the best link out of each host costs, and the best one into it; rows send."""
    cost = _without_own(cost_HH)
    out_H: Floats = cost.min(axis=1)
    in_H: Floats = cost.min(axis=0)
    return out_H, in_H


def through(cost_HH: Floats, *, visits_once: bool) -> Floats:
    """Return what the slowest link of a ring through each host, and through others, costs at least.

    It leaves the host and comes back. Where it visits each host once, and three or more, it does not come back from
    where it went.
    """
    cost = _without_own(cost_HH)
    out_H, in_H = best_ways(cost_HH)
    best_H: Floats = np.maximum(out_H, in_H)
    if not visits_once or len(cost) < 3:
        return best_H
    second_out_H = np.partition(cost, 1, axis=1)[:, 1]
    second_in_H = np.partition(cost, 1, axis=0)[1]
    apart_H = np.minimum(np.maximum(second_out_H, in_H), np.maximum(out_H, second_in_H))
    return np.where(cost.argmin(axis=1) == cost.argmin(axis=0), apart_H, best_H)


def ring_thresholds(
    cost_HH: Floats, *, units_per_host: int, ring_units: int, fewest: int, through_H: Floats
) -> list[float]:
    """Return, for each ring in turn, what its slowest link costs at least: J entries, cheapest ring first.

    Rings that use only links up to some cost lie inside the parts that these links join, on hosts that such a ring can
    pass through: a part of m such hosts holds no more than floor(m * units_per_host / ring_units) rings, and none if m
    is below `fewest`. Rings that fit on one host cost 0.

    Args:
        cost_HH: seconds of a ring whose slowest link is the one from host to host; rows send.
        units_per_host: units on each host.
        ring_units: units of a ring.
        fewest: hosts that a ring lies on at least.
        through_H: least seconds of a ring that passes through each host.

    """
    hosts = len(cost_HH)
    rings = hosts * units_per_host // ring_units
    if fewest < 2 or hosts < 2:
        return [0.0] * rings

    def num_held(hosts: int) -> int:
        return hosts * units_per_host // ring_units if hosts >= fewest else 0

    part_of = list(range(hosts))
    members = [[host] for host in range(hosts)]
    usable = [0] * hosts
    events = [(cost, 1, one, other) for cost, one, other in spanning_tree(cost_HH)]
    events += [(float(cost), 0, host, host) for host, cost in enumerate(through_H)]
    found: list[float] = []
    held = 0
    for cost, is_join, one, other in sorted(events):
        keep, drop = part_of[one], part_of[other]
        if is_join and len(members[keep]) < len(members[drop]):
            keep, drop = drop, keep
        held -= num_held(usable[keep])
        if is_join:
            held -= num_held(usable[drop])
            usable[keep] += usable[drop]
            for host in members[drop]:
                part_of[host] = keep
            members[keep] += members[drop]
        else:
            usable[keep] += 1
        held += num_held(usable[keep])
        found += [cost] * (held - len(found))
    return found[:rings]


def partitions(cost_HH: Floats, *, most: int) -> list[tuple[Ints, float]]:
    """Return some ways to part the hosts: the part of each host, and what the cheapest link between parts costs.

    Hosts are parted where the joining links grow the most from one to the next; the first way is every host for itself.
    """
    tree = spanning_tree(cost_HH)
    costs = [cost for cost, _, _ in tree]
    steps = sorted(range(1, len(costs)), key=lambda at: costs[at - 1] / costs[at] if costs[at] else 1.0)
    found = []
    for at in [0, *(at for at in steps[: most - 1] if costs[at - 1] < costs[at])] if costs else []:
        part_H = np.arange(len(cost_HH))
        for _, one, other in tree[:at]:
            part_H[part_H == part_H[other]] = part_H[one]
        found.append((np.unique(part_H, return_inverse=True)[1].reshape(-1), costs[at]))
    return found


def cheapest_between(cost_HH: Floats, part_H: Ints) -> float:
    """Return what the cheapest link costs that leads from one part to another."""
    return float(cost_HH[part_H[:, None] != part_H[None, :]].min())


def cuts(stages: int, longest: int, *, most: int) -> list[tuple[int, ...]]:
    """Return sets of hops such that any cut of the stages into runs of at most `longest` cuts all hops of one of them.

    Hop h leads from stage h to h + 1. Where there are more than `most` smallest sets, their smaller subsets stand in.
    """
    smallest = list(itertools.islice(_smallest_cuts(stages, longest), most + 1))
    if len(smallest) <= most:
        return smallest
    needed = -(-stages // longest) - 1
    fewer = max(size for size in range(needed + 1) if math.comb(stages - 1, size) <= most)
    return list(itertools.combinations(range(stages - 1), fewer))


def returning_cuts(stages: int, longest: int, *, most: int) -> list[tuple[int, ...]] | None:
    """Return the same where first and last run lie together, and are at most `longest` in all; None = too many.

    There are two cuts or more then; an empty list says that first and last stage cannot lie together.
    """
    found = []
    for first, last in itertools.combinations(range(stages - 1), 2):
        if first + stages - last <= longest:
            for inner in _smallest_cuts(last - first, longest):
                found.append((first, *(first + 1 + hop for hop in inner), last))
                if len(found) > most:
                    return None
    return found


def _smallest_cuts(stages: int, longest: int, done: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the cuts of which every hop is needed: any two runs side by side are longer than `longest`."""
    first = done[-1] + 1 if done else 0
    if stages - first <= longest:
        if _needs_all(done, stages, longest):
            yield done
        return
    before = done[-2] if len(done) > 1 else -1
    for hop in range(first, first + longest):
        if not done or hop - before > longest:
            yield from _smallest_cuts(stages, longest, (*done, hop))


def _needs_all(hops: Sequence[int], stages: int, longest: int) -> bool:
    bounds = [-1, *hops, stages - 1]
    return all(after - before > longest for before, after in zip(bounds, bounds[2:], strict=False))


def _without_own(cost_HH: Floats) -> Floats:
    cost: Floats = cost_HH.copy()
    np.fill_diagonal(cost, np.inf)
    return cost
