"""The search for the placement of a layout with the least step time.

A placement gives each slot (a device of a host) its RANK. On each host, a higher device has a higher rank. The search
begins at several start placements, and improves a placement by exchanging the ranks of whole hosts, or single ranks.
"""

# H = hosts, D = devices of one host, K = placements or orders of hosts, Q = sets of ranks that one host holds (seats),
# E = links between seats.

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice, permutations

import numpy as np

from pipette_launch.cost.step.predictor import PlacementCost
from pipette_launch.facts import Layout, Links, Measurements
from pipette_launch.facts.cluster import in_device_order
from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.facts.measurements import ERROR_OF_MEDIAN, LINK_REPEATS
from pipette_launch.search.assignment.descent import Flows, ProblemBuilder, descend
from pipette_launch.search.slots import IsLate, Placed, Placement, PlacementProblem, Slots, distances_s, tiers_of
from pipette_launch.search.step_model import linearise
from pipette_launch.text import rate_text

ROUNDS = 4
FEW_STARTS = 6
"""Number of start placements that are priced first. On 512 GPUs, the best of 6 start placements was 0.1 % slower than
the best of all start placements."""
MANY_STARTS = 24
"""Number of start placements that the first round prices."""
FEW_SLOTS = 32
"""Largest number of slots for which each round also moves single ranks between hosts. On four hosts of two devices,
moving single ranks saved up to 11 % of a step, if rings had to visit a host twice."""
ANNEALING_STEPS = 60
ANNEALED_SLOTS = range(FEW_SLOTS + 1, 257)
"""Numbers of slots for which single ranks change hosts once, after all rounds. On 64 slots, that saved up to 5 %."""
STEPS_AT_LAST = 20
SHUFFLED = 0.1
"""Share of the hosts whose ranks are exchanged at random before every second round."""


def begin(problem: PlacementProblem, *, is_late: IsLate) -> tuple[Placed, float]:
    """Return the best start placement (if placements are few, the best of all), and the seconds of torchrun's order."""
    order_W = np.arange(problem.slots.num_slots)
    starts_KW = problem.starts(FEW_STARTS)
    is_allowed = bool((starts_KW[0] == order_W).all())
    priced_KW = starts_KW if is_allowed else np.concatenate([order_W[None], starts_KW])
    costs_s = problem.objective.costs(priced_KW)
    first = 0 if is_allowed else 1
    least = first + int(costs_s[first:].argmin())
    best = problem.placed(tuple(priced_KW[least].tolist()), float(costs_s[least]))
    if are_few(problem.layout, problem.slots) and not best.is_optimal:
        *_, best = best, *exhaustion(problem, best, is_late=is_late)
    return best, float(costs_s[0])


def improve(problem: PlacementProblem, best: Placed, *, turn: int, rng: random.Random, is_late: IsLate) -> Placed:
    """Search one round for a placement that is better than the best so far; `turn` is the number of earlier rounds.

    First, whole hosts exchange their ranks. On few slots, simulated annealing then moves single ranks. Round 0 begins
    at the best placement. Later rounds begin in turn at the best placement with some hosts exchanged, and at another
    start placement, to find other minima.
    """
    slots = problem.slots
    start = _start(problem, best, turn, rng)
    if problem.has_linear_model and isinstance(problem.objective, PlacementCost) and slots.num_hosts > 1:
        start = rearranged(problem, start, model=problem.objective, rng=rng, is_late=is_late)
    found = best.or_faster(start)
    if slots.num_slots <= FEW_SLOTS and not found.is_optimal:
        found = annealed(problem, start, steps=ANNEALING_STEPS, rng=rng, is_late=is_late)
    return best.or_faster(found)


def exchange_devices(problem: PlacementProblem, best: Placed, *, rng: random.Random, is_late: IsLate) -> Placed:
    """Move single ranks between hosts after the last round, on clusters too large to do so in each round."""
    if best.is_optimal or problem.slots.num_slots not in ANNEALED_SLOTS:
        return best
    return annealed(problem, best, steps=STEPS_AT_LAST, rng=rng, is_late=is_late)


def improved_once(problem: PlacementProblem, start: Placed, *, rng: random.Random, is_late: IsLate) -> Placed:
    """Search one round from a start placement: exchange the ranks of whole hosts, then move single ranks."""
    placed = improve(problem, start, turn=0, rng=rng, is_late=is_late)
    return exchange_devices(problem, placed, rng=rng, is_late=is_late)


def _start(problem: PlacementProblem, best: Placed, turn: int, rng: random.Random) -> Placed:
    slots = problem.slots
    if turn > 0 and slots.num_hosts > MANY_HOSTS:
        # On many hosts a round does not converge, so the next round continues from the best placement.
        return best
    if turn % 2 == 1 and slots.num_hosts > 1:
        return problem.best_of([shuffled(best.placement, slots, rng, share=SHUFFLED)])
    starts_KW = problem.starts(MANY_STARTS)
    if turn == 0:
        # Price the first start placements again, because `best` may be the placement of another layout.
        return best.or_faster(problem.best_of(starts_KW))
    chosen = turn // 2 % len(starts_KW)
    return problem.best_of(starts_KW[chosen : chosen + 1])


# All placements of a layout on a few slots.

AT_ONCE = 720 * 6**2
"""If placements * slots^2 is at most this number (its value on six slots), pricing all is faster than annealing."""
EXACT = 10_080
"""If the best layout has at most this number of placements, all are priced. Most layouts on eight slots have fewer."""
EXACT_QUANTUM = 128


def exhaustion(problem: PlacementProblem, best: Placed, *, is_late: IsLate) -> Iterator[Placed]:
    """Price all placements up to symmetry, in a fixed order, and yield the best so far. The last result is optimal."""
    todo = placements(problem.layout, problem.slots)
    while not is_late():
        piece = list(islice(todo, EXACT_QUANTUM))
        if not piece:
            yield replace(best, is_optimal=True)
            return
        best = best.or_faster(problem.best_of(piece))
        yield best


def are_few(layout: Layout, slots: Slots) -> bool:
    """Return whether a layout has so few placements that the search prices all of them."""
    return num_placements(layout, slots) * slots.num_slots**2 <= AT_ONCE


def num_placements(layout: Layout, slots: Slots) -> int:
    """Count the allowed placements; placements with rotated rings count once."""
    hosts, devices = slots.num_hosts, slots.devices_per_host
    if slots.num_slots > 64:
        # The exact number of placements takes long to compute and is far above every limit.
        return EXACT * EXACT
    allowed = math.factorial(slots.num_slots) // math.prod([math.factorial(devices)] * hosts)
    if slots.keeps_residues:
        allowed = math.prod([math.factorial(hosts)] * devices)
    return allowed // (layout.dp * layout.tp if _is_cyclic(layout, slots) else 1)


def placements(layout: Layout, slots: Slots) -> Iterator[Placement]:
    """Yield all allowed placements; rotated rings are yielded once.

    If all data-parallel or all tensor-parallel indices grow by one, every group keeps its ranks and the order of its
    ring. Therefore only placements with data-parallel and tensor-parallel index 0 on slot 0 are yielded. With expert
    parallelism all placements are yielded, because rotation changes the expert groups. With several devices per host
    all placements are yielded too, because two rotated ranks of a host may be equal modulo its number of devices.
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


# Simulated annealing: the swap, migration and reversal moves of Pipette, for whole hosts or single ranks.

WIDTH = 32
"""Number of neighbour placements that each annealing step prices together, which takes little longer than one."""
PATIENCE = 12
"""Number of annealing steps without a new best placement after which annealing ends."""
START_TEMPERATURE, END_TEMPERATURE = 0.01, 0.001
"""First and last temperature of the annealing, as a share of the possible gain, so that the same values suit short and
long steps. The annealer of Pipette ignores the size of a change, so a loss of 0.1 % is as likely to be accepted as a
loss of 100 %."""


def annealed(problem: PlacementProblem, start: Placed, *, steps: int, rng: random.Random, is_late: IsLate) -> Placed:
    """Improve a placement by simulated annealing, and return the best placement seen.

    A faster neighbour is always accepted, and a slower neighbour sometimes, while the temperature falls geometrically.
    The deadline only ends the annealing, so more time never gives a worse placement.
    """
    here = best = start
    found_at, slots = 0, problem.slots
    devices = slots.devices_per_host
    for step in range(steps if _line_kinds(slots) else 0):
        if is_late() or step - found_at >= PATIENCE:
            break
        neighbours = [neighbour(here.placement, slots, rng) for _ in range(WIDTH)]
        there = problem.best_of(in_device_order(neighbours, devices))
        temperature = START_TEMPERATURE * math.pow(END_TEMPERATURE / START_TEMPERATURE, step / steps)
        rise_s, scale_s = there.cost_s - here.cost_s, temperature * (start.cost_s - problem.bound_s)
        # Accept by Metropolis' rule. Always draw the number, so that rounding of costs cannot change later draws.
        chance = rng.random()
        if rise_s <= 0 or (scale_s > 0 and chance < math.exp(-rise_s / scale_s)):
            here = there
            if here.cost_s < best.cost_s:
                best, found_at = here, step
    return best


def neighbour(placement: Placement, slots: Slots, rng: random.Random) -> Placement:
    """Swap, move or reverse the ranks along a random list of hosts, or of slots on several hosts.

    On CUDA, ranks change hosts only if they are equal modulo the number of devices of a host. So the ranks of every
    host still differ modulo the number of devices. The result decides the ranks of each host, but not the device of
    each rank.
    """
    line = _line(placement, slots, rng)
    changed = list(placement)
    for target, source in enumerate(_rearranged(len(line), rng)):
        for to, origin in zip(line[target], line[source], strict=True):
            changed[to] = placement[origin]
    return tuple(changed)


def _line(placement: Placement, slots: Slots, rng: random.Random) -> Sequence[Sequence[int]]:
    """Return sets of slots of equal length, whose ranks may be exchanged with each other."""
    kind = rng.choice(_line_kinds(slots))
    groups = slots.host_groups
    hosts = groups[0] if len(groups) == 1 or kind == "units" else rng.choice(groups)
    if kind == "hosts":
        return [slots.host(host) for host in hosts]
    if not slots.keeps_residues:
        return [(slot,) for slot in range(slots.num_slots)]
    # Take one unit of consecutive ranks on each host, with equal first ranks modulo devices.
    size = slots.ranks_of_a_unit if kind == "units" else slots.ranks_of_a_host_unit
    chosen = set(range(slots.num_hosts) if kind == "units" else hosts)
    apart = math.lcm(size, slots.devices_per_host)
    first = size * rng.randrange(apart // size)
    slot_of = {rank: slot for slot, rank in enumerate(placement)}
    units = [tuple(slot_of[rank] for rank in range(one, one + size)) for one in range(first, len(placement), apart)]
    return sorted(unit for unit in units if unit[0] // slots.devices_per_host in chosen)


def _line_kinds(slots: Slots) -> list[str]:
    """Return the kinds of exchange (hosts or single ranks) that split no block of ranks and have several members."""
    devices = slots.devices_per_host
    kinds = ["hosts"] if all(len(group) > 1 for group in slots.host_groups) else []
    kinds += ["slots"] if kinds and slots.ranks_of_a_host_unit < devices else []
    apart = math.lcm(slots.ranks_of_a_unit, devices)
    if slots.domain_H and slots.num_slots >= 2 * apart and slots.num_slots % apart == 0:
        kinds.append("units")
    return kinds


def _rearranged(length: int, rng: random.Random) -> list[int]:
    """Reorder `length` entries by a random move of Pipette: swap two entries, move one, or reverse a segment."""
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


# Whole hosts: a linear model of the step time proposes exchanges, and the step time itself decides.

FEW_HOSTS = 6
"""Largest number of hosts for which all orders (720 of six) are priced by the step time itself."""
FEW_DOMAINS = 4
"""If ranks must stay in an NVLink domain: largest number of domains for which all orders (24 of four) are priced."""
MANY_HOSTS = 64
DESCENTS = 3
"""Number of descents with different random numbers, up to `MANY_HOSTS` hosts. On more hosts, only one descent runs."""
DESCENT_STEPS = 50
TURNS = 3
"""Largest number of linear models, each made at the best placement so far."""
NEAR = 16
"""Number of nearest hosts to which the ranks of a host may move."""
WORTH = 1e-6
"""Another placement is priced only if the linear model predicts that it saves this share of the step."""


def rearranged(
    problem: PlacementProblem, start: Placed, *, model: PlacementCost, rng: random.Random, is_late: IsLate
) -> Placed:
    """Exchange the ranks of whole hosts; return the best placement found, or the start.

    On few hosts, all orders of the hosts are priced. On more hosts, the search takes some milliseconds for ten hosts,
    and about a second for a thousand hosts.
    """
    best, slots = start, problem.slots
    num_hosts = slots.num_hosts
    orders = list(_orders(best.placement, slots))
    if orders:
        best = best.or_faster(problem.best_of(orders))
    if num_hosts <= FEW_HOSTS:
        return best
    chance = np.random.default_rng(rng.getrandbits(64))
    known = None
    for _ in range(TURNS):
        if is_late() or best.is_optimal:
            break
        linear = linearise(model, np.array(best.placement), known=known)
        known = linear.tangents
        seats, near_HK = np.arange(num_hosts), _nearest(problem.cluster.between_hosts, NEAR)
        search = partial(descend, linear.flows, seats, near_HK=near_HK, group_H=slots.domain_H, steps=DESCENT_STEPS)
        descents = range(DESCENTS if num_hosts <= MANY_HOSTS else 1)
        arranged = min((search(rng=chance, is_late=is_late) for _ in descents), key=lambda found: found.cost_s)
        if arranged.cost_s >= linear.flows.cost(seats) - WORTH * best.cost_s:
            break
        placement = moved(best.placement, arranged.place_Q)
        cost_s = model.cost(placement)
        is_faster = cost_s < best.cost_s
        if is_faster:
            best = problem.placed(placement, cost_s)
        if num_hosts > MANY_HOSTS:
            # One linear model takes as long as a whole round should take.
            break
        if not is_faster:
            # The model priced this placement too low: add its critical paths (tangents) to the model.
            known = linearise(model, np.array(placement), known=known).tangents
    return best


@lru_cache(maxsize=4)
def _nearest(links: Links, count: int) -> Ints:
    """Return the `count` nearest hosts of each host (at most H - 1), unordered: shape (H, count)."""
    distance_HH = distances_s(links)
    np.fill_diagonal(distance_HH, np.inf)
    count = min(count, links.size - 1)
    return np.argpartition(distance_HH, count - 1, axis=1)[:, :count]


def _orders(placement: Placement, slots: Slots) -> Iterator[Placement]:
    """Yield all allowed orders of few hosts, or of few equal NVLink domains if hosts must not leave them."""
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


def moved(placement: Placement, place_Q: Ints) -> Placement:
    """Give the ranks of host q to host `place_Q[q]`."""
    ranks_HD = np.array(placement, dtype=np.int64).reshape(len(place_Q), -1)
    there_HD = np.empty_like(ranks_HD)
    there_HD[place_Q] = ranks_HD
    return tuple(there_HD.ravel().tolist())


def shuffled(placement: Placement, slots: Slots, rng: random.Random, *, share: float) -> Placement:
    """Choose a `share` of the hosts (at least three) of one group at random, and rotate the ranks among these hosts."""
    groups = slots.host_groups
    group = groups[0] if len(groups) == 1 else rng.choice(groups)
    chosen = rng.sample(group, min(len(group), max(3, round(share * len(group)))))
    place_Q = np.arange(slots.num_hosts)
    place_Q[chosen] = np.roll(chosen, 1)
    return moved(placement, place_Q)


# The hosts of a job that cannot be planned: only the links and maybe the parallel degrees are known. The devices of a
# host keep successive ranks. `order_H` gives the host of each seat, and seat q holds the ranks from q * devices on.

ESTIMATED_ERROR = 0.1
"""Standard error of a link that was not measured, as a share of its time."""
MOST_ERROR = 0.25


def order_hosts(measured: Measurements, given_H: Ints, layout: Layout, *, margin: float, seed: int) -> tuple[Ints, str]:
    """Order hosts so that the slowest and the mean link of each ring and pipeline take least time.

    `given_H` are the hosts in torchrun's order. The given order stays unless the gain exceeds the margin even if each
    link of the found order is slower, and each link of the given order faster, by its standard error. `layout` has the
    job's parallel degrees and rank order. Returns the order and the gain in words, empty if the given order stays.
    """
    links, devices = measured.cluster.between_hosts, measured.cluster.devices_per_host
    seconds_HH, error_HH = distances_s(links), _error_HH(measured)
    pairs = [*_exchanges(layout, devices)]
    flows = _flows(pairs, seconds_HH)
    if len(given_H) <= FEW_HOSTS:
        orders_KH = np.array([*permutations(given_H.tolist())], dtype=np.int64)
    else:
        near_HK, rng = _nearest(links, NEAR), np.random.default_rng(seed)
        starts = (given_H, tiers_of(links).order_H) * DESCENTS
        found = (
            descend(flows, start_H, near_HK=near_HK, steps=DESCENT_STEPS, rng=rng, is_late=lambda: False)
            for start_H in starts
        )
        best_H = min(found, key=lambda one: one.cost_s).place_Q
        turns = range(len(best_H))
        orders_KH = np.array([np.roll(way_H, turn) for way_H in (best_H, best_H[::-1]) for turn in turns])
    costs_K = flows.costs(orders_KH)
    # RANK 0 stays on its host if an equally fast order allows it.
    equal_KH = orders_KH[costs_K <= costs_K.min() * (1 + 1e-9)]
    order_H = max(equal_KH, key=lambda one_H: (one_H[0] == given_H[0], (one_H == given_H).sum()))
    slow_s = _flows(pairs, seconds_HH * (1 + error_HH)).cost(order_H)
    if slow_s > (1 - margin) * _flows(pairs, seconds_HH * (1 - error_HH)).cost(given_H):
        return given_H, ""

    sender_E, receiver_E = np.concatenate(pairs, axis=1)
    new, old = (links.bandwidth_bytes_per_s[one_H[sender_E], one_H[receiver_E]] for one_H in (order_H, given_H))
    least, old_least, mean, old_mean = map(float, (new.min(), old.min(), new.mean(), old.mean()))
    gain = f"the slowest link in use has {rate_text(least)} instead of {rate_text(old_least)}"
    if least > (1 + margin) * old_least:
        gain += f", so exchanges between hosts are up to {least / old_least:.1f} times faster"
    return order_H, f"{gain}; the mean link has {rate_text(mean)} instead of {rate_text(old_mean)}"


def _exchanges(layout: Layout, devices: int) -> Iterator[Ints]:
    """Yield the seats that send (first row) and receive, for each kind of parallelism that crosses hosts."""
    shape = (layout.pp, layout.dp) if not layout.use_tp_pp_dp_mapping else (layout.dp, layout.pp)
    ranks = np.arange(layout.world_size).reshape(*shape, layout.cp, layout.tp)
    pipeline = int(layout.use_tp_pp_dp_mapping)
    for axis in range(4):
        # Experts exchange tokens by an all-to-all among successive data-parallel ranks.
        for step in range(1, max(min(layout.ep, layout.dp), 2) if axis == 1 - pipeline else 2):
            sender, receiver = ranks, np.roll(ranks, -step, axis=axis)
            if axis == pipeline:
                # The last stage of a pipeline sends nothing to the first stage.
                sender, receiver = (np.delete(one, -1, axis=axis) for one in (sender, receiver))
            seats_E2 = np.unique(np.stack([sender.ravel(), receiver.ravel()], axis=1) // devices, axis=0)
            crossing_E2 = seats_E2[seats_E2[:, 0] != seats_E2[:, 1]]
            if len(crossing_E2):
                yield crossing_E2.T


def _flows(pairs: list[Ints], seconds_HH: Floats) -> Flows:
    """Return the problem whose cost is the sum, over kinds of parallelism, of the slowest and the mean link."""
    builder = ProblemBuilder(len(seconds_HH))
    kind = builder.add_type(seconds_HH)
    for sender_E, receiver_E in pairs:
        builder.add_flows(kind, sender_E, receiver_E, 1.0, builder.add_family(np.zeros(len(sender_E))))
        mean = np.repeat(builder.add_family(0.0), len(sender_E))
        builder.add_flows(kind, sender_E, receiver_E, 1 / len(sender_E), mean)
    return builder.flows()


def _error_HH(measured: Measurements) -> Floats:
    """Return the standard error of each link's time, as a share of this time."""
    if measured.survey is None:
        return np.zeros((len(measured.cluster.hosts),) * 2)
    estimated_HH = np.array([[*row] for row in measured.survey.origin_HH]) == "e"
    scatter_HH = measured.survey.spread_HH * ERROR_OF_MEDIAN / math.sqrt(LINK_REPEATS)
    error_HH = np.where(estimated_HH, ESTIMATED_ERROR, np.minimum(scatter_HH, MOST_ERROR))
    return np.asarray(np.maximum(error_HH, error_HH.T))
