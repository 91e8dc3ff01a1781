"""One move away from a placement: Pipette's swap, migration and reversal, of hosts or of single devices."""

# A line is a list of carriers, each a sequence of slots that move together.

from __future__ import annotations

import random
from collections.abc import Sequence

from pipette_launch.search.placement.allowed import Placement, Seats


def neighbour(placement: Placement, seats: Seats, rng: random.Random) -> Placement:
    """Swap, move or reverse along a random line: the hosts, the slots of one host, or slots of several hosts.

    Between hosts on CUDA only ranks of equal residue change places, which keeps every host's residues distinct.
    """
    line = _line(placement, seats, rng)
    order = _rearranged(len(line), rng)
    changed = list(placement)
    for target, source in enumerate(order):
        if target != source:
            for to, origin in zip(line[target], line[source], strict=True):
                changed[to] = placement[origin]
    return tuple(changed)


def _line(placement: Placement, seats: Seats, rng: random.Random) -> Sequence[Sequence[int]]:
    """A line along which ranks may move."""
    kinds = ["hosts"] if seats.num_hosts > 1 else []
    kinds += ["host"] if seats.devices_per_host > 1 else []
    kinds += ["slots"] if len(kinds) > 1 else []
    kind = rng.choice(kinds)
    if kind == "hosts":
        return [seats.host(host) for host in range(seats.num_hosts)]
    if kind == "host":
        return [(slot,) for slot in seats.host(rng.randrange(seats.num_hosts))]
    if not seats.keeps_residues:
        return [(slot,) for slot in range(seats.num_slots)]
    size = seats.devices_per_host
    residue = rng.randrange(size)
    return [(slot,) for slot, rank in enumerate(placement) if rank % size == residue]


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
