"""Which rank sits on which slot: starts, moves, and the search for the placement with the least step time."""

# H = hosts, D = devices of one host, S = slots. A placement gives the RANK of each slot.

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pipette_launch.facts import Cluster, Layout
from pipette_launch.search.anneal import Cooling, anneal
from pipette_launch.search.tiers import tiers_of

Placement = tuple[int, ...]
Cost = Callable[[Placement], float]

AT_ONCE = 720
"""Up to so many placements (six slots) trying them all is cheaper than annealing."""
EXACT = 10_080
"""Up to so many placements (most layouts on eight slots) all are tried for the best layout."""
EXACT_QUANTUM = 64
ROUNDS = 4
"""Improvements of one layout's placement, after which nothing new is tried."""
MOVES_PER_SLOT = 60
MOST_MOVES = 600
START_TEMPERATURE = 0.1
END_TEMPERATURE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Seats:
    """The slots of a cluster, and which placements are allowed on them.

    On CUDA the RANKs of a host must differ modulo D: then LOCAL_RANK = RANK % D with one CUDA_VISIBLE_DEVICES list
    for the host puts every rank on its slot, and whatever takes RANK modulo the device count finds its own device.
    """

    num_hosts: int
    devices_per_host: int
    keeps_residues: bool

    @classmethod
    def of(cls, cluster: Cluster) -> Seats:
        """Take the slots of a cluster."""
        return cls(
            num_hosts=len(cluster.hosts),
            devices_per_host=cluster.devices_per_host,
            keeps_residues=cluster.device_kind == "cuda",
        )

    @property
    def num_slots(self) -> int:
        """S."""
        return self.num_hosts * self.devices_per_host

    def host(self, index: int) -> range:
        """Slots of a host."""
        return range(index * self.devices_per_host, (index + 1) * self.devices_per_host)

    def allows(self, placement: Placement) -> bool:
        """Whether each host's ranks differ modulo D, where they must."""
        size = self.devices_per_host
        return not self.keeps_residues or all(
            len({placement[slot] % size for slot in self.host(host)}) == size for host in range(self.num_hosts)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """The best placement so far."""

    placement: Placement
    cost_s: float
    is_optimal: bool
    """No other allowed placement is faster under the same model: all were tried, or this one meets the bound."""


def host_order(num_slots: int) -> Placement:
    """Place rank i on slot i, as torchrun does."""
    return tuple(range(num_slots))


def begin(
    layout: Layout,
    cluster: Cluster,
    *,
    cost: Cost,
    bound_s: float,
    clock: Callable[[], float],
    deadline_s: float,
) -> Placed:
    """Return the best of a few starts or, for a few slots, of all placements."""
    seats = Seats.of(cluster)
    best = _best_start(cluster, seats, cost, bound_s)
    if num_placements(layout, seats) <= AT_ONCE and not best.is_optimal:
        *_, best = (
            best,
            *exhaustion(layout, seats, best, cost=cost, clock=clock, deadline_s=deadline_s),
        )
    return best


def improve(
    cluster: Cluster,
    best: Placed,
    *,
    cost: Cost,
    bound_s: float,
    strays: bool,
    rng: random.Random,
    clock: Callable[[], float],
    deadline_s: float,
) -> Placed:
    """Go one bounded piece of work further from the best placement so far: an annealing, never worse.

    Args:
        cluster: the slots.
        best: where to begin.
        cost: seconds per step of a placement.
        bound_s: no placement is faster.
        strays: walk away from the best first, so that not every round ends in one valley.
        rng: the only source of chance.
        clock: seconds, on the scale of `deadline_s`.
        deadline_s: when to stop.

    """
    seats = Seats.of(cluster)

    def step(placement: Placement, chance: random.Random) -> Placement:
        return neighbour(placement, seats, chance)

    start = best.placement
    for _ in range(seats.num_slots if strays else 0):
        start = step(start, rng)
    annealed = anneal(
        start,
        cost=cost,
        neighbour=step,
        cooling=Cooling(start=START_TEMPERATURE, end=END_TEMPERATURE, steps=_moves(seats)),
        scale=best.cost_s - bound_s,
        rng=rng,
        clock=clock,
        deadline_s=deadline_s,
    )
    if annealed.cost >= best.cost_s:
        return best
    return Placed(placement=annealed.state, cost_s=annealed.cost, is_optimal=meets(annealed.cost, bound_s))


def improvements(
    layout: Layout,
    cluster: Cluster,
    *,
    cost: Cost,
    bound_s: float,
    rng: random.Random,
    clock: Callable[[], float],
    deadline_s: float,
) -> Iterator[Placed]:
    """Yield ever better placements of one layout, each after a bounded piece of work, until nothing is left to try.

    First the starts, then for a few slots every placement, else some annealings from around the best so far. The
    course depends on the arguments and `rng` alone; whoever stops asking, or the deadline, only cuts it short.
    """
    best = begin(layout, cluster, cost=cost, bound_s=bound_s, clock=clock, deadline_s=deadline_s)
    yield best
    if num_placements(layout, Seats.of(cluster)) <= AT_ONCE:
        return
    for annealing in range(ROUNDS):
        if best.is_optimal or clock() >= deadline_s:
            return
        best = improve(
            cluster,
            best,
            cost=cost,
            bound_s=bound_s,
            strays=annealing > 0,
            rng=rng,
            clock=clock,
            deadline_s=deadline_s,
        )
        yield best


def exhaustion(
    layout: Layout, seats: Seats, best: Placed, *, cost: Cost, clock: Callable[[], float], deadline_s: float
) -> Iterator[Placed]:
    """Try every placement that symmetry leaves, in one fixed order; the last one yielded is optimal."""
    todo = placements(layout, seats)
    while clock() < deadline_s:
        piece = list(islice(todo, EXACT_QUANTUM))
        if not piece:
            yield Placed(placement=best.placement, cost_s=best.cost_s, is_optimal=True)
            return
        cost_s, placement = min((cost(candidate), candidate) for candidate in piece)
        if cost_s < best.cost_s:
            best = Placed(placement=placement, cost_s=cost_s, is_optimal=False)
        yield best


def meets(cost_s: float, bound_s: float) -> bool:
    """Whether a step time is as good as its lower bound, but for rounding."""
    return cost_s <= bound_s * (1 + 1e-9)


def num_placements(layout: Layout, seats: Seats) -> int:
    """How many placements are left when those that differ only by turning their rings count once."""
    hosts, devices = seats.num_hosts, seats.devices_per_host
    allowed = math.factorial(seats.num_slots)
    if seats.keeps_residues:
        allowed = math.prod([math.factorial(hosts)] * devices + [math.factorial(devices)] * hosts)
    return allowed // (layout.dp * layout.tp if _turns(layout) else 1)


def placements(layout: Layout, seats: Seats) -> Iterator[Placement]:
    """Yield every allowed placement, one of each set that differs only by turning its rings.

    Shifting all data-parallel indices by one, or all tensor-parallel ones, leaves every group's members and the order
    around its ring as they were, so slot 0 may be given index 0 in both. Expert groups are cut out of the
    data-parallel index, which breaks that symmetry.
    """
    cells = [layout.cell_of(rank) for rank in range(seats.num_slots)]
    first = [rank for rank, cell in enumerate(cells) if not _turns(layout) or cell.dp == cell.tp == 0]
    chosen: list[int] = []

    def extend() -> Iterator[Placement]:
        if len(chosen) == seats.num_slots:
            yield tuple(chosen)
            return
        size = seats.devices_per_host
        beside = chosen[len(chosen) // size * size :]
        taken = {rank % size for rank in beside} if seats.keeps_residues else set()
        for rank in first if not chosen else range(seats.num_slots):
            if rank not in chosen and rank % size not in taken:
                chosen.append(rank)
                yield from extend()
                chosen.pop()

    return extend()


def neighbour(placement: Placement, seats: Seats, rng: random.Random) -> Placement:
    """Swap, move or reverse along a random line: the hosts, the slots of one host, or slots of several hosts.

    Between hosts on CUDA only ranks of equal residue change places, which keeps every host's residues distinct.
    """
    line = rng.choice(_lines(placement, seats, rng))
    order = _rearranged(len(line), rng)
    changed = list(placement)
    for target, source in enumerate(order):
        for to, origin in zip(line[target], line[source], strict=True):
            changed[to] = placement[origin]
    return tuple(changed)


def starts(cluster: Cluster, seats: Seats) -> list[Placement]:
    """Placements to begin with: host order, near hosts side by side, and near hosts dealt ranks in turn."""
    chain = tiers_of(cluster.between_hosts).order_H.tolist()
    blocks, dealt = [0] * seats.num_slots, [0] * seats.num_slots
    for position, host in enumerate(chain):
        for device, slot in enumerate(seats.host(host)):
            blocks[slot] = position * seats.devices_per_host + device
            dealt[slot] = position + device * seats.num_hosts
    found = dict.fromkeys((host_order(seats.num_slots), tuple(blocks), tuple(dealt)))
    return [placement for placement in found if seats.allows(placement)]


def _turns(layout: Layout) -> bool:
    return layout.ep == 1 and layout.etp == layout.tp


def _moves(seats: Seats) -> int:
    return min(MOVES_PER_SLOT * seats.num_slots, MOST_MOVES)


def _best_start(cluster: Cluster, seats: Seats, cost: Cost, bound_s: float) -> Placed:
    candidates = starts(cluster, seats)
    costs = [cost(placement) for placement in candidates]
    least = min(costs)
    return Placed(placement=candidates[costs.index(least)], cost_s=least, is_optimal=meets(least, bound_s))


def _lines(placement: Placement, seats: Seats, rng: random.Random) -> list[list[Sequence[int]]]:
    """Lines along which ranks may move: a list of carriers, each a sequence of slots that move together."""
    hosts = [seats.host(host) for host in range(seats.num_hosts)]
    lines: list[list[Sequence[int]]] = []
    if seats.num_hosts > 1:
        lines.append(list(hosts))
    if seats.devices_per_host > 1:
        lines.append([(slot,) for slot in rng.choice(hosts)])
    if seats.num_hosts > 1 and seats.devices_per_host > 1:
        if seats.keeps_residues:
            size = seats.devices_per_host
            residue = rng.randrange(size)
            lines.append([(next(slot for slot in host if placement[slot] % size == residue),) for host in hosts])
        else:
            lines.append([(slot,) for slot in range(seats.num_slots)])
    return lines


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
