"""Another order of devices inside hosts, the same on all hosts, where that order alone pays clearly."""

# H = hosts, D = devices of one host, O = orders.
# A line is a list of carriers, each a sequence of slots that move together.
# H = hosts = seats = places, D = devices of one host.

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice, permutations

import numpy as np

from pipette_launch.cost.step.predictor import PlacementCost
from pipette_launch.facts import Cluster, Layout, Links
from pipette_launch.facts.cluster import in_device_order, shared_order
from pipette_launch.search.assignment.descent import descend
from pipette_launch.search.assignment.problem import Arrangement, Flows, Ints
from pipette_launch.search.near_hosts import distances_s, nearest, tiers_of
from pipette_launch.search.slots import IsLate, Placed, Placement, PlacementProblem, Slots, faster, starts
from pipette_launch.search.step_model import linearise

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


AT_ONCE = 720 * 6**2
"""Placements times the square of their slots, up to which trying all of them is cheaper than annealing (six slots)."""
EXACT = 10_080
"""Up to so many placements (most layouts on eight slots) all are tried for the best layout."""
EXACT_QUANTUM = 128


def exhaustion(problem: PlacementProblem, best: Placed, *, is_late: IsLate) -> Iterator[Placed]:
    """Try every placement that symmetry leaves, in one fixed order; the last one is optimal if no order can pay."""
    todo = placements(problem.layout, problem.slots)
    while not is_late():
        piece = list(islice(todo, EXACT_QUANTUM))
        if not piece:
            yield replace(best, is_optimal=best.is_optimal or not are_uneven(problem.cluster.within_host))
            return
        best = faster(best, problem.best_of(piece))
        yield best


def are_few(layout: Layout, slots: Slots) -> bool:
    """Return true if the search tries all placements of every layout that it prices."""
    return num_placements(layout, slots) * slots.num_slots**2 <= AT_ONCE


def num_placements(layout: Layout, slots: Slots) -> int:
    """Count the placements in device order; those that differ only by turning their rings count once."""
    hosts, devices = slots.num_hosts, slots.devices_per_host
    if slots.num_slots > 64:
        # Far too many to need the number, which takes long to multiply out.
        return EXACT * EXACT
    allowed = math.factorial(slots.num_slots) // math.prod([math.factorial(devices)] * hosts)
    if slots.keeps_residues:
        allowed = math.prod([math.factorial(hosts)] * devices)
    return allowed // (layout.dp * layout.tp if _turns(layout, slots) else 1)


def placements(layout: Layout, slots: Slots) -> Iterator[Placement]:
    """Yield every allowed placement in device order; with one device a host, one of each set of turned rings.

    Shifting all data-parallel indices by one, or all tensor-parallel ones, leaves every group's members and the order
    around its ring as they were, so slot 0 may be given index 0 in both. Expert groups are cut out of the
    data-parallel index, which breaks that symmetry. With several devices a host a turn may break the rule of residues.
    """
    cells = [layout.cell_of(rank) for rank in range(slots.num_slots)]
    first = [rank for rank, cell in enumerate(cells) if not _turns(layout, slots) or cell.dp == cell.tp == 0]
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


def _turns(layout: Layout, slots: Slots) -> bool:
    return slots.devices_per_host == 1 and layout.ep == 1 and layout.etp == layout.tp


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


ROUNDS = 4
"""How often the placement of one layout is improved at most."""
FEW_STARTS = 6
"""Priced at first: on 512 GPUs the best of so many was 0.1 % worse than the best of all in the mean."""
MANY_STARTS = 24
"""The first round prices so many."""
FEW_SLOTS = 32
"""Slots up to which single ranks change hosts in each round too. On four hosts of two devices this saved up to 11 % of
a step, where rings had to pass one host twice."""
ANNEALING_STEPS = 60
ANNEALED_SLOTS = range(FEW_SLOTS + 1, 257)
"""Numbers of slots on which single ranks change hosts once, after all rounds: on 64 slots this saved up to 5 % of a
step."""
STEPS_AT_LAST = 20
SHUFFLED = 0.1
"""Share of the hosts that every other round exchanges at random first."""


def begin(problem: PlacementProblem, *, is_late: IsLate) -> tuple[Placed, float]:
    """Return the best of a few starts or, for a few slots, of all placements; and the seconds of torchrun's order.

    That order is priced together with the starts, which takes little longer than one of them.
    """
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


def improve(
    problem: PlacementProblem,
    best: Placed,
    *,
    turn: int,
    rng: random.Random,
    is_late: IsLate,
) -> Placed:
    """Search for a better placement by one bounded piece of work; never worse than the best so far.

    Whole hosts change places first, then on few slots single ranks, by annealing. The first turn goes on from the
    best, later ones in turn from the best with some hosts exchanged and from other starts, to find other minima.

    Args:
        problem: what is placed where.
        best: the best so far.
        turn: how often this was done before.
        rng: the only source of chance.
        is_late: whether to stop.

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
    """Let single ranks change hosts after the last round, on as many slots as no round of `improve` does it on.

    Args:
        problem: what is placed where.
        best: the best so far; nothing worse is ever returned.
        rng: the only source of chance.
        is_late: whether to stop.

    """
    if best.is_optimal or problem.slots.num_slots not in ANNEALED_SLOTS:
        return best
    found = annealed(problem, best, steps=STEPS_AT_LAST, rng=rng, is_late=is_late)
    return faster(best, _reordered(problem, found, is_late))


def _reordered(problem: PlacementProblem, found: Placed, is_late: IsLate) -> Placed:
    """Judge the order of devices anew, as hosts have changed places since."""
    return ordered(problem, found, is_late=is_late, thorough=problem.slots.num_slots < ANNEALED_SLOTS.stop)


def _start(problem: PlacementProblem, best: Placed, turn: int, rng: random.Random) -> Placed:
    """Where a turn begins: the best of all starts, hosts moved away from the best, or another start."""
    slots = problem.slots
    num_hosts = slots.num_hosts

    def candidates() -> Ints:
        return starts(problem.layout, problem.cluster, most=MANY_STARTS, blocks=problem.blocks)

    if turn == 0:
        # The first few too: a layout may have come with the placement of another.
        return faster(best, problem.best_of(candidates()))
    if num_hosts > MANY_HOSTS:
        # A turn does not converge there, so each goes on from the result of the last.
        return best
    if turn % 2 == 1 and num_hosts > 1:
        return problem.best_of([shuffled(best.placement, slots, rng, share=SHUFFLED)])
    others_KW = candidates()
    chosen = turn // 2 % len(others_KW)
    return problem.best_of(others_KW[chosen : chosen + 1])
