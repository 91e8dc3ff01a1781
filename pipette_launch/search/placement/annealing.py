"""Simulated annealing of a placement: Pipette's swap, migration and reversal, of hosts or of single ranks."""

# A line is a list of carriers, each a sequence of slots that move together.

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from pipette_launch.facts.cluster import in_device_order, shared_order
from pipette_launch.search.placement.slots import IsLate, Placed, Placement, PlacementProblem, Slots

WIDTH = 32
"""Neighbours that are priced together at each step, of which the best is looked at: 32 cost little more than one."""
PATIENCE = 12
"""The walk ends after so many steps without a new best."""
START_TEMPERATURE, END_TEMPERATURE = 0.01, 0.001
"""In parts of what the step time may fall at all.

Relative temperatures make one schedule serve a step of 10 ms and one of 10 s; Pipette's annealer drops the size of a
change altogether, and so treats a loss of 0.1 % like one of 100 %.
"""


def annealed(problem: PlacementProblem, start: Placed, *, steps: int, rng: random.Random, is_late: IsLate) -> Placed:
    """Walk from a placement to its neighbours, downhill always and uphill at times, and return the best one seen.

    It depends on the arguments and `rng` alone; the deadline only cuts it short, so more time is never worse.

    Args:
        problem: what is placed where.
        start: where to begin; nothing worse is ever returned.
        steps: over so many steps the temperature falls, geometrically.
        rng: the only source of chance.
        is_late: whether to stop.

    """
    here = best = start
    found_at, slots = 0, problem.slots
    devices = slots.devices_per_host
    order_D = shared_order(start.placement, devices)
    for step in range(steps if _kinds(slots) else 0):
        if is_late() or step - found_at >= PATIENCE:
            break
        neighbours = [neighbour(here.placement, slots, rng) for _ in range(WIDTH)]
        there = problem.best_of(in_device_order(neighbours, devices, order_D))
        temperature = START_TEMPERATURE * math.pow(END_TEMPERATURE / START_TEMPERATURE, step / steps)
        if _accepts(there.cost_s - here.cost_s, temperature * (start.cost_s - problem.bound_s), rng):
            here = there
            if here.cost_s < best.cost_s:
                best, found_at = here, step
    return best


def _accepts(rise_s: float, temperature_s: float, rng: random.Random) -> bool:
    """Metropolis' rule."""
    chance = rng.random()  # Drawn always, so that the walk does not depend on how costs are rounded.
    return rise_s <= 0 or (temperature_s > 0 and chance < math.exp(-rise_s / temperature_s))


def neighbour(placement: Placement, slots: Slots, rng: random.Random) -> Placement:
    """Swap, move or reverse along a random line: hosts, or slots of several hosts.

    Between hosts on CUDA only ranks of equal residue change places, which keeps every host's residues distinct. The
    result says which ranks a host has, and not which of its devices they take.
    """
    line = _line(placement, slots, rng)
    order = _rearranged(len(line), rng)
    changed = list(placement)
    for target, source in enumerate(order):
        if target != source:
            for to, origin in zip(line[target], line[source], strict=True):
                changed[to] = placement[origin]
    return tuple(changed)


def _line(placement: Placement, slots: Slots, rng: random.Random) -> Sequence[Sequence[int]]:
    """A line along which ranks may move."""
    kinds = _kinds(slots)
    kind = rng.choice(kinds)
    groups = slots.host_groups
    hosts = groups[0] if len(groups) == 1 or kind == "units" else rng.choice(groups)
    if kind == "hosts":
        return [slots.host(host) for host in hosts]
    if not slots.keeps_residues:
        return [(slot,) for slot in range(slots.num_slots)]
    if kind == "units":
        return _carriers(placement, slots, slots.ranks_of_a_unit, range(slots.num_hosts), rng)
    return _carriers(placement, slots, slots.ranks_of_a_host_unit, hosts, rng)


def _kinds(slots: Slots) -> list[str]:
    """The lines that there are: each has two carriers at least, and keeps what must lie together."""
    devices = slots.devices_per_host
    kinds = ["hosts"] if all(len(group) > 1 for group in slots.host_groups) else []
    kinds += ["slots"] if kinds and slots.ranks_of_a_host_unit < devices else []
    apart = math.lcm(slots.ranks_of_a_unit, devices)
    if slots.domain_H and slots.num_slots >= 2 * apart and slots.num_slots % apart == 0:
        kinds.append("units")
    return kinds


def _carriers(
    placement: Placement, slots: Slots, size: int, hosts: Sequence[int], rng: random.Random
) -> Sequence[Sequence[int]]:
    """The slots of each unit of `size` ranks on some hosts, of those that begin with the same residue, by rank."""
    apart = math.lcm(size, slots.devices_per_host)
    first = size * rng.randrange(apart // size)
    slot_of = {rank: slot for slot, rank in enumerate(placement)}
    units = [tuple(slot_of[rank] for rank in range(one, one + size)) for one in range(first, len(placement), apart)]
    chosen = set(hosts)
    return sorted(unit for unit in units if unit[0] // slots.devices_per_host in chosen)


def _rearranged(length: int, rng: random.Random) -> list[int]:
    """Pipette's moves on a line: swap two, move one elsewhere, or reverse a segment."""
    order = list(range(length))
    first, second = sorted(rng.sample(order, 2))
    move = rng.choice(("swap", "migrate", "reverse"))
    if move == "swap":
        order[first], order[second] = second, first
    elif move == "reverse":
        order[first : second + 1] = order[first : second + 1][::-1]
    elif rng.random() < 0.5:
        order.insert(second, order.pop(first))
    else:
        order.insert(first, order.pop(second))
    return order
