"""The search for the placement of a layout with the least step time: from several starts, by hosts and by ranks."""

# H = hosts = seats = places, D = devices of one host.

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, islice, permutations

import numpy as np

from pipette_launch.cost.step.predictor import PlacementCost
from pipette_launch.facts import Layout, Links
from pipette_launch.facts.cluster import in_device_order, shared_order
from pipette_launch.search.assignment.descent import descend
from pipette_launch.search.assignment.problem import Arrangement, Flows, Ints
from pipette_launch.search.near_hosts import distances_s, nearest, tiers_of
from pipette_launch.search.slots import IsLate, Placed, Placement, PlacementProblem, Slots, faster, starts
from pipette_launch.search.step_model import linearise

ROUNDS = 4
"""Largest number of rounds that improve the placement of one layout."""
FEW_STARTS = 6
"""Starts that are priced first. On 512 GPUs the best of 6 was 0.1 % slower than the best of all, on average."""
MANY_STARTS = 24
"""Starts that the first round prices."""
FEW_SLOTS = 32
"""Largest number of slots for which single ranks change hosts in each round too. On four hosts of two devices this
saved up to 11 % of a step, in cases in which rings had to pass a host twice."""
ANNEALING_STEPS = 60
ANNEALED_SLOTS = range(FEW_SLOTS + 1, 257)
"""Numbers of slots for which single ranks change hosts once, after all rounds. On 64 slots this saved up to 5 %."""
STEPS_AT_LAST = 20
SHUFFLED = 0.1
"""Share of the hosts that every second round first exchanges at random."""


def begin(problem: PlacementProblem, *, is_late: IsLate) -> tuple[Placed, float]:
    """Return the best of a few starts (of all placements if these are few), and the seconds of torchrun's order."""
    order_W = np.arange(problem.slots.num_slots)
    starts_KW = starts(problem.layout, problem.cluster, most=FEW_STARTS, blocks=problem.blocks)
    is_allowed = bool((starts_KW[0] == order_W).all())
    priced_KW = starts_KW if is_allowed else np.concatenate([order_W[None], starts_KW])
    costs_s = problem.objective.costs(priced_KW)
    first = 0 if is_allowed else 1
    least = first + int(costs_s[first:].argmin())
    best = problem.placed(tuple(priced_KW[least].tolist()), float(costs_s[least]))
    if are_few(problem.layout, problem.slots) and not best.is_optimal:
        *_, best = best, *exhaustion(problem, best, is_late=is_late)
    return faster(best, ordered(problem, best, is_late=is_late, thorough=False)), float(costs_s[0])


def improve(problem: PlacementProblem, best: Placed, *, turn: int, rng: random.Random, is_late: IsLate) -> Placed:
    """Search one round for a placement that is better than the best so far.

    Whole hosts change places first; on few slots, single ranks follow by annealing. Round 0 continues from the best.
    Later rounds alternate between the best with some hosts exchanged, and another start, to reach other minima.

    Args:
        problem: the layout and its slots.
        best: best placement so far.
        turn: number of earlier rounds.
        rng: random numbers.
        is_late: ends the round early.

    """
    slots = problem.slots
    start = _start(problem, best, turn, rng)
    if isinstance(problem.objective, PlacementCost) and slots.num_hosts > 1:
        start = rearranged(problem, start, model=problem.objective, rng=rng, is_late=is_late)
    found = faster(best, start)
    if slots.num_slots <= FEW_SLOTS and not found.is_optimal:
        found = annealed(problem, start, steps=ANNEALING_STEPS, rng=rng, is_late=is_late)
    return faster(best, _reordered(problem, found, is_late))


def exchange_devices(problem: PlacementProblem, best: Placed, *, rng: random.Random, is_late: IsLate) -> Placed:
    """Let single ranks change hosts after the last round, on clusters that are too large for it in each round."""
    if best.is_optimal or problem.slots.num_slots not in ANNEALED_SLOTS:
        return best
    found = annealed(problem, best, steps=STEPS_AT_LAST, rng=rng, is_late=is_late)
    return faster(best, _reordered(problem, found, is_late))


def improved_once(problem: PlacementProblem, start: Placed, *, rng: random.Random, is_late: IsLate) -> Placed:
    """Search one round from a start, and let single ranks change hosts at the end."""
    placed = improve(problem, start, turn=0, rng=rng, is_late=is_late)
    return exchange_devices(problem, placed, rng=rng, is_late=is_late)


def _reordered(problem: PlacementProblem, found: Placed, is_late: IsLate) -> Placed:
    """Choose the order of devices again, as hosts have changed places."""
    return ordered(problem, found, is_late=is_late, thorough=problem.slots.num_slots < ANNEALED_SLOTS.stop)


def _start(problem: PlacementProblem, best: Placed, turn: int, rng: random.Random) -> Placed:
    slots = problem.slots
    if turn > 0 and slots.num_hosts > MANY_HOSTS:
        # A round does not converge on many hosts, so the next one continues.
        return best
    if turn % 2 == 1 and slots.num_hosts > 1:
        return problem.best_of([shuffled(best.placement, slots, rng, share=SHUFFLED)])
    starts_KW = starts(problem.layout, problem.cluster, most=MANY_STARTS, blocks=problem.blocks)
    if turn == 0:
        # The first starts are priced again: the layout may have come with the placement of another.
        return faster(best, problem.best_of(starts_KW))
    chosen = turn // 2 % len(starts_KW)
    return problem.best_of(starts_KW[chosen : chosen + 1])


# Order of devices inside hosts: the same on all hosts, and changed only if the change alone pays clearly.

LEAST_GAIN = 0.02
"""Share of the step that an order of devices must save against device order on the same hosts."""
UNEVEN = 1.25
"""Links inside a host differ if the slowest takes longer than the fastest by this factor, mean of both directions. With
noise of 3 %, the 28 links of eight devices stay within 1.2 on each of 64 hosts."""
ALL_ORDERS = 4
"""Largest number of devices for which all orders are priced."""
SWEEPS = 8
"""Largest number of passes over all swaps of two devices."""


def settled(problem: PlacementProblem, placement: Placement) -> Placed:
    """Price a placement of another search; its devices are put in order unless their own order pays here too."""
    return _best_order(problem, [shared_order(placement, problem.slots.devices_per_host)], placement)


def ordered(problem: PlacementProblem, placed: Placed, *, is_late: IsLate, thorough: bool) -> Placed:
    """Choose the best order of devices, the same on all hosts; `thorough` also swaps devices while that gains."""
    devices = problem.slots.devices_per_host
    if not are_uneven(problem.cluster.within_host):
        return placed
    known = shared_order(placed.placement, devices)
    likely = map(tuple, _likely_orders(problem.cluster.within_host).tolist())
    best = _best_order(problem, [known, *likely], placed.placement)
    for _ in range(SWEEPS if thorough and devices > ALL_ORDERS else 0):
        here = shared_order(best.placement, devices)
        if here is None or is_late():
            break
        found = _best_order(problem, [here, *_swapped(here)], best.placement)
        if found.cost_s >= best.cost_s:
            break
        best = found
    return best


@lru_cache(maxsize=4)
def are_uneven(within_host: tuple[Links, ...]) -> bool:
    """Return whether the links inside any host differ by more than noise."""
    return within_host[0].size > 2 and any(_ratio(links) > UNEVEN for links in set(within_host))


def _ratio(links: Links) -> float:
    one_way = distances_s(links)[np.triu_indices(links.size, 1)]
    return float(one_way.max() / one_way.min()) if one_way.min() > 0 else 1.0


def _best_order(problem: PlacementProblem, orders: list[tuple[int, ...] | None], placement: Placement) -> Placed:
    """Return the best of some orders of the devices, or device order if no other pays clearly."""
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
    for first, second in combinations(range(len(order)), 2):
        swapped = list(order)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        found.append(tuple(swapped))
    return found


@lru_cache(maxsize=4)
def _likely_orders(within_host: tuple[Links, ...]) -> Ints:
    """Return all orders of few devices; else orders with near devices side by side, or at each even distance."""
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


# All placements of a layout on a few slots.

AT_ONCE = 720 * 6**2
"""Placements times slots squared up to which pricing all placements is cheaper than annealing (six slots)."""
EXACT = 10_080
"""Largest number of placements (most layouts on eight slots) that are all priced for the best layout."""
EXACT_QUANTUM = 128


def exhaustion(problem: PlacementProblem, best: Placed, *, is_late: IsLate) -> Iterator[Placed]:
    """Price all placements up to symmetry, in a fixed order; the last result is optimal if device order is."""
    todo = placements(problem.layout, problem.slots)
    while not is_late():
        piece = list(islice(todo, EXACT_QUANTUM))
        if not piece:
            yield replace(best, is_optimal=best.is_optimal or not are_uneven(problem.cluster.within_host))
            return
        best = faster(best, problem.best_of(piece))
        yield best


def are_few(layout: Layout, slots: Slots) -> bool:
    """Return whether the search prices all placements of every layout."""
    return num_placements(layout, slots) * slots.num_slots**2 <= AT_ONCE


def num_placements(layout: Layout, slots: Slots) -> int:
    """Count the placements in device order; those that differ only by rotated rings count once."""
    hosts, devices = slots.num_hosts, slots.devices_per_host
    if slots.num_slots > 64:
        # The exact number takes long to compute and is far above every limit.
        return EXACT * EXACT
    allowed = math.factorial(slots.num_slots) // math.prod([math.factorial(devices)] * hosts)
    if slots.keeps_residues:
        allowed = math.prod([math.factorial(hosts)] * devices)
    return allowed // (layout.dp * layout.tp if _is_cyclic(layout, slots) else 1)


def placements(layout: Layout, slots: Slots) -> Iterator[Placement]:
    """Yield every allowed placement in device order; with one device a host, one of each set of rotated rings.

    A shift of all data-parallel or all tensor-parallel indices by one keeps every group and the order of its ring. So
    slot 0 gets index 0 of both. Expert groups are parts of the data-parallel index and break this symmetry. With
    several devices a host, a shift may break the rule of residues.
    """
    cells = [layout.cell_of(rank) for rank in range(slots.num_slots)]
    first = [rank for rank, cell in enumerate(cells) if not _is_cyclic(layout, slots) or cell.dp == cell.tp == 0]
    chosen: list[int] = []

    def extend() -> Iterator[Placement]:
        if len(chosen) == slots.num_slots:
            if not slots.blocks or slots.allows(chosen):
                yield tuple(chosen)
            return
        size = slots.devices_per_host
        beside = chosen[len(chosen) // size * size :]
        taken = {rank % size for rank in beside} if slots.keeps_residues else set()
        for rank in first if not chosen else range(slots.num_slots):
            if rank not in chosen and rank % size not in taken and (not beside or rank > beside[-1]):
                chosen.append(rank)
                yield from extend()
                chosen.pop()

    return extend()


def _is_cyclic(layout: Layout, slots: Slots) -> bool:
    return slots.devices_per_host == 1 and layout.ep == 1 and layout.etp == layout.tp


# Simulated annealing: Pipette's swap, migration and reversal, of hosts or of single ranks.

WIDTH = 32
"""Neighbours that are priced together in each step, of which the best is considered; 32 cost little more than one."""
PATIENCE = 12
"""Steps without a new best placement after which the walk ends."""
START_TEMPERATURE, END_TEMPERATURE = 0.01, 0.001
"""As a share of the possible gain, so that one schedule suits steps of 10 ms and of 10 s. Pipette's annealer ignores
the size of a change, and so treats a loss of 0.1 % like a loss of 100 %."""


def annealed(problem: PlacementProblem, start: Placed, *, steps: int, rng: random.Random, is_late: IsLate) -> Placed:
    """Walk from a placement to its neighbours, always downhill and sometimes uphill; return the best one seen.

    The walk depends on the arguments and `rng` alone. The deadline only ends it, so more time is never worse.

    Args:
        problem: the layout and its slots.
        start: first placement.
        steps: number of steps over which the temperature falls geometrically.
        rng: random numbers.
        is_late: ends the walk early.

    """
    here = best = start
    found_at, slots = 0, problem.slots
    devices = slots.devices_per_host
    order_D = shared_order(start.placement, devices)
    for step in range(steps if _line_kinds(slots) else 0):
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
    """Apply Metropolis' rule. The random number is always drawn, so that rounding of costs cannot shift the walk."""
    chance = rng.random()
    return rise_s <= 0 or (temperature_s > 0 and chance < math.exp(-rise_s / temperature_s))


def neighbour(placement: Placement, slots: Slots, rng: random.Random) -> Placement:
    """Swap, move or reverse along a random line of hosts, or of slots of several hosts.

    On CUDA only ranks of equal residue change hosts, so that the residues of every host stay distinct. The result
    decides the ranks of each host, not their devices.
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
    """Return a line: sequences of slots whose ranks may change places with each other."""
    kind = rng.choice(_line_kinds(slots))
    groups = slots.host_groups
    hosts = groups[0] if len(groups) == 1 or kind == "units" else rng.choice(groups)
    if kind == "hosts":
        return [slots.host(host) for host in hosts]
    if not slots.keeps_residues:
        return [(slot,) for slot in range(slots.num_slots)]
    if kind == "units":
        return _unit_slots(placement, slots, slots.ranks_of_a_unit, range(slots.num_hosts), rng)
    return _unit_slots(placement, slots, slots.ranks_of_a_host_unit, hosts, rng)


def _line_kinds(slots: Slots) -> list[str]:
    """Return the kinds of lines with at least two members that keep together the ranks that must lie together."""
    devices = slots.devices_per_host
    kinds = ["hosts"] if all(len(group) > 1 for group in slots.host_groups) else []
    kinds += ["slots"] if kinds and slots.ranks_of_a_host_unit < devices else []
    apart = math.lcm(slots.ranks_of_a_unit, devices)
    if slots.domain_H and slots.num_slots >= 2 * apart and slots.num_slots % apart == 0:
        kinds.append("units")
    return kinds


def _unit_slots(
    placement: Placement, slots: Slots, size: int, hosts: Sequence[int], rng: random.Random
) -> Sequence[Sequence[int]]:
    """Return the slots of each unit of `size` ranks on some hosts, for units that begin with one random residue."""
    apart = math.lcm(size, slots.devices_per_host)
    first = size * rng.randrange(apart // size)
    slot_of = {rank: slot for slot, rank in enumerate(placement)}
    units = [tuple(slot_of[rank] for rank in range(one, one + size)) for one in range(first, len(placement), apart)]
    chosen = set(hosts)
    return sorted(unit for unit in units if unit[0] // slots.devices_per_host in chosen)


def _rearranged(length: int, rng: random.Random) -> list[int]:
    """Make one of Pipette's moves on a line: swap two, move one elsewhere, or reverse a segment."""
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


# Whole hosts: a linear model of the step time proposes places, the step time itself decides.

FEW_HOSTS = 6
"""Largest number of hosts for which all orders (720 of six) are priced by the step time itself."""
FEW_DOMAINS = 4
"""The same for orders of NVLink domains that hosts must not leave (24 orders of four)."""
MANY_HOSTS = 64
DESCENTS = 3
"""Descents with different random numbers, up to `MANY_HOSTS` hosts; more hosts get one descent."""
DESCENT_STEPS = 50
"""Batches of proposals."""
TURNS = 3
"""Largest number of linear models, each at the best placement so far."""
NEAR = 16
"""Near places to which a seat may be brought."""
WORTH = 1e-6
"""Share of the step that the model must promise to save for another placement to be priced."""


def rearranged(
    problem: PlacementProblem, start: Placed, *, model: PlacementCost, rng: random.Random, is_late: IsLate
) -> Placed:
    """Exchange the ranks of whole hosts; return the best placement found, or the start.

    All orders of a few hosts are priced. For more hosts the work is bounded: some milliseconds for ten hosts, about a
    second for a thousand.
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
        known = linear.tangents
        arranged = _arranged(linear.flows, problem.cluster.between_hosts, slots, chance, is_late)
        if arranged.cost_s >= linear.flows.cost(np.arange(num_hosts)) - WORTH * best.cost_s:
            break
        placement = moved(best.placement, arranged.place_Q)
        cost_s = model.cost(placement)
        if cost_s < best.cost_s:
            best = problem.placed(placement, cost_s)
        if num_hosts > MANY_HOSTS:
            # One turn takes as long as a round should take.
            break
        if cost_s > best.cost_s:
            # The model priced this placement too low: add its tangents.
            known = linearise(model, np.array(placement), known=known).tangents
    return best


def _orders(placement: Placement, slots: Slots) -> Iterator[Placement]:
    """Yield all allowed orders of few hosts, or of a few equal domains that hosts must not leave."""
    groups = slots.host_groups
    ranks_HD = np.array(placement, dtype=np.int64).reshape(slots.num_hosts, -1)
    if slots.num_hosts <= FEW_HOSTS:
        for order in permutations(range(slots.num_hosts)):
            found = tuple(ranks_HD[list(order)].ravel().tolist())
            if len(groups) == 1 or slots.allows(found):
                yield found
    elif 1 < len(groups) <= FEW_DOMAINS and len({len(group) for group in groups}) == 1:
        there_HD = np.empty_like(ranks_HD)
        for domains in permutations(groups):
            there_HD[np.ravel(groups)] = ranks_HD[np.ravel(domains)]
            yield tuple(there_HD.ravel().tolist())


def _arranged(flows: Flows, links: Links, slots: Slots, rng: np.random.Generator, is_late: IsLate) -> Arrangement:
    start_Q, near_HK = np.arange(flows.num_seats), nearest(links, NEAR)
    group_H = np.asarray(slots.domain_H, dtype=np.int64) if slots.domain_H else None
    descents = (
        descend(flows, start_Q, near_HK=near_HK, group_H=group_H, steps=DESCENT_STEPS, rng=rng, is_late=is_late)
        for _ in range(DESCENTS if flows.num_seats <= MANY_HOSTS else 1)
    )
    return min(descents, key=lambda found: found.cost_s)


def moved(placement: Placement, place_Q: Ints) -> Placement:
    """Give the ranks of host q to host `place_Q[q]`."""
    ranks_HD = np.array(placement, dtype=np.int64).reshape(len(place_Q), -1)
    there_HD = np.empty_like(ranks_HD)
    there_HD[place_Q] = ranks_HD
    return tuple(there_HD.ravel().tolist())


def shuffled(placement: Placement, slots: Slots, rng: random.Random, *, share: float) -> Placement:
    """Let a random `share` of the hosts, but at least three, pass on their ranks in a circle inside one host group."""
    groups = slots.host_groups
    group = groups[0] if len(groups) == 1 else rng.choice(groups)
    chosen = rng.sample(group, min(len(group), max(3, round(share * len(group)))))
    place_Q = np.arange(slots.num_hosts)
    place_Q[chosen] = np.roll(chosen, 1)
    return moved(placement, place_Q)
