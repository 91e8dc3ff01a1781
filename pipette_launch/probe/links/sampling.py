"""Which pairs of hosts are measured in which round: all of them, or a sample where they are too many. Pure.

A clean measurement occupies both ends, so a round is a matching: disjoint pairs of hosts, the lower host first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise, zip_longest
from itertools import count as counted

import numpy as np

from pipette_launch.probe.options import FULL_HOSTS

Pair = tuple[int, int]
Round = tuple[Pair, ...]
Place = tuple[str, ...]
"""The switches above a host, outermost first; empty where they are not known."""
Tier = list[list[int]]
"""Hosts by the switch above them."""


def ordered(pair: Pair) -> Pair:
    """The pair with its lower host first."""
    return (pair[0], pair[1]) if pair[0] < pair[1] else (pair[1], pair[0])


def all_pairs(hosts: Sequence[int]) -> tuple[Round, ...]:
    """Split all pairs of these hosts into the fewest rounds, by the circle method: N-1, or N where N is odd.

    The first host keeps its position and the others turn. An odd number is filled up by -1, whose partner rests.
    """
    if len(hosts) < 2:
        return ()
    ring = [*hosts, *([] if len(hosts) % 2 == 0 else [-1])]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append(tuple(sorted(ordered(pair) for pair in pairs if -1 not in pair)))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return tuple(rounds)


def rounds_of(pairs: Iterable[Pair], *, most: int | None = None) -> tuple[Round, ...]:
    """Split any pairs into rounds: at most one round more than the busiest host has pairs.

    Pairs are given in either direction, the most important first. A pair that comes twice is measured once. Where there
    may be `most` rounds, a host that has too many pairs loses the last of them.
    """
    degree: Counter[int] = Counter()
    kept: list[Pair] = []
    for pair in dict.fromkeys(ordered(pair) for pair in pairs if pair[0] != pair[1]):
        # One pair of a host less than rounds: the colouring may need one round more. A single round is a matching.
        if most is None or max(degree[host] for host in pair) < max(most - 1, 1):
            kept.append(pair)
            degree.update(pair)
    colouring = _Colouring()
    for pair in kept:
        colouring.add(*pair, most_edges=max(degree.values()))
    return colouring.rounds()


def blind_rounds(num_hosts: int, places: Sequence[Place], count: int, rng: np.random.Generator) -> tuple[Round, ...]:
    """Draw rounds before anything is measured; no pair comes twice.

    Where the switches are known, every other round stays under the innermost ones, because plans use near links most,
    and the other rounds go to the tiers above in turn. Where they are not known, half as many rounds are drawn, because
    the rounds that find out which hosts are near choose better (`switches`): pairs at random, and in turn neighbours in
    the order of the hosts, because host names often follow the racks.

    Args:
        num_hosts: N.
        places: the switches above each host; empty, or with empty entries, where they are not known.
        count: how many rounds to draw; among few hosts there may be fewer.
        rng: the source of randomness.

    """
    inner, *outer = nested_groups(num_hosts, places)
    near = _within(inner, rng)
    far = [_across(tier, switches, rng) for switches, tier in zip([inner, *outer], outer, strict=False)]
    if not far and num_hosts > FULL_HOSTS:
        count = -(-count // 2)
    turns = zip_longest(near, chain.from_iterable(zip(*far, strict=True)) if far else _along(num_hosts))
    seen: set[Pair] = set()
    rounds = []
    # The draws are limited: among few hosts all pairs are soon taken.
    for drawn in islice((one for turn in turns for one in turn if one is not None), 4 * count):
        fresh = tuple(pair for pair in drawn if pair not in seen)
        seen.update(fresh)
        rounds += [fresh] if fresh else []
    return tuple(rounds[:count])


def nested_groups(num_hosts: int, places: Sequence[Place]) -> list[Tier]:
    """Hosts by the switch above them, for each tier of switches, innermost first; the last holds all hosts as one."""
    tiers: list[Tier] = [[list(range(num_hosts))]]
    depth = min((len(place) for place in places), default=0) if len(places) == num_hosts else 0
    for level in range(1, depth + 1):
        under: dict[Place, list[int]] = {}
        for host, place in enumerate(places):
            under.setdefault(place[:level], []).append(host)
        # A tier that splits nothing, or leaves every host alone, has no information.
        if len(tiers[0]) < len(under) < num_hosts:
            tiers.insert(0, list(under.values()))
    return tiers


def _within(tier: Tier, rng: np.random.Generator) -> Iterator[Round]:
    """All pairs under each switch, all switches at once."""
    shuffled = [[int(host) for host in rng.permutation(hosts)] for hosts in tier]
    for parts in zip_longest(*(all_pairs(hosts) for hosts in shuffled), fillvalue=()):
        yield tuple(sorted(pair for part in parts for pair in part))


def _across(tier: Tier, switches: Tier, rng: np.random.Generator) -> Iterator[Round]:
    """Pairs under one switch of a tier, each between two switches of the tier below; without end."""
    below = {host: number for number, hosts in enumerate(switches) for host in hosts}
    for _ in counted():
        pairs: list[Pair] = []
        for hosts in tier:
            # The list holds the hosts switch by switch, so hosts half a list apart mostly have different switches.
            rank = rng.permutation(len(switches))
            order = sorted((int(host) for host in rng.permutation(hosts)), key=lambda host: int(rank[below[host]]))
            half = len(order) // 2
            pairs += map(ordered, zip(order[:half], order[half:], strict=False))
        yield tuple(sorted(pair for pair in pairs if below[pair[0]] != below[pair[1]]))


def _along(num_hosts: int) -> Iterator[Round]:
    """Neighbours in the order of the hosts, then those further apart: each distance in two rounds."""
    for apart in range(1, num_hosts // 2):
        for first in (0, apart):
            starts = (start + step for start in range(first, num_hosts - apart, 2 * apart) for step in range(apart))
            yield tuple((start, start + apart) for start in starts if start + apart < num_hosts)


Edges = Iterable[tuple[int, int, int]]
"""Two hosts and a colour each."""


class _Colouring:
    """Colours edges so that no two of a host have the same colour, with one colour more than the largest degree.

    Misra and Gries, "A constructive proof of Vizing's theorem" (1992); their step is taken only where the ends of an
    edge have no colour in common that is free.
    """

    def __init__(self) -> None:
        self._at: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """For each host the other end of its edge of each colour."""

    def add(self, hub: int, new: int, most_edges: int) -> None:
        """Colour one more edge, which must be new; `most_edges` is the largest degree that there will be."""
        shared = self._free(hub, new)
        if shared < most_edges:
            self._paint([(hub, new, shared)])
            return
        # The fan: neighbours of the hub, each by a colour that is free at the one before; the longest such list.
        left, fan = self._colour_of(hub), [new]
        while (end := next((host for host in left if left[host] not in self._at[fan[-1]]), None)) is not None:
            fan.append(end)
            del left[end]
        ours, theirs = self._free(hub), self._free(fan[-1])
        # Exchange both colours along the path that begins at the hub with theirs; ours is free there.
        path = [hub]
        while (end := self._at[path[-1]].get((theirs, ours)[(len(path) - 1) % 2])) is not None:
            path.append(end)
        edges = [(one, other, (theirs, ours)[step % 2]) for step, (one, other) in enumerate(pairwise(path))]
        self._clear(edges)
        self._paint((one, other, ours + theirs - colour) for one, other, colour in edges)
        # Up to the first host of the fan at which theirs is free: each edge takes the colour of the next.
        fan = fan[: next(place for place, host in enumerate(fan) if theirs not in self._at[host]) + 1]
        colour_of = self._colour_of(hub)
        colours = [colour_of[host] for host in fan[1:]]
        self._clear((hub, host, colour) for host, colour in zip(fan[1:], colours, strict=True))
        self._paint((hub, host, colour) for host, colour in zip(fan, [*colours, theirs], strict=True))

    def rounds(self) -> tuple[Round, ...]:
        """Edges by colour, ascending."""
        by_colour: defaultdict[int, list[Pair]] = defaultdict(list)
        for host, edges in self._at.items():
            for colour, other in edges.items():
                if host < other:
                    by_colour[colour].append((host, other))
        return tuple(tuple(sorted(by_colour[colour])) for colour in sorted(by_colour))

    def _free(self, *hosts: int) -> int:
        """The lowest colour that none of the hosts has."""
        return next(colour for colour in counted() if not any(colour in self._at[host] for host in hosts))

    def _colour_of(self, hub: int) -> dict[int, int]:
        return {other: colour for colour, other in self._at[hub].items()}

    def _paint(self, edges: Edges) -> None:
        for one, other, colour in edges:
            self._at[one][colour], self._at[other][colour] = other, one

    def _clear(self, edges: Edges) -> None:
        for one, other, colour in edges:
            del self._at[one][colour], self._at[other][colour]
