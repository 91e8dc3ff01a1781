"""Pure functions that choose the links between hosts to measure, and estimate the remaining links.

With few hosts, every pair is measured. With many hosts, 30 or 50 rounds are measured.

1. Blind rounds: random pairs. If a scheduler names the switches, all rounds are blind, and half of them stay below
   the innermost switches.
2. If the switches are unknown: scouting rounds, with pairs that show which hosts share fast links. The rounds left
   then measure random pairs, half of them below the switches that the scouting rounds found.

Links that were not measured are estimated.

A round is a set of disjoint pairs of hosts, because a clean measurement occupies both hosts. The planner finds near
hosts in another way (`search/slots.py`), which needs the links of all pairs.
"""

# H = hosts, C = groups of one tier, N = measured pairs; row sends to column; nan = not measured; log = ln(bytes/s).

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pipette_launch.facts import Links
from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.text import plural

Pair = tuple[int, int]
Round = tuple[Pair, ...]
Place = tuple[str, ...]  # Names of the switches above a host, outermost first; empty if unknown


class Line(NamedTuple):
    """Time of a message in seconds = latency_s + bytes * seconds_per_byte."""

    latency_s: float
    seconds_per_byte: float


Lines = Mapping[Pair, Line]  # Lines by (sending host, receiving host)
Measure = Callable[[Sequence[Round]], Lines]
"""Function that measures rounds of host pairs, and returns the two directions of each pair that could be measured."""

TREE_ROUNDS = 30
"""Number of rounds if the switches are known."""
CHECK_ROUNDS = 2
"""Number of rounds that check the links of an earlier warm-up."""
SCOUTED_ROUNDS = 50
"""Largest number of rounds of all kinds if the switches are unknown."""
SCOUTING_SHARE = 0.8
"""Scouting rounds take at most this share of the rounds left after the blind rounds."""
LEAST_SCOUTS = 0.05
"""Scouting ends if fewer than this share of the hosts are in an untested pair."""
BLIND_SCOUTING_ROUNDS = 4
"""Largest number of scouting rounds with random pairs, while no groups of near hosts are visible."""
CHANGED = 0.10
"""A cached link counts as changed if its time per byte differs by more than this share."""
STALE = 0.25
"""With many hosts, all cached links are measured again if more than this share of the checked links has changed."""

GRID, BLUR = 0.005, 0.01
"""Step of the histogram of links and width of its smoothing kernel, in log bandwidth. A few percent of noise must not
look like a tier of switches."""
VALLEY = 0.5
"""Two tiers of links differ if the density between them is below this share of the lower peak."""
LEAST_LINKS, LEAST_SEEN = 6, 200
"""Least number of measured links in one tier, and least number of measured links from which tiers are inferred."""
FAR_SHARE = 0.1
"""A group of hosts is split only if more than this share of its links are far."""
SHIFT, MOST_SHIFTS, SHIFT_BLUR = 0.01, 120, 0.03
"""Step of the log bandwidth by which a host is slow, most steps, and width of the kernel of the usual density."""
RARE, RARER, DOUBT = 0.001, 2.5, 8.0
"""A link outside the usual density counts as 0.001 of the peak, because some links are disturbed. A shift costs 2.5 for
each link and unit of log bandwidth, because rounds prefer near links, and 8 in all, because few hosts are slow."""
SWEEPS = 3  # Passes over all hosts to find slow hosts, because slow partners make a host look slow
MOST_LEVELS = 3
SEVERAL = 3
SURE = 2  # Majority of far or near links that decides about two groups, because one link may be disturbed

HOST_QUANTILE = 0.75
"""A host's rate is this quantile of its links' rates, because a slow link may be due to the other host."""
SHRINKAGE = 2.0
"""The log rate of a host with n measured links, relative to the median host, is multiplied by n / (n + SHRINKAGE)."""


def ordered(pair: Pair) -> Pair:
    """Return the pair with its lower host first."""
    return (pair[0], pair[1]) if pair[0] < pair[1] else (pair[1], pair[0])


def all_pairs(hosts: Sequence[int]) -> tuple[Round, ...]:
    """Split all pairs of these hosts into the fewest rounds: N - 1 for N hosts, or N if N is odd (circle method)."""
    # The last place of an even circle is fixed, and the other places rotate. An empty place leaves its partner idle.
    turning = len(hosts) - 1 + len(hosts) % 2
    rounds = []
    for turn in range(turning if len(hosts) > 1 else 0):
        places = [(turn, turning), *(((turn + i) % turning, (turn - i) % turning) for i in range(1, turning // 2 + 1))]
        rounds.append(tuple(sorted(ordered((hosts[a], hosts[b])) for a, b in places if max(a, b) < len(hosts))))
    return tuple(rounds)


def rounds_of(pairs: Iterable[Pair]) -> tuple[Round, ...]:
    """Put each pair into the first round in which both hosts are free; the direction of a pair does not matter."""
    rounds: list[list[Pair]] = []
    busy: list[set[int]] = []
    for pair in dict.fromkeys(ordered(pair) for pair in pairs if pair[0] != pair[1]):
        number = next((number for number, hosts in enumerate(busy) if hosts.isdisjoint(pair)), len(rounds))
        if number == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[number].append(pair)
        busy[number].update(pair)
    return tuple(tuple(sorted(one)) for one in rounds)


def blind_rounds(
    num_hosts: int, groups: Sequence[Ints], count: int, rng: np.random.Generator, *, done: Iterable[Pair] = ()
) -> tuple[Round, ...]:
    """Choose at most `count` rounds of random host pairs; no pair comes twice, and no pair of `done` comes again.

    `groups` has each host's group below each tier of switches, innermost first. Every other round stays below the
    innermost switches, because plans use near links most. The other rounds take the higher tiers in turn. Without
    groups, pairs are random, or neighbours in the order of the hosts, because host names often follow the racks.
    """
    tier_HH = tiers_between(num_hosts, groups)
    order_H = np.arange(num_hosts)
    apart_HH = np.abs(order_H[:, None] - order_H)
    free_HH = apart_HH > 0
    for one, other in done:
        free_HH[one, other] = free_HH[other, one] = False
    rounds: list[Round] = []
    # A turn is empty if all pairs of its tier were drawn before.
    for turn in range(4 * count):
        if len(rounds) == count or not free_HH.any():
            break
        score_HH, turn_order_H, tier = 1 / np.maximum(apart_HH, 1), order_H, 0
        if groups or turn % 2 == 0:
            score_HH, turn_order_H = rng.random((num_hosts, num_hosts)), rng.permutation(num_hosts)
        if groups and turn % 2:
            tier = 1 + turn // 2 % len(groups)
        pairs = _matching(np.where(free_HH & (tier_HH == tier), score_HH, 0.0), turn_order_H)
        for one, other in pairs:
            free_HH[one, other] = free_HH[other, one] = False
        rounds += [pairs] if pairs else []
    return tuple(rounds)


def changed_links(known: Lines, measured: Lines) -> tuple[Pair, ...]:
    """Return the measured links that an earlier warm-up measured too, with another time per byte."""
    return tuple(
        way
        for way, line in measured.items()
        if way in known and abs(known[way].seconds_per_byte / line.seconds_per_byte - 1) > CHANGED
    )


def _matching(score_HH: Floats, order_H: Ints) -> Round:
    """Return a round: each idle host, in the given order, gets the idle host with the highest score above 0."""
    found = []
    idle_H = np.ones(len(score_HH), dtype=bool)
    for host in order_H.tolist():
        score_H = np.where(idle_H, score_HH[host], 0.0)
        partner = int(score_H.argmax())
        if idle_H[host] and score_H[partner] > 0:
            found.append(ordered((host, partner)))
            idle_H[[host, partner]] = False
    return tuple(sorted(found))


def switch_groups(num_hosts: int, places: Sequence[Place]) -> tuple[Ints, ...]:
    """Return each host's group (H) below each tier of switches, innermost first; empty if no switches are known."""
    tiers: list[Ints] = []
    depth = min((len(place) for place in places), default=0) if len(places) == num_hosts else 0
    for level in range(1, depth + 1):
        names = [place[:level] for place in places]
        number = {name: index for index, name in enumerate(dict.fromkeys(names))}
        # A tier without information puts all hosts into one group, or each host into a separate group.
        if (int(tiers[0].max()) + 1 if tiers else 1) < len(number) < num_hosts:
            tiers.insert(0, np.array([number[name] for name in names], dtype=np.int64))
    return tuple(tiers)


def tiers_between(num_hosts: int, groups: Sequence[Ints]) -> Ints:
    """Return how far apart hosts are (H x H): 0 in the same innermost group, plus 1 for each tier not shared."""
    tier_HH = np.zeros((num_hosts, num_hosts), dtype=np.int64)
    for group_H in groups:
        tier_HH += group_H[:, None] != group_H
    return tier_HH


class Grouping(NamedTuple):
    """Groups of near hosts at one level of nearness."""

    group_H: Ints
    tests_CC: Ints
    """Number of far links minus number of near links between two groups; SURE on the diagonal."""


def groupings_of(num_hosts: int, lines: Lines) -> tuple[Grouping, ...]:
    """Infer groupings of near hosts from few measured links; each grouping splits the groups of the grouping before.

    Being near is transitive, and near hosts have the same distance to every other host. So one link between two groups
    is evidence about all their members.
    """
    log_HH = np.full((num_hosts, num_hosts), np.nan)
    for (one, other), line in lines.items():
        # The better direction of a pair counts.
        log_HH[one, other] = log_HH[other, one] = np.fmax(log_HH[other, one], -np.log(line.seconds_per_byte))
    outer_H, slow_H = np.zeros(num_hosts, dtype=np.int64), slowness(log_HH)
    # Slow hosts get the usual speed here; otherwise their near links would look far.
    usual_HH = np.minimum(log_HH + np.maximum(slow_H[:, None], slow_H), np.nanmax(log_HH))
    found: list[Grouping] = []
    while len(found) < MOST_LEVELS:
        # Links between known groups are far, and would outnumber the links inside groups.
        inside_HH = outer_H[:, None] == outer_H
        level = lowest_level(usual_HH[np.triu(inside_HH & ~np.isnan(usual_HH))])
        if level is None:
            break
        nearness_HH = np.where(np.isnan(usual_HH), 0, np.where(usual_HH > level, 1, -1))
        # By measured speed, links of slow hosts come last, because their corrected speeds are uncertain.
        outer_H = _grouped(nearness_HH * inside_HH, log_HH)
        tests_CC = np.zeros((int(outer_H.max()) + 1,) * 2, dtype=np.int64)
        one_N, other_N = nearness_HH.nonzero()
        np.add.at(tests_CC, (outer_H[one_N], outer_H[other_N]), -nearness_HH[one_N, other_N])
        np.fill_diagonal(tests_CC, SURE)
        found.append(Grouping(group_H=outer_H, tests_CC=tests_CC))
    return tuple(found)


def scouting_round(num_hosts: int, lines: Lines, rng: np.random.Generator) -> Round:
    """Choose pairs that best show which hosts are near; empty if no groups are visible, or if every pair is decided.

    Each pair tests whether the groups of its hosts are one group, at the widest level that is still undecided.
    Different pairs test different groups.
    """
    pairs: list[Pair] = []
    idle_H = np.ones(num_hosts, dtype=bool)
    outer_H = np.zeros(num_hosts, dtype=np.int64)
    for group_H, known_CC in groupings_of(num_hosts, lines):
        tests_CC = known_CC.copy()
        for needed in range(1, SURE + 1):
            for host in rng.permutation(np.flatnonzero(idle_H)).tolist():
                open_H = idle_H & (outer_H == outer_H[host]) & (tests_CC[group_H[host]][group_H] < needed)
                if not idle_H[host] or not open_H.any():
                    continue
                other = int(rng.choice(np.flatnonzero(open_H)))
                pairs.append(ordered((host, other)))
                idle_H[[host, other]] = False
                tests_CC[group_H[host], group_H[other]] = tests_CC[group_H[other], group_H[host]] = SURE
        outer_H = group_H
    return tuple(sorted(pairs))


def lowest_level(log_N: Floats) -> float | None:
    """Return the log bandwidth between far and near links: the lowest valley of their density; None = no valley."""
    if len(log_N) < LEAST_SEEN:
        return None
    grid = np.arange(log_N.min() - 4 * BLUR, log_N.max() + 4 * BLUR, GRID)
    count, _ = np.histogram(log_N, bins=np.append(grid, grid[-1] + GRID))
    density = _smooth(count, BLUR / GRID)
    top = 0
    for peak in (np.flatnonzero((density[1:-1] > density[:-2]) & (density[1:-1] >= density[2:])) + 1).tolist():
        valley = top + int(density[top : peak + 1].argmin())
        below = int((log_N < grid[valley]).sum())
        # If few links are far, the far links belong to slow hosts.
        enough = below >= max(FAR_SHARE * len(log_N), LEAST_LINKS) and len(log_N) - below >= LEAST_LINKS
        rare = min(density[top], density[peak])
        # Counts are random, so the lower peak may be one standard deviation smaller.
        if enough and density[valley] < VALLEY * (rare - np.sqrt(rare)):
            return float(grid[valley])
        if density[peak] > density[top]:
            top = peak
    return None


def slowness(log_HH: Floats) -> Floats:
    """Return the log bandwidth that slow hosts lack to the usual speed, by measured links; 0 for the other hosts.

    Links of a slow host have the usual density, but shifted. Each host gets the shift that fits its links best.
    """
    row_N, column_N = (~np.isnan(log_HH)).nonzero()
    bin_N = np.rint((log_HH[row_N, column_N] - np.nanmin(log_HH)) / SHIFT).astype(np.int64)
    bins, shift_H = int(bin_N.max()) + 1, np.zeros(len(log_HH), dtype=np.int64)
    for _ in range(SWEEPS):
        usual_N = bin_N + np.maximum(shift_H[row_N], shift_H[column_N])
        density = _smooth(np.bincount(usual_N, minlength=bins + MOST_SHIFTS), SHIFT_BLUR / SHIFT)
        fit = np.log(density / density.max() + RARE) - RARER * SHIFT * np.arange(len(density))
        shows_N = shift_H[column_N] <= shift_H[row_N]  # A link shows the speed of its slower host
        counts = np.bincount((row_N * bins + bin_N)[shows_N], minlength=len(log_HH) * bins)
        fit_HS = counts.reshape(-1, bins) @ sliding_window_view(fit, MOST_SHIFTS)[:bins]
        shift_H = (fit_HS - DOUBT * (np.arange(MOST_SHIFTS) > 0)).argmax(axis=1)
    return np.asarray(SHIFT * shift_H)


def _smooth(count: Ints, width: float) -> Floats:
    """Smooth a histogram by a normal density of this width in bins."""
    bin_K = np.arange(-round(4 * width), round(4 * width) + 1)
    return np.convolve(count.astype(np.float64), np.exp(-0.5 * (bin_K / width) ** 2), mode="same")


def _grouped(nearness_HH: Ints, log_HH: Floats) -> Ints:
    """Join groups along near links (1), fastest first, unless far links (-1) between the two groups outvote them."""
    group_H = np.arange(len(nearness_HH))
    size_H, votes_HH = np.ones_like(group_H), nearness_HH.copy()
    one_N, other_N = np.triu(nearness_HH > 0).nonzero()
    for index in np.argsort(-log_HH[one_N, other_N], kind="stable").tolist():
        kept, gone = group_H[one_N[index]], group_H[other_N[index]]
        if size_H[kept] < size_H[gone]:
            kept, gone = gone, kept
        needed = SURE if size_H[gone] >= SEVERAL else 1
        if kept != gone and votes_HH[kept, gone] >= needed:
            group_H[group_H == gone] = kept
            size_H[kept] += size_H[gone]
            votes_HH[kept] += votes_HH[gone]
            votes_HH[:, kept] = votes_HH[kept]
    return np.unique(group_H, return_inverse=True)[1].astype(np.int64)


def estimate(num_hosts: int, lines: Lines, places: Sequence[Place] = ()) -> Links:
    """Return the links of all pairs; a link that was not measured is estimated.

    An estimate is the rate of the switch tier times the relative rate of the slower host. All parameters are
    quantiles of logarithms, because each host has few measured links, and some are disturbed.

    `lines` has at least one line, and may have only one direction of a pair. `places` has the switches above each host;
    if switches are not known, tiers are inferred from the links.
    """
    latency_HH, seconds_HH = (np.full((num_hosts, num_hosts), np.nan) for _ in range(2))
    ends = np.array(list(lines), dtype=np.int64).T
    latency_HH[ends[0], ends[1]], seconds_HH[ends[0], ends[1]] = np.array(list(lines.values())).T
    measured_HH = ~np.isnan(seconds_HH)
    groups = switch_groups(num_hosts, places) or [one.group_H for one in groupings_of(num_hosts, lines)]
    tier_HH = tiers_between(num_hosts, groups)
    log_HH, is_link_HH = -np.log(seconds_HH), ~np.eye(num_hosts, dtype=bool)
    rate_HH = np.exp(np.where(measured_HH, log_HH, _as_slower_end(log_HH, tier_HH))) * is_link_HH
    filled_HH = np.where(measured_HH, latency_HH, _by_tier(latency_HH, tier_HH, 0.5)) * is_link_HH
    return Links(latency_s=filled_HH, bandwidth_bytes_per_s=rate_HH)


def _as_slower_end(log_HH: Floats, tier_HH: Ints) -> Floats:
    """Estimate each host's rates as sender and as receiver; a link has the rate of its slower host."""
    left_HH = log_HH - _by_tier(log_HH, tier_HH, 0.5)
    rates = (_host_rates(one_HH, HOST_QUANTILE) for one_HH in (left_HH, left_HH.T))
    sender_H, receiver_H = (rate_H * count_H / (count_H + SHRINKAGE) for rate_H, count_H in rates)
    ends_HH = np.minimum(sender_H[:, None], receiver_H)
    return ends_HH + _by_tier(log_HH - ends_HH, tier_HH, 0.5)


def _host_rates(log_HH: Floats, share: float) -> tuple[Floats, Ints]:
    """Return a quantile of each row's measured links minus the median row's quantile, and the row's number of links."""
    ranked_HH = np.sort(log_HH, axis=1)
    count_H = (~np.isnan(ranked_HH)).sum(axis=1)
    at_H = np.floor(share * np.maximum(count_H - 1, 0)).astype(np.int64)
    value_H = ranked_HH[np.arange(len(at_H)), at_H]
    middle = np.median(value_H[count_H > 0]) if count_H.any() else 0.0
    return np.where(count_H > 0, value_H - middle, 0.0), count_H


def _by_tier(value_HH: Floats, tier_HH: Ints, share: float) -> Floats:
    """Return a quantile of the measured values of each pair's tier; a tier without values takes the nearest tier's."""
    known_HH = ~np.isnan(value_HH)
    found = {
        tier: float(np.quantile(value_HH[known_HH & (tier_HH == tier)], share))
        for tier in np.unique(tier_HH[known_HH]).tolist()
    }
    nearest = [min(found, key=lambda one: (abs(one - tier), one)) for tier in range(int(tier_HH.max()) + 1)]
    filled: Floats = np.array([found[tier] for tier in nearest])[tier_HH]
    return filled


class Scouted(NamedTuple):
    """Links after the scouting rounds and the random rounds that follow."""

    lines: Lines
    scouting: int
    """Number of scouting rounds."""
    random: int
    """Number of rounds of random pairs after the scouting rounds."""

    def words(self) -> str:
        """Describe the rounds in one sentence."""
        after = f", and {self.random} of random pairs" if self.random else ""
        return f"links: {self.scouting} more {plural('round', self.scouting)} to find hosts near each other{after}"


def scout(
    num_hosts: int,
    known: Lines,
    *,
    measure: Measure,
    allows: Callable[[], bool] = lambda: True,
    seed: int = 0,
) -> Scouted:
    """Measure more rounds of pairs of hosts below unknown switches.

    Scouting rounds run until few pairs are left to test. The remaining rounds measure random pairs, half of them of
    hosts that are near each other. `known` has the links of the blind rounds, in both directions, and is not empty.
    The blind rounds count towards SCOUTED_ROUNDS. `allows` returns whether there is time for another round.
    """
    lines, rng, scouting = dict(known), np.random.default_rng(seed), 0
    # The number of blind rounds equals the number of pairs of the busiest host.
    blind = max(Counter(host for pair in {ordered(pair) for pair in known} for host in pair).values())
    left = SCOUTED_ROUNDS - blind
    while scouting < round(SCOUTING_SHARE * left):
        pairs = scouting_round(num_hosts, lines, rng)
        if not pairs and scouting < BLIND_SCOUTING_ROUNDS:
            (pairs,) = blind_rounds(num_hosts, (), 1, rng, done=lines) or ((),)
        if 2 * len(pairs) < LEAST_SCOUTS * num_hosts or not allows():
            break
        lines.update(measure([pairs]))
        scouting += 1
    groups = tuple(one.group_H for one in reversed(groupings_of(num_hosts, lines)))
    random = 0
    for pairs in blind_rounds(num_hosts, groups, left - scouting, rng, done=lines):
        if not allows():
            break
        lines.update(measure([pairs]))
        random += 1
    return Scouted(lines=lines, scouting=scouting, random=random)
