"""Which pairs of hosts to measure when all are too many, and in how few rounds. Pure.

A clean measurement occupies both ends, so a round is a matching: disjoint pairs of hosts, the lower host first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count as counted
from itertools import islice, pairwise, zip_longest

import numpy as np

from pipette_launch.probe.options import FULL_HOSTS

Pair = tuple[int, int]
Round = tuple[Pair, ...]
Place = tuple[str, ...]
"""The switches above a host, outermost first; empty where they are not known."""
Tier = list[list[int]]
"""Hosts by the switch above them."""


def circle_rounds(hosts: Sequence[int]) -> tuple[Round, ...]:
    """Split all pairs of these hosts into the fewest rounds, by the circle method: N-1, or N where N is odd.

    One host stands still and the others turn; with an odd count the still one is a ghost, whose partner rests.
    """
    if len(hosts) < 2:
        return ()
    ring = [*hosts, *([] if len(hosts) % 2 == 0 else [-1])]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        couples = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append(tuple(sorted((min(a, b), max(a, b)) for a, b in couples if -1 not in (a, b))))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return tuple(rounds)


def rounds_of(pairs: Iterable[Pair], *, most: int | None = None) -> tuple[Round, ...]:
    """Split any pairs into rounds: at most one more than the pairs of the busiest host.

    Args:
        pairs: most important first, in either direction; a pair that comes twice is measured once.
        most: no more rounds than that; of the pairs of a host that has too many, the last are left out.

    """
    wanted = list(dict.fromkeys((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]))
    if most is not None:
        # One colour less than rounds: the proof may need one more. A single round is a matching either way.
        wanted = list(_thinned(wanted, max(most - 1, 1)))
    colouring = _Colouring(max(Counter(host for pair in wanted for host in pair).values(), default=0))
    for pair in wanted:
        colouring.add(*pair)
    return colouring.rounds()


def blind_rounds(num_hosts: int, places: Sequence[Place], count: int, rng: np.random.Generator) -> tuple[Round, ...]:
    """Draw rounds before anything is measured; no pair comes twice.

    Where the switches are known, every other round stays under the innermost ones: near links are the ones that plans
    use, and the fewer; the rest are for the tiers above, in turn. Else half as many rounds are drawn, as whoever finds
    out who is near knows better where to look: of all pairs alike, and in turn of neighbours in the order of the hosts,
    since names often follow the racks.

    Args:
        num_hosts: N.
        places: of each host; empty, or with empty places, where switches are not known.
        count: how many rounds; fewer where there are not so many.
        rng: the only source of chance.

    """
    inner, *outer = nested_groups(num_hosts, places)
    near = _within(inner, rng)
    far = [_across(tier, switches, rng) for switches, tier in zip([inner, *outer], outer, strict=False)]
    if not far and num_hosts > FULL_HOSTS:
        count = -(-count // 2)
    turns = zip_longest(near, _in_turn(far) if far else _along(num_hosts))
    seen: set[Pair] = set()
    rounds = []
    # Drawing ends some time: among few hosts all pairs are soon taken.
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
        # A tier that splits nothing, or leaves everyone alone, tells nothing.
        if len(tiers[0]) < len(under) < num_hosts:
            tiers.insert(0, list(under.values()))
    return tiers


def _within(tier: Tier, rng: np.random.Generator) -> Iterator[Round]:
    """All pairs under each switch, all switches at once."""
    shuffled = [[int(host) for host in rng.permutation(hosts)] for hosts in tier]
    for parts in zip_longest(*(circle_rounds(hosts) for hosts in shuffled), fillvalue=()):
        yield tuple(sorted(pair for part in parts for pair in part))


def _across(tier: Tier, switches: Tier, rng: np.random.Generator) -> Iterator[Round]:
    """Pairs under one switch of a tier, each of two switches of the tier below; without end."""
    below = {host: number for number, hosts in enumerate(switches) for host in hosts}
    for _ in counted():
        pairs = []
        for hosts in tier:
            # Host by host of one switch, then of the next: half way round the list is mostly another switch.
            rank = rng.permutation(len(switches))
            order = sorted((int(host) for host in rng.permutation(hosts)), key=lambda host: int(rank[below[host]]))
            half = len(order) // 2
            pairs += [(min(a, b), max(a, b)) for a, b in zip(order[:half], order[half:], strict=False)]
        yield tuple(sorted(pair for pair in pairs if below[pair[0]] != below[pair[1]]))


def _along(num_hosts: int) -> Iterator[Round]:
    """Neighbours in the order of the hosts, then those further apart: each distance in two rounds."""
    for apart in range(1, num_hosts // 2):
        for first in (0, apart):
            starts = (start + step for start in range(first, num_hosts - apart, 2 * apart) for step in range(apart))
            yield tuple((start, start + apart) for start in starts if start + apart < num_hosts)


def _in_turn(tiers: Sequence[Iterator[Round]]) -> Iterator[Round]:
    for turn in zip(*tiers, strict=True):
        yield from turn


def _thinned(pairs: Iterable[Pair], most: int) -> Iterator[Pair]:
    """The pairs, in order, as long as both hosts have fewer than so many."""
    degree: dict[int, int] = {}
    for one, other in pairs:
        if degree.get(one, 0) < most and degree.get(other, 0) < most:
            degree[one], degree[other] = degree.get(one, 0) + 1, degree.get(other, 0) + 1
            yield one, other


class _Colouring:
    """An edge colouring that grows edge by edge, in at most one colour more than the largest degree.

    Misra and Gries, "A constructive proof of Vizing's theorem" (1992); their step is taken only where the ends of an
    edge have no colour in common that is free.
    """

    def __init__(self, most_edges: int) -> None:
        self._most_edges = most_edges
        """Largest degree there will be."""
        self._at: dict[int, dict[int, int]] = {}
        """For each host the other end of its edge of each colour."""

    def add(self, one: int, other: int) -> None:
        """Colour one more edge, which must be new."""
        for host in (one, other):
            self._at.setdefault(host, {})
        shared = self._free(one, other)
        if shared < self._most_edges:
            self._paint(one, other, shared)
            return
        fan = self._fan(one, other)
        ours, theirs = self._free(one), self._free(fan[-1])
        self._invert(one, theirs, ours)
        self._rotate(one, self._cut(fan, theirs), theirs)

    def rounds(self) -> tuple[Round, ...]:
        """Edges by colour, ascending."""
        by_colour: dict[int, list[Pair]] = {}
        for host, edges in self._at.items():
            for colour, other in edges.items():
                if host < other:
                    by_colour.setdefault(colour, []).append((host, other))
        return tuple(tuple(sorted(by_colour[colour])) for colour in sorted(by_colour))

    def _free(self, *hosts: int) -> int:
        """The lowest colour that none of the hosts has."""
        return next(colour for colour in counted() if not any(colour in self._at[host] for host in hosts))

    def _paint(self, one: int, other: int, colour: int) -> None:
        self._at[one][colour], self._at[other][colour] = other, one

    def _fan(self, hub: int, first: int) -> list[int]:
        """Neighbours of the hub, each by a colour that is free at the one before; as many as there are."""
        left = {other: colour for colour, other in self._at[hub].items()}
        fan = [first]
        while True:
            following = next((other for other, colour in left.items() if colour not in self._at[fan[-1]]), None)
            if following is None:
                return fan
            fan.append(following)
            del left[following]

    def _invert(self, host: int, first: int, second: int) -> None:
        """Exchange two colours along the path from a host that begins with the first; the second is free there."""
        path = [host]
        colours = [first, second]
        while (following := self._at[path[-1]].get(colours[(len(path) - 1) % 2])) is not None:
            path.append(following)
        edges = [(one, other, colours[at % 2]) for at, (one, other) in enumerate(pairwise(path))]
        for one, other, colour in edges:
            del self._at[one][colour], self._at[other][colour]
        for one, other, colour in edges:
            self._paint(one, other, first + second - colour)

    def _cut(self, fan: list[int], colour: int) -> list[int]:
        """The fan up to the first host at which the colour is free."""
        return fan[: next(at for at, host in enumerate(fan) if colour not in self._at[host]) + 1]

    def _rotate(self, hub: int, fan: list[int], last: int) -> None:
        """Give every edge of the fan the colour of the next, and the last one the given colour."""
        colour_of = {other: colour for colour, other in self._at[hub].items()}
        colours = [colour_of[host] for host in fan[1:]]
        for host, colour in zip(fan[1:], colours, strict=True):
            del self._at[hub][colour], self._at[host][colour]
        for host, colour in zip(fan, [*colours, last], strict=True):
            self._paint(hub, host, colour)
