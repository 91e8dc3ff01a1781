"""Pure functions that choose the links between hosts to measure, and estimate the remaining links.

With few hosts, every pair is measured. With many hosts, 30 or 40 rounds of three kinds are measured.

1. Blind rounds: a random sample, before any link is known.
2. Scouting rounds, if no scheduler names the switches: pairs that show which hosts share fast links.
3. Plan rounds: the adviser (the planner's process) plans with all links, and the links that its plans use are measured.
With the new links the adviser plans again.

Links that were not measured are estimated. The first plans use optimistic estimates, so these plans try links that may
be fast, and such links are then measured. The last plan uses likely estimates, so this plan mostly uses measured links.

A round is a set of disjoint pairs of hosts, because a clean measurement occupies both hosts. The planner finds near
hosts in another way (`search/slots.py`), which needs the links of all pairs.
"""

# H = hosts, C = groups of one tier, N = measured pairs; row sends to column; nan = not measured; log = ln(bytes/s).

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pipette_launch.facts import Links
from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.probe.messages import FULL_HOSTS
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
Advise = Callable[[Links], Sequence[Pair]]
"""Function that plans with given links, and returns the host pairs that the plans use, most important first."""

MOST_ROUNDS, SCOUTED_ROUNDS = 30, 40
"""Largest number of blind, scouting and plan rounds together: if switches are known, and if switches are unknown."""
PASS_ROUNDS = 5
"""Most plan rounds before the adviser plans again. A ring plus a path through all hosts need 4 links of each host."""
LEAST_ROUNDS = 2
"""With fewer rounds left, the adviser does not plan again."""
SCOUTING_SHARE = 0.8
"""Scouting rounds take at most this share of the rounds left after the blind rounds."""
LEAST_SCOUTS = 0.05
"""Scouting ends if fewer than this share of the hosts are in an untested pair."""
BLIND_SCOUTING_ROUNDS = 4
"""Largest number of scouting rounds with random pairs, while no groups of near hosts are visible."""
CHANGED = 0.10
"""A cached link counts as changed if its time per byte differs by more than this share."""
STALE, STALE_LEAST = 0.25, 2
"""All cached links are discarded if more than 25 % of the links measured again have changed, and at least 2 links. A
single changed link is no reason to doubt the other links."""

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
OPTIMISTIC_QUANTILE = 0.9  # Optimistic estimates equal this quantile of the measured links of a tier


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


def rounds_of(pairs: Iterable[Pair], *, most: int | None = None) -> tuple[Round, ...]:
    """Put each pair into the first round in which both hosts are free.

    The most important pairs come first; the direction of a pair does not matter. Pairs that do not fit into `most`
    rounds are left out; None = no limit.
    """
    rounds: list[list[Pair]] = []
    busy: list[set[int]] = []
    for pair in dict.fromkeys(ordered(pair) for pair in pairs if pair[0] != pair[1]):
        number = next((number for number, hosts in enumerate(busy) if hosts.isdisjoint(pair)), len(rounds))
        if number == len(rounds) != most:
            rounds.append([])
            busy.append(set())
        if number != most:
            rounds[number].append(pair)
            busy[number].update(pair)
    return tuple(tuple(sorted(one)) for one in rounds)


def most_rounds(places: Sequence[Place]) -> int:
    """Return the largest number of rounds for hosts below these switches; hosts below unknown switches have ()."""
    return MOST_ROUNDS if switch_groups(len(places), places) else SCOUTED_ROUNDS


def blind_rounds(num_hosts: int, places: Sequence[Place], count: int, rng: np.random.Generator) -> tuple[Round, ...]:
    """Choose at most `count` rounds of host pairs before any link is measured; no pair comes twice.

    If switches are known, every other round stays below the innermost switches, because plans use near links most. If
    switches are known, the other rounds take the higher tiers of switches in turn. If switches are unknown, pairs are
    random, or neighbours in the order of the hosts, because host names often follow the racks. Large jobs with unknown
    switches draw only half of the rounds, because scouting rounds choose better pairs.
    """
    groups = switch_groups(num_hosts, places)
    tier_HH = tiers_between(num_hosts, groups)
    if not groups and num_hosts > FULL_HOSTS:
        count = -(-count // 2)
    order_H = np.arange(num_hosts)
    apart_HH = np.abs(order_H[:, None] - order_H)
    free_HH = apart_HH > 0
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


def _matching(score_HH: Floats, order_H: Ints, pairs: Round = ()) -> Round:
    """Add pairs to a round: each idle host, in the given order, gets the idle host with the highest score above 0."""
    found = list(pairs)
    idle_H = np.ones(len(score_HH), dtype=bool)
    idle_H[[host for pair in pairs for host in pair]] = False
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


class Estimate(NamedTuple):
    """Measured links, and estimates of all other links between hosts: likely and optimistic."""

    links: Links
    optimistic: Links


def estimate(num_hosts: int, lines: Lines, places: Sequence[Place] = ()) -> Estimate:
    """Estimate the links that were not measured: rate of the switch tier times the relative rate of the slower host.

    All parameters are quantiles of logarithms, because each host has few measured links, and some are disturbed.

    `lines` has at least one line, and may have only one direction of a pair. `places` has the switches above each host;
    if switches are not known, tiers are inferred from the links.
    """
    latency_HH, seconds_HH = (np.full((num_hosts, num_hosts), np.nan) for _ in range(2))
    ends = np.array(list(lines), dtype=np.int64).T
    latency_HH[ends[0], ends[1]], seconds_HH[ends[0], ends[1]] = np.array(list(lines.values())).T
    measured_HH = ~np.isnan(seconds_HH)
    groups = switch_groups(num_hosts, places) or [one.group_H for one in groupings_of(num_hosts, lines)]
    tier_HH = tiers_between(num_hosts, groups)
    log_HH = -np.log(seconds_HH)
    likely_HH = _as_slower_end(log_HH, tier_HH)
    optimistic_HH = likely_HH + _by_tier(log_HH - likely_HH, tier_HH, OPTIMISTIC_QUANTILE)
    is_link_HH = ~np.eye(num_hosts, dtype=bool)
    filled_HH = np.where(measured_HH, latency_HH, _by_tier(latency_HH, tier_HH, 0.5)) * is_link_HH
    rates = (np.exp(np.where(measured_HH, log_HH, guess_HH)) * is_link_HH for guess_HH in (likely_HH, optimistic_HH))
    return Estimate(*(Links(latency_s=filled_HH, bandwidth_bytes_per_s=rates_HH) for rates_HH in rates))


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


class Pass(NamedTuple):
    """Result of one scouting round, or of the rounds that measure the links in one answer of the adviser."""

    new: int
    """Number of wanted pairs that were measured. Other pairs were known already, or did not fit into the rounds."""
    rounds: int
    is_scouting: bool = False


@dataclass(kw_only=True, eq=False)
class Survey:
    """Links known so far, and the scouting and plan rounds."""

    num_hosts: int
    lines: dict[Pair, Line]
    """Lines of all measured links, new and cached, in both directions."""
    places: Sequence[Place] = ()
    is_cached: bool = False
    """True if the initial lines are from an earlier warm-up, so that these links may be measured again."""
    passes: list[Pass] = field(default_factory=list)
    changed: list[Pair] = field(default_factory=list)
    """Pairs whose cached links have changed, most important first."""
    is_settled: bool = False
    """True if the plans use only links that were measured in this warm-up."""

    def __post_init__(self) -> None:
        # Pairs that this warm-up has tried to measure, with or without success.
        self._done: set[Pair] = set() if self.is_cached else {ordered(pair) for pair in self.lines}

    @property
    def rounds(self) -> int:
        """Number of scouting and plan rounds, without blind rounds."""
        return sum(one.rounds for one in self.passes)

    def estimate(self) -> Estimate:
        """Estimate the links that were not measured."""
        return estimate(self.num_hosts, self.lines, self.places)

    def is_stale(self, *, are_few: bool) -> bool:
        """Return whether all cached links must be measured again.

        The links of few hosts are measured quickly, and a slow link shows only by comparison with all other links. So
        with few hosts, all links are measured again after one changed link, or after passes that could check no link.
        """
        changed, measured = len(self.changed), sum(one.new for one in self.passes)
        if are_few:
            return changed > 0 or measured == 0
        return changed >= STALE_LEAST and changed > STALE * measured

    def words(self) -> str:
        """Describe the plan rounds and scouting rounds in one sentence."""
        passes = [one for one in self.passes if not one.is_scouting]
        measured, rounds = sum(one.new for one in passes), sum(one.rounds for one in passes)
        scouting = self.rounds - rounds
        why = "to find hosts that are near each other"
        if not passes:
            return f"links: {scouting} more {plural('round', scouting)} {why}"
        before = f", after {scouting} {why}" if scouting else ""
        changed = f"; {len(self.changed)} changed since the last warm-up" if self.changed else ""
        end = "" if self.is_settled else "; the last plans also use links that were not measured"
        return (
            f"links: {measured} {plural('pair', measured)} of hosts that plans use, measured in "
            f"{rounds} {plural('round', rounds)}{before}{changed}{end}"
        )

    def scout(self, most: int, measure: Measure, allows: Callable[[], bool], rng: np.random.Generator) -> int:
        """Run scouting rounds until few pairs are left to test; returns the number of rounds, at most `most`."""
        for taken in range(most):
            pairs = scouting_round(self.num_hosts, self.lines, rng)
            if not pairs and taken < BLIND_SCOUTING_ROUNDS:
                order = rng.permutation(self.num_hosts).tolist()
                drawn = (ordered(pair) for pair in zip(order[::2], order[1::2], strict=False))
                pairs = tuple(sorted(pair for pair in drawn if pair not in self._done))
            if 2 * len(pairs) < LEAST_SCOUTS * self.num_hosts or not allows():
                return taken
            # If most hosts of a round would be idle, idle hosts measure links that may be fast.
            hope = self.estimate().optimistic if 4 * len(pairs) < self.num_hosts else None
            self.take(pairs, 1, measure, hope=hope, is_scouting=True)
        return most

    def take(
        self, wanted: Sequence[Pair], most: int, measure: Measure, *, hope: Links | None, is_scouting: bool = False
    ) -> int:
        """Measure the wanted pairs that are new, most important first; returns the number of rounds, at most `most`.

        With `hope` (optimistic links), a host that would be idle in a round measures the link that may be fastest.
        """
        pairs = list(dict.fromkeys(ordered(pair) for pair in wanted))
        rounds = rounds_of((pair for pair in pairs if pair not in self._done), most=most)
        self.passes.append(Pass(new=sum(map(len, rounds)), rounds=len(rounds), is_scouting=is_scouting))
        if rounds:
            rounds = rounds if hope is None else _filled(rounds, hope, self._done)
            measured = measure(rounds)
            different = {
                ordered(way)
                for way, line in measured.items()
                if way in self.lines and abs(self.lines[way].seconds_per_byte / line.seconds_per_byte - 1) > CHANGED
            }
            self.changed += [pair for pair in pairs if pair in different]
            self.lines.update(measured)
            self._done.update(pair for one in rounds for pair in one)
        return len(rounds)


def _filled(rounds: Sequence[Round], hope: Links, done: Collection[Pair]) -> tuple[Round, ...]:
    """Give each idle host of a round the partner with the fastest unmeasured link, according to `hope`."""
    rates_HH = np.minimum(hope.bandwidth_bytes_per_s, hope.bandwidth_bytes_per_s.T)
    taken: Collection[Pair] = [*done, *(pair for one in rounds for pair in one)]
    filled = []
    for pairs in rounds:
        one_P, other_P = np.array(list(taken), dtype=np.int64).reshape(-1, 2).T
        rates_HH[one_P, other_P] = rates_HH[other_P, one_P] = 0.0
        taken = _matching(rates_HH, np.arange(len(rates_HH)), pairs)
        filled.append(taken)
    return tuple(filled)


def survey(
    num_hosts: int,
    known: Lines,
    *,
    measure: Measure,
    advise: Advise | None,
    most_rounds: int,
    places: Sequence[Place] = (),
    is_cached: bool = False,
    allows: Callable[[], bool] = lambda: True,
    seed: int = 0,
) -> Survey:
    """Run scouting rounds, then plan rounds until all links of the plans are measured or no rounds or time are left.

    Without `advise` no planner names links, so there are only scouting rounds.

    `known` has links in both directions and is not empty. If `known` is cached from an earlier warm-up, estimates are
    not optimistic, and links of `known` may be measured again. If `known` is new, the rounds that measured `known`
    count towards `most_rounds`. `allows` returns whether there is time for more rounds.
    """
    found, left = Survey(num_hosts=num_hosts, lines=dict(known), places=places, is_cached=is_cached), most_rounds
    if not is_cached:
        # The number of rounds spent so far equals the number of pairs of the busiest host.
        left -= max(Counter(host for pair in {ordered(pair) for pair in known} for host in pair).values(), default=0)
        if num_hosts > FULL_HOSTS and not switch_groups(num_hosts, places):
            left -= found.scout(round(SCOUTING_SHARE * left), measure, allows, np.random.default_rng(seed))
    links, is_optimistic = found.estimate(), not is_cached
    while advise and left >= LEAST_ROUNDS and not found.is_settled and allows():
        # The last plan rounds confirm links that the plan uses, and earlier plan rounds explore.
        is_optimistic = is_optimistic and left > PASS_ROUNDS
        wanted = advise(links.optimistic if is_optimistic else links.links)
        hope = None if is_cached else links.optimistic
        rounds = found.take(wanted, min(PASS_ROUNDS, left), measure, hope=hope)
        left -= rounds
        if rounds:
            links = found.estimate()
        else:
            is_optimistic, found.is_settled = False, not is_optimistic
    return found
