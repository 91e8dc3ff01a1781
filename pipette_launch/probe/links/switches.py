"""Infers from measured links which hosts share switches, and chooses the links to measure for that.

A link tells how far apart two hosts are, and being near is transitive: hosts that are near to each other have the same
distance to every other host. So few links place every host: each host tests one of the groups that it may belong to,
all hosts at the same time, and the result for one member of a group holds for all of it.
"""

# H = hosts, C = groups (clusters) of one tier, N = measured pairs, L = levels between tiers, outermost first.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.probe.harness import Line
from pipette_launch.probe.links.sampling import Pair, Place, Round, ordered

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
