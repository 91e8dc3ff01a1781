"""Which pairs of hosts are measured in which round: all of them, or a sample where they are too many. Pure.

A clean measurement occupies both ends, so a round is a matching: disjoint pairs of hosts, the lower host first.
"""

# H = hosts, C = groups (clusters) of one tier, N = measured pairs, L = levels between tiers, outermost first.
# H = hosts (or devices of one), row sends to column; nan = not measured. All bandwidths as logarithms (log_HH).
# H = hosts, row sends to column.

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise, zip_longest
from itertools import count as counted
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts import Links
from pipette_launch.probe.messages import FULL_HOSTS
from pipette_launch.text import plural

Pair = tuple[int, int]
Round = tuple[Pair, ...]
Place = tuple[str, ...]
"""The switches above a host, outermost first; empty where they are not known."""
Tier = list[list[int]]
"""Hosts by the switch above them."""


class Line(NamedTuple):
    """Seconds = latency_s + bytes * seconds_per_byte."""

    latency_s: float
    seconds_per_byte: float


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


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
GRID, BLUR = 0.005, 0.01
"""Step of the histogram of log bandwidths, and width of its kernel: noise of some percent must not look like a tier."""
VALLEY = 0.5
"""Two tiers are distinct where the density between them is below this part of the lower peak, less its uncertainty."""
LEAST_LINKS, LEAST_SEEN = 6, 200
"""A tier of fewer links may be chance, and with fewer links in all no tier is inferred."""
FAR_SHARE = 0.1
"""Groups are split only if more than this part of the links within them is far."""
MOST_LEVELS = 3
SMALL = 0.3
"""A group smaller than this part of what most hosts are in is left over."""
SEVERAL = 3
SURE = 2
"""Two groups are apart if so many more links between them are far than near: a single one may be disturbed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouping:
    """The hosts in groups of one level, and how well it is known which groups are apart."""

    group_H: Ints
    home_H: Ints
    """The same, but hosts of small groups are put into the group to which their links are best."""
    tests_CC: Ints
    """Number of far links less near links between two groups; `SURE` on the diagonal."""


def inferred_places(num_hosts: int, lines: Mapping[Pair, Line]) -> tuple[Place, ...]:
    """Names of groups of near hosts, the widest first, in place of switches; empty where all links are alike."""
    groupings = groupings_of(num_hosts, lines)
    return tuple(
        tuple(f"{level}.{grouping.home_H[host]}" for level, grouping in enumerate(groupings))
        for host in range(num_hosts)
    )


def groupings_of(num_hosts: int, lines: Mapping[Pair, Line]) -> tuple[Grouping, ...]:
    """Groups of near hosts, the widest first; each further grouping divides the groups before it."""
    one_N, other_N, log_N = _pairs(lines)
    outer_H = np.zeros(num_hosts, dtype=np.int64)
    found: list[Grouping] = []
    while len(found) < MOST_LEVELS:
        # Links between the groups are known to be far by now, and would outnumber the rarer ones.
        inside_N = outer_H[one_N] == outer_H[other_N]
        level = lowest_level(log_N[inside_N])
        if level is None:
            break
        group_H = _grouped(num_hosts, one_N[inside_N], other_N[inside_N], log_N[inside_N] > level, log_N[inside_N])
        tests_CC = np.zeros((int(group_H.max()) + 1,) * 2, dtype=np.int64)
        far_N = np.where(log_N > level, -1, 1)
        np.add.at(tests_CC, (group_H[one_N], group_H[other_N]), far_N)
        tests_CC += tests_CC.T
        np.fill_diagonal(tests_CC, SURE)
        outer_H = _taken_in(group_H, outer_H, one_N, other_N, log_N)
        found.append(Grouping(group_H=group_H, home_H=outer_H, tests_CC=tests_CC))
    return tuple(found)


def scouting_round(num_hosts: int, lines: Mapping[Pair, Line], rng: np.random.Generator) -> Round:
    """Choose pairs that tell most about which hosts are near; empty where all is known, or no groups are seen.

    Each host tests a group that may be its own, at the widest level where it is not known to be apart from all others;
    no two hosts test the same two groups.
    """
    pairs: list[Pair] = []
    idle_H = np.ones(num_hosts, dtype=bool)
    outer_H = np.zeros(num_hosts, dtype=np.int64)
    for grouping in groupings_of(num_hosts, lines):
        group_H, tests_CC = grouping.group_H, grouping.tests_CC.copy()
        for needed in range(1, SURE + 1):
            for host in rng.permutation(np.flatnonzero(idle_H)).tolist():
                open_H = idle_H & (outer_H == outer_H[host]) & (tests_CC[group_H[host]][group_H] < needed)
                if not idle_H[host] or not open_H.any():
                    continue
                other = int(rng.choice(np.flatnonzero(open_H)))
                pairs.append(ordered((host, other)))
                idle_H[[host, other]] = False
                tests_CC[group_H[host], group_H[other]] = tests_CC[group_H[other], group_H[host]] = SURE
        outer_H = grouping.home_H
    return tuple(sorted(pairs))


def lowest_level(log_N: Floats) -> float | None:
    """The log bandwidth that separates far from near links: the lowest valley between two peaks; None = one peak."""
    if len(log_N) < LEAST_SEEN:
        return None
    grid = np.arange(log_N.min() - 4 * BLUR, log_N.max() + 4 * BLUR, GRID)
    count, _ = np.histogram(log_N, bins=np.append(grid, grid[-1] + GRID))
    kernel = np.exp(-0.5 * (np.arange(-4 * BLUR, 4 * BLUR + GRID, GRID) / BLUR) ** 2)
    density = np.convolve(count, kernel, mode="same")
    top = 0
    for peak in (np.flatnonzero((density[1:-1] > density[:-2]) & (density[1:-1] >= density[2:])) + 1).tolist():
        valley = top + int(density[top : peak + 1].argmin())
        below = int((log_N < grid[valley]).sum())
        # A peak of few far links are the links of slow hosts.
        enough = below >= max(FAR_SHARE * len(log_N), LEAST_LINKS) and len(log_N) - below >= LEAST_LINKS
        rare = min(density[top], density[peak])
        # The count at a peak is random: one standard deviation fewer is as likely.
        if enough and density[valley] < VALLEY * (rare - np.sqrt(rare)):
            return float(grid[valley])
        if density[peak] > density[top]:
            top = peak
    return None


def _pairs(lines: Mapping[Pair, Line]) -> tuple[Ints, Ints, Floats]:
    """Measured pairs, each once, with the better of both directions."""
    rates: dict[Pair, float] = {}
    for ends, line in lines.items():
        pair = ordered(ends)
        rates[pair] = max(rates.get(pair, 0.0), 1 / line.seconds_per_byte)
    one_N, other_N = np.array(list(rates), dtype=np.int64).reshape(-1, 2).T
    log_N = np.log(np.array(list(rates.values())))
    return one_N, other_N, log_N


def _taken_in(group_H: Ints, outer_H: Ints, one_N: Ints, other_N: Ints, log_N: Floats) -> Ints:
    """Put the hosts of small groups into the large group to which their links are best.

    A host without a group is slow, so that all of its links seem far, or only far ones of its links were measured.
    """
    count = int(group_H.max()) + 1
    size_C = np.bincount(group_H, minlength=count)
    is_small_C = size_C < SMALL * np.median(size_C[group_H])
    links_CC, sum_CC = np.zeros((count, count)), np.zeros((count, count))
    for a, b in ((one_N, other_N), (other_N, one_N)):
        np.add.at(links_CC, (group_H[a], group_H[b]), 1.0)
        np.add.at(sum_CC, (group_H[a], group_H[b]), log_N)
    mean_CC = np.where(links_CC > 0, sum_CC / np.maximum(links_CC, 1.0), -np.inf)
    outer_C = np.zeros(count, dtype=np.int64)
    outer_C[group_H] = outer_H
    mean_CC[(outer_C[:, None] != outer_C) | is_small_C] = -np.inf
    home_C = np.where(is_small_C & (mean_CC.max(axis=1) > -np.inf), mean_CC.argmax(axis=1), np.arange(count))
    taken_H: Ints = home_C[group_H]
    return taken_H


def _grouped(num_hosts: int, one_N: Ints, other_N: Ints, near_N: NDArray[np.bool_], log_N: Floats) -> Ints:
    """Join hosts along near links, best first, unless as many links between the two groups are far.

    Two groups of several hosts each are not joined by a single link, which may be disturbed.
    """
    group_H = list(range(num_hosts))
    members = {host: [host] for host in range(num_hosts)}
    votes: dict[int, dict[int, int]] = {host: {} for host in range(num_hosts)}
    for one, other, near in zip(one_N.tolist(), other_N.tolist(), near_N.tolist(), strict=True):
        for a, b in ((one, other), (other, one)):
            votes[a][b] = votes[a].get(b, 0) + (1 if near else -1)
    order = np.argsort(-log_N, kind="stable")
    for index in order[near_N[order]].tolist():
        kept, gone = group_H[one_N[index]], group_H[other_N[index]]
        if len(members[kept]) < len(members[gone]):
            kept, gone = gone, kept
        needed = SURE if len(members[gone]) >= SEVERAL else 1
        if kept == gone or votes[kept].get(gone, 0) < needed:
            continue
        for host in members[gone]:
            group_H[host] = kept
        members[kept] += members.pop(gone)
        for other, vote in votes.pop(gone).items():
            del votes[other][gone]
            if other != kept:
                votes[kept][other] = votes[other][kept] = votes[kept].get(other, 0) + vote
    return np.unique(group_H, return_inverse=True)[1].astype(np.int64)


HOST_QUANTILE = 0.75
"""A host's own rate shows on the better of its links: the others may be slow because of their other ends."""
SHRINKAGE = 2.0
"""The factor of a host with n measured links is its estimate times n / (n + this)."""
SWEEPS = 3
HOPEFUL_QUANTILE = 0.9
"""A hopeful estimate is as good as this quantile of the measured links of the tier."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """Links of all pairs, measured and not."""

    links: Links
    hopeful: Links
    """The same, but with hopeful estimates for those that were not measured."""
    measured_HH: NDArray[np.bool_]
    """Which were measured; the others are estimated."""


def estimate(num_hosts: int, lines: Mapping[Pair, Line], places: Sequence[Place] = ()) -> Estimate:
    """Fill in the links that were not measured.

    Args:
        num_hosts: H, two or more.
        lines: measured lines by (sender, receiver), for both directions of a pair or for one; at least one.
        places: the switches above each host; where they are not known, they are inferred.

    """
    latency_HH, seconds_HH = (np.full((num_hosts, num_hosts), np.nan) for _ in range(2))
    ends = np.array(list(lines), dtype=np.int64).T
    latency_HH[ends[0], ends[1]], seconds_HH[ends[0], ends[1]] = np.array(list(lines.values())).T
    measured_HH = ~np.isnan(seconds_HH)
    if len(nested_groups(num_hosts, places)) == 1:
        places = inferred_places(num_hosts, lines)
    tier_HH = tiers_between(num_hosts, places)
    log_HH = -np.log(seconds_HH)
    # Two models: the slower end decides, or both ends have a share. The one with the smaller median error counts.
    fits = [_as_slower_end(log_HH, tier_HH), _as_product(log_HH, tier_HH)]
    likely_HH = min(fits, key=lambda fit_HH: float(np.nanmedian(np.abs(log_HH - fit_HH))))
    hope_HH = likely_HH + _by_tier(log_HH - likely_HH, tier_HH, HOPEFUL_QUANTILE)
    filled_HH = np.where(measured_HH, latency_HH, _by_tier(latency_HH, tier_HH, 0.5))
    np.fill_diagonal(filled_HH, 0.0)
    off_diagonal_HH = ~np.eye(num_hosts, dtype=bool)
    links, hopeful = (
        Links(
            latency_s=filled_HH,
            bandwidth_bytes_per_s=np.exp(np.where(measured_HH, log_HH, guess_HH)) * off_diagonal_HH,
        )
        for guess_HH in (likely_HH, hope_HH)
    )
    return Estimate(links=links, hopeful=hopeful, measured_HH=measured_HH)


def tiers_between(num_hosts: int, places: Sequence[Place]) -> Ints:
    """How far apart hosts are: 0 under the same innermost switch, and one more for each tier that they do not share."""
    tier_HH = np.zeros((num_hosts, num_hosts), dtype=np.int64)
    for groups in nested_groups(num_hosts, places)[:-1]:
        group_H = np.empty(num_hosts, dtype=np.int64)
        for number, hosts in enumerate(groups):
            group_H[hosts] = number
        tier_HH += group_H[:, None] != group_H
    return tier_HH


def _as_slower_end(log_HH: Floats, tier_HH: Ints) -> Floats:
    """Each host has a rate of its own, and a link has the rate of its slower end."""
    left_HH = log_HH - _by_tier(log_HH, tier_HH, 0.5)
    sender_H, receiver_H = _host_factors(left_HH, HOST_QUANTILE), _host_factors(left_HH.T, HOST_QUANTILE)
    ends_HH = np.minimum(sender_H[:, None], receiver_H)
    return ends_HH + _by_tier(log_HH - ends_HH, tier_HH, 0.5)


def _as_product(log_HH: Floats, tier_HH: Ints) -> Floats:
    """Each host has a factor as a sender and one as a receiver: Tukey's median polish."""
    ends_HH = np.zeros_like(log_HH)
    receiver_H = np.zeros(len(log_HH))
    for _ in range(SWEEPS):
        left_HH = log_HH - _by_tier(log_HH - ends_HH, tier_HH, 0.5)
        sender_H = _host_factors(left_HH - receiver_H, 0.5)
        receiver_H = _host_factors((left_HH - sender_H[:, None]).T, 0.5)
        ends_HH = sender_H[:, None] + receiver_H
    return ends_HH + _by_tier(log_HH - ends_HH, tier_HH, 0.5)


def _host_factors(left_HH: Floats, share: float) -> Floats:
    """The factor of each host (row) against the median host: a quantile of its links, shrunk where it has few."""
    ranked_HH = np.sort(left_HH, axis=1)
    count_H = (~np.isnan(ranked_HH)).sum(axis=1)
    at_H = np.floor(share * np.maximum(count_H - 1, 0)).astype(np.int64)
    value_H = np.where(count_H > 0, ranked_HH[np.arange(len(at_H)), at_H], np.nan)
    middle = np.median(value_H[count_H > 0])
    factor_H: Floats = np.where(count_H > 0, value_H - middle, 0.0) * count_H / (count_H + SHRINKAGE)
    return factor_H


def _by_tier(value_HH: Floats, tier_HH: Ints, share: float) -> Floats:
    """A quantile of each tier's measured values, for all pairs of the tier; a tier without any takes the nearest's."""
    known_HH = ~np.isnan(value_HH)
    found = {
        tier: float(np.quantile(value_HH[known_HH & (tier_HH == tier)], share))
        for tier in np.unique(tier_HH[known_HH]).tolist()
    }
    nearest = [min(found, key=lambda one: (abs(one - tier), one)) for tier in range(int(tier_HH.max()) + 1)]
    filled: Floats = np.array([found[tier] for tier in nearest])[tier_HH]
    return filled


Lines = Mapping[Pair, Line]
Measure = Callable[[Sequence[Round]], Lines]
"""Measures rounds of pairs of hosts; returns both directions of each pair that could be measured."""
Advise = Callable[[Links], Sequence[Pair]]
"""Plans with such links, and returns the pairs of hosts that the plans would use, most important first."""
MOST_ROUNDS = 30
"""Of all passes together with the blind rounds before them."""
PASS_ROUNDS = 5
"""A ring and a path through every host are four links of each host, which take so many rounds at most."""
LEAST_ROUNDS = 2
"""With fewer rounds left no pass begins, as `rounds_of` may need one more than a host has pairs."""
SCOUTING_SHARE = 0.8
"""Largest part of the rounds that may go into finding out which hosts are near, where switches are not known."""
LEAST_SCOUTS = 0.05
"""Scouting ends when a smaller part of the hosts than this has a pair that would tell anything."""
BLIND_SCOUTING_ROUNDS = 4
"""So many scouting rounds measure random pairs while no groups of hosts are seen."""
CHANGED = 0.10
"""A cached link whose time for a byte is off by more than this has changed."""
STALE = 0.25
"""If more than this part of the cached links that were measured again have changed, none of them is believed."""
STALE_LEAST = 2
"""A single changed link says nothing of the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass of planning and measuring, or one round of scouting."""

    asked: int
    """Number of pairs that the plans would use, or that tell which hosts are near to each other."""
    new: int
    """Number of those that were measured now; the others were known, or did not fit into the rounds."""
    rounds: int
    is_scouting: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapted:
    """What is known of all links after the passes."""

    estimate: Estimate
    lines: Lines
    """All that was measured, now or before, in both directions."""
    passes: tuple[Pass, ...]
    changed: tuple[Pair, ...]
    """Pairs from an earlier warm-up whose links have changed, most important first."""
    is_settled: bool
    """The plans use only links that were measured in this warm-up."""

    @property
    def rounds(self) -> int:
        """Number of rounds of all passes."""
        return sum(one.rounds for one in self.passes)

    def is_stale(self, *, are_few: bool) -> bool:
        """Whether all cached links ought to be measured anew.

        The links of few hosts are quickly measured, and only all of them together show which one is slower than its
        peers. So among few hosts one changed link is enough, and also if nothing could be checked.
        """
        changed, measured = len(self.changed), sum(one.new for one in self.passes)
        if are_few:
            return changed > 0 or measured == 0
        return changed >= STALE_LEAST and changed > STALE * measured

    def words(self) -> str:
        """Describe the passes in a sentence."""
        passes = [one for one in self.passes if not one.is_scouting]
        measured, rounds = sum(one.new for one in passes), sum(one.rounds for one in passes)
        scouting = self.rounds - rounds
        before = f", after {scouting} to find out which hosts are near to each other" if scouting else ""
        end = "" if self.is_settled else "; the rounds were spent before the plans stopped asking for more"
        changed = f", {len(self.changed)} of them changed since" if self.changed else ""
        return (
            f"links: {measured} {plural('pair', measured)} of hosts that plans would use, measured in "
            f"{rounds} {plural('round', rounds)}"
            f"{before}{changed}{end}"
        )


def adapt(
    num_hosts: int,
    known: Lines,
    *,
    measure: Measure,
    advise: Advise,
    most_rounds: int,
    places: Sequence[Place] = (),
    is_cached: bool = False,
    allows: Callable[[], bool] = lambda: True,
    seed: int = 0,
) -> Adapted:
    """Measure what plans would use until they ask for nothing new, or until the rounds or the budget are spent.

    Args:
        num_hosts: H.
        known: links that were measured before, in both directions; not empty.
        measure: see `Measure`.
        advise: see `Advise`.
        most_rounds: the largest number of rounds, together with those that `known` took, unless it is cached.
        places: the switches above each host; where they are not known, rounds go into finding out who is near to whom.
        is_cached: `known` is from an earlier warm-up. It is believed until measured again, and links are not shown
            as hopeful.
        allows: whether the budget has room for another pass.
        seed: of the random choice among pairs that tell as much.

    """
    survey, left = _Survey(known, is_cached=is_cached), most_rounds
    if not is_cached:
        # As many rounds as the busiest host has pairs.
        left -= max(Counter(host for pair in {ordered(pair) for pair in known} for host in pair).values(), default=0)
        if num_hosts > FULL_HOSTS and len(nested_groups(num_hosts, places)) == 1:
            left -= survey.scout(num_hosts, measure, most=round(SCOUTING_SHARE * left), allows=allows, seed=seed)
    found = estimate(num_hosts, survey.lines, places)
    hopes, is_settled = not is_cached, False
    while left >= LEAST_ROUNDS and not is_settled and allows():
        # The last pass confirms links that the plan uses, the others explore.
        hopes = hopes and left > PASS_ROUNDS
        asked = advise(found.hopeful if hopes else found.links)
        rounds = survey.go(asked, measure, most=min(PASS_ROUNDS, left), hope=None if is_cached else found.hopeful)
        left -= rounds
        if rounds:
            found = estimate(num_hosts, survey.lines, places)
        else:
            hopes, is_settled = False, not hopes
    return Adapted(
        estimate=found,
        lines=survey.lines,
        passes=tuple(survey.passes),
        changed=tuple(survey.changed),
        is_settled=is_settled,
    )


class _Survey:
    """The links that are known so far, and the passes that measured them."""

    def __init__(self, known: Lines, *, is_cached: bool) -> None:
        self.lines = dict(known)
        self.passes: list[Pass] = []
        self.changed: list[Pair] = []
        self._done: set[Pair] = set() if is_cached else {ordered(pair) for pair in known}
        """Pairs that were measured in this warm-up, or could not be: they are not measured again."""

    def scout(self, num_hosts: int, measure: Measure, *, most: int, allows: Callable[[], bool], seed: int) -> int:
        """Find out which hosts are near to each other, in at most so many rounds, until few pairs would tell more.

        Returns the number of rounds; `allows` tells whether the budget has room for another one.
        """
        rng = np.random.default_rng(seed)
        for taken in range(most):
            pairs = scouting_round(num_hosts, self.lines, rng)
            if not pairs and taken < BLIND_SCOUTING_ROUNDS:
                order = rng.permutation(num_hosts).tolist()
                drawn = (ordered(pair) for pair in zip(order[::2], order[1::2], strict=False))
                pairs = tuple(sorted(pair for pair in drawn if pair not in self._done))
            if 2 * len(pairs) < LEAST_SCOUTS * num_hosts or not allows():
                return taken
            is_sparse = 4 * len(pairs) < num_hosts
            hope = estimate(num_hosts, self.lines).hopeful if is_sparse else None
            self.go(pairs, measure, most=1, hope=hope, is_scouting=True)
        return most

    def go(
        self, asked: Sequence[Pair], measure: Measure, *, most: int, hope: Links | None, is_scouting: bool = False
    ) -> int:
        """Measure what is new among the pairs asked for, the most important first; returns the number of rounds.

        Hosts that would be idle in a round measure the partner that may be the fastest by the links `hope`, as that
        costs nothing; None = they stay idle.
        """
        pairs = list(dict.fromkeys(ordered(pair) for pair in asked))
        rounds = rounds_of((pair for pair in pairs if pair not in self._done), most=most)
        self.passes.append(
            Pass(asked=len(pairs), new=sum(map(len, rounds)), rounds=len(rounds), is_scouting=is_scouting)
        )
        if rounds:
            rounds = rounds if hope is None else _filled(rounds, hope, self._done)
            measured = measure(rounds)
            now = {pair for one in rounds for pair in one}
            # The time of either direction was known and differs now.
            self.changed += [
                pair
                for pair in pairs
                if pair in now
                and any(
                    abs(self.lines[way].seconds_per_byte / measured[way].seconds_per_byte - 1) > CHANGED
                    for way in (pair, pair[::-1])
                    if way in self.lines and way in measured
                )
            ]
            self.lines.update(measured)
            self._done |= now
        return len(rounds)


def _filled(rounds: Sequence[Round], hope: Links, done: Collection[Pair]) -> tuple[Round, ...]:
    """Give idle hosts of each round the fastest partners, by `hope`, that they have not been measured with."""
    rates_HH = np.minimum(hope.bandwidth_bytes_per_s, hope.bandwidth_bytes_per_s.T)
    taken = [*done, *(pair for one in rounds for pair in one)]
    if taken:
        one_P, other_P = np.array(taken, dtype=np.int64).T
        rates_HH[one_P, other_P] = rates_HH[other_P, one_P] = 0.0
    filled = []
    for pairs in rounds:
        more = list(pairs)
        idle_H = np.ones(len(rates_HH), dtype=bool)
        idle_H[[host for pair in pairs for host in pair]] = False
        for host in np.flatnonzero(idle_H).tolist():
            rates_H = np.where(idle_H, rates_HH[host], 0.0)
            partner = int(rates_H.argmax())
            if idle_H[host] and rates_H[partner] > 0:
                more.append(ordered((host, partner)))
                idle_H[[host, partner]] = False
                rates_HH[host, partner] = rates_HH[partner, host] = 0.0
        filled.append(tuple(sorted(more)))
    return tuple(filled)
