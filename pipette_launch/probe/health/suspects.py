"""Which links, hosts and devices are slower than their peers explain. Pure numpy.

Links differ for good reasons: islands joined by slow links, tiers of a fat tree, hosts with slower NICs. In every such
network the rate between two places is that of the narrowest point on the way, so a detour over a third host cannot be
faster than the direct link: b[i, j] >= min(b[i, k], b[k, j]) (an ultrametric). A link that is much slower than its
best detour therefore has a fault of its own. Where many links are, rates differ at random (links of the internet
kind), nothing explains any of them, and none is suspected.

A slow host obeys the same law, so hosts are compared by their best links instead. Some cases cannot be told apart: a
slow tier (all links between two racks) and a network built like that; a host alone behind a narrow uplink and a faulty
host. With two hosts only the two directions can be compared.

Everything found is a suspicion: the caller measures it again, and `confirmed_links` returns what is left.
"""

# H = hosts, S = slots; row sends to column; nan = not measured; logarithms are natural.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]
Pair = tuple[int, int]

SUSPECT_RATIO = 0.8
"""A link below this part of what its peers explain is worth a second measurement."""
FAULT_RATIO = 0.75
"""Both measurements together must be below this."""
RANDOM_SCALE = 0.2
"""Where links scatter by more than this (logarithm) about what explains them, they differ at random."""
MOST_SHARE = 0.25
"""More than this share of the hosts or slots is no outlier but another kind."""
SUSPECT_SCALES = 2.0
"""A link that is lower by twice the usual scatter is measured again, which is cheap."""
FALSE_ALARMS = 2e-4
"""Chance that two measurements together name any of a healthy cluster's links as faulty."""
MIN_SCALE = 0.02
FEW = 12
"""The scatter of fewer links, or hosts, than this cannot be estimated from them; then it is `FEW_SCALE`."""
FEW_SCALE = 0.12
DETOUR_SHARE = 0.15
"""The detours' part of the variance of a link against its detours; it remains if only the link is measured again."""
MOST_LINKS = 4
MOST_LINKS_SHARE = 1 / 16
"""More slow links than `MOST_LINKS` and than this share are how the network is, not faults."""
ALIKE_SCATTERS = 4.0
"""Detours that differ by less than so many scatters are as good as each other."""
MAX_DETOURS = 64
"""Of a sender's fastest links, so many are tried as detours."""
RETRIED_LINKS = 3
"""A slow host is measured again on so many of its links each way."""
SUSPECT_SPEED = {"cuda": 0.92, "cpu": 0.75}
FAULT_SPEED = {"cuda": 0.9, "cpu": 0.7}
MIN_SLOT_SCALE = {"cuda": 0.01, "cpu": 0.05}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """A direction between two hosts that is slower than a detour over a third one."""

    source: int
    target: int
    bytes_per_s: float
    peers_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowHost:
    """A host whose best link is slower than other hosts' best."""

    host: int
    direction: str
    """`sends` or `receives`."""
    bytes_per_s: float
    peers_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowSlot:
    """A device that computes slower than the others of its kind."""

    slot: int
    seconds: float
    peers_seconds: float


def suspect_links(bandwidth_HH: Matrix) -> tuple[Pair, ...]:
    """Name the directed links that ought to be measured again, worst first; for a slow host some of its links.

    `bandwidth_HH` is in bytes/s from row to column, nan = not measured; the diagonal is ignored.
    """
    known = _links(bandwidth_HH)
    excess, scale = _excess(known)
    if scale > RANDOM_SCALE:
        return ()
    low = (excess < math.log(SUSPECT_RATIO)) & (excess < -SUSPECT_SCALES * scale)
    found = sorted((float(excess[i, j]), (int(i), int(j))) for i, j in np.argwhere(low))
    again = [pair for _, pair in found]
    for rates, turned in ((known, False), (known.T, True)):
        for host in _slow_hosts(rates):
            peers = [int(peer) for peer in np.argsort(-np.nan_to_num(rates[host]))[:RETRIED_LINKS]]
            pairs = [(peer, host) if turned else (host, peer) for peer in peers]
            again += [pair for pair in pairs if not math.isnan(known[pair])]
    return tuple(dict.fromkeys(again))


def confirmed_links(bandwidth_HH: Matrix, again_HH: Matrix, *, times: int = 1) -> tuple[SlowLink, ...]:
    """Return the links that all measurements together find slow, worst first; a slow host's links do not count.

    Args:
        bandwidth_HH: the first measurement, as for `suspect_links`.
        again_HH: the second, nan where there was none.
        times: each entry of `again_HH` is the geometric mean of so many measurements. Where measurements scatter by
            10 %, one finds half of the links of 0.6 of their peers, and three find four of five (bench_health).

    """
    known, second = _links(bandwidth_HH), _links(again_HH)
    excess, scale = _excess(known)
    again = excess + np.log(second) - np.log(known)
    together = (excess + times * again) / (1 + times)
    limit = min(math.log(FAULT_RATIO), -_needed(excess, times) * scale)
    faulty = (together < limit) & (again < math.log(SUSPECT_RATIO)) & (scale <= RANDOM_SCALE)
    for slow in confirmed_hosts(bandwidth_HH, again_HH):
        faulty[(slow.host, slice(None)) if slow.direction == "sends" else (slice(None), slow.host)] = False
    if faulty.sum() > max(MOST_LINKS, MOST_LINKS_SHARE * np.isfinite(excess).sum()):
        return ()
    rate = np.exp(np.log(known) - excess + together)
    return tuple(
        SlowLink(source=i, target=j, bytes_per_s=float(rate[i, j]), peers_bytes_per_s=float(rate[i, j] / math.exp(x)))
        for x, i, j in sorted((float(together[i, j]), int(i), int(j)) for i, j in np.argwhere(faulty))
    )


def confirmed_hosts(bandwidth_HH: Matrix, again_HH: Matrix) -> tuple[SlowHost, ...]:
    """Return the hosts whose best links are slow in both measurements; one entry for each slow direction."""
    known, second = _links(bandwidth_HH), _links(again_HH)
    if _excess(known)[1] > RANDOM_SCALE:
        return ()
    found = []
    for direction, first, again in (("sends", known, second), ("receives", known.T, second.T)):
        best, best_again = _best(first), _best(again)
        usual = _centre(best)
        for host in _slow_hosts(first):
            together = (best[host] + best_again[host]) / 2
            # Comparisons with nan are false.
            if best_again[host] - usual < math.log(SUSPECT_RATIO) and together - usual < math.log(FAULT_RATIO):
                rates = math.exp(together), math.exp(usual)
                found.append(SlowHost(host=host, direction=direction, bytes_per_s=rates[0], peers_bytes_per_s=rates[1]))
    return tuple(found)


def suspect_slots(
    seconds_S: Vector, *, device_kind: Literal["cuda", "cpu"] = "cuda", alike_S: Sequence[str] = ()
) -> dict[int, float]:
    """Name the slots that ought to be timed again, slowest first, each with the usual seconds of its peers.

    Args:
        seconds_S: the same work on every slot, nan = not measured.
        device_kind: CPUs share cores and so differ more.
        alike_S: names of the devices: only slots of one name are peers; empty = all are.

    """
    name_S = np.array(alike_S or [""] * len(seconds_S))
    found: list[tuple[float, int, float]] = []
    for name in np.unique(name_S):
        members = np.flatnonzero(name_S == name)
        logs = np.log(seconds_S[members])
        if len(members) >= FEW:
            # Of many values the median of all is as good as that of the others.
            usual = np.full(len(members), _centre(logs))
        else:
            usual = np.array([_centre(np.delete(logs, at)) for at in range(len(members))])
        lag = logs - usual
        count, scale = int(np.isfinite(lag).sum()), MIN_SLOT_SCALE[device_kind]
        # The scatter of few slots cannot be estimated from them: one slow slot of two would be half of it.
        if count >= FEW:
            scale = max(scale, _scatter(lag, 0.0))
        slow = (lag > -math.log(SUSPECT_SPEED[device_kind])) & (lag > SUSPECT_SCALES * scale)
        if slow.sum() <= max(1, int(MOST_SHARE * count)):
            found += [(-lag[at], int(members[at]), math.exp(usual[at])) for at in np.flatnonzero(slow)]
    return {slot: usual_s for _, slot, usual_s in sorted(found)}


def confirmed_slots(
    seconds_S: Vector, again_S: Vector, *, device_kind: Literal["cuda", "cpu"] = "cuda", alike_S: Sequence[str] = ()
) -> tuple[SlowSlot, ...]:
    """Return the slots that two measurements find slow, slowest first.

    Args:
        seconds_S: the first measurement, as for `suspect_slots`.
        again_S: the second, nan where there was none.
        device_kind: as for `suspect_slots`.
        alike_S: as for `suspect_slots`.

    """
    found = []
    for slot, usual_s in suspect_slots(seconds_S, device_kind=device_kind, alike_S=alike_S).items():
        together_s = math.sqrt(seconds_S[slot] * again_S[slot])
        # Comparisons with nan are false.
        slow_again = usual_s / again_S[slot] < SUSPECT_SPEED[device_kind]
        if slow_again and usual_s / together_s < FAULT_SPEED[device_kind]:
            found.append(SlowSlot(slot=slot, seconds=together_s, peers_seconds=usual_s))
    return tuple(sorted(found, key=lambda slow: (slow.peers_seconds / slow.seconds, slow.slot)))


def _links(bandwidth_HH: Matrix) -> Matrix:
    """Rates with nan wherever there is none."""
    rates = np.array(bandwidth_HH, dtype=np.float64)
    np.fill_diagonal(rates, np.nan)
    rates[~(rates > 0)] = np.nan
    return rates


def _detours(known_HH: Matrix, scatter: float) -> Matrix:
    """The usual rate of the best detours over one other host; nan where no way was measured.

    The best of many noisy detours is the best by chance, so the median of those counts that `scatter` does not
    distinguish from it. With two hosts the only other link is the opposite direction.
    """
    if len(known_HH) == 2:
        return np.array(known_HH.T)
    rates = np.nan_to_num(known_HH, nan=0.0)
    usual = np.full_like(rates, np.nan)
    for host, row in enumerate(rates):
        over, to = np.argsort(-row)[:MAX_DETOURS], np.flatnonzero(row)
        via = np.minimum(row[over][:, None], rates[np.ix_(over, to)])
        if not scatter:
            usual[host, to] = via.max(axis=0, initial=0.0)
            continue
        # Best first, for each target.
        via = -np.sort(-via, axis=0)
        count = (via >= via[0] * math.exp(-ALIKE_SCATTERS * scatter)).sum(axis=0)
        usual[host, to] = via[(count - 1) // 2, np.arange(len(to))]
    usual[usual == 0] = np.nan
    return usual


def _excess(known_HH: Matrix) -> tuple[Matrix, float]:
    """Logarithm of each rate over that of its detours, centred, and how much that scatters."""
    scale = 0.0
    # The first turn, with the best detours, estimates the scatter that the second turn needs to choose detours.
    for _ in range(2):
        excess: Matrix = np.log(known_HH) - np.log(_detours(known_HH, scale))
        finite = excess[np.isfinite(excess)]
        if finite.size < FEW:
            # Of two hosts' links each is compared with a single measurement, which scatters as much.
            return excess, FEW_SCALE * (math.sqrt(2) if len(known_HH) == 2 else 1)
        # Detours that are slower than their links must not shift the centre.
        centre = min(0.0, float(np.median(finite)))
        scale = max(MIN_SCALE, _scatter(finite, centre))
    return excess - centre, scale


def _needed(excess_HH: Matrix, times: int) -> float:
    """How many scales a mean must lie below its peers so that chance makes no healthy link look faulty."""
    count = max(1, int(np.isfinite(excess_HH).sum()))
    # The scale is an estimate, and that of few links may be too small.
    doubt = 1 + 1.5 / math.sqrt(count) if count >= FEW else 1.0
    left = math.sqrt((1 - DETOUR_SHARE) / (1 + times) + DETOUR_SHARE)
    return -NormalDist().inv_cdf(FALSE_ALARMS / count) * left * doubt


def _best(rates_HH: Matrix) -> Vector:
    """Logarithm of the usual rate among each row's best links; nan for a row without any."""
    logs = np.log(rates_HH)
    # The best of many rates is higher by chance than the best of few, so the median of the good ones counts.
    floor = np.nan_to_num(rates_HH).max(axis=1, keepdims=True) * SUSPECT_RATIO
    logs[~(rates_HH >= floor)] = np.nan
    return np.array([_centre(row) for row in logs])


def _slow_hosts(rates_HH: Matrix) -> list[int]:
    """Rows whose best rate is far below the others' best; none where many are."""
    best = _best(rates_HH)
    count = int(np.isfinite(best).sum())
    if count < 3:
        return []
    usual = _centre(best)
    scale = max(MIN_SCALE, _scatter(best, usual))
    slow = np.flatnonzero((best - usual < math.log(SUSPECT_RATIO)) & (best - usual < -SUSPECT_SCALES * scale))
    return slow.tolist() if len(slow) <= max(1, int(MOST_SHARE * count)) else []


def _centre(values: Vector) -> float:
    """The median of the known values; nan where there are none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def _scatter(values: Vector, centre: float) -> float:
    """A robust standard deviation: the median distance from the centre, scaled to a normal distribution's."""
    finite = values[np.isfinite(values)]
    return 1.4826 * float(np.median(np.abs(finite - centre))) if finite.size else 0.0
