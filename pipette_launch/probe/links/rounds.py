"""Who talks to whom in which round, so that nobody does two things at once. Pure.

A clean measurement has both ends to itself, so a round is a matching: disjoint pairs. All pairs of N places need N-1
rounds when N is even and N when it is odd: there are N(N-1)/2 pairs, and a round of an odd number holds (N-1)/2, as one
place must rest. `matching_rounds` uses exactly so many. N-1 rounds of an odd number exist only where a place sends to
one peer and receives from another at the same time (ring shifts). That was tried and left: over one communicator both
transfers are one operation, which ends when the slower of them does, so a fast link beside a slow one looks slow. On 5
namespaced hosts, links of 50 to 525 Mbit/s, it put 60 of 190 pairs of links in the wrong order, and these rounds none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TypeAlias

from pipette_launch.probe.links.sampling import Pair, Round, circle_rounds

Group: TypeAlias = tuple[Pair, ...]
"""Pairs of slots that are measured in step: the rails of a pair of hosts, or one pair of local devices."""


def matching_rounds(count: int) -> tuple[Round, ...]:
    """Split all pairs of `count` places into `least_rounds(count)` rounds of disjoint pairs."""
    return circle_rounds(range(count))


def least_rounds(count: int) -> int:
    """How many rounds of disjoint pairs all pairs of `count` places need."""
    return 0 if count < 2 else count - 1 + count % 2


def rail_groups(pairs: Sequence[Pair], devices_per_host: int) -> tuple[Group, ...]:
    """All rails of each pair of hosts: device i of one talks to device i of the other, for all i at once."""
    size = devices_per_host
    return tuple(tuple((a * size + rail, b * size + rail) for rail in range(size)) for a, b in pairs)


def local_groups(pairs: Sequence[Pair], num_hosts: int, devices_per_host: int) -> tuple[Group, ...]:
    """The same pairs of local devices in every host at once, each a group of its own."""
    bases = range(0, num_hosts * devices_per_host, devices_per_host)
    return tuple(((base + a, base + b),) for base in bases for a, b in pairs)


def in_turns(between: Sequence[Round], within: Sequence[Round]) -> Iterator[tuple[bool, int, Round]]:
    """The order of rounds between hosts and within them: (whether between, its number from 1, its pairs).

    In turns, so that a budget that runs out cuts both kinds and leaves neither without a measurement.
    """
    for number, (outer, inner) in enumerate(zip_longest(between, within), start=1):
        if outer is not None:
            yield True, number, outer
        if inner is not None:
            yield False, number, inner
