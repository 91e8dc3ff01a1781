"""Estimates links that were not measured from those that were, by tiers of switches and by fast and slow hosts. Pure.

The model is bandwidth_ij = tier_ij * f(sender_i, receiver_j). Each host has few measured links, some of them disturbed,
so all parameters are quantiles of logarithms.
"""

# H = hosts (or devices of one), row sends to column; nan = not measured. All bandwidths as logarithms (log_HH).

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts import Links
from pipette_launch.probe.harness import Line
from pipette_launch.probe.links.sampling import Pair, Place, nested_groups
from pipette_launch.probe.links.switches import inferred_places

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
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
