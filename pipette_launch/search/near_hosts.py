"""Which hosts are near each other: racks, leaves and pods, found in the measured links alone."""

# H = hosts, L = tiers. Tier 0 is the finest; the groups of each tier are unions of those of the tier before.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipette_launch.cost.communication.collectives import spanning_tree
from pipette_launch.facts import Links
from pipette_launch.search.assignment.problem import Floats, Ints

TYPICAL_MESSAGE_BYTES = 4 << 20
"""The message by which the distance of hosts is measured: it weighs latency against bandwidth."""
LEAST_RATIO = 1.12
"""A tier ends where the next joint is longer by this factor: noise of 8 % leaves no such gap among full racks."""
MOST_TIERS = 4
REACH = 0.25
"""Quantile of the distances from a host to all that tells how far it is from others as a rule."""
FASTEST, SLOW = 0.1, 1.3
"""Hosts whose reach is longer by this factor than that of the fastest tenth are slow."""
MANY_SLOW = 0.125
"""From this share of the hosts on, slow ones are told apart. Fewer do least harm among their near ones."""
POWER = 4
"""Rings and pipelines wait for their slowest link: chains are joined where the sum of so high powers is least."""
_MOST_GAPS = 12
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiers:
    """The hosts of an allocation as a hierarchy of near ones."""

    order_H: Ints
    """Hosts in an order in which near ones stand side by side: every group of every tier is a run of it."""
    by_speed: tuple[Ints, ...]
    """Fast hosts, then slow ones, both in an order in which near ones stand side by side; empty with few slow hosts.

    A host is slow if the nearest quarter of all hosts is far from it; so the hosts of a small rack beside a large one
    count as slow too."""
    group_LH: Ints
    """The group of each host in each tier, finest tier first, numbered from 0 along the order; no row = all alike."""

    @property
    def num_tiers(self) -> int:
        """How many levels were told apart."""
        return len(self.group_LH)

    def runs(self, tier: int) -> list[Ints]:
        """Hosts of each group of a tier, along the order."""
        sizes = np.bincount(self.group_LH[tier])
        return np.split(self.order_H, np.cumsum(sizes)[:-1])


@lru_cache(maxsize=4)
def tiers_of(links: Links) -> Tiers:
    """Cluster hosts by single linkage, and cut where the joints grow by the largest factors. O(H^2 log H).

    Single linkage goes by the best link between two groups, so noise on single links hardly moves it. What makes all
    links of one host slow is taken out first: a bad host stays in its rack.
    """
    distance_HH = distances_s(links)
    joints = spanning_tree(_without_bad_hosts(distance_HH))
    lengths = np.array([seconds for seconds, _, _ in joints])
    order_H, snapshots = _join(joints, distance_HH, _gaps(lengths))
    cuts = sorted(_told_apart(snapshots, lengths))
    rows = [_numbered(snapshots[cut], order_H) for cut in cuts]
    return Tiers(
        order_H=order_H,
        by_speed=_by_speed(distance_HH),
        group_LH=np.array(rows, dtype=np.int64).reshape(len(rows), links.size),
    )


def distances_s(links: Links) -> Floats:
    """Seconds of a typical message between two hosts, the mean of both ways (H x H, 0 on the diagonal)."""
    one_way_HH = np.asarray(links.latency_s) + TYPICAL_MESSAGE_BYTES * links.seconds_per_byte()
    symmetric: Floats = (one_way_HH + one_way_HH.T) / 2
    return symmetric


@lru_cache(maxsize=4)
def nearest(links: Links, count: int) -> Ints:
    """Give up to `count` nearest hosts of each host, in no order: shape (H, count), or fewer where there are fewer."""
    distance_HH = distances_s(links)
    np.fill_diagonal(distance_HH, np.inf)
    count = min(count, links.size - 1)
    return np.argpartition(distance_HH, count - 1, axis=1)[:, :count]


def _without_bad_hosts(distance_HH: Floats) -> Floats:
    """Divide by how much slower a host is than the others to near and to far ones alike.

    A host alone in its rack is far from its nearest, but not from its farthest, so it counts as good.
    """
    size = len(distance_HH)
    if size < 3:
        return distance_HH
    others_HO = np.sort(distance_HH, axis=1)[:, 1:]
    places = np.round(np.array(_QUANTILES) * (size - 2)).astype(np.int64)
    quantile_HK = others_HO[:, places]
    typical_K = np.maximum(np.median(quantile_HK, axis=0), np.finfo(float).tiny)
    badness_H = np.maximum((quantile_HK / typical_K).min(axis=1), 1.0)
    corrected: Floats = distance_HH / np.maximum(badness_H[:, None], badness_H[None, :])
    return corrected


def _by_speed(distance_HH: Floats) -> tuple[Ints, ...]:
    """Tell fast and slow hosts apart and bring each into an order; nothing where few are slow."""
    reach_H = np.quantile(distance_HH, REACH, axis=1)
    is_slow_H = reach_H > SLOW * np.quantile(reach_H, FASTEST)
    if is_slow_H.mean() < MANY_SLOW:
        return ()
    orders = []
    for hosts in (np.flatnonzero(~is_slow_H), np.flatnonzero(is_slow_H)):
        among_HH = distance_HH[np.ix_(hosts, hosts)]
        orders.append(hosts[_join(spanning_tree(_without_bad_hosts(among_HH)), among_HH, [])[0]])
    return tuple(orders)


def _gaps(lengths: Floats) -> list[int]:
    """How many of the sorted joints lie before each of the widest gaps."""
    if len(lengths) < 2:
        return []
    ratios = lengths[1:] / np.maximum(lengths[:-1], np.finfo(float).tiny)
    widest = np.argsort(-ratios, kind="stable")[:_MOST_GAPS]
    return [int(index) + 1 for index in widest if ratios[index] >= LEAST_RATIO]


def _join(
    joints: Sequence[tuple[float, int, int]], distance_HH: Floats, gaps: Sequence[int]
) -> tuple[Ints, dict[int, Ints]]:
    """Join chains of hosts, joint by joint, to one; and name the group of each host after so many joints."""
    size = len(distance_HH)
    lengths_HH = (distance_HH / max(distance_HH.max(), np.finfo(float).tiny)) ** POWER
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
    """Join two chains where that costs least: end to end, or a single host inside the other chain.

    A chain costs the lengths along it, and of each end what is to be expected of the link that joins it to another
    chain. So a host that is far from all others comes to stand inside, and good hosts link groups to each other.
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


def _told_apart(snapshots: dict[int, Ints], lengths: Floats) -> list[int]:
    """Cuts that make tiers, widest gaps first: two groups or more, and half of the hosts not alone in theirs."""
    chosen = []
    for cut, name_H in snapshots.items():
        sizes = np.bincount(name_H)
        if (sizes > 1).sum() >= 2 and 2 * sizes[sizes > 1].sum() >= len(name_H):
            chosen.append(cut)
    chosen.sort(key=lambda cut: (-lengths[cut] / max(lengths[cut - 1], np.finfo(float).tiny), cut))
    return chosen[:MOST_TIERS]


def _numbered(name_H: Ints, order_H: Ints) -> Ints:
    """Groups numbered along the order, in which each is a run."""
    along_H = name_H[order_H]
    group_H = np.empty_like(along_H)
    group_H[order_H] = np.concatenate(([0], np.cumsum(along_H[1:] != along_H[:-1])))
    return group_H
