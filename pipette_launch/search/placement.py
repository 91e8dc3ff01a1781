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
from functools import lru_cache, partial
from itertools import permutations

import numpy as np

from pipette_launch.cost.step.predictor import PlacementCost
from pipette_launch.facts import Layout, Links, Measurements
from pipette_launch.facts.cluster import in_device_order
from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.facts.measurements import ERROR_OF_MEDIAN, LINK_REPEATS
from pipette_launch.search.assignment.descent import Flows, ProblemBuilder, descend
from pipette_launch.search.host_swaps import linearise
from pipette_launch.search.slots import IsLate, Placed, Placement, PlacementProblem, Slots, distances_s, tiers_of
from pipette_launch.text import rate_text

ROUNDS = 4
FEW_STARTS = 6
"""Number of start placements that are priced first. On 512 GPUs, the best of 6 start placements was 0.1 % slower than
the best of all start placements."""
HOSTS_AT_ONCE = 4
"""On at most this number of hosts, all orders of the hosts are priced at the best start. On four slots with links 100
times apart, the search otherwise stopped at a layout that was 43 % slower than the best."""
MANY_STARTS = 24
"""Number of start placements that the first round prices."""
FEW_SLOTS = 32
"""Largest number of slots for which each round also moves single ranks between hosts. On four hosts of two devices,
moving single ranks saved up to 11 % of a step, if rings had to visit a host twice."""
ANNEALING_STEPS = 60
SHUFFLED = 0.1
"""Share of the hosts whose ranks are exchanged at random before every second round."""


def begin(problem: PlacementProblem) -> tuple[Placed, float]:
    """Return the best start placement, and the seconds of torchrun's order."""
    order_W = np.arange(problem.slots.num_slots)
    starts_KW = problem.starts(FEW_STARTS)
    is_allowed = bool((starts_KW[0] == order_W).all())
    priced_KW = starts_KW if is_allowed else np.concatenate([order_W[None], starts_KW])
    costs_s = problem.objective.costs(priced_KW)
    first = 0 if is_allowed else 1
    least = first + int(costs_s[first:].argmin())
    best = Placed(placement=tuple(priced_KW[least].tolist()), cost_s=float(costs_s[least]))
    if problem.slots.num_hosts <= HOSTS_AT_ONCE:
        best = best.or_faster(problem.best_of([*_orders(best.placement, problem.slots)]))
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
    if slots.num_slots <= FEW_SLOTS and not problem.meets_bound(found):
        found = annealed(problem, start, rng=rng, is_late=is_late)
    return best.or_faster(found)


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


# Simulated annealing: the swaps of Pipette, for single ranks and runs of ranks.

WIDTH = 32
"""Number of neighbour placements that each annealing step prices together, which takes little longer than one."""
PATIENCE = 12
"""Number of annealing steps without a new best placement after which annealing ends."""
START_TEMPERATURE, END_TEMPERATURE = 0.01, 0.001
"""First and last temperature of the annealing, as a share of the possible gain, so that the same values suit short and
long steps. The annealer of Pipette ignores the size of a change, so a loss of 0.1 % is as likely to be accepted as a
loss of 100 %."""


def annealed(problem: PlacementProblem, start: Placed, *, rng: random.Random, is_late: IsLate) -> Placed:
    """Improve a placement by simulated annealing, and return the best placement seen.

    A faster neighbour is always accepted, and a slower neighbour sometimes, while the temperature falls geometrically.
    The deadline only ends the annealing, so more time never gives a worse placement.
    """
    here = best = start
    found_at, slots = 0, problem.slots
    devices = slots.devices_per_host
    for step in range(ANNEALING_STEPS if _exchanges_of(slots) else 0):
        if is_late() or step - found_at >= PATIENCE:
            break
        neighbours = [neighbour(here.placement, slots, rng) for _ in range(WIDTH)]
        there = problem.best_of(in_device_order(neighbours, devices))
        temperature = START_TEMPERATURE * math.pow(END_TEMPERATURE / START_TEMPERATURE, step / ANNEALING_STEPS)
        rise_s, scale_s = there.cost_s - here.cost_s, temperature * (start.cost_s - problem.bound_s)
        # Accept by Metropolis' rule. Always draw the number, so that rounding of costs cannot change later draws.
        chance = rng.random()
        if rise_s <= 0 or (scale_s > 0 and chance < math.exp(-rise_s / scale_s)):
            here = there
            if here.cost_s < best.cost_s:
                best, found_at = here, step
    return best


def neighbour(placement: Placement, slots: Slots, rng: random.Random) -> Placement:
    """Swap the ranks of two single slots, or on CUDA two equally long runs of successive ranks.

    On CUDA, ranks change hosts only if they are equal modulo the number of devices of a host. So the ranks of every
    host still differ modulo the number of devices. The result decides the ranks of each host, but not the device of
    each rank.
    """
    changed = list(placement)
    one, other = rng.sample(_runs(placement, slots, rng), 2)
    for here, there in zip(one, other, strict=True):
        changed[here], changed[there] = placement[there], placement[here]
    return tuple(changed)


def _runs(placement: Placement, slots: Slots, rng: random.Random) -> Sequence[Sequence[int]]:
    """Return the slots of runs of ranks that may be exchanged with each other, in the order of the slots."""
    if not slots.keeps_residues:
        return [(slot,) for slot in range(slots.num_slots)]
    hosts, unit = rng.choice(_exchanges_of(slots))
    devices = slots.devices_per_host
    size = rng.choice([unit, *(size for size in range(2 * unit, devices + 1, unit) if devices % size == 0)])
    # All runs begin at ranks that are equal modulo devices.
    apart = math.lcm(size, devices)
    first = size * rng.randrange(apart // size)
    slot_of = {rank: slot for slot, rank in enumerate(placement)}
    runs = [tuple(slot_of[rank] for rank in range(one, one + size)) for one in range(first, len(placement), apart)]
    return sorted(run for run in runs if all(slot // devices in hosts for slot in run))


def _exchanges_of(slots: Slots) -> list[tuple[tuple[int, ...], int]]:
    """Return sets of hosts that may exchange units, and the ranks of a unit, so that no block of ranks is split."""
    found = [(hosts, slots.ranks_of_a_host_unit) for hosts in slots.host_groups if len(hosts) > 1]
    apart = math.lcm(slots.ranks_of_a_unit, slots.devices_per_host)
    if slots.domain_H and slots.num_slots >= 2 * apart and slots.num_slots % apart == 0:
        found.append((tuple(range(slots.num_hosts)), slots.ranks_of_a_unit))
    return found


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
    for _ in range(TURNS):
        if is_late() or problem.meets_bound(best):
            break
        flows = linearise(model, np.array(best.placement))
        seats, near_HK = np.arange(num_hosts), _nearest(problem.cluster.between_hosts, NEAR)
        search = partial(descend, flows, seats, near_HK=near_HK, group_H=slots.domain_H, steps=DESCENT_STEPS)
        descents = range(DESCENTS if num_hosts <= MANY_HOSTS else 1)
        arranged = min((search(rng=chance, is_late=is_late) for _ in descents), key=lambda found: found.cost_s)
        if arranged.cost_s >= flows.cost(seats) - WORTH * best.cost_s:
            break
        placement = moved(best.placement, arranged.place_Q)
        cost_s = model.cost(placement)
        if cost_s >= best.cost_s:
            break
        best = Placed(placement=placement, cost_s=cost_s)
        if num_hosts > MANY_HOSTS:
            # One linear model takes as long as a whole round should take.
            break
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
