"""Racks, leaves and pods: groups of near hosts, found in the measured links alone."""

# H = hosts, L = tiers. Tier 0 is the finest; each group of a tier is a union of groups of the finer tier.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipette_launch.cost.communication.collectives import spanning_tree
from pipette_launch.facts import Links
from pipette_launch.facts.layout import Floats, Ints

TYPICAL_MESSAGE_BYTES = 4 << 20
"""Message size that defines the distance of two hosts; latency and bandwidth both matter at this size."""
LEAST_RATIO = 1.12
"""A tier ends if the next link between groups takes this many times as long. Noise of 8 % on the links of a rack does
not end a tier."""
MOST_TIERS = 4
REACH = 0.25
"""The typical distance of a host (`reach_H`) is this quantile of its distances to all hosts."""
FASTEST, SLOW = 0.1, 1.3
"""A host is slow if its typical distance exceeds `SLOW` times the `FASTEST` quantile over all hosts."""
MANY_SLOW = 0.125
"""Slow hosts are ordered apart from fast hosts if at least this share of the hosts is slow."""
POWER = 4
"""Exponent of link times in the cost of a chain of hosts. A high exponent counts the slowest link most."""
_MOST_GAPS = 12
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9)
_TINY = np.finfo(float).tiny


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiers:
    """The hosts of an allocation as a hierarchy of groups of near hosts."""

    order_H: Ints
    """Hosts in an order with near hosts side by side; each group of each tier is contiguous in this order."""
    by_speed: tuple[Ints, ...]
    """Fast hosts, then slow hosts, each with near hosts side by side; empty if few hosts are slow.

    Hosts of a small rack beside a large rack count as slow too, because most hosts are far from the small rack."""
    group_LH: Ints
    """Group of each host in each tier, finest tier first, numbered from 0 along `order_H`. Without rows (no tier), all
    links are alike."""

    @property
    def num_tiers(self) -> int:
        """Number of tiers: 0 if all links are alike."""
        return len(self.group_LH)

    def runs(self, tier: int) -> list[Ints]:
        """Return the hosts of each group of a tier, in the order of `order_H`."""
        sizes = np.bincount(self.group_LH[tier])
        return np.split(self.order_H, np.cumsum(sizes)[:-1])


@lru_cache(maxsize=4)
def tiers_of(links: Links) -> Tiers:
    """Cluster hosts by single linkage, and end tiers at the largest growth of the joining links. O(H^2 log H).

    Single linkage uses the best link between two groups, so noise on single links has little effect. If all links of a
    host are slow by a common factor, their times are first divided by this factor. After the division, the host stays
    in its rack.
    """
    distance_HH = distances_s(links)
    joints = spanning_tree(_without_bad_hosts(distance_HH))
    lengths = np.array([seconds for seconds, _, _ in joints])
    # The joining links are sorted by length. `gaps` has the number of links before each of the widest gaps in length.
    ratios = lengths[1:] / np.maximum(lengths[:-1], _TINY)
    widest = np.argsort(-ratios, kind="stable")[:_MOST_GAPS]
    gaps = [int(index) + 1 for index in widest if ratios[index] >= LEAST_RATIO]
    order_H, snapshots = _join(joints, distance_HH, gaps)
    rows = []
    for gap in sorted(_clear_gaps(snapshots, lengths)):
        # Number the groups along the order, in which each group is contiguous.
        along_H, group_H = snapshots[gap][order_H], np.empty_like(order_H)
        group_H[order_H] = np.concatenate(([0], np.cumsum(along_H[1:] != along_H[:-1])))
        rows.append(group_H)
    return Tiers(
        order_H=order_H,
        by_speed=_by_speed(distance_HH),
        group_LH=np.array(rows, dtype=np.int64).reshape(len(rows), links.size),
    )


def distances_s(links: Links) -> Floats:
    """Return the seconds of a typical message between two hosts, mean of both directions (H x H, diagonal 0)."""
    one_way_HH = np.asarray(links.latency_s) + TYPICAL_MESSAGE_BYTES * links.seconds_per_byte
    return np.asarray((one_way_HH + one_way_HH.T) / 2)


@lru_cache(maxsize=4)
def nearest(links: Links, count: int) -> Ints:
    """Return the `count` nearest hosts of each host (at most H - 1), unordered: shape (H, count)."""
    distance_HH = distances_s(links)
    np.fill_diagonal(distance_HH, np.inf)
    count = min(count, links.size - 1)
    return np.argpartition(distance_HH, count - 1, axis=1)[:, :count]


def _without_bad_hosts(distance_HH: Floats) -> Floats:
    """Divide the distances of each host by the factor by which the host is slower to near and far hosts alike.

    A host alone in its rack is far from its nearest host, but not slow to far hosts, so its factor is 1.
    """
    size = len(distance_HH)
    if size < 3:
        return distance_HH
    others_HO = np.sort(distance_HH, axis=1)[:, 1:]
    quantile_HK = others_HO[:, np.round(np.array(_QUANTILES) * (size - 2)).astype(np.int64)]
    typical_K = np.maximum(np.median(quantile_HK, axis=0), _TINY)
    badness_H = np.maximum((quantile_HK / typical_K).min(axis=1), 1.0)
    return np.asarray(distance_HH / np.maximum(badness_H[:, None], badness_H[None, :]))


def _by_speed(distance_HH: Floats) -> tuple[Ints, ...]:
    reach_H = np.quantile(distance_HH, REACH, axis=1)
    is_slow_H = reach_H > SLOW * np.quantile(reach_H, FASTEST)
    if is_slow_H.mean() < MANY_SLOW:
        return ()
    orders = []
    for hosts in (np.flatnonzero(~is_slow_H), np.flatnonzero(is_slow_H)):
        among_HH = distance_HH[np.ix_(hosts, hosts)]
        orders.append(hosts[_join(spanning_tree(_without_bad_hosts(among_HH)), among_HH, [])[0]])
    return tuple(orders)


def _join(
    joints: Sequence[tuple[float, int, int]], distance_HH: Floats, gaps: Sequence[int]
) -> tuple[Ints, dict[int, Ints]]:
    """Join chains of hosts, link by link, to one chain; also return the group of each host at each gap."""
    size = len(distance_HH)
    lengths_HH = (distance_HH / max(distance_HH.max(), _TINY)) ** POWER
    reach_H = np.quantile(lengths_HH, REACH, axis=1)
    chains = {host: np.array([host]) for host in range(size)}
    name_H = np.arange(size)
    snapshots = {}
    for done, (_, one, other) in enumerate(joints, start=1):
        left, right = sorted((int(name_H[one]), int(name_H[other])))
        chain = _joined(chains[left], chains.pop(right), lengths_HH, reach_H)
        name_H[chain] = left
        chains[left] = chain
        if done in gaps:
            snapshots[done] = name_H.copy()
    return chains[0], snapshots


def _joined(near: Ints, far: Ints, lengths_HH: Floats, reach_H: Floats) -> Ints:
    """Join two chains at the least cost: end to end, or by inserting a single host into the other chain.

    The cost of a chain is the sum of its link lengths, plus the typical distance of the host at each end as the next
    link. Therefore a host that is far from all other hosts lies inside a chain, and well connected hosts lie at the
    ends.
    """
    if len(near) == 1:
        near, far = far, near
    turned = [(first, second) for first in (near, near[::-1]) for second in (far, far[::-1])]
    costs = [lengths_HH[first[-1], second[0]] - reach_H[first[-1]] - reach_H[second[0]] for first, second in turned]
    best = int(np.argmin(costs))
    if len(far) == 1:
        before, after, host = near[:-1], near[1:], far[0]
        inside = lengths_HH[before, host] + lengths_HH[host, after] - lengths_HH[before, after] - 2 * reach_H[host]
        if len(inside) and inside.min() < costs[best]:
            return np.insert(near, int(inside.argmin()) + 1, host)
    return np.concatenate(turned[best])


def _clear_gaps(snapshots: dict[int, Ints], lengths: Floats) -> list[int]:
    """Return the gaps that make tiers, widest first: two groups or more, and at most half of the hosts alone."""
    chosen = []
    for gap, name_H in snapshots.items():
        sizes = np.bincount(name_H)
        if (sizes > 1).sum() >= 2 and 2 * sizes[sizes > 1].sum() >= len(name_H):
            chosen.append(gap)
    chosen.sort(key=lambda gap: (-lengths[gap] / max(lengths[gap - 1], _TINY), gap))
    return chosen[:MOST_TIERS]
