"""Simulates how often a healthy cluster gets a false alarm, and how often a slow link or device is found.

`python -m benchmarks.bench_health [--record] [--clusters N]` draws networks with known rates and measures them with
lognormal noise. Suspects are measured again, and then confirmed or not. No network and no device is involved.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.telling import shown
from benchmarks.validation.conditions import conditions
from pipette_launch.probe.health.verdicts import (
    confirmed_hosts,
    confirmed_links,
    confirmed_slots,
    suspect_links,
    suspect_slots,
)

# H = hosts, S = slots.

RESULTS = Path(__file__).parent / "results"
SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
SLOW = 0.6
"""Rate of a slow link, as a share of its proper rate."""
SLOTS = {"cuda": (0.85, (0.01, 0.02)), "cpu": (0.6, (0.05, 0.1))}
"""By device kind: (speed of a slow device, noise levels of a timing)."""

Matrix = NDArray[np.float64]
Network = Callable[[int, np.random.Generator], Matrix]


def uniform(num_hosts: int, _: np.random.Generator) -> Matrix:
    """Return equal links."""
    return np.ones((num_hosts, num_hosts))


def islands(num_hosts: int, rng: np.random.Generator) -> Matrix:
    """Return two islands of at least two hosts, with 0.1 to 0.8 of the rate between them."""
    if num_hosts < 4:
        return uniform(num_hosts, rng)
    inside = rng.permutation(np.arange(num_hosts) < rng.integers(2, num_hosts - 1))
    return np.where(inside[:, None] == inside, 1.0, rng.uniform(0.1, 0.8))


def fat_tree(num_hosts: int, rng: np.random.Generator) -> Matrix:
    """Return leaves of two to eight hosts in pods of two leaves; each tier has 0.3 to 0.9 of the rate below it."""
    leaf = np.arange(num_hosts) // rng.integers(2, 9)
    leaf[leaf == leaf.max()] = max(0, leaf.max() - 1)
    leaf = rng.permutation(leaf)
    up, top = rng.uniform(0.3, 0.9, 2)
    return np.where(leaf[:, None] == leaf, 1.0, np.where((leaf // 2)[:, None] == leaf // 2, up, up * top))


def nics(num_hosts: int, rng: np.random.Generator) -> Matrix:
    """Return a network in which half of the hosts have NICs of half the rate; equal links below 4 hosts."""
    if num_hosts < 4:
        return uniform(num_hosts, rng)
    rates = np.where(rng.permutation(num_hosts) < num_hosts // 2, 0.5, 1.0)
    return np.minimum.outer(rates, rates)


def random_links(num_hosts: int, rng: np.random.Generator) -> Matrix:
    """Return links with random rates from 0.2 to 1."""
    return np.exp(rng.uniform(math.log(0.2), 0.0, (num_hosts, num_hosts)))


@dataclass(frozen=True)
class Score:
    """Results of many clusters."""

    clusters: int
    accused: int
    """Number of clusters with a verdict on a healthy link or host."""
    found: int
    """Number of clusters whose slow link was named."""
    again: float
    """Mean number of links measured a second time."""


def links_score(
    network: Network, sizes: tuple[int, ...], *, noise: float, slow: float, clusters: int, seed: int
) -> Score:
    """Judge the links of many clusters, each with one slow direction unless `slow` is 1."""
    rng = np.random.default_rng(seed)
    accused = found = again_count = 0
    for _ in range(clusters):
        truth = network(int(rng.choice(sizes)), rng)
        pair = tuple(int(place) for place in rng.choice(len(truth), 2, replace=False))
        truth[pair] *= slow
        first = truth * np.exp(rng.normal(0, noise, truth.shape))
        again = np.full_like(truth, np.nan)
        suspects = suspect_links(first)
        for one in suspects:
            again[one] = truth[one] * math.exp(rng.normal(0, noise))
        links = {(link.source, link.target) for link in confirmed_links(first, again)}
        hosts = {slower.host for slower in confirmed_hosts(first, again)}
        guilty = {pair} if slow < 1 else set()
        found += pair in links
        accused += bool(links - guilty or hosts)
        again_count += len(suspects)
    return Score(clusters, accused, found, again_count / clusters)


def slots_score(kind: str, *, noise: float, slow: float, clusters: int, seed: int) -> Score:
    """Judge many clusters of 2 to 64 slots; the first slot is slow unless `slow` is 1."""
    rng = np.random.default_rng(seed)
    accused = found = again_count = 0
    for _ in range(clusters):
        truth = np.ones(int(rng.choice(SIZES)))
        truth[0] /= slow
        first, second = truth * np.exp(rng.normal(0, noise, (2, len(truth))))
        suspects = suspect_slots(first, device_kind=kind)  # type: ignore[arg-type]
        again = np.where(np.isin(np.arange(len(truth)), list(suspects)), second, np.nan)
        slots = {one.slot for one in confirmed_slots(first, again, device_kind=kind)}  # type: ignore[arg-type]
        found += slow < 1 and 0 in slots
        accused += bool(slots - ({0} if slow < 1 else set()))
        again_count += len(suspects)
    return Score(clusters, accused, found, again_count / clusters)


def link_table(clusters: int) -> Iterator[str]:
    """Yield a table of healthy networks, and the same networks with one slow direction."""
    yield (
        f"| network | noise | healthy accused | measured again | slow direction ({SLOW}) found "
        "| others accused | ms a cluster |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for network in (uniform, islands, fat_tree, nics, random_links):
        for noise in (0.05, 0.1):
            began_s = time.process_time()
            sizes = tuple(size for size in SIZES if size > 4) if network is random_links else SIZES
            well = links_score(network, sizes, noise=noise, slow=1.0, clusters=clusters, seed=1)
            spent_ms = (time.process_time() - began_s) / clusters * 1e3
            large = tuple(size for size in sizes if size > 3)
            sick = links_score(network, large, noise=noise, slow=SLOW, clusters=clusters, seed=2)
            yield (
                f"| {network.__name__.replace('_', ' ')} | {noise:.0%} | {well.accused} | {well.again:.2f} "
                f"| {sick.found / clusters:.1%} | {sick.accused} | {spent_ms:.1f} |"
            )


def slot_table(clusters: int) -> Iterator[str]:
    """Yield a table of 2 to 64 slots, all healthy or with one slow slot."""
    yield "| device | speed of the slow one | noise | healthy accused | timed again | slow one found | others accused |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for kind, (slow, noises) in SLOTS.items():
        for noise in noises:
            well = slots_score(kind, noise=noise, slow=1.0, clusters=clusters, seed=1)
            sick = slots_score(kind, noise=noise, slow=slow, clusters=clusters, seed=2)
            yield (
                f"| {kind} | {slow} | {noise:.0%} | {well.accused} | {well.again:.2f} | {sick.found / clusters:.1%} "
                f"| {sick.accused} |"
            )


def report(clusters: int) -> Iterator[str]:
    """Yield the report, conditions first."""
    yield f"# False alarms and findings, simulated, {datetime.now(tz=timezone.utc):%Y-%m-%d}"
    yield ""
    yield f"`python -m benchmarks.bench_health --clusters {clusters}`; no network and no device is involved."
    yield ""
    yield from (f"- {name}: {value}" for name, value in conditions(None).items())
    yield f"- load of the machine: {os.getloadavg()[0]:.1f}; times are processor time"
    yield ""
    yield (
        f"Each figure is from {clusters} clusters of {SIZES[0]} to {SIZES[-1]} hosts ({', '.join(map(str, SIZES))}; at "
        "least 4 hosts with a slow link, at least 5 with random links). Noise is lognormal and independent. Accused: "
        "clusters in which both measurements find a healthy link or host slow. If an island has two hosts, a slow "
        "direction between them is reported as slow hosts; this counts as not found and as others accused."
    )
    yield ""
    yield from link_table(clusters)
    yield ""
    yield from slot_table(clusters)


def main() -> None:
    """Print the report, and write it with --record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=1000, help="clusters in each figure (default 1000)")
    parser.add_argument("--record", action="store_true", help="write the report into benchmarks/results")
    args = parser.parse_args()
    text = shown(report(args.clusters))
    if args.record:
        (RESULTS / "health.md").write_text(text)


if __name__ == "__main__":
    main()
